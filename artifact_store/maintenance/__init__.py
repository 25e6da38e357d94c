"""Maintenance of a store: reachability and retention, garbage collection, fsck, disk usage, backend probes."""
