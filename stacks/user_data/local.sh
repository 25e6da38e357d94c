# Joins the disks of the instance store, which are faster than EBS and cost nothing, to one file system for jobs. It is
# empty at first, and lost with the host. A disk has several names, and mdadm comes from Amazon Linux's own repositories.
shopt -s nullglob
names=("$DISKS"/nvme-Amazon_EC2_NVMe_Instance_Storage_*)
((${#names[@]})) || { report "this host has no disk of the instance store, and its type has; check the AMI" && false; }
mapfile -t disks < <(readlink -f "${names[@]}" | sort --unique)
joined=${disks[0]}
if ((${#disks[@]} > 1)); then
    dnf install --assumeyes --quiet mdadm
    joined=$ARRAY
    mdadm --create "$joined" --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
fi
mkfs.ext4 -q -E nodiscard "$joined"
mkdir --parents "$LOCAL"
mount -o noatime "$joined" "$LOCAL"
chmod 1777 "$LOCAL"
