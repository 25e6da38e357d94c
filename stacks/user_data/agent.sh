# The agent comes as packages from the artifact bucket, for the network has no way to a package index. The digest is the
# bundle's name; nothing of it runs before that has proved right.

bundle=$(mktemp -d)
aws s3 cp --only-show-errors --region "$REGION" "$AGENT_URL" "$bundle/agent.tar"
echo "$AGENT_SHA256  $bundle/agent.tar" | sha256sum --check --strict --quiet
tar --extract --file "$bundle/agent.tar" --directory "$bundle" --no-same-owner
if compgen -G "$bundle/*.deb" > /dev/null; then dpkg --install "$bundle"/*.deb; fi
mkdir -p "$PROGRAMS"
python3 -m venv "$PROGRAMS/agent"
"$PROGRAMS/agent/bin/pip" install --quiet --no-index --no-deps --disable-pip-version-check "$bundle"/*.whl
rm -r "$bundle"
