"""Why a compilation failed, as an error of ours: one that the same request would meet again, or one that may pass."""

import re
import signal
from typing import Final

from nxpipe.pipeline.check.finding import DOES_NOT_FIT
from nxpipe.pipeline.compile.neuronx.codes import finding_of, first_code
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, NotEnoughMemory

_STATUS: Final = re.compile(r"neuronx-cc failed with (-?[0-9]+)")
_CACHED: Final = "Got a cached failed neff"


class CompilerFailed(BuildRefused):
    """AWS's compiler failed for no reason that it holds against the program."""

    deterministic = False


def explain(model: str, program: str, status: int, output: str) -> BuildRefused:
    """The error for a process that ended with `status` (negative: by that signal) and no NEFF to show."""
    what = f"{model} {program}"
    found = finding_of(output, program)
    if _CACHED in output:
        return CompilerFailed(
            f"{what}: the answer is a failure out of AWS's compile cache, not of this attempt; run "
            "`neuron_parallel_compile --command clean`, or unset NEURON_COMPILE_CACHE_URL"
        )
    if found is not None:
        kind = DoesNotFit if found.rule is DOES_NOT_FIT else BuildRefused
        return kind(f"{what}: neuronx-cc refuses it by {found.message} ({found.rule.id}); {found.advice}")
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
    return lines[-1][:300].rstrip(".") if lines else "it said nothing"
