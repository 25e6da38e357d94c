"""Executors of jobs: this machine, a Ray cluster, AWS Batch. The choice never changes a result."""
