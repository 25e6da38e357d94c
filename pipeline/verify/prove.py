"""Device evidence: an artifact's NEFFs, run on Neuron devices on the inputs of its emulated evidence.

Each program runs on all of its ranks. Its answers are compared with those of the evidence, then it is measured. Nothing
is stored before all programs have agreed. Neither torch, transformers nor jaxlib is imported.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.backends.protocol import ignore_progress
from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.evidence import DEVICE, UNVERIFIED, Compared, Evidence, Figures, Limits, Timing
from nxpipe.pipeline.models.thresholds import Deviation, Thresholds, complete_evidence
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, ProgramInvalid, VerificationFailed
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.verify.device import (
    DeviceOptions,
    FetchedProgram,
    described_device,
    device_faults,
    fetched_artifact,
    open_programs,
    physical_cores,
    require_device_programs,
    run_programs,
)
from nxpipe.pipeline.verify.stored_artifact import stored_arrays

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.executable.neff import Neff
    from nxpipe.pipeline.verify.comparison import Comparison

Trusts = Callable[[Evidence], bool]

REFERENCE: Final = "emulated evidence"
LEAST_RUNS: Final = 20  # a smaller number has no 99th percentile to speak of
_DRIVER: Final = Path("/sys/module/neuron/version")
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
    golden = _golden(manifest, store, trusts)
    with device_faults():
        with step("open the device"):
            described = described_device(manifest, options)
        with fetched_artifact(manifest, store, step, watch) as folder:
            proofs = replay(manifest, golden, store, folder, allowed, options, step)
            with step("store the evidence"):
                programs = tuple(proof.stored(store, described) for proof in proofs)
                limits = Limits.model_validate(asdict(allowed))
                evidence = Evidence(manifest=manifest.digest, kind=DEVICE, programs=programs, limits=limits)
                return store.attest(evidence)


def _golden(manifest: "Manifest", store: "Store", trusts: Trusts | None) -> Evidence:
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
) -> "list[Proof]":
    """A proof of each program of a fetched folder; VerificationFailed for an answer beyond the thresholds."""
    programs = open_programs(manifest, store, folder)
    goldens = _goldens(golden, store)
    ran = run_programs(programs, lambda program: goldens[program.name].inputs(), folder, options, step)
    proofs = [judged(program, goldens[program.name], timings, allowed) for program, timings in ran]
    return sorted(proofs, key=lambda proof: programs.index(proof.program))


def compare_on_devices(
    published: "Published", store: "Store", options: DeviceOptions, step: Step, watch: Watch
) -> "Iterator[Comparison]":
    """Compare every program of an artifact on this machine's devices with its emulated evidence; nothing is stored.

    A result that ranks have in copies has a row for each copy that differs from the first. VerificationFailed for a
    device that did not run a program."""
    from nxpipe.pipeline.verify.comparison import Comparison, VariantResult

    for program, golden, _ in _replayed(published.manifest, store, options, step, watch):
        _, deviations, copies = _deviations(program, golden)
        result = VariantResult("as stored", (*deviations, *copies))
        yield Comparison(program.name, "the stored inputs", REFERENCE, (result,), ())


def measure(manifest: "Manifest", store: "Store", options: ProveOptions, step: Step, watch: Watch) -> dict[str, Timing]:
    """The durations of every program of an artifact on this machine's devices; nothing is judged or stored."""
    return {program.name: _timing(timings) for program, _, timings in _replayed(manifest, store, options, step, watch)}


def _replayed(
    manifest: "Manifest", store: "Store", options: DeviceOptions, step: Step, watch: Watch
) -> "Iterator[tuple[FetchedProgram, _Golden, list[Any]]]":
    """Each program of an artifact after its run on golden inputs, with its timings."""
    goldens = _goldens(_golden(manifest, store, None), store)
    with device_faults():
        with step("open the device"):
            described_device(manifest, options)
        with fetched_artifact(manifest, store, step, watch) as folder:
            programs = open_programs(manifest, store, folder)
            ran = run_programs(programs, lambda program: goldens[program.name].inputs(), folder, options, step)
            for program, timings in ran:
                yield program, goldens[program.name], timings


@dataclass(frozen=True)
class _Golden:
    """The evidence of a program. Its arrays are read when they are used: caches are large."""

    compared: Compared
    store: "Store"

    def inputs(self) -> Arrays:
        return stored_arrays(self.store, self.compared.inputs)

    def answers(self) -> Arrays:
        return stored_arrays(self.store, self.compared.answers)


def _goldens(golden: Evidence, store: "Store") -> dict[str, _Golden]:
    return {compared.program: _Golden(compared, store) for compared in golden.programs}


@dataclass(frozen=True)
class Proof:
    """A program that agrees with its evidence: deviations and timing, and a file with its answers."""

    program: FetchedProgram
    golden: _Golden
    deviations: Sequence[Deviation]
    timing: Timing
    answers: Path

    def stored(self, store: "Store", described: Mapping[str, Any]) -> Compared:
        return Compared(
            program=self.program.name,
            yardstick=REFERENCE,
            outputs=tuple(_figures(deviation) for deviation in self.deviations),
            inputs=self.golden.compared.inputs,
            answers=store.put_blob(self.answers.read_bytes()),
            surroundings=surroundings(self.program.neff, self.program.interface.degree, described),
            timing=self.timing,
        )


def judged(
    program: FetchedProgram, golden: _Golden, timings: Sequence[Mapping[str, Any]], allowed: Thresholds
) -> Proof:
    """The proof of a program that has run; VerificationFailed for an answer that is beyond the thresholds, on any rank
    that has it."""
    from nxpipe.pipeline.verify.evidence import tensors_file

    answers, deviations, copies = _deviations(program, golden)
    for deviation in (*deviations, *copies):
        _require_within(program, deviation, allowed)
    path = program.path.with_name(f"{program.name}.answers")
    path.write_bytes(tensors_file(answers))
    return Proof(program, golden, deviations, _timing(timings), path)


def _deviations(program: FetchedProgram, golden: _Golden) -> tuple[Arrays, list[Deviation], list[Deviation]]:
    """The answers of a program that has run, their deviations, and those of copies on other ranks that differ."""
    from nxpipe.pipeline.verify.evidence import compare

    results, expected, inputs = program.results(), golden.answers(), golden.inputs()
    if results.keys() != expected.keys():
        raise ProgramInvalid(f"{program.name}: its evidence has answers {', '.join(expected)}; build the model again")
    answers = {name: program.joined(name, results[name]) for name in expected}
    copies: list[Deviation] = []
    for name, answer in answers.items():
        program.require_shape(name, expected[name], answer.shape)
        _require_computed(program, name, answer, expected[name], inputs.get(name))
        for rank, other in enumerate(results[name][1:] if name not in program.shards else [], 1):
            if other.tobytes() != answer.tobytes():
                own = f"{name} on rank {rank}"
                copies += compare({own: other}, {own: expected[name]})
    return answers, compare(answers, expected), copies


def _require_computed(program: FetchedProgram, name: str, answer: Any, golden: Any, given: Any) -> None:
    """Refuse what a device leaves behind that did not run the program: memory as it was."""
    import numpy as np

    from nxpipe.emulator.numerics import settle

    state = program.states.get(name)
    if state is not None and given is not None:
        before = settle(given, state.type.dtype)
        if np.array_equal(answer, before) and not np.array_equal(golden, before):
            raise VerificationFailed(
                f"verification failed: {program.name} left the state {name} as it was, so the alias of its input and "
                "its output is lost; see `nxpipe doctor --hardware`"
            )
    if _varies(golden) and not _varies(answer):
        raise VerificationFailed(
            f"verification failed: {program.name} {name} is {answer.flat[0]} everywhere, where the golden answer "
            "varies: a core was not initialised, or did not run the program; restart the instance and try again"
        )


def _varies(array: Any) -> bool:
    """True if an array has two different elements; NaN is equal to NaN."""
    first = array.reshape(-1)[:1]
    return bool(((array != first) & ((array == array) | (first == first))).any())


def _require_within(program: FetchedProgram, deviation: Deviation, allowed: Thresholds) -> None:
    if faults := deviation.faults(allowed):
        raise VerificationFailed(
            f"verification failed: {program.name} {deviation.output} of the device: {'; '.join(faults)}; the "
            f"reference is {REFERENCE}; see `nxpipe doctor --hardware`, or change [verify]"
        )


def _figures(deviation: Deviation) -> Figures:
    """The deviation, without a divergence that is NaN, which JSON lacks and no threshold limits."""
    figures = asdict(deviation)
    if deviation.kl is not None and deviation.kl != deviation.kl:
        figures["kl"] = None
    return Figures.model_validate(figures)


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
        "physical cores of a logical core": str(physical_cores(neff)),
    }
    with suppress(OSError):
        found["driver"] = _DRIVER.read_text(errors="replace").strip()
    with suppress(OSError):
        name = _INSTANCE.read_text(errors="replace").strip()
        if re.fullmatch(r"[a-z0-9-]{1,20}\.[a-z0-9-]{1,20}", name):
            found["instance type"] = name
    return {name: "".join(filter(str.isprintable, text))[:200] for name, text in found.items() if text}
