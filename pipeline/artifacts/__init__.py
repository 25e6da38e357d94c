"""Artifacts after their build: channels, signatures, comparison, predicted time, export to Neuron's compile cache."""
