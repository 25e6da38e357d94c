"""Elementwise operators on tiles: the instructions that compute one node's result from its operands.

Every node rounds to its own type, so that a fused node computes the same numbers as one that runs alone.
"""
