"""Fleets on AWS: the agent on an instance, Kubernetes manifests, templates, contents of lock files."""
