"""Reasons for missed mutants without a proof of equivalence: properties of the numbers at run time."""

from tests.mutation.changes import Mutant

_REFUSED = "a row number outside its table is rejected even if it is not marked"
# By program, and by a part of the mutant's description.
_WHY = (
    ("gather", "tensor_tensor of gpsimd", _REFUSED),
    ("gather", "tensor_tensor, have each other's", _REFUSED),
    ("gather", "memset of vector: value is 62", _REFUSED),
    ("gather", "tensor_copy_predicated of vector: dst axis", _REFUSED),
    ("norm", "activation of scalar: dst as", "only the total is read, not its terms"),
    ("norm", "activation of scalar: bias is", "what is added to a whole row goes with its mean"),
    ("norm", "activation of scalar: function is relu", "a variance is never negative"),
    (
        "attention",
        "operand0 is -1.0",
        "it guards rows without visible columns (totals below 1), which do not occur",
    ),
)


def explanation(mutant: Mutant) -> str:
    found = (why for name, part, why in _WHY if mutant.sample.name == name and part in str(mutant))
    return next(found, "")
