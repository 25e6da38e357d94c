# Puts the agent's state on the instance store, before each start of the agent. It is faster than EBS, costs nothing, and
# is empty after a stop: the agent then fetches the artifact again. Deep Learning AMIs join all disks and mount them, as
# SHARED. Other images leave them blank; one is enough, and the others stay free for the server.

if mountpoint --quiet "$STATE"; then exit 0; fi
mkdir -p "$STATE"
if mountpoint --quiet "$SHARED"; then
    mkdir -p "$SHARED/nxpipe"
    mount --bind "$SHARED/nxpipe" "$STATE"
    exit 0
fi
shopt -s nullglob
for disk in "$DISKS"/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
    case $disk in *-part*) continue ;; esac
    found=0
    label=$(blkid --probe --output value --match-tag LABEL "$disk") || found=$?
    if ((found == 2)); then # nothing is on it
        mkfs.ext4 -q -L nxpipe -E nodiscard "$disk"
        label=nxpipe
    fi
    if [ "$label" = nxpipe ]; then
        mount -o noatime "$disk" "$STATE"
        exit 0
    fi
done
echo "nxpipe: no disk of the instance store is free; $STATE stays on the root volume" >&2
