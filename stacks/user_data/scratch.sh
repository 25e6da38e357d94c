# The fast file system beside the nodes. Its client comes from Amazon Linux's own repositories, which are in S3.
dnf install --assumeyes --quiet lustre-client
mkdir --parents "$SCRATCH"
mount -t lustre -o relatime,flock "$FILE_SYSTEM@tcp:/$MOUNT_NAME" "$SCRATCH"
chmod 1777 "$SCRATCH"
