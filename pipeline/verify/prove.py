"""Device evidence: an artifact's NEFFs, run on Neuron devices on the inputs of its emulated evidence.

Each program runs on all of its ranks. Its answers are compared with those of the evidence, then it is measured. Nothing
is stored before all programs have agreed. Neither torch, transformers nor jaxlib is imported.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.backends.protocol import ignore_progress
from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.evidence import DEVICE, UNVERIFIED, Compared, Evidence, Limits, Timing
from nxpipe.pipeline.models.thresholds import Deviation, Thresholds, complete_evidence
from nxpipe.pipeline.models.versions import DRIVER_VERSION
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, VerificationFailed
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.verify.device import (
    Batches,
    DeviceOptions,
    FetchedProgram,
    Runs,
    artifact_on_devices,
    open_programs,
    require_computed,
    require_device_programs,
    run_programs,
)
from nxpipe.pipeline.verify.stored_artifact import stored_arrays

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.executable.neff import Neff

Trusts = Callable[[Evidence], bool]

REFERENCE: Final = "emulated evidence"
LEAST_RUNS: Final = 20  # a smaller number has no 99th percentile to speak of
_INSTANCE: Final = Path("/sys/devices/virtual/dmi/id/product_name")  # on Nitro, the instance type


@dataclass(frozen=True)
class ProveOptions(DeviceOptions):
    """Options of a run that is measured."""

    runs: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs < LEAST_RUNS:
            raise BuildRefused(f"{self.runs} runs are too few for a 99th percentile; pass {LEAST_RUNS} or more")


def prove(
    published: "Published",
    store: "Store",
    allowed: Thresholds,
    options: ProveOptions,
    step: Step,
    watch: Watch = lambda title, size: nullcontext(ignore_progress),
    trusts: Trusts | None = None,
) -> Evidence:
    """Run an artifact on this machine's devices, and store the evidence.

    `trusts` decides which emulated evidence is replayed; default: any. VerificationFailed for an answer beyond the
    thresholds, NotReady for a device that fails.
    """
    manifest = published.manifest
    goldens = _goldens(golden_evidence(manifest, store, trusts), store)
    with artifact_on_devices(manifest, store, _inputs(goldens), options, step, watch) as (described, runs):
        proofs = _proofs(manifest, goldens, runs, allowed)
        with step("store the evidence"):
            programs = tuple(proof.stored(store, described) for proof in proofs)
            limits = Limits.model_validate(asdict(allowed))
            return store.attest(Evidence(manifest=manifest.digest, kind=DEVICE, programs=programs, limits=limits))


def golden_evidence(manifest: "Manifest", store: "Store", trusts: Trusts | None = None) -> Evidence:
    """The emulated evidence of an artifact that devices can run."""
    require_device_programs(manifest)
    evidence = store.evidence(manifest.digest)
    golden = complete_evidence(manifest, [each for each in evidence if trusts is None or trusts(each)])
    if golden is None:
        untrusted = complete_evidence(manifest, evidence) is not None
        problem = (
            "its emulated evidence has no signature that the channel trusts; sign it with `nxpipe store sign`"
            if untrusted
            else UNVERIFIED
        )
        raise Refused(f"{manifest.model.id}: {problem}")
    return golden


def replay(
    manifest: "Manifest",
    golden: Evidence,
    store: "Store",
    folder: Path,
    allowed: Thresholds,
    options: ProveOptions,
    step: Step,
    core: int = 0,
) -> "list[Proof]":
    """A proof of each program of a fetched folder, from a core on; VerificationFailed for an answer beyond the
    thresholds."""
    goldens = _goldens(golden, store)
    programs = open_programs(manifest, store, folder)
    runs = run_programs(programs, _inputs(goldens), folder, options, step, core)
    return _proofs(manifest, goldens, runs, allowed)


def _proofs(manifest: "Manifest", goldens: Mapping[str, "Golden"], runs: Runs, allowed: Thresholds) -> "list[Proof]":
    """A proof of each program in the order of the manifest; those that have run are judged before others run."""
    proofs = {program.name: judged(program, goldens[program.name], own, allowed) for program, own in runs}
    return [proofs[executable.name] for executable in manifest.executables]


def measure(manifest: "Manifest", store: "Store", options: ProveOptions, step: Step, watch: Watch) -> dict[str, Timing]:
    """The durations of every program of an artifact on this machine's devices, on its golden inputs; nothing is judged
    or stored."""
    goldens = _goldens(golden_evidence(manifest, store), store)
    with artifact_on_devices(manifest, store, _inputs(goldens), options, step, watch) as (_, runs):
        return {program.name: _timing(own) for program, own in runs}


@dataclass(frozen=True)
class Golden:
    """The evidence of a program. Its arrays are read when they are used: caches are large."""

    compared: Compared
    store: "Store"

    def inputs(self) -> Arrays:
        return stored_arrays(self.store, self.compared.inputs)

    def answers(self) -> Arrays:
        return stored_arrays(self.store, self.compared.answers)


def _goldens(golden: Evidence, store: "Store") -> dict[str, Golden]:
    return {compared.program: Golden(compared, store) for compared in golden.programs}


def _inputs(goldens: Mapping[str, Golden]) -> Batches:
    return lambda program: [goldens[program.name].inputs()]


@dataclass(frozen=True)
class Proof:
    """A program that agrees with its evidence: deviations and timing, and a file with its answers."""

    program: FetchedProgram
    golden: Golden
    deviations: Sequence[Deviation]
    timing: Timing
    answers: Path

    def stored(self, store: "Store", described: Mapping[str, Any]) -> Compared:
        return Compared(
            program=self.program.name,
            yardstick=REFERENCE,
            outputs=tuple(deviation.figures() for deviation in self.deviations),
            inputs=self.golden.compared.inputs,
            answers=store.put_blob(self.answers.read_bytes()),
            surroundings=surroundings(self.program.neff, self.program.interface.degree, described),
            timing=self.timing,
        )


def judged(program: FetchedProgram, golden: Golden, timings: Sequence[Mapping[str, Any]], allowed: Thresholds) -> Proof:
    """The proof of a program that has run; VerificationFailed for an answer that is beyond the thresholds, on any rank
    that has it."""
    from nxpipe.pipeline.verify.evidence import compare, tensors_file

    results, expected, inputs = program.results(), golden.answers(), golden.inputs()
    require_computed(program, results, expected, inputs)
    answers = program.whole(results)
    deviations = compare(answers, expected)
    for deviation in deviations:
        _require_within(program, deviation, allowed)
    for rank in program.differing_ranks(results):
        copies = {name: results[name][rank] for name in expected if name not in program.shards}
        for deviation in compare(copies, {name: expected[name] for name in copies}):
            _require_within(program, deviation, allowed, f" on rank {rank}")
    path = program.path.with_name(f"{program.name}.answers")
    path.write_bytes(tensors_file(answers))
    return Proof(program, golden, deviations, _timing(timings), path)


def _require_within(program: FetchedProgram, deviation: Deviation, allowed: Thresholds, where: str = "") -> None:
    if faults := deviation.faults(allowed):
        raise VerificationFailed(
            f"verification failed: {program.name} {deviation.output}{where} of the device: {'; '.join(faults)}; the "
            f"reference is {REFERENCE}; see `nxpipe doctor --hardware`, or change [verify]"
        )


def _timing(ranks: Sequence[Mapping[str, Any]]) -> Timing:
    """Durations of a program: of each run, that of the slowest rank."""
    from nxpipe.emulator.run.devices import protocol

    clock = "device" if all(own["clock"] == "device" for own in ranks) else "host"
    slowest = tuple(map(max, zip(*(own["durations_ms"] for own in ranks), strict=True)))
    measured = protocol.Timing(clock, slowest)  # type: ignore[arg-type]
    return Timing(clock=clock, runs=len(slowest), p50_ms=measured.p50_ms, p99_ms=measured.p99_ms)


def surroundings(neff: "Neff", degree: int, described: Mapping[str, Any]) -> dict[str, str]:
    """What a measurement depends on: no host, user or path."""
    found = {
        "device": described["family"],
        "runtime": f"{described['implementation']} {described['version']}",
        "compiler": neff.info.get("version") or neff.header.build_version,
        "logical cores": str(degree),
        "physical cores of a logical core": str(neff.physical_cores),
    }
    with suppress(OSError):
        found["driver"] = DRIVER_VERSION.read_text(errors="replace").strip()
    with suppress(OSError):
        name = _INSTANCE.read_text(errors="replace").strip()
        if re.fullmatch(r"[a-z0-9-]{1,20}\.[a-z0-9-]{1,20}", name):
            found["instance type"] = name
    return {name: "".join(filter(str.isprintable, text))[:200] for name, text in found.items() if text}
