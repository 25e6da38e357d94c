# The EFA driver. ECS images have none, and a container that names a missing device does not start. An image of one's own
# may have it. The installer comes from the artifact bucket, since the network may have no way to another one; nothing of
# it runs before its digest has proved right. Containers have libfabric of their own, hence --minimal.

efa_devices() {
    local found
    shopt -s nullglob
    found=("$EFA_DEVICES"/uverbs*)
    echo "${#found[@]}"
}

if (($(efa_devices) < EFA_CARDS)); then
    dnf install --assumeyes --quiet awscli-2
    installer=$(mktemp -d)
    if ! aws s3 cp --only-show-errors --region "$REGION" "$EFA_URL" "$installer/efa.tar.gz"; then
        report "the store has no $EFA_URL, or its policy denies it; upload the EFA installer, as the guide describes"
        false
    fi
    echo "$EFA_SHA256  $installer/efa.tar.gz" | sha256sum --check --strict --quiet
    tar --extract --file "$installer/efa.tar.gz" --directory "$installer" --no-same-owner
    cd "$installer/aws-efa-installer"
    ./efa_installer.sh --minimal --yes
    cd /
    rm -r "$installer"
    modprobe efa
    for ((left = 30; left > 0 && $(efa_devices) < EFA_CARDS; left--)); do sleep 1; done
fi
if (($(efa_devices) < EFA_CARDS)); then
    report "this host has $(efa_devices) EFA devices, and its type $EFA_CARDS; check the interfaces of the launch template"
    false
fi
