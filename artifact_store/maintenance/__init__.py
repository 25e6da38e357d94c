"""Maintenance of a store: reachability, garbage collection, fsck, disk usage, backend probes."""
