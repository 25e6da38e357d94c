# The agent comes as packages from the artifact bucket, for the network has no way to a package index. The digest is the
# bundle's name; nothing of it runs before that has proved right.

# unattended-upgrades may hold dpkg's lock during the first boot, and dpkg itself does not wait for it.
install_system_packages() {
    local left said
    for ((left = 30; left > 0; left--)); do
        if said=$(LC_ALL=C dpkg --install "$@" 2>&1); then return; fi
        if [[ $said != *"locked by another process"* ]]; then
            fail "dpkg cannot install the .deb files of the agent's bundle: $said; bundle packages for this image"
        fi
        sleep 10
    done
    fail "another process holds dpkg's lock for five minutes; disable unattended-upgrades in the image"
}

bundle=$(mktemp -d)
if ! said=$(aws s3 cp --only-show-errors --region "$REGION" "$AGENT_URL" "$bundle/agent.tar" 2>&1); then
    remedy="correct the role of the instance, the key's policy or the route to S3"
    if [[ $said == *"(404)"* ]]; then remedy="upload it with \`nxpipe agent bundle\`"; fi
    fail "the agent's bundle $AGENT_URL cannot be fetched: $said; $remedy"
fi
if ! echo "$AGENT_SHA256  $bundle/agent.tar" | sha256sum --check --strict --status; then
    fail "$AGENT_URL does not have the digest of its name; delete it, and upload it with \`nxpipe agent bundle\`"
fi
if ! said=$(tar --extract --file "$bundle/agent.tar" --directory "$bundle" --no-same-owner 2>&1); then
    fail "the agent's bundle cannot be unpacked: $said; correct the cause, such as a full disk"
fi
if compgen -G "$bundle/*.deb" > /dev/null; then install_system_packages "$bundle"/*.deb; fi
mkdir -p "$PROGRAMS"
if ! python3 -m venv "$PROGRAMS/agent" > /dev/null; then
    fail "python3 of this image makes no virtual environment; use an image that has python3-venv"
fi
if ! said=$("$PROGRAMS/agent/bin/pip" install --quiet --no-index --no-deps --disable-pip-version-check "$bundle"/*.whl \
    2>&1); then
    fail "pip cannot install the agent's bundle: $said; bundle wheels for the Python of this image"
fi
rm -r "$bundle"
