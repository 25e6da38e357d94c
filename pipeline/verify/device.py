"""An artifact's NEFFs on this machine's Neuron devices, in a process for each rank.

Programs and weights are fetched into a temporary folder, as an instance does that serves them, and run there on batches
of whole tensors. Neither torch, transformers nor jaxlib is imported.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware, NotReady, ProgramInvalid, VerificationFailed
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.executable.interface import Argument, Interface
    from nxpipe.emulator.executable.neff import Neff
    from nxpipe.emulator.ir.types import TensorType
    from nxpipe.emulator.passes.shard import Sharding
    from nxpipe.emulator.run.devices import Implementation

Batches = Callable[["FetchedProgram"], Sequence[Arrays]]  # the inputs of a program's runs: whole tensors by name
Runs = Iterator[tuple["FetchedProgram", list[Any]]]  # programs that have run, with the timing on each rank

DEVICES: Final = ("auto", "nrtpy", "libnrt")
_HOST: Final = "nxpipe.emulator.run.devices.session"
_WARMUP: Final = 5
_PROGRAMS: Final = "executables"


@dataclass(frozen=True)
class DeviceOptions:
    """The library that drives the devices, the number of timed runs, and the seconds that a rank may be silent."""

    device: str = "auto"
    runs: int = 0
    limit: float = 900.0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise BuildRefused(f"{self.device!r} is no device; pass {', '.join(DEVICES)}")


def require_device_programs(manifest: "Manifest") -> None:
    """Raise BuildRefused for an artifact that devices cannot run."""
    if not manifest.executables or not manifest.runs_on_devices:
        raise BuildRefused(
            f"{manifest.model.id}: it has no programs for Neuron devices; build it with --backend neuronx"
        )


@contextmanager
def device_faults() -> Iterator[None]:
    """Raise errors of devices as NotReady, which says whether a retry may succeed."""
    from nxpipe.emulator.run.status import RuntimeFault

    try:
        yield
    except RuntimeFault as fault:
        retry = "" if fault.deterministic else "; the fault may not occur again: run the command once more"
        raise NotReady(f"{fault}{retry}") from fault


def described_device(manifest: "Manifest", options: DeviceOptions) -> Mapping[str, Any]:
    """The description of this machine's device, which must be one of the artifact's target."""
    described: Mapping[str, Any] = on_ranks(f"{_HOST}:describe", None, 1, 1, options)[0]
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


def on_ranks(host: str, argument: object, degree: int, lnc: int, options: DeviceOptions, offset: int = 0) -> list[Any]:
    """The results of a function on ranks; `offset` counts from the first core that the environment permits."""
    from nxpipe.emulator.run.devices.environment import RankPlacement, free_address
    from nxpipe.emulator.run.devices.ranks import run_ranks

    device: Implementation = options.device  # type: ignore[assignment]  # checked by DeviceOptions
    placement = RankPlacement(degree, free_address(), _first_core(offset + degree) + offset, lnc)
    return run_ranks(host, argument, world=degree, implementation=device, limit=options.limit, placement=placement)


def _first_core(degree: int) -> int:
    """The first of the cores that the environment permits."""
    from nxpipe.emulator.run.devices.environment import VISIBLE_CORES
    from nxpipe.emulator.run.status import CoresUnavailable

    cores = permitted_cores()
    if cores is None:
        return 0
    if len(cores) < degree:
        text = os.environ[VISIBLE_CORES]
        raise CoresUnavailable(f"{VISIBLE_CORES} is {text}, and the program needs {degree} cores; permit as many")
    return cores[0]


def permitted_cores() -> Sequence[int] | None:
    """The cores that the environment permits; None for all."""
    from nxpipe.emulator.run.devices.environment import VISIBLE_CORES, visible_cores

    text = os.environ.get(VISIBLE_CORES)
    return visible_cores(text) if text else None


@dataclass(frozen=True, eq=False)
class FetchedProgram:
    """A NEFF in a folder, with its interface and the shards of its states."""

    name: str
    path: Path
    neff: "Neff"
    interface: "Interface"
    shards: Mapping[str, "Sharding"]

    @property
    def states(self) -> "dict[str, Argument]":
        return {each.name: each for each in self.interface.arguments if each.alias is not None}

    def batch(self, number: int) -> dict[str, list[str]]:
        """The files of a run, one for each rank."""
        return {
            end: [f"{self.path}.{end}-{number}-{rank}.npz" for rank in range(self.interface.degree)]
            for end in ("inputs", "answers")
        }

    def files(self, batches: int) -> dict[str, Any]:
        """The files of `session.replay`."""
        interface = self.path.with_name(f"{self.name}.json")
        return {
            "neff": str(self.path),
            "interface": str(interface),
            "batches": [self.batch(number) for number in range(batches)],
        }

    def write_inputs(self, number: int, inputs: Arrays) -> None:
        """Write the inputs of each rank for a run, from whole tensors."""
        import numpy as np

        shares = [self._shares_of(argument, inputs) for argument in self.interface.requested]
        for rank, path in enumerate(self.batch(number)["inputs"]):
            np.savez(path, *(share[rank] for share in shares))

    def results(self, number: int = 0) -> dict[str, list[Any]]:
        """Each result on each rank, as the ranks have written it after a run."""
        import numpy as np

        found: dict[str, list[Any]] = {result.name: [] for result in self.interface.results}
        for path in self.batch(number)["answers"]:
            with np.load(path) as answers:
                for name, key in zip(found, answers.files, strict=True):
                    found[name].append(answers[key])
        return found

    def answers(self, number: int = 0) -> Arrays:
        """The whole results of a run."""
        return self.whole(self.results(number))

    def whole(self, results: Mapping[str, Sequence[Any]], rank: int = 0) -> Arrays:
        """The results from those of all ranks; of copies, the rank's."""
        return {
            name: self.shards[name].joined(shares) if name in self.shards else shares[rank]
            for name, shares in results.items()
        }

    def divided(self, name: str, whole: Any) -> Sequence[Any]:
        """A state or a result on each rank, from the whole tensor."""
        degree = self.interface.degree
        return self.shards[name].split(whole, degree) if name in self.shards else [whole] * degree

    def differing_ranks(self, results: Mapping[str, Sequence[Any]]) -> list[int]:
        """The ranks with a result that should be a copy of the first rank's, and is not."""
        copies = [shares for name, shares in results.items() if name not in self.shards]
        return [
            rank
            for rank in range(1, self.interface.degree)
            if any(shares[rank].tobytes() != shares[0].tobytes() for shares in copies)
        ]

    def place(self, rank: int) -> str:
        """Where a fault is; nothing for a program of one rank."""
        return f" on rank {rank}" if self.interface.degree > 1 else ""

    def require_whole(self, name: str, stored: Any, type_: "TensorType") -> None:
        """Raise ProgramInvalid for a tensor of evidence that is of another shape in the program, whose type on a rank
        is given."""
        shape = (self.shards[name].whole(type_) if name in self.shards else type_).shape
        if stored.shape != shape:
            raise ProgramInvalid(
                f"{self.name}: {name} of its evidence is {list(stored.shape)}, and {list(shape)} in the program; "
                "build the model again"
            )

    def _shares_of(self, argument: "Argument", inputs: Arrays) -> Sequence[Any]:
        """An input on each rank; a state that is not given is zero."""
        import numpy as np

        if argument.name not in inputs:
            if argument.alias is None:
                raise ProgramInvalid(f"{self.name}: its evidence has no input {argument.name}; build the model again")
            return [np.zeros(argument.type.shape, argument.type.dtype.held)] * self.interface.degree
        self.require_whole(argument.name, inputs[argument.name], argument.type)
        return self.divided(argument.name, inputs[argument.name])


@contextmanager
def artifact_on_devices(
    manifest: "Manifest", store: "Store", batches: Batches, options: DeviceOptions, step: Step, watch: Watch
) -> "Iterator[tuple[Mapping[str, Any], Runs]]":
    """The description of this machine's device, and the runs of an artifact on it, as long as its files exist.

    NotReady for a device that is missing, of another target, or fails.
    """
    require_libraries()
    with device_faults():
        with step("open the device"):
            described = described_device(manifest, options)
        with tempfile.TemporaryDirectory(prefix="nxpipe-device-") as name:
            folder = Path(name)
            fetch_programs(manifest, store, folder, step, watch)
            yield described, run_programs(open_programs(manifest, store, folder), batches, folder, options, step)


def require_libraries() -> None:
    """Raise MissingSoftware for a library that is not installed: an instance needs no compiler, but these."""
    for name in ("numpy", "ml_dtypes", "safetensors"):
        if find_spec(name) is None:
            raise MissingSoftware(name, "A program on a device", "run: pip install 'nxpipe[devices]'")


def fetch_programs(manifest: "Manifest", store: "Store", folder: Path, step: Step, watch: Watch) -> None:
    from nxpipe.artifact_store.fetch.folder import Programs, fetch, size_of

    size = size_of(manifest, Programs.DEVICE)
    if size > shutil.disk_usage(folder).free:
        reason = f"too small for {human_bytes(size)} of programs and weights; name a larger folder in TMPDIR"
        raise OSError(errno.ENOSPC, reason, str(folder.parent))
    with step(f"fetch {manifest.name}"), watch(f"fetch {manifest.name}", size) as sent:
        fetch(store.blobs, manifest, folder, sent, Programs.DEVICE)


def open_programs(manifest: "Manifest", store: "Store", folder: Path) -> list[FetchedProgram]:
    """The programs of a fetched folder; ProgramInvalid for one that is not what the manifest says."""
    return [_opened(executable, store, folder / _PROGRAMS) for executable in manifest.executables]


def _opened(executable: "Executable", store: "Store", folder: Path) -> FetchedProgram:
    from nxpipe.emulator.errors import InterfaceInvalid, NeffInvalid
    from nxpipe.emulator.executable.interface import interface_from
    from nxpipe.emulator.executable.neff import open_neff

    name = executable.name
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
    return FetchedProgram(name, path, neff, interface, _shards(executable, store))


def _shards(executable: "Executable", store: "Store") -> Mapping[str, "Sharding"]:
    """How the states of a program are divided: given states are whole, and only the emulator's program says it."""
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


def run_programs(
    programs: Sequence[FetchedProgram],
    batches: Batches,
    folder: Path,
    options: DeviceOptions,
    step: Step,
    core: int = 0,
) -> Runs:
    """Run each program of a fetched folder on its batches, then time it as often as the options say; a program without
    batches is left out. `core` is that of the first rank."""
    for group in groups(programs):
        given = {program.name: _written(program, batches(program)) for program in group}
        if running := [program for program in group if given[program.name]]:
            timings = _run(running, given, folder, options, step, core)
            yield from ((program, [own.get(program.name) for own in timings]) for program in running)


def _written(program: FetchedProgram, batches: Sequence[Arrays]) -> int:
    """The number of a program's batches, whose inputs are written now."""
    for number, inputs in enumerate(batches):
        program.write_inputs(number, inputs)
    return len(batches)


def _run(
    programs: Sequence[FetchedProgram],
    batches: Mapping[str, int],
    folder: Path,
    options: DeviceOptions,
    step: Step,
    core: int,
) -> list[Any]:
    """Run programs together, in a process for each rank; what `session.replay` returns on each."""
    from nxpipe.artifact_store.fetch.folder import WEIGHTS

    degree, lnc = programs[0].interface.degree, programs[0].neff.physical_cores
    names = programs[0].name if len(programs) == 1 else f"{len(programs)} programs"
    place = f", from core {core}" if core else ""
    with step(f"run {names} on {degree} rank{'' if degree == 1 else 's'}{place}"):
        files = {program.name: program.files(batches[program.name]) for program in programs}
        argument = {"weights": str(folder / WEIGHTS), "programs": files, "runs": options.runs, "warmup": _WARMUP}
        return on_ranks(f"{_HOST}:replay", argument, degree, lnc, options, core)


def require_computed(
    program: FetchedProgram, results: Mapping[str, Sequence[Any]], golden: Arrays, given: Arrays
) -> None:
    """Refuse what a device leaves behind that did not run the program: memory as it was, on any rank.

    `golden` has the answers of evidence, whole; `given` the inputs, with states as they were before the run.
    """
    if results.keys() != golden.keys():
        raise ProgramInvalid(f"{program.name}: its evidence has answers {', '.join(golden)}; build the model again")
    for result in program.interface.results:
        program.require_whole(result.name, golden[result.name], result.type)
        shares, expected = results[result.name], program.divided(result.name, golden[result.name])
        _require_updated(program, result.name, shares, expected, given.get(result.name))
        for rank, (own, wanted) in enumerate(zip(shares, expected, strict=True)):
            require_varied(f"{program.name} {result.name}", own, wanted, program.place(rank))


def require_varied(title: str, own: Any, wanted: Any, where: str = "") -> None:
    """Refuse an answer that is one value everywhere, where the golden one is not."""
    if varies(wanted) and not varies(own):
        raise VerificationFailed(
            f"verification failed: {title} is {own.flat[0]} everywhere{where}, where the golden answer varies: a core "
            "was not initialised, or did not run the program; restart the instance and try again"
        )


def _require_updated(
    program: FetchedProgram, name: str, shares: Sequence[Any], expected: Sequence[Any], given: Any
) -> None:
    """Refuse a state that is the given one, where the expected one is not."""
    import numpy as np

    from nxpipe.emulator.numerics import settle

    state = program.states.get(name)
    if state is None or given is None:
        return
    before = program.divided(name, settle(given, state.type.dtype))
    for rank, (own, wanted, old) in enumerate(zip(shares, expected, before, strict=True)):
        if np.array_equal(own, old) and not np.array_equal(wanted, old):
            raise VerificationFailed(
                f"verification failed: {program.name} left the state {name} as it was{program.place(rank)}, so the "
                "alias of its input and its output is lost; see `nxpipe doctor --hardware`"
            )


def varies(array: Any) -> bool:
    """True if an array has two different elements; NaN is equal to NaN."""
    first = array.reshape(-1)[:1]
    return bool(((array != first) & ((array == array) | (first == first))).any())
