"""The Neuron runtime's persistent compile cache: what lies in one, and bringing artifacts there. docs/neuronx.md."""
