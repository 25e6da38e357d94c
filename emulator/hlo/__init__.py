"""The graph as StableHLO and HLO, for AWS's compiler and for XLA: the second code generator."""
