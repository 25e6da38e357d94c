"""Device evidence: an artifact's NEFFs, run on Neuron devices on the inputs of its emulated evidence.

Each program runs on all of its ranks. Its answers are compared with those of the evidence, then it is measured. Nothing
is stored before all programs have agreed. Neither torch, transformers nor jaxlib is imported.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.backends.protocol import ignore_progress
from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.evidence import DEVICE, UNVERIFIED, Compared, Evidence, Limits, Timing
from nxpipe.pipeline.models.thresholds import Deviation, Thresholds, complete_evidence
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, NotReady, ProgramInvalid, VerificationFailed
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.executable.interface import Argument, Interface
    from nxpipe.emulator.executable.neff import Neff
    from nxpipe.emulator.passes.shard import Sharding
    from nxpipe.emulator.run.devices import Implementation

Trusts = Callable[[Evidence], bool]

REFERENCE: Final = "emulated evidence"
DEVICES: Final = ("auto", "nrtpy", "libnrt")
LEAST_RUNS: Final = 20  # a smaller number has no 99th percentile to speak of
_HOST: Final = "nxpipe.emulator.run.devices.session"
_WARMUP: Final = 5
_DRIVER: Final = Path("/sys/module/neuron/version")
_INSTANCE: Final = Path("/sys/devices/virtual/dmi/id/product_name")  # on Nitro, the instance type
_PROGRAMS: Final = "executables"


@dataclass(frozen=True)
class ProveOptions:
    """The library that drives the devices, the number of timed runs, and the seconds that a rank may be silent."""

    device: str = "auto"
    runs: int = 100
    limit: float = 900.0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise BuildRefused(
                f"{self.device!r} is no device, so what it computes is no evidence of kind {DEVICE}; pass "
                f"{', '.join(DEVICES)}"
            )
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
            described = _described(manifest, options)
        with tempfile.TemporaryDirectory(prefix="nxpipe-prove-") as folder:
            _fetch(manifest, store, Path(folder), step, watch)
            proofs = replay(manifest, golden, store, Path(folder), allowed, options, step)
            with step("store the evidence"):
                programs = tuple(proof.stored(store, described) for proof in proofs)
                limits = Limits.model_validate(asdict(allowed))
                evidence = Evidence(manifest=manifest.digest, kind=DEVICE, programs=programs, limits=limits)
                return store.attest(evidence)


def _golden(manifest: "Manifest", store: "Store", trusts: Trusts | None) -> Evidence:
    """The emulated evidence of an artifact that devices can run."""
    if not manifest.executables or not manifest.runs_on_devices:
        raise BuildRefused(
            f"{manifest.model.id}: it has no programs for Neuron devices; build it with --backend neuronx"
        )
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


@contextmanager
def device_faults() -> Iterator[None]:
    """Raise errors of devices as NotReady, which says whether a retry may succeed."""
    from nxpipe.emulator.run.status import RuntimeFault

    try:
        yield
    except RuntimeFault as fault:
        retry = "" if fault.deterministic else "; the fault may not occur again: run the command once more"
        raise NotReady(f"{fault}{retry}") from fault


def _described(manifest: "Manifest", options: ProveOptions) -> Mapping[str, Any]:
    """The description of this machine's device, which must be one of the artifact's target."""
    described: Mapping[str, Any] = _on_ranks("describe", None, 1, 1, options)[0]
    target = target_of(described["family"])
    if target != manifest.target:
        raise NotReady(
            f"{manifest.name} is for {manifest.target}, and this machine has {described['family']}; run the command on "
            f"an instance of {manifest.target}"
        )
    return described


def target_of(family: str) -> str | None:
    """The compiler's target for a family of instances, which may have further letters, as trn2u has."""
    from nxpipe.emulator.hardware import INSTANCES

    targets = {each.compiler_target for each in INSTANCES.values()}
    return max((target for target in targets if family.startswith(target)), key=len, default=None)


def _on_ranks(host: str, argument: object, degree: int, lnc: int, options: ProveOptions) -> list[Any]:
    from nxpipe.emulator.run.devices.environment import RankPlacement, free_address
    from nxpipe.emulator.run.devices.ranks import run_ranks

    device: Implementation = options.device  # type: ignore[assignment]  # checked by ProveOptions
    placement = RankPlacement(degree, free_address(), _first_core(degree), lnc)
    return run_ranks(
        f"{_HOST}:{host}", argument, world=degree, implementation=device, limit=options.limit, placement=placement
    )


def _first_core(degree: int) -> int:
    """The first of the cores that the environment permits."""
    from nxpipe.emulator.run.devices.environment import VISIBLE_CORES, visible_cores
    from nxpipe.emulator.run.status import CoresUnavailable

    text = os.environ.get(VISIBLE_CORES)
    if not text:
        return 0
    cores = visible_cores(text)
    if len(cores) < degree:
        raise CoresUnavailable(f"{VISIBLE_CORES} is {text}, and the program needs {degree} cores; permit as many")
    return cores[0]


@dataclass(frozen=True, eq=False)
class FetchedProgram:
    """A NEFF in a folder, with its interface, the shards of its states, and its evidence, which is read when it is
    used: caches are large."""

    name: str
    path: Path
    neff: "Neff"
    interface: "Interface"
    shards: Mapping[str, "Sharding"]
    golden: Compared
    store: "Store"

    @property
    def states(self) -> "dict[str, Argument]":
        return {each.name: each for each in self.interface.arguments if each.alias is not None}

    @property
    def files(self) -> dict[str, Any]:
        """The files of `session.replay`."""
        ranks = range(self.interface.degree)
        return {
            "neff": str(self.path),
            "interface": str(self.path.with_name(f"{self.name}.json")),
            "inputs": [f"{self.path}.inputs-{rank}.npz" for rank in ranks],
            "answers": [f"{self.path}.answers-{rank}.npz" for rank in ranks],
        }

    def golden_inputs(self) -> Arrays:
        from nxpipe.pipeline.verify.stored_artifact import stored_arrays

        return stored_arrays(self.store, self.golden.inputs)

    def golden_answers(self) -> Arrays:
        from nxpipe.pipeline.verify.stored_artifact import stored_arrays

        return stored_arrays(self.store, self.golden.answers)

    def write_inputs(self) -> None:
        """Write the golden inputs of each rank."""
        import numpy as np

        inputs = self.golden_inputs()
        shares = [self._on_ranks(argument, inputs) for argument in self.interface.requested]
        for rank, path in enumerate(self.files["inputs"]):
            np.savez(path, *(share[rank] for share in shares))

    def results(self) -> dict[str, list[Any]]:
        """Each result on each rank, as the ranks have written it."""
        import numpy as np

        found: dict[str, list[Any]] = {result.name: [] for result in self.interface.results}
        for path in self.files["answers"]:
            with np.load(path) as answers:
                for name, key in zip(found, answers.files, strict=True):
                    found[name].append(answers[key])
        return found

    def joined(self, name: str, shares: Sequence[Any], golden: Any) -> Any:
        """A result from those of all ranks, which has the shape of the golden answer."""
        whole = self.shards[name].joined(shares) if name in self.shards else shares[0]
        self._require(name, golden, whole.shape)
        return whole

    def _on_ranks(self, argument: "Argument", inputs: Arrays) -> Sequence[Any]:
        """A golden input on each rank; a state that the evidence does not have is zero."""
        import numpy as np

        degree = self.interface.degree
        if argument.name not in inputs:
            if argument.alias is None:
                raise ProgramInvalid(f"{self.name}: its evidence has no input {argument.name}; build the model again")
            return [np.zeros(argument.type.shape, argument.type.dtype.held)] * degree
        array, shard = inputs[argument.name], self.shards.get(argument.name)
        self._require(argument.name, array, (shard.whole(argument.type) if shard else argument.type).shape)
        return shard.split(array, degree) if shard else [array] * degree

    def _require(self, name: str, golden: Any, shape: tuple[int, ...]) -> None:
        if golden.shape != shape:
            raise ProgramInvalid(
                f"{self.name}: {name} of its evidence is {list(golden.shape)}, and {list(shape)} in the program; "
                "build the model again"
            )


def _fetch(manifest: "Manifest", store: "Store", folder: Path, step: Step, watch: Watch) -> None:
    """Fetch programs and weights into a folder, as an instance does that serves them."""
    from nxpipe.artifact_store.fetch.folder import Programs, fetch, size_of

    size = size_of(manifest, Programs.DEVICE)
    if size > shutil.disk_usage(folder).free:
        reason = f"too small for {human_bytes(size)} of programs and weights; name a larger folder in TMPDIR"
        raise OSError(errno.ENOSPC, reason, str(folder.parent))
    with step(f"fetch {manifest.name}"), watch(f"fetch {manifest.name}", size) as sent:
        fetch(store.blobs, manifest, folder, sent, Programs.DEVICE)


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
    fetched = [_opened(executable, golden, store, folder / _PROGRAMS) for executable in manifest.executables]
    proofs = [proof for group in groups(fetched) for proof in _run(group, folder, allowed, options, step)]
    return sorted(proofs, key=lambda proof: fetched.index(proof.program))


def _opened(executable: "Executable", golden: Evidence, store: "Store", folder: Path) -> FetchedProgram:
    from nxpipe.emulator.errors import InterfaceInvalid, NeffInvalid
    from nxpipe.emulator.executable.interface import interface_from
    from nxpipe.emulator.executable.neff import open_neff

    name, compared = executable.name, golden.of(executable.name)
    assert compared is not None  # the evidence is complete
    path = folder / f"{name}.neff"
    try:
        neff, interface = open_neff(path), interface_from((folder / f"{name}.json").read_bytes())
    except (NeffInvalid, InterfaceInvalid) as fault:
        raise ProgramInvalid(f"{name}: {fault}; build the model again") from fault
    results = {each.name for each in interface.results}
    if interface.degree != executable.tensor_parallel or results != set(executable.outputs):
        raise ProgramInvalid(
            f"{name}: its interface has {interface.degree} ranks and the results {', '.join(sorted(results))}, its "
            f"manifest {executable.tensor_parallel} and {', '.join(executable.outputs)}; build the model again"
        )
    return FetchedProgram(name, path, neff, interface, _shards(executable, store), compared, store)


def _shards(executable: "Executable", store: "Store") -> Mapping[str, "Sharding"]:
    """How the states of a program are divided: golden states are whole, and only the emulator's program says it."""
    if executable.tensor_parallel == 1:
        return {}
    from nxpipe.emulator.errors import ExecutableInvalid
    from nxpipe.emulator.executable.executable import from_bytes
    from nxpipe.emulator.isa.program import Role

    try:
        return from_bytes(store.read_blob(executable.blob)).pieces(Role.STATE)
    except ExecutableInvalid as fault:
        raise ProgramInvalid(f"{executable.name}: {fault}; build the model again") from fault


def groups(programs: Sequence[FetchedProgram]) -> list[list[FetchedProgram]]:
    """Programs that ranks load together: those of one degree whose states of equal name have equal types."""
    found: list[tuple[dict[str, str], list[FetchedProgram]]] = []
    for program in programs:
        types = {name: str(state.type) for name, state in program.states.items()}
        types |= {"degree": str(program.interface.degree), "physical cores": str(program.neff.physical_cores)}
        for known, members in found:
            if all(known.get(name, type_) == type_ for name, type_ in types.items()):
                known |= types
                members.append(program)
                break
        else:
            found.append((types, [program]))
    return [members for _, members in found]


@dataclass(frozen=True)
class Proof:
    """A program that agrees with its evidence: deviations and timing, and a file with its answers."""

    program: FetchedProgram
    deviations: Sequence[Deviation]
    timing: Timing
    answers: Path

    def stored(self, store: "Store", described: Mapping[str, Any]) -> Compared:
        return Compared(
            program=self.program.name,
            yardstick=REFERENCE,
            outputs=tuple(deviation.figures() for deviation in self.deviations),
            inputs=self.program.golden.inputs,
            answers=store.put_blob(self.answers.read_bytes()),
            surroundings=surroundings(self.program.neff, self.program.interface.degree, described),
            timing=self.timing,
        )


def _run(
    programs: Sequence[FetchedProgram],
    folder: Path,
    allowed: Thresholds,
    options: ProveOptions,
    step: Step,
) -> Iterator[Proof]:
    """The proofs of programs that run together, in a process for each rank."""
    from nxpipe.artifact_store.fetch.folder import WEIGHTS

    degree, lnc = programs[0].interface.degree, programs[0].neff.physical_cores
    for program in programs:
        program.write_inputs()
    names = programs[0].name if len(programs) == 1 else f"{len(programs)} programs"
    with step(f"run {names} on {degree} rank{'' if degree == 1 else 's'}"):
        files = {program.name: program.files for program in programs}
        argument = {"weights": str(folder / WEIGHTS), "programs": files, "runs": options.runs, "warmup": _WARMUP}
        timings = _on_ranks("replay", argument, degree, lnc, options)
    for program in programs:
        yield judged(program, [own[program.name] for own in timings], allowed)


def judged(program: FetchedProgram, timings: Sequence[Mapping[str, Any]], allowed: Thresholds) -> Proof:
    """The proof of a program that has run; VerificationFailed for an answer that is beyond the thresholds, on any rank
    that has it."""
    from nxpipe.pipeline.verify.evidence import compare, tensors_file

    results, golden, inputs = program.results(), program.golden_answers(), program.golden_inputs()
    if results.keys() != golden.keys():
        raise ProgramInvalid(f"{program.name}: its evidence has answers {', '.join(golden)}; build the model again")
    answers = {name: program.joined(name, results[name], golden[name]) for name in golden}
    deviations = compare(answers, golden)
    for deviation in deviations:
        name = deviation.output
        _require_computed(program, name, answers[name], golden[name], inputs.get(name))
        _require_within(program, deviation, allowed)
        for rank, other in enumerate(results[name][1:] if name not in program.shards else [], 1):
            (own,) = compare({name: other}, {name: golden[name]})
            _require_within(program, own, allowed, f" on rank {rank}")
    path = program.path.with_name(f"{program.name}.answers")
    path.write_bytes(tensors_file(answers))
    return Proof(program, deviations, _timing(timings), path)


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
        found["driver"] = _DRIVER.read_text(errors="replace").strip()
    with suppress(OSError):
        name = _INSTANCE.read_text(errors="replace").strip()
        if re.fullmatch(r"[a-z0-9-]{1,20}\.[a-z0-9-]{1,20}", name):
            found["instance type"] = name
    return {name: "".join(filter(str.isprintable, text))[:200] for name, text in found.items() if text}
