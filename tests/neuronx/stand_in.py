"""Stand-in for neuronx-cc: its command line, its checks of the HLO proto as far as they are documented, its files.

It compiles nothing. It proves that a command line, a module and the handling of results are as documented, and not that
the compiler would accept the module. A test chooses a failure by the variable `NEURONX_CC_STAND_IN`:

    killed        SIGKILL, as the kernel does when memory runs out
    F137          the message about that, and status 70
    timeout       no end
    no-output     status 0 without a NEFF
    truncated     status 0 and half of a NEFF
    crash         status 1 without an error code
    drop-unused   a NEFF without the inputs that nothing uses
    NCC_...       that text as an error, and status 70
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.constraints import OPCODES, TARGETS, CheckedModule, HloLimits, HloViolation, violations
from nxpipe.emulator.hlo.schema import INPUT_NAMES, OUTPUT_NAMES, HloModule, InstructionField
from tests.neuronx.neff_files import BUILD, Variable, archive, container, members

FAILURE: Final = "NEURONX_CC_STAND_IN"
COMPILER_ERROR: Final = 70
_GIB: Final = 1 << 30
# HBM of one physical core; None where it is not documented.
_HBM: Final = {"inf2": 16 * _GIB, "trn1": 16 * _GIB, "trn1n": 16 * _GIB, "trn2": 12 * _GIB, "trn3": None}
_MALFORMED: Final = "NCC_EVRF064"  # for a rule of the form, which has no code of its own
_DOWNCASTS: Final = {"NCC_EVRF035": "dot", "NCC_EVRF061": "all_reduce"}  # what --implicit-integer-downcast permits
_UNSAFE_FP8: Final = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"

# Every flag that AWS documents or that its own frameworks pass, with its values.
_CHOICES: Final[dict[str, Sequence[str]]] = {
    "--framework": ["XLA"],
    "--target": TARGETS,
    "--model-type": ["generic", "transformer", "unet-inference"],
    "--auto-cast": ["none", "matmult", "all"],
    "--auto-cast-type": ["bf16", "fp16", "tf32", "fp8_e4m3"],
    "--native-int64": ["default", "enabled", "disabled"],
    "--distribution-strategy": ["llm-training", "generic", "NEMO"],
    "--verbose": ["info", "warning", "error", "critical", "debug", "INFO", "WARNING", "ERROR", "35"],
    "--internal-enable-dge-levels": ["spill_reload", "vector_dynamic_offsets"],
    "--recursive-layer-det": ["true", "false"],
}
_SWITCHES: Final = (
    "--enable-mixed-precision-accumulation",
    "--disable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
    "--disable-dge",
    "--enable-internal-neff-wrapper",
    "--internal-disable-fma-on-ios",
    "--no-internal-hlo-remat",
    _UNSAFE_FP8,
)
_NUMBERS: Final = (
    "--hbm-scratchpad-page-size",
    "--num-parallel-jobs",
    "--execute-repetition",
    "--internal-max-instruction-limit",
    "--internal-tensorizer-opt-level",
)
_TEXTS: Final = (
    "--implicit-integer-downcast",
    "--tensorizer-options",
    "--internal-hlo2tensorizer-options",
    "--internal-backend-options",
    "--logfile",
    "--output",
)
_REQUIRED: Final = ("--framework", "--target")


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="neuronx-cc", allow_abbrev=False)
    python = ".".join(map(str, sys.version_info[:3]))
    whole.add_argument("--version", action="version", version=f"NeuronX Compiler version {BUILD} Python {python}")
    commands = whole.add_subparsers(dest="command", required=True)
    operators = commands.add_parser("list-operators", allow_abbrev=False)
    operators.add_argument("--framework", required=True, choices=["XLA"])
    compiler = commands.add_parser("compile", allow_abbrev=False)
    compiler.add_argument("module", type=Path)
    for name, choices in _CHOICES.items():
        compiler.add_argument(name, choices=choices, required=name in _REQUIRED)
    for name in _SWITCHES:
        compiler.add_argument(name, action="store_true")
    for name in _NUMBERS:
        compiler.add_argument(name, type=int)
    for name in _TEXTS:
        compiler.add_argument(name)
    compiler.add_argument("--logical-nc-config", "-lnc", "--lnc", dest="lnc", type=int, choices=[1, 2])
    compiler.add_argument("--optlevel", "-O", type=int, choices=[1, 2, 3])
    compiler.add_argument("--pipeline", nargs="+", choices=["compile", "SaveTemps", "verify", "tensorize"])
    compiler.set_defaults(output="file.neff", logfile="log-neuron-cc.txt", implicit_integer_downcast="default")
    return whole


class Failure(Exception):
    """An error of the compiler, with its text in the log."""


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.command == "list-operators":
        sys.stdout.write("".join(f"{opcode}\n" for opcode in sorted(OPCODES)))
        return 0
    Path("command.txt").write_text(shlex.join(["neuronx-cc", *arguments]) + "\n")
    failure = os.environ.get(FAILURE, "")
    try:
        _fail(failure)
        neff = compiled(options, drops_unused=failure == "drop-unused")
    except Failure as error:
        lines = [f"2026-11-23T00:00:00Z ERROR {os.getpid()} [neuronx-cc]: {line}" for line in str(error).splitlines()]
        Path(options.logfile).write_text("".join(f"{line}\n" for line in lines))
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        return COMPILER_ERROR
    Path(options.logfile).write_text("2026-11-23T00:00:00Z INFO [neuronx-cc]: finished\n")
    for name in ("global_metric_store.json", "hlo_metrics.json"):
        Path(name).write_text("{}\n")
    if failure != "no-output":
        Path(options.output).write_bytes(neff[: len(neff) // 2] if failure == "truncated" else neff)
    sys.stdout.write("Compiler status PASS\n")
    return 0


def _fail(failure: str) -> None:
    match failure:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "timeout":
            signal.pause()
        case "crash":
            sys.exit("Segmentation fault in hlo2penguin")
        case "F137":
            raise Failure("[F137] neuronx-cc was forcibly killed: the host has insufficient memory")
        case _ if failure.startswith("NCC_"):
            code, _, text = failure.partition(" ")
            raise Failure(f"[{code}] {text}")


def compiled(options: argparse.Namespace, *, drops_unused: bool) -> bytes:
    """The NEFF of a module without a violation."""
    lnc = options.lnc or (2 if options.target in ("trn2", "trn3") else 1)
    if lnc == 2 and options.target not in ("trn2", "trn3"):
        raise Failure(f"[NCC_EARG001] Logical Neuron Core config 2 is not valid for {options.target}")
    try:
        data = options.module.read_bytes()
        module = HloModule.read(data)
        found = violations(module, options.target, _limits(options))
    except OSError as error:
        raise Failure(f"[NCC_EARG001] {options.module} cannot be read: {error.strerror}") from error
    except HloInvalid as error:
        raise Failure(f"[{_MALFORMED}] {error}") from error
    if errors := [_message(each) for each in found if not _permitted(each, options)]:
        raise Failure("\n".join(errors))
    variables = interface(module, drops_unused=drops_unused)
    hbm = _HBM[options.target]
    if hbm is not None and sum(each.nbytes for each in variables) > hbm * lnc:
        raise Failure(f"[NCC_EOOM001] the tensors of the interface exceed the {hbm * lnc // _GIB} GB of a core's HBM")
    random.shuffle(variables)  # a reader must not rely on their order
    variables.insert(0, Variable("scratch", "virtual", 4096))
    files = members(variables, subgraphs=lnc, extra={"hlo.pb": data})
    body = archive(files, is_compressed=not options.enable_fast_loading_neuron_binaries)
    return container(body, name=options.output, lnc=lnc)


def _limits(options: argparse.Namespace) -> HloLimits:
    limit = options.internal_max_instruction_limit
    return HloLimits() if limit is None else HloLimits(instructions=limit)


def _permitted(violation: HloViolation, options: argparse.Namespace) -> bool:
    downcasts = options.implicit_integer_downcast.split(",")
    if violation.source in _DOWNCASTS:
        return "all" in downcasts or _DOWNCASTS[violation.source] in downcasts
    if violation.rule == "fp8-e4m3fn":
        return options.experimental_unsafe_fp8e4m3fn_as_fp8e4m3 or _UNSAFE_FP8 in str(
            options.internal_hlo2tensorizer_options
        )
    return False


def _message(violation: HloViolation) -> str:
    code = violation.source if re.fullmatch(r"NCC_[A-Z]{4}[0-9]{3}", violation.source) else _MALFORMED
    return f"[{code}] {violation.subject}: {violation.detail}"


def interface(module: HloModule, *, drops_unused: bool = False) -> list[Variable]:
    """Inputs and outputs by the names that the module gives them, or the default ones."""
    checked = CheckedModule(module, TARGETS[0], HloLimits())
    entry = module.entry
    assert entry is not None
    assert entry.root is not None
    used = {number for each in entry.instructions for number in each.operand_ids}
    found = []
    for each in checked.parameters():
        number = each.proto.number(InstructionField.PARAMETER_NUMBER)
        if each.id in used or not drops_unused:
            found.append(Variable(each.attribute(INPUT_NAMES) or f"input{number}", "input", each.shape.nbytes))
    text = entry.root.attribute(OUTPUT_NAMES)
    shapes = [shape for _, shape in checked.outputs()]
    names = text.split(",") if text else [f"output{index}" for index in range(len(shapes))]
    found += [Variable(name, "output", shape.nbytes) for name, shape in zip(names, shapes, strict=True)]
    return found


def install(folder: Path) -> Path:
    """The executable `neuronx-cc` in a folder, to be on the PATH."""
    root = Path(__file__).parent.parent.parent
    program = folder / "neuronx-cc"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {json.dumps(str(root))})\n"
        "from tests.neuronx.stand_in import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    program.chmod(0o755)
    return program
