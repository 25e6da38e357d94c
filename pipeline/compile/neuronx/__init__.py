"""AWS's neuronx-cc as a backend, where it is installed. docs/neuronx.md has its calls and files."""
