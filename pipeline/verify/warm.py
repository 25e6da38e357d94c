"""Golden inputs of a fetched artifact, run on every core of this instance before it serves.

A folder that holds the right bytes may still not serve: a core may not initialise, a collective may hang, a device may
be slow, or a driver may be older than the one that the artifact was proved with. Each program therefore runs on the
inputs of the artifact's evidence, in new processes with a time limit, and its answers are compared with the evidence's.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Evidence, Timing
from nxpipe.pipeline.models.thresholds import Thresholds, complete_evidence
from nxpipe.pipeline.models.versions import DRIVER_VERSION, version_numbers
from nxpipe.pipeline.util.errors import NotReady, VerificationFailed
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.device import (
    DeviceOptions,
    described_device,
    device_faults,
    permitted_cores,
    require_device_programs,
    require_libraries,
    require_varied,
)
from nxpipe.pipeline.verify.execution import FAST, Runner
from nxpipe.pipeline.verify.prove import LEAST_RUNS, Proof, ProveOptions, Trusts, replay
from nxpipe.pipeline.verify.stored_artifact import ArtifactFolder, StoredProgram, read_artifact

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

# A median beyond the 99th percentile of the proof by this factor is no jitter: the device is throttled, shared, or not
# the one that was proved.
SLOWEST: Final = 1.5


@dataclass(frozen=True)
class WarmUp:
    """What has run: `programs` on each of `copies` groups of cores. Without golden inputs, nothing has."""

    programs: int
    copies: int

    @property
    def sentence(self) -> str:
        if not self.programs:
            return "the artifact has no golden inputs; verify it, and require emulated evidence on its channel"
        groups = "" if self.copies == 1 else f" on each of {self.copies} groups of cores"
        return f"{self.programs} programs agree with their golden answers{groups}"


def warm_up(
    path: Path,
    store: "Store",
    allowed: Thresholds,
    machine: DeviceOptions | None,
    cores: int,
    step: Step,
    trusts: Trusts | None = None,
) -> WarmUp:
    """Run the golden inputs of the artifact of a fetched folder; VerificationFailed or NotReady if it must not serve.

    On devices, programs run on as many groups of this instance's `cores` as there are; on the emulator (None), once.
    `trusts` decides which evidence counts; default: any.
    """
    require_libraries()
    folder = ArtifactFolder.open(path, store)
    if machine is not None:
        require_device_programs(folder.manifest)
    evidence = [each for each in folder.evidence(folder.manifest_digest) if trusts is None or trusts(each)]
    golden = complete_evidence(folder.manifest, evidence, EMULATED)
    if golden is None:
        return WarmUp(0, 0)
    if machine is None:
        return _on_the_emulator(folder, allowed, step)
    proved = complete_evidence(folder.manifest, evidence, DEVICE)
    options = ProveOptions(machine.device, LEAST_RUNS, machine.limit)
    return _on_devices(folder, golden, proved, allowed, cores, options, step)


def _on_the_emulator(folder: ArtifactFolder, allowed: Thresholds, step: Step) -> WarmUp:
    artifact = read_artifact(folder, folder, step, weights=False)  # type: ignore[arg-type]  # what is read of both
    weights, runner = folder.weights(), Runner(FAST, artifact.core)
    for stored in artifact.programs:
        with step(f"run {stored.executable.name} on its golden inputs"):
            _require_equal(stored, runner.load(stored.program, weights, stored.instructions).run, allowed)
    return WarmUp(len(artifact.programs), 1)


def _require_equal(stored: StoredProgram, run: Callable[[Any], Mapping[str, Any]], allowed: Thresholds) -> None:
    from nxpipe.pipeline.verify.evidence import compare

    assert stored.inputs is not None
    assert stored.outputs is not None
    name, answers = stored.executable.name, run(stored.inputs)
    for output, wanted in stored.outputs.items():
        require_varied(f"{name} {output}", answers[output], wanted)
    for deviation in compare({output: answers[output] for output in stored.outputs}, stored.outputs):
        if faults := deviation.faults(allowed):
            raise VerificationFailed(
                f"verification failed: {name} {deviation.output}: {'; '.join(faults)}; the reference is its emulated "
                "evidence; fetch the artifact again, or build it with this version of nxpipe"
            )


def _on_devices(
    folder: ArtifactFolder,
    golden: Evidence,
    proved: Evidence | None,
    allowed: Thresholds,
    cores: int,
    options: ProveOptions,
    step: Step,
) -> WarmUp:
    store, manifest = folder.origin, folder.manifest
    assert store is not None
    degree = max(executable.tensor_parallel for executable in manifest.executables)
    permitted = permitted_cores()
    copies = (cores if permitted is None else len(permitted)) // degree
    if not copies:
        raise NotReady(f"{manifest.name} needs {degree} cores, and this instance has {cores}; choose a larger one")
    with device_faults():
        with step("open the device"):
            described = described_device(manifest, options)
        require_software(described, proved)
        for copy in range(copies):
            with _writable(folder.path) as view:
                proofs = replay(manifest, golden, store, view, allowed, options, step, copy * degree)
            _require_speed(proofs, proved, copy * degree)
    return WarmUp(len(manifest.executables), copies)


@contextmanager
def _writable(folder: Path) -> Iterator[Path]:
    """A folder beside the fetched one with the same files, in which ranks can write: what is served stays as it is."""
    with tempfile.TemporaryDirectory(prefix="nxpipe-warm-", dir=folder.parent) as name:
        view = Path(name)
        for path in folder.rglob("*"):
            if path.is_file():
                copied = view / path.relative_to(folder)
                copied.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, copied)
        yield view


def _require_speed(proofs: Sequence[Proof], proved: Evidence | None, core: int) -> None:
    for proof in proofs:
        compared = proved.of(proof.program.name) if proved else None
        timing = compared.timing if compared else None
        if timing is not None and _is_slow(proof.timing, timing):
            raise NotReady(
                f"{proof.program.name} takes {proof.timing.p50_ms:.3g} ms from core {core} on, and {SLOWEST} times the "
                f"{timing.p99_ms:.3g} ms of its proof are the limit; the device is throttled or shared: replace the "
                "instance"
            )


def _is_slow(measured: Timing, proved: Timing) -> bool:
    """Durations of different clocks are not compared."""
    return measured.clock == proved.clock and measured.p50_ms > SLOWEST * proved.p99_ms


def require_software(described: Mapping[str, Any], proved: Evidence | None) -> None:
    """Refuse a runtime or a driver that is older than the one that the artifact was proved with."""
    if proved is None:
        return
    present = {"runtime": f"{described['implementation']} {described['version']}"}
    with suppress(OSError):
        present["driver"] = DRIVER_VERSION.read_text(errors="replace").strip()
    for name, wanted in proved.programs[0].surroundings.items():
        if name in present and _version_of(present[name]) < _version_of(wanted):
            raise NotReady(
                f"the Neuron {name} is {present[name]}, and the artifact was proved with {wanted}; update the AMI, or "
                "prove the artifact on it"
            )


def _version_of(software: str) -> tuple[int, ...]:
    """Of `IMPLEMENTATION VERSION`, or of a version alone."""
    return version_numbers(software.rpartition(" ")[2])
