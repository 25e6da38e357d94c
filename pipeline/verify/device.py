"""An artifact's NEFFs on this machine's Neuron devices, in a process for each rank.

Programs and weights are fetched into a folder, as an instance does that serves them. Neither torch, transformers nor
jaxlib is imported.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.errors import Refused
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, NotReady, ProgramInvalid
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.executable.interface import Argument, Interface
    from nxpipe.emulator.executable.neff import Neff
    from nxpipe.emulator.passes.shard import Sharding
    from nxpipe.emulator.run.devices import Implementation
    from nxpipe.pipeline.verify.replay import RunResult

Inputs = Callable[["FetchedProgram"], Arrays]  # of a program: whole tensors by name

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


def _on_ranks(host: str, argument: object, degree: int, lnc: int, options: DeviceOptions) -> list[Any]:
    from nxpipe.emulator.run.devices.environment import RankPlacement, free_address
    from nxpipe.emulator.run.devices.ranks import run_ranks

    device: Implementation = options.device  # type: ignore[assignment]  # checked by DeviceOptions
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
    """A NEFF in a folder, with its interface and the shards of its states."""

    name: str
    path: Path
    neff: "Neff"
    interface: "Interface"
    shards: Mapping[str, "Sharding"]

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

    def write_inputs(self, inputs: Arrays) -> None:
        """Write the inputs of each rank, from whole tensors."""
        import numpy as np

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

    def joined(self, name: str, shares: Sequence[Any]) -> Any:
        """A result from those of all ranks."""
        return self.shards[name].joined(shares) if name in self.shards else shares[0]

    def whole_shape(self, argument: "Argument") -> tuple[int, ...]:
        """The shape of an input on all ranks together."""
        shard = self.shards.get(argument.name)
        return (shard.whole(argument.type) if shard else argument.type).shape

    def _on_ranks(self, argument: "Argument", inputs: Arrays) -> Sequence[Any]:
        """An input on each rank; a state that is not given is zero."""
        import numpy as np

        degree = self.interface.degree
        if argument.name not in inputs:
            if argument.alias is None:
                raise ProgramInvalid(f"{self.name}: its evidence has no input {argument.name}; build the model again")
            return [np.zeros(argument.type.shape, argument.type.dtype.held)] * degree
        array, shard = inputs[argument.name], self.shards.get(argument.name)
        self.require_shape(argument.name, array, self.whole_shape(argument))
        return shard.split(array, degree) if shard else [array] * degree

    def require_shape(self, name: str, golden: Any, shape: tuple[int, ...]) -> None:
        if golden.shape != shape:
            raise ProgramInvalid(
                f"{self.name}: {name} of its evidence is {list(golden.shape)}, and {list(shape)} in the program; "
                "build the model again"
            )


def physical_cores(neff: "Neff") -> int:
    """Physical cores of a logical one (LNC), as the program was compiled; older files do not have the number."""
    return max(neff.header.lnc_size, 1)


@contextmanager
def fetched_artifact(manifest: "Manifest", store: "Store", step: Step, watch: Watch) -> Iterator[Path]:
    """A temporary folder with programs and weights, as an instance has that serves them."""
    with tempfile.TemporaryDirectory(prefix="nxpipe-device-") as name:
        _fetch(manifest, store, Path(name), step, watch)
        yield Path(name)


def _fetch(manifest: "Manifest", store: "Store", folder: Path, step: Step, watch: Watch) -> None:
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
        types |= {"degree": str(program.interface.degree), "physical cores": str(physical_cores(program.neff))}
        for known, members in found:
            if all(known.get(name, type_) == type_ for name, type_ in types.items()):
                known |= types
                members.append(program)
                break
        else:
            found.append((types, [program]))
    return [members for _, members in found]


def run_programs(
    programs: Sequence[FetchedProgram], inputs: Inputs, folder: Path, options: DeviceOptions, step: Step
) -> Iterator[tuple[FetchedProgram, list[Any]]]:
    """Run each program once on its inputs, then time it as often as the options say. Each program as it has run, with
    its timing on each rank; `FetchedProgram.results` has its answers."""
    for group in groups(programs):
        timings = _run(group, inputs, folder, options, step)
        for program in group:
            yield program, [own[program.name] for own in timings]


def _run(
    programs: Sequence[FetchedProgram], inputs: Inputs, folder: Path, options: DeviceOptions, step: Step
) -> list[Any]:
    """The timings of programs that run together, in a process for each rank."""
    from nxpipe.artifact_store.fetch.folder import WEIGHTS

    degree, lnc = programs[0].interface.degree, physical_cores(programs[0].neff)
    for program in programs:
        program.write_inputs(inputs(program))
    names = programs[0].name if len(programs) == 1 else f"{len(programs)} programs"
    with step(f"run {names} on {degree} rank{'' if degree == 1 else 's'}"):
        files = {program.name: program.files for program in programs}
        argument = {"weights": str(folder / WEIGHTS), "programs": files, "runs": options.runs, "warmup": _WARMUP}
        return _on_ranks("replay", argument, degree, lnc, options)


def require_device_programs(manifest: "Manifest") -> None:
    """Raise BuildRefused for an artifact that devices cannot run."""
    if not manifest.executables or not manifest.runs_on_devices:
        raise BuildRefused(
            f"{manifest.model.id}: it has no programs for Neuron devices; build it with --backend neuronx"
        )


def run_on_devices(
    published: "Published", store: "Store", tensors: Arrays | None, options: DeviceOptions, step: Step, watch: Watch
) -> "Iterator[RunResult]":
    """Run every program of an artifact on this machine's devices, on its stored inputs unless the user passed others:
    the results of `replay.run_artifact`."""
    from nxpipe.pipeline.verify.replay import RunResult

    manifest = published.manifest
    require_device_programs(manifest)
    given = _inputs(manifest, store, tensors)
    source = "the stored inputs" if tensors is None else "the given inputs"
    with device_faults():
        with step("open the device"):
            described_device(manifest, options)
        with fetched_artifact(manifest, store, step, watch) as folder:
            programs = open_programs(manifest, store, folder)
            for program, _ in run_programs(programs, lambda own: given[own.name], folder, options, step):
                outputs = {name: program.joined(name, shares) for name, shares in program.results().items()}
                yield RunResult(published.model_id, program.name, source, given[program.name], outputs, None)


def _blank_states(program: "CompiledGraph") -> Arrays:
    """The states of a stored program, whole, with zeros."""
    import numpy as np

    types = {name: value.type for name, value in program.graph.inputs.items() if name in program.graph.outputs}
    whole = {
        name: program.states[name].whole(type_) if name in program.states else type_ for name, type_ in types.items()
    }
    return {name: np.zeros(type_.shape, type_.dtype.held) for name, type_ in whole.items()}


def _inputs(manifest: "Manifest", store: "Store", tensors: Arrays | None) -> dict[str, Arrays]:
    """The inputs of each program, checked as the emulator checks them; states that the user does not pass are zero."""
    from nxpipe.pipeline.models.thresholds import complete_evidence
    from nxpipe.pipeline.verify.stored_artifact import read_graph, stored_arrays

    if tensors is not None:
        graphs = {executable.name: read_graph(manifest, executable, store) for executable in manifest.executables}
        found = {name: _blank_states(graph) | dict(tensors) for name, graph in graphs.items()}
        for name, graph in graphs.items():
            graph.require_inputs(found[name])
        return found
    golden = complete_evidence(manifest, store.evidence(manifest.digest))
    if golden is None:
        raise Refused(f"{manifest.model.id}: it has no stored inputs; pass --input FILE, or build it with verification")
    return {compared.program: stored_arrays(store, compared.inputs) for compared in golden.programs}
