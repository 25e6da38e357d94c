"""Serving fleet: load balancer, blue and green Auto Scaling groups, user data."""
