"""AWS's neuronx-cc as a backend, where it is installed. docs/guides/neuronx.md has its calls and files."""
