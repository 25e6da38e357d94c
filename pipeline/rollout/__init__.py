"""Rollouts of a fleet: planning, simulation, start, status and end."""
