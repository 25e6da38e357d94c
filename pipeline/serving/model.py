"""A served model: its programs on emulated cores or on Neuron devices, and the files that describe its text.

It is read from a store, from the folder that `store fetch` and the agent write, or compiled now from a specification.
On devices, programs run in a process for each rank, which loads them once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.compile.artifact_files import UTILISATION
from nxpipe.pipeline.serving.programs import Decoder, DecoderPrograms, ProgramShape, Session
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Scheduler
from nxpipe.pipeline.serving.text import Files, Text, json_object
from nxpipe.pipeline.util.errors import InputInvalid, ProgramInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.verify.device import (
    DeviceOptions,
    described_device,
    device_faults,
    fetch_programs,
    on_ranks,
    require_device_programs,
    require_libraries,
)
from nxpipe.pipeline.verify.stored_artifact import ArtifactFolder, StoredArtifact, StoredProgram, read_artifact

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.ir.types import TensorType
    from nxpipe.emulator.numerics import Array
    from nxpipe.emulator.run.counters import Prediction
    from nxpipe.emulator.run.model import Code
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.execution import ExecutionOptions

_HOST: Final = "nxpipe.emulator.run.devices.service:serve"
_GENERATION: Final = "generation_config.json"
_OF_PROGRAMS: Final = ("graphs/", "constants/", UTILISATION)  # files of an artifact that describe no text


class EmulatedSession:
    """Programs on emulated cores, with one set of states. `copy` is the number of the group of cores."""

    def __init__(
        self,
        codes: "Mapping[str, Code]",
        weights: "Mapping[str, Array]",
        copy: int = 0,
        predict: "Callable[[str], Prediction] | None" = None,
    ) -> None:
        from nxpipe.emulator.run.counters import SessionCounters
        from nxpipe.emulator.run.isa import Resident, SharedWeights

        shared: SharedWeights = {}
        self._codes = codes
        self._loaded = {name: code.load(weights, shared) for name, code in codes.items()}
        types = {name: type_ for code in codes.values() for name, type_ in code.states.items()}
        ranks = max((code.ranks for code in codes.values()), default=1)
        self._states = [Resident(types) for _ in range(ranks)]
        self._counters = SessionCounters(codes, range(copy * ranks, copy * ranks + ranks), predict)

    def run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        return self._counters.programs[program].run(self._run, program, inputs)

    def _run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        states = [resident.only(self._codes[program].states) for resident in self._states]
        outputs, after = self._loaded[program].run(inputs, states)
        for resident, updated in zip(self._states, after, strict=True):
            resident.take(updated)
        return outputs

    def close(self) -> None:
        self._loaded = {}
        self._counters.close()


Load = Callable[[Sequence[str], int], Session]  # programs by name; the number of the copy
Latency = Callable[[str], float | None]  # the predicted milliseconds of a program
Inputs = Callable[[str], Mapping[str, "TensorType"]]  # the types of a program's inputs


@dataclass(frozen=True)
class ServingModel:
    """A model with its text, and the programs that it can be served by."""

    name: str
    task: str
    config: Mapping[str, Any]
    files: Files
    programs: Sequence[ProgramShape]
    load: Load
    latency_ms: Latency
    artifact: str | None = None  # the artifact's name
    inputs: Inputs | None = None  # None if they are not known before a program is loaded

    @classmethod
    def read(cls, published: "Published", store: "Store", execution: "ExecutionOptions", step: Step) -> "ServingModel":
        """The artifact of a store."""
        artifact = read_artifact(published, store, step)
        return cls._of_artifact(artifact, artifact.weights, execution, store.read_blob)

    @classmethod
    def read_folder(cls, path: Path, execution: "ExecutionOptions", step: Step) -> "ServingModel":
        """The artifact in a folder that a fetch has filled. Weights are mapped into memory, not copied."""
        folder = ArtifactFolder.open(path)
        artifact = read_artifact(folder, folder, step, weights=False)  # type: ignore[arg-type]  # what is read of both
        return cls._of_artifact(artifact, folder.weights(), execution, folder.read_blob)

    @classmethod
    def compiled(cls, spec: "BuildSpec", execution: "ExecutionOptions", step: Step) -> "ServingModel":
        """A model that is compiled when its programs are loaded, and not stored."""
        spec.check()
        files = dict(spec.companions.contents())
        source, load = spec.source, partial(_compile, spec, execution, step)
        return cls(source.id, source.task, source.config, files, spec.shapes, load, lambda _: None)

    @classmethod
    def of_manifest(
        cls,
        manifest: "Manifest",
        read: "Callable[[Blob], bytes]",
        load: Load,
        latency: Latency = lambda _: None,
        inputs: Inputs | None = None,
    ) -> "ServingModel":
        """A model from its manifest, a reader of its files, and a loader of its programs."""
        files = {file.path: read(file.blob) for file in manifest.files if not file.path.startswith(_OF_PROGRAMS)}
        config = json_object(manifest.model.id, files, "config.json")
        model, programs = manifest.model, manifest.executables
        return cls(model.id, model.task, config, files, programs, load, latency, manifest.name, inputs)

    @classmethod
    def _of_artifact(
        cls,
        artifact: StoredArtifact,
        weights: "Mapping[str, Array]",
        execution: "ExecutionOptions",
        read: "Callable[[Blob], bytes]",
    ) -> "ServingModel":
        from nxpipe.emulator.isa.program import Role

        stored = {each.executable.name: each for each in artifact.programs}
        predictions = _Predictions(stored, _utilisations(artifact.manifest, read))

        def load(names: Sequence[str], copy: int) -> Session:
            codes = {name: _stored_code(stored[name], execution) for name in names}
            return EmulatedSession(codes, weights, copy, predictions.of)

        def inputs(name: str) -> "Mapping[str, TensorType]":
            ports = stored[name].instructions.ports
            return {port.name: port.type for port in ports if port.role is Role.INPUT}

        return cls.of_manifest(artifact.manifest, read, load, predictions.latency_ms, inputs)

    @cached_property
    def text(self) -> Text:
        return Text(self.name, self.files)

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """The checkpoint's generation_config.json."""
        return json_object(self.name, self.files, _GENERATION)

    @property
    def vocabulary(self) -> int | None:
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None

    def require_tokens(self, tokens: Sequence[int], title: str = "prompt") -> tuple[int, ...]:
        """The token ids of an input; InputInvalid for one that the model does not have."""
        size = self.vocabulary
        outside = next((each for each in tokens if each < 0 or (size is not None and each >= size)), None)
        if outside is not None:
            raise InputInvalid(
                f"{title}: token {outside} is not in the vocabulary of {size}; use the model's own tokenizer"
            )
        return tuple(tokens)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer: those of the generation configuration, of the model's, of the tokenizer."""
        for ids in (self.generation.get("eos_token_id"), self.config.get("eos_token_id"), self.text.end_of_text):
            found = ids if isinstance(ids, list) else [ids]
            if tokens := frozenset(token for token in found if isinstance(token, int)):
                return tokens
        return frozenset()

    def default_params(self) -> SamplingParams:
        """The checkpoint's own way to sample, where a request does not say another."""
        given = self.generation
        named = {name: given[name] for name in ("temperature", "top_p", "top_k") if given.get(name) is not None}
        return SamplingParams(**named)

    @property
    def generates(self) -> bool:
        """True if it has programs that generate text."""
        phases = {each.phase for each in self.programs}
        return "decode" in phases and not phases.isdisjoint(("prefill", "extend"))

    def scheduler(self, rows: int | None = None, copy: int = 0, *, smallest: bool = False) -> Scheduler:
        """A scheduler over the decoder's programs of a batch size, loaded on the cores of a copy."""
        programs = DecoderPrograms.of(self.name, self.programs, rows, smallest=smallest)
        decoder = Decoder(programs, self.load(programs.names, copy), self.latency_ms)
        return Scheduler(decoder, self.text, end_tokens=self.end_tokens)

    def forward_session(self) -> Session:
        """The forward programs, loaded."""
        return self.load([each.name for each in self.programs if each.phase == "forward"], 0)


class _Predictions:
    """The predicted figures of an artifact's programs: those that its build has stored, else computed once."""

    def __init__(self, stored: Mapping[str, StoredProgram], utilisations: Mapping[str, Any]) -> None:
        self._stored, self._utilisations = stored, utilisations
        self._known: dict[str, Prediction] = {}
        self._computing = Lock()  # an engine and the thread that publishes ask for the same

    def of(self, program: str) -> "Prediction":
        from nxpipe.emulator.run.counters import Prediction

        with self._computing:
            if program not in self._known:
                found = Prediction.read(self._utilisations.get(program))
                self._known[program] = found or Prediction.of(self._stored[program].instructions.program)
            return self._known[program]

    def latency_ms(self, program: str) -> float | None:
        seconds = self.of(program).seconds
        return None if seconds is None else seconds * 1e3


def _utilisations(manifest: "Manifest", read: "Callable[[Blob], bytes]") -> Mapping[str, Any]:
    """Documents by program; empty for an artifact without them."""
    blob = next((file.blob for file in manifest.files if file.path == UTILISATION), None)
    try:
        documents = json_of(read(blob)) if blob else {}
    except DocumentInvalid:  # of another producer
        return {}
    return documents if isinstance(documents, dict) else {}


def _stored_code(stored: StoredProgram, execution: "ExecutionOptions") -> "Code":
    from nxpipe.emulator.run.isa import Isa
    from nxpipe.emulator.run.model import Fast

    if execution.mode == "fast":
        return Fast(stored.program, stored.instructions.ports)
    return Isa(stored.instructions, order=execution.order)


def _compile(spec: "BuildSpec", execution: "ExecutionOptions", step: Step, names: Sequence[str], copy: int) -> Session:
    from nxpipe.emulator.compile import emit, ports_of
    from nxpipe.emulator.run.counters import Prediction, process_counters
    from nxpipe.emulator.run.isa import Isa
    from nxpipe.emulator.run.model import Fast
    from nxpipe.pipeline.compile.frontend import compile_shape
    from nxpipe.pipeline.verify.comparison import require_memory

    codes: dict[str, Code] = {}
    tensors = spec.tensors()
    require_memory(spec.source.id, tensors.kinds)
    for shape in (each for each in spec.shapes if each.name in names):
        with step(f"compile {shape.name}"):
            program = compile_shape(spec, shape)
            fast = execution.mode == "fast"
            isa = None if fast else Isa(emit(program, spec.target.core), order=execution.order)
            codes[shape.name] = isa or Fast(program, ports_of(program))
            process_counters().compiled += 1

    def predict(name: str) -> Prediction:
        code = codes[name]
        return Prediction.of(code.executable.program) if isinstance(code, Isa) else Prediction()

    with step("load the programs"):
        return EmulatedSession(codes, tensors, copy, predict)


class DeviceSession:
    """Programs on the cores of a device."""

    def __init__(self, programs: Sequence[str], folder: Path, options: DeviceOptions, copy: int = 0) -> None:
        from nxpipe.artifact_store.fetch.folder import WEIGHTS
        from nxpipe.emulator.run.devices.service import RankService

        files = {name: _files(folder, name) for name in programs}
        degree, physical_cores = _shape(files)
        argument = {"programs": files, "weights": str(folder / WEIGHTS)}

        def start(document: Any) -> None:
            on_ranks(_HOST, document, degree, physical_cores, options, copy * degree)

        with device_faults():
            self._ranks = RankService(degree, start, argument)

    def run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        with device_faults():
            return self._ranks.run(program, inputs)

    def close(self) -> None:
        self._ranks.close()


def on_devices(folder: Path, options: DeviceOptions, step: Step) -> ServingModel:
    """The artifact of a fetched folder, on this machine's devices; NotReady if there are none of its target."""
    require_libraries()
    opened = ArtifactFolder.open(folder)
    require_device_programs(opened.manifest)
    with device_faults(), step("open the device"):
        described_device(opened.manifest, options)
    return ServingModel.of_manifest(
        opened.manifest, opened.read_blob, lambda names, copy: DeviceSession(names, folder, options, copy)
    )


def folder_model(folder: Path, machine: "ExecutionOptions | DeviceOptions", step: Step) -> ServingModel:
    """The artifact in a fetched folder, on the emulator or on this machine's devices."""
    if isinstance(machine, DeviceOptions):
        return on_devices(folder, machine, step)
    return ServingModel.read_folder(folder, machine, step)


@contextmanager
def served_model(
    published: "Published", store: "Store", machine: "ExecutionOptions | DeviceOptions", step: Step, watch: Watch
) -> Iterator[ServingModel]:
    """The artifact of a store, on the emulator, or on this machine's devices from a temporary folder."""
    if not isinstance(machine, DeviceOptions):
        yield ServingModel.read(published, store, machine, step)
        return
    require_device_programs(published.manifest)
    with TemporaryDirectory(prefix="nxpipe-device-") as name:
        fetch_programs(published.manifest, store, Path(name), step, watch)
        yield on_devices(Path(name), machine, step)


def _files(folder: Path, name: str) -> dict[str, str]:
    program = folder / "executables" / name
    return {"neff": f"{program}.neff", "interface": f"{program}.json"}


def _shape(files: Mapping[str, Mapping[str, str]]) -> tuple[int, int]:
    """The ranks of the programs, and the physical cores of each."""
    from nxpipe.emulator.errors import InterfaceInvalid, NeffInvalid
    from nxpipe.emulator.executable.interface import interface_from
    from nxpipe.emulator.executable.neff import open_neff

    try:
        shapes = {
            (interface_from(Path(own["interface"]).read_bytes()).degree, open_neff(Path(own["neff"])).physical_cores)
            for own in files.values()
        }
    except (InterfaceInvalid, NeffInvalid, OSError) as fault:
        raise ProgramInvalid(f"a program cannot be read ({fault}); fetch the artifact again") from fault
    if len(shapes) != 1:
        raise ProgramInvalid(f"programs of different ranks cannot be loaded together: {sorted(shapes)}")
    return shapes.pop()
