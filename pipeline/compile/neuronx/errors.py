"""Errors of neuronx-cc: error codes as findings, failed compilations as deterministic or retryable failures.

Codes that its public reference attributes to the program are deterministic; anything else may pass on a retry.
"""

import re
import signal
from typing import Final

from nxpipe.pipeline.compile import findings as rules
from nxpipe.pipeline.compile.findings import DOES_NOT_FIT, Finding, Rule
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, NotEnoughMemory

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
    """The first error code in the output that the reference attributes to the program, as a finding."""
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


_STATUS: Final = re.compile(r"neuronx-cc failed with (-?[0-9]+)")
_CACHED: Final = "Got a cached failed neff"


class CompilerFailed(BuildRefused):
    """neuronx-cc failed for a reason that is not the program's; the same build may succeed later."""

    deterministic = False


def explain(model: str, program: str, status: int, output: str) -> BuildRefused:
    """The error for a process that ended with `status` (negative: by that signal) and left no NEFF."""
    what = f"{model} {program}"
    found = finding_of(output, program)
    if _CACHED in output:
        return CompilerFailed(
            f"{what}: AWS's compile cache returned the failure of an earlier attempt; run "
            "`neuron_parallel_compile --command clean`, or unset NEURON_COMPILE_CACHE_URL"
        )
    if found is not None:
        kind = DoesNotFit if found.rule is DOES_NOT_FIT else BuildRefused
        return kind(f"{what}: neuronx-cc reports {found.message} ({found.rule.id}); {found.advice}")
    compiler = _STATUS.search(output)
    ended = int(compiler[1]) if compiler else status
    if ended == -signal.SIGKILL:
        return NotEnoughMemory(
            f"{what}: the compiler was killed, as the kernel does when memory runs out; use a machine with more of it"
        )
    if ended < 0:
        return CompilerFailed(f"{what}: signal {-ended} ended the compiler; run the same command again")
    if compiler:
        code = first_code(output) or "no error code"
        return CompilerFailed(
            f"{what}: neuronx-cc ended with status {ended} and {code}, which its reference does not hold against a "
            "program; run the same command again, and report it to AWS if it stays"
        )
    return CompilerFailed(f"{what}: torch_neuronx failed: {_last_line(output)}; nxpipe doctor shows the releases")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else "no output"
