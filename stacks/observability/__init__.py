"""Observability: the table of metrics, and the stack of alarms, dashboard and notifications."""
