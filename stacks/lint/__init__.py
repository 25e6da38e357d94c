"""Lint of synthesised templates: NXP rules, cost estimates, deployment plans, egress analysis."""
