"""AWS's own compiler, where it is installed. docs/guides/neuronx.md says what is called, and what is kept."""
