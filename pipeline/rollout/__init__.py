"""Rollouts before and after they happen: what one can expect of a plan, and what a record says of one that is over."""
