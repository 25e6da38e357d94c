# The compile cache, through the access point of one version of the compiler: encrypted on its way, opened by the role.
# In fstab, so that an instance that comes out of a warm pool has it too. A mount target that was made a moment ago has
# no name yet, which is why the first attempts may fail.

if ! command -v mount.efs > /dev/null; then
    echo "nxpipe: this image cannot mount EFS; put amazon-efs-utils and what it needs into the agent's bundle" >&2
    false
fi
mkdir -p "$CACHE"
echo "$FILE_SYSTEM:/ $CACHE efs _netdev,nofail,tls,iam,accesspoint=$ACCESS_POINT 0 0" >> "$FSTAB"
for pause in 5 10 20 0; do
    if mount "$CACHE"; then break; fi
    sleep "$pause"
done
mountpoint --quiet "$CACHE"
