"""NeuronCore compiler and emulator: a model is captured as a checked graph, compiled, and executed on the host.

It needs only numpy and the standard library; torch and transformers are imported by `emulator.capture` alone, and only
when a model is captured.
"""

# Part of every cache key: raise it whenever the same model could compile to a different graph or program.
COMPILER_VERSION = "0.1.0"
