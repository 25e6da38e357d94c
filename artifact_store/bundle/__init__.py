"""Bundles: one artifact as an OCI image layout, in a folder or a tar file, for networks without access to the store."""
