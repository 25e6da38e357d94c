"""The error codes of neuronx-cc's reference that are a request's own fault, as findings."""

import re
from typing import Final

from nxpipe.pipeline.check import finding as rules
from nxpipe.pipeline.check.finding import Finding, Rule

_SMALLER: Final = "use a smaller bucket or batch, or a target with more memory"
_INTEGERS: Final = "keep integers and booleans out of this operation, or cast its operands to fp32"
_QUANTISED: Final = "build from the checkpoint that is not quantised"
_OTHER_OPERATOR: Final = "replace the operator in the model; nxpipe check names its line"


def _numbers(family: str, *numbers: int) -> list[str]:
    return [f"{family}{number:03}" for number in numbers]


_TABLE: Final[tuple[tuple[Rule, str, list[str]], ...]] = (
    (rules.NOT_CAPTURED, "report it, with the model's configuration", ["EVRF064"]),
    (rules.GRAPH_BREAK, "use padding or buckets for a size that depends on values", ["EMOD025"]),
    (
        rules.OPERATOR,
        _OTHER_OPERATOR,
        ["EUOC002", "EHCA005", *_numbers("EVRF", 1, 4, 6, 10, 11, 15, 19, 65)],
    ),
    (rules.POSITIONS, "use a bucket of at most as many tokens as the table has rows", _numbers("EVRF", 31, 56)),
    (rules.UNKNOWN_OPTION, "report it, with the target", ["EARG001"]),
    (rules.INT64, "keep integers within 32 bits", ["ESFH002", *_numbers("EVRF", 35, 60, 61, 62, 63)]),
    (rules.OPERAND_TYPE, _INTEGERS, ["ESPP004", "ESPP047", *_numbers("EVRF", 5, 13, 16, 22)]),
    (rules.OPERAND_TYPE, _QUANTISED, _numbers("EVRF", *range(36, 51), 53, 54, 55, 57, 58)),
    (rules.FP8_KIND, "use the E4M3 of the target, or bf16", _numbers("EVRF", 51, 52)),
    (rules.WINDOW, "pool without dilation", _numbers("EVRF", 17, 18)),
    (rules.DOES_NOT_FIT, _SMALLER, ["EOOM001", "EOOM002", "EVRF009", "EXSP001"]),
    (rules.DOES_NOT_FIT, _SMALLER, ["EBVF030", "EVRF007", "EXTP004", "EBIR023"]),
)
_BY_CODE: Final = {code: (rule, advice) for rule, advice, codes in _TABLE for code in codes}

_CODE: Final = re.compile(r"NCC_([A-Z]{4}[0-9]{3})\b\]?:?[ \t]*([^\n]*)")
_LONGEST: Final = 300  # characters of the compiler's own words


def finding_of(output: str, program: str) -> Finding | None:
    """What the compiler holds against the request: the first code that its reference knows as such."""
    for match in _CODE.finditer(output):
        if match[1] in _BY_CODE:
            rule, advice = _BY_CODE[match[1]]
            words = " ".join(match[2].split())[:_LONGEST].rstrip(".")
            return Finding(rule, f"NCC_{match[1]}: {words or rule.meaning}", advice, programs=(program,))
    return None


def first_code(output: str) -> str | None:
    """Any code, of the compiler's own defects too."""
    match = _CODE.search(output)
    return f"NCC_{match[1]}" if match else None
