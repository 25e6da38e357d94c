"""Rollout stack: state machines that shift traffic between blue and green, and the watchdog."""
