"""AWS's neuronx-cc as a backend, where it is installed. docs/neuronx.md has the calls, and the files that are kept."""
