"""Compilation of a build specification: cache keys, front end and backends. All backends fill the same artifact."""
