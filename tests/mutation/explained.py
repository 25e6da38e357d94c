"""Why nobody notices some mutants that are not proved to be the same: what is true of the numbers that come there."""

from tests.mutation.changes import Mutant

_REFUSED = "a row number outside of its table is refused even where nobody has marked it"
# By program, and by what the mutant's description contains.
_WHY = (
    ("gather", "tensor_tensor of gpsimd", _REFUSED),
    ("gather", "tensor_tensor, have each other's", _REFUSED),
    ("gather", "memset of vector: value is 62", _REFUSED),
    ("gather", "tensor_copy_predicated of vector: dst axis", _REFUSED),
    ("norm", "activation of scalar: dst as", "only the total is read, not what it is the total of"),
    (
        "attention",
        "operand0 is -1.0",
        "it guards rows that see no column, of which there are none: their totals are below 1",
    ),
)


def explanation(mutant: Mutant) -> str:
    found = (why for name, part, why in _WHY if mutant.sample.name == name and part in str(mutant))
    return next(found, "")
