"""A NeuronCore compiler and emulator: models become checked graphs, graphs become numbers.

Only numpy and the standard library are needed here; torch and transformers are met in `emulator.capture` alone,
and there only when a model is really captured.
"""

# Part of every cache key: raise it whenever the same model could compile to a different graph or program.
COMPILER_VERSION = "0.1.0"
