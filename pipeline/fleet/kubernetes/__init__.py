"""Kubernetes objects of a project's cluster, as files."""
