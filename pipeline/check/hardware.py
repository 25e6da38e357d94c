"""Probes of the corpus on a machine with neuronx-cc, and with devices where it has them.

Each module is compiled in a process of its own with limits, and runs in rank processes, so that a crash or a hang is
the result of one probe. Nothing here opens a device in the process of the command.
"""

import hashlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import numpy as np

from nxpipe.emulator.hlo.assumptions import assumptions
from nxpipe.emulator.hlo.constraints import TARGETS
from nxpipe.emulator.hlo.corpus import matching
from nxpipe.emulator.hlo.probe import NAMES, Arrays, Probe
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices import resolved
from nxpipe.emulator.run.devices.environment import RankPlacement, free_address
from nxpipe.emulator.run.devices.protocol import DeviceTensor, plain
from nxpipe.emulator.run.devices.ranks import Rank, run_ranks
from nxpipe.emulator.run.status import InvalidLoad, RuntimeFault
from nxpipe.pipeline.check.hardware_report import (
    HardwareReport,
    Surroundings,
    Trial,
    anonymous,
    finite,
    last_lines,
)
from nxpipe.pipeline.compile.neuronx.compiler import (
    COMMAND,
    COMPILER_REMEDY,
    ProcessLimits,
    compile_module,
    compiler_release,
    read_compiled,
)
from nxpipe.pipeline.compile.neuronx.toolchain import Compilation
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, MissingSoftware, NotReady, PipelineError
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import plain as plain_text

_COMPILE_SECONDS: Final = 600.0  # for one module of a few instructions
_RUN_SECONDS: Final = 120.0  # without a report of a rank
_QUERY_SECONDS: Final = 120.0
_LONGEST_LINE: Final = 80  # of a file of the kernel
_CODE: Final = re.compile(r"NCC_[A-Z]{4}[0-9]{3}\b")
_DESCRIBE: Final = "nxpipe.emulator.run.devices.session:describe"
_NEFF: Final = "program.neff"
_PATTERN: Final = 0xA5  # what outputs hold before a run, so that unwritten ones differ

Compile: TypeAlias = Callable[[Probe, str], bytes]  # the NEFF for a target; a PipelineError if there is none
Run: TypeAlias = Callable[[Probe, bytes], list[Arrays]]  # the outputs of each rank; RuntimeFault


# The machine ----------------------------------------------------------------------------------------------------------


def survey(root: Path = Path("/")) -> Surroundings:
    """Software and devices of this machine; MissingSoftware without neuronx-cc."""
    if shutil.which(COMMAND) is None:
        raise MissingSoftware(f"{COMMAND} on the PATH", "nxpipe doctor --hardware", COMPILER_REMEDY)
    return Surroundings(
        compiler=plain_text(compiler_release() or "unknown"),
        driver=_line(root / "sys/module/neuron/version"),
        instance=_line(root / "sys/devices/virtual/dmi/id/product_name") if _is_ec2(root) else "",
        devices=len([path for path in (root / "dev").glob("neuron*") if path.name.removeprefix("neuron").isdigit()]),
    )


def with_runtime(found: Surroundings) -> Surroundings:
    """The runtime as well, opened in a process of its own; NotReady if no device can be opened."""
    try:
        (described,) = run_ranks(_DESCRIBE, None, world=1, limit=_RUN_SECONDS)
    except RuntimeFault as fault:
        raise NotReady(f"the devices cannot be opened: {fault}") from fault
    return replace(found, implementation=resolved("auto"), runtime=described["version"], family=described["family"])


def native_target(found: Surroundings) -> str | None:
    """The compiler's target for the devices of this machine."""
    name = found.instance.partition(".")[0].lower() or found.family.lower()
    return next((target for target in sorted(TARGETS, key=len, reverse=True) if name.startswith(target)), None)


def missing_opcodes() -> tuple[str, ...] | None:
    """Opcodes that nxpipe writes and that the compiler's list lacks; None without a list."""
    listed = {_folded(word) for word in re.findall(r"[A-Za-z][\w-]*", _query("list-operators", "--framework", "XLA"))}
    if not listed:
        return None
    used = {feature for probe in assumptions() for feature in probe.features}
    opcodes = (feature.removeprefix("opcode ") for feature in used if feature.startswith("opcode "))
    return tuple(sorted(opcode for opcode in opcodes if _folded(opcode) not in listed))


def _folded(opcode: str) -> str:
    return opcode.replace("-", "").replace("_", "").lower()


def _query(*arguments: str) -> str:
    """The output of a short command of the compiler; empty if it fails."""
    try:
        done = subprocess.run(
            [COMMAND, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUERY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def _is_ec2(root: Path) -> bool:
    return "Amazon EC2" in _line(root / "sys/devices/virtual/dmi/id/sys_vendor")


def _line(path: Path) -> str:
    try:
        return plain_text(path.read_text(errors="replace"))[:_LONGEST_LINE]
    except OSError:
        return ""


def chosen_probes(pattern: str) -> list[Probe]:
    """The probes of a group, or with a name like the pattern; InputInvalid if there is none."""
    probes = matching(pattern)
    if not probes:
        raise InputInvalid(f"no probe is like {pattern[:80]!r}; examples are 'opcode', 'alias/*', 'rank/own-rank'")
    return probes


def for_target(probes: Sequence[Probe], target: str) -> list[Probe]:
    """The probes that a target can compile: not each has logical cores of two physical ones. InputInvalid if none is
    left."""
    physical = Compilation(target).logical_cores
    found = [probe for probe in probes if probe.physical_cores <= physical]
    if not found:
        raise InputInvalid(
            f"{target} has no logical cores of two physical ones, which all chosen probes need; choose trn2 or trn3"
        )
    return found


# Trials ---------------------------------------------------------------------------------------------------------------


def try_all(
    report: HardwareReport,
    probes: Sequence[Probe],
    target: str,
    compile_neff: Compile,
    run: Run | None,
    *,
    force: bool = False,
) -> Iterator[tuple[Probe, Trial]]:
    """Each probe with its trial, which is in the report. A finished trial of an equal module is not repeated."""
    trials = report.trials.setdefault(target, {})
    for probe in probes:
        earlier = trials.get(probe.name)
        if force or earlier is None or not _is_finished(earlier, probe, run):
            trials[probe.name] = try_probe(probe, target, compile_neff, run)
        yield probe, trials[probe.name]


def _is_finished(trial: Trial, probe: Probe, run: Run | None) -> bool:
    if trial.module != _digest(probe) or not trial.is_final:
        return False
    return run is None or trial.ran is not None or trial.compiled is False


def try_probe(probe: Probe, target: str, compile_neff: Compile, run: Run | None) -> Trial:
    trial, started = Trial(_digest(probe)), time.monotonic()
    try:
        neff = compile_neff(probe, target)
        names = _require_interface(probe, neff)
    except PipelineError as error:
        notes = "\n".join([str(error), *getattr(error, "__notes__", ())])
        code = _CODE.search(notes)
        return replace(
            trial,
            compiled=False,
            code=code[0] if code else "",
            message=anonymous(str(error)),
            log=last_lines(notes),
            is_final=getattr(error, "deterministic", False),
        )
    trial = replace(trial, compiled=True, seconds=round(time.monotonic() - started, 1))
    if names:
        trial = replace(trial, agrees=False, message=names)
    return trial if run is None else _executed(trial, probe, neff, run)


def _executed(trial: Trial, probe: Probe, neff: bytes, run: Run) -> Trial:
    try:
        outputs = run(probe, neff)
    except RuntimeFault as fault:
        code = getattr(fault.status, "name", str(fault.status))
        return replace(
            trial,
            ran=False,
            code=code,
            message=anonymous(str(fault)),
            log=last_lines(str(fault)),
            is_final=getattr(fault, "deterministic", True),
        )
    distance = max(probe.distance(rank, found) for rank, found in enumerate(outputs))
    if distance <= probe.tolerance:
        return replace(trial, ran=True, agrees=trial.agrees is None, distance=finite(distance))
    worst = (
        f"outputs differ from the expected ones by {distance:.2g} of the largest, and {probe.tolerance:g} is permitted"
    )
    return replace(trial, ran=True, agrees=False, distance=finite(distance), message=trial.message or worst)


def _digest(probe: Probe) -> str:
    return hashlib.sha256(probe.module).hexdigest()


# Compilation ----------------------------------------------------------------------------------------------------------


def compile_probe(probe: Probe, target: str) -> bytes:
    """The NEFF by neuronx-cc, with types as they are declared."""
    cores = str(probe.physical_cores)
    flags = ("--target", target, "--model-type", "generic", "--auto-cast", "none", "--lnc", cores, "--optlevel", "1")
    return compile_module(probe.name, probe.module, flags, ProcessLimits(_COMPILE_SECONDS, available_memory()))


def _require_interface(probe: Probe, neff: bytes) -> str:
    """Refuse a NEFF for other cores than requested, or with other tensors than the module's; the sentence about lost
    names if the probe is about them."""
    found = read_compiled(probe.name, neff)
    if (cores := found.physical_cores) != probe.physical_cores:
        requested = f"{probe.physical_cores} were requested"
        raise BuildRefused(f"{probe.name}: the NEFF is for {cores} physical cores of a logical one, and {requested}")
    outputs = {
        each.name: stored.nbytes
        for each, stored in zip(probe.interface.results, probe.outputs[0].values(), strict=True)
    }
    inputs = {name: array.nbytes for name, array in probe.inputs[0].items()}
    for role, declared, variables in (("input", inputs, found.inputs), ("output", outputs, found.outputs)):
        sizes = {each.name: each.nbytes for each in variables}
        names = names_of(list(declared), sizes, role)
        for name, own in names.items():
            if sizes[own] != declared[name]:
                raise BuildRefused(f"{probe.name}: {role} {name[:40]} has {sizes[own]} bytes, and not {declared[name]}")
        if unknown := sizes.keys() - names.values():
            raise BuildRefused(f"{probe.name}: the NEFF has {role}s that the module lacks: {sorted(unknown)[:3]}")
        lost = any(plain(own) != name for name, own in names.items())
        if lost and f"names of {role}s" in probe.features.intersection(NAMES):
            return f"the NEFF has default names of {role}s"
    return ""


def names_of(declared: Sequence[str], found: Iterable[str], role: str) -> dict[str, str]:
    """The program's name of each declared tensor that it has: the same, or the default one by number."""
    by_plain = {plain(name): name for name in found}
    if any(name in by_plain for name in declared):
        return {name: by_plain[name] for name in declared if name in by_plain}
    return {name: by_plain[f"{role}{number}"] for number, name in enumerate(declared) if f"{role}{number}" in by_plain}


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceRun:
    """Execution of a probe's NEFF by ranks with this limit; `launch` starts the ranks."""

    launch: Callable[..., list[Any]] = run_ranks
    limit: float = _RUN_SECONDS

    def __call__(self, probe: Probe, neff: bytes) -> list[Arrays]:
        with TemporaryDirectory(prefix="nxpipe-probe-") as folder:
            path = Path(folder) / _NEFF
            path.write_bytes(neff)
            job = job_of(probe, path)
            cores = probe.runtime_cores or probe.physical_cores
            placement = RankPlacement(probe.world, free_address(), physical_cores=cores)
            results = self.launch(
                f"{__name__}:run_program", job, world=probe.world, limit=self.limit, placement=placement
            )
        return [_arrays(probe, rank, result) for rank, result in enumerate(results)]


def job_of(probe: Probe, program: Path) -> dict[str, Any]:
    """The argument of the host function; bytes of tensors as hexadecimal text."""
    return {
        "program": str(program),
        "inputs": [{name: array.tobytes().hex() for name, array in arrays.items()} for arrays in probe.inputs],
        "outputs": {name: array.nbytes for name, array in probe.outputs[0].items()},
        "aliases": probe.aliases,
        "runs": probe.runs,
    }


def run_program(rank: Rank, argument: Any) -> Any:
    """Host function: the outputs of one rank after the last run."""
    rank.step("load")
    path = Path(argument["program"])
    model = rank.runtime.load(path, core=rank.core, rank=rank.number, world=rank.world)
    given, sizes, aliases = argument["inputs"][rank.number], argument["outputs"], argument["aliases"]
    own_inputs = names_of(list(given), model.inputs, "input")
    own_outputs = names_of(list(sizes), model.outputs, "output")
    if absent := sizes.keys() - own_outputs.keys():
        raise InvalidLoad(f"the program lacks the outputs {sorted(absent)}; its names are {sorted(model.outputs)[:4]}")

    def tensor(name: str, data: bytes) -> DeviceTensor:
        made = rank.runtime.allocate(len(data), core=rank.core, name=name[:40])
        made.write(np.frombuffer(data, np.uint8))
        return made

    tensors = {name: tensor(name, bytes.fromhex(text)) for name, text in given.items()}
    results = {
        name: tensors[aliases[name]] if name in aliases else tensor(name, bytes([_PATTERN]) * nbytes)
        for name, nbytes in sizes.items()
    }
    inputs = {own: tensors[name] for name, own in own_inputs.items()}
    outputs = {own: results[name] for name, own in own_outputs.items()}
    for number in range(argument["runs"]):
        rank.step(f"execute run {number + 1}")
        _spoil(result for name, result in results.items() if name not in aliases)
        model.execute(inputs, outputs)
    rank.step("read")
    return {name: result.read().tobytes().hex() for name, result in results.items()}


def _spoil(tensors: Iterable[DeviceTensor]) -> None:
    for each in tensors:
        each.write(np.full(each.nbytes, _PATTERN, np.uint8))


def _arrays(probe: Probe, rank: int, result: Mapping[str, str]) -> dict[str, Array]:
    return {
        name: np.frombuffer(bytes.fromhex(result[name]), expected.dtype).reshape(expected.shape)
        for name, expected in probe.outputs[rank].items()
    }
