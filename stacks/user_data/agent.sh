# The agent comes as packages from the artifact bucket, for the network has no way to a package index. The digest is the
# bundle's name; nothing of it runs before that has proved right.

# unattended-upgrades may hold dpkg's lock during the first boot, and dpkg itself does not wait for it.
install_system_packages() {
    local left said
    for ((left = 30; left > 0; left--)); do
        if said=$(LC_ALL=C dpkg --install "$@" 2>&1); then return; fi
        if [[ $said != *"locked by another process"* ]]; then
            report "dpkg cannot install the .deb files of the agent's bundle: ${said//$'\n'/; }"
            return 1
        fi
        sleep 10
    done
    report "another process holds dpkg's lock for five minutes; disable unattended-upgrades in the image"
    return 1
}

bundle=$(mktemp -d)
aws s3 cp --only-show-errors --region "$REGION" "$AGENT_URL" "$bundle/agent.tar"
echo "$AGENT_SHA256  $bundle/agent.tar" | sha256sum --check --strict --quiet
tar --extract --file "$bundle/agent.tar" --directory "$bundle" --no-same-owner
if compgen -G "$bundle/*.deb" > /dev/null; then install_system_packages "$bundle"/*.deb; fi
mkdir -p "$PROGRAMS"
if ! python3 -m venv "$PROGRAMS/agent"; then
    report "python3 of this image makes no virtual environment; use an image that has python3-venv"
    false
fi
"$PROGRAMS/agent/bin/pip" install --quiet --no-index --no-deps --disable-pip-version-check "$bundle"/*.whl
rm -r "$bundle"
