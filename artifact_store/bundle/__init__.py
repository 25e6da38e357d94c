"""One artifact as an OCI image layout, in a folder or a tar file, for where no network leads."""
