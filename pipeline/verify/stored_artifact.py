"""Stored artifacts read back: programs, weights, and the inputs and outputs of their evidence.

Every byte is checked against its digest, and every program against the manifest and the graph it was compiled from.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.thresholds import complete_evidence
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, ModelSourceError, ProgramInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Executable as StoredExecutable
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.executable.executable import Executable
    from nxpipe.emulator.executable.tables import Port
    from nxpipe.emulator.ir.types import TensorType
    from nxpipe.emulator.isa.program import Buffer


_REMEDY = "build the model again"
TOKENIZER: Final = "tokenizer.json"


def core_of(manifest: "Manifest") -> str:
    """The core generation that the artifact was built for."""
    from nxpipe.emulator.hardware import INSTANCES

    cores = {instance.compiler_target: instance.core for instance in INSTANCES.values()}
    if manifest.target not in cores:
        raise ProgramInvalid(f"{manifest.model.id}: unknown target {manifest.target!r}; {_REMEDY}")
    return cores[manifest.target]


def require_instructions(manifest: "Manifest") -> None:
    """Raise BuildRefused for an artifact without the emulator's programs: those of neuronx-cc had none once, and
    imported ones are for other servers."""
    if manifest.serving and not manifest.executables:
        names = ", ".join(payload.name for payload in manifest.serving)
        raise BuildRefused(
            f"{manifest.model.id}: was imported for {names} and has no programs that nxpipe runs; fetch it, and start "
            "the server of its contract"
        )
    if manifest.backend != "emulator" and not manifest.runs_on_devices:
        raise BuildRefused(
            f"{manifest.model.id}: its programs are of backend {manifest.backend} alone, which the emulator cannot "
            f"run; {_REMEDY}"
        )


def read_instructions(manifest: "Manifest", stored: "StoredExecutable", store: "Store") -> "Executable":
    """A program with its constant tables; ProgramInvalid unless it is for the cores and ranks of the manifest."""
    from nxpipe.emulator.errors import ExecutableInvalid
    from nxpipe.emulator.executable.executable import from_bytes

    require_instructions(manifest)
    where = f"{manifest.model.id} {stored.name}"
    if not any(file.path == artifact_files.graph(stored.name) for file in manifest.files):
        raise ProgramInvalid(f"{where}: built by an older nxpipe, which stored no program of instructions; {_REMEDY}")
    try:
        executable = from_bytes(store.read_blob(stored.blob))
    except ExecutableInvalid as error:
        raise ProgramInvalid(f"{where}: {error}; {_REMEDY}") from error
    actual, expected = (executable.program.core, executable.program.ranks), (core_of(manifest), stored.tensor_parallel)
    if actual != expected:
        raise ProgramInvalid(
            f"{where}: its program is for {_cores(*actual)}, its manifest for {_cores(*expected)}; {_REMEDY}"
        )
    return executable.with_constants(_tables(executable, manifest, where, store))


def require_compiled_from(program: "CompiledGraph", instructions: "Executable", where: str) -> None:
    """ProgramInvalid unless the instructions have the interface and the weights of the graph."""
    from nxpipe.emulator.compile import ports_of
    from nxpipe.emulator.isa.program import Role

    def on_a_rank(port: "Port") -> "Port":
        piece = program.states.get(port.name) if port.role is Role.STATE else None
        return replace(port, type=piece.local(port.type) if piece else port.type, sizes=())

    ports_found, buffers = [on_a_rank(port) for port in instructions.ports], instructions.program.buffers
    ends = ({f"{port.role} {port.name} {port.type}" for port in ports} for ports in (ports_of(program), ports_found))
    reads = ({f"parameter {name}" for name in names} for names in (program.graph.parameters, _parameters(buffers)))
    for ours, theirs in (ends, reads):
        if ours != theirs:
            only = f"its graph has {sorted(ours - theirs)[:1]}, the program {sorted(theirs - ours)[:1]}"
            raise ProgramInvalid(f"{where}: its program was not compiled from its graph: {only}; {_REMEDY}")


def _parameters(buffers: "Iterable[Buffer]") -> Iterator[str]:
    from nxpipe.emulator.isa.program import Role

    return (name for buffer in buffers if buffer.role is Role.PARAMETER for name in buffer.names)


def _cores(core: str, ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'} of NeuronCore-{core}"


def _tables(executable: "Executable", manifest: "Manifest", where: str, store: "Store") -> dict[str, bytes]:
    """The constant tables of a program, which are stored beside it and shared with others."""
    from nxpipe.emulator.executable.tables import constant_sizes

    files, tables = {file.path: file.blob for file in manifest.files}, dict[str, bytes]()
    sizes = constant_sizes(executable.program.buffers)
    for digest in executable.absent_constants:
        blob = files.get(artifact_files.constant(digest))
        if blob is None or (blob.sha256, {blob.size}) != (digest, sizes[digest]):
            raise ProgramInvalid(f"{where}: the table {digest[:12]} that it reads is not stored with it; {_REMEDY}")
        tables[digest] = store.read_blob(blob)
    return tables


@dataclass(frozen=True)
class StoredProgram:
    """A program of a stored artifact."""

    executable: "StoredExecutable"
    program: "CompiledGraph"  # the graph
    instructions: "Executable"
    inputs: Arrays | None  # inputs of the evidence, if there is any
    outputs: Arrays | None  # outputs of the evidence for these inputs


@dataclass(frozen=True)
class StoredArtifact:
    """A stored artifact with its weights and programs in memory."""

    manifest: "Manifest"
    source: PretrainedModel | None  # None for a program file, which has no model class
    weights: Arrays
    programs: tuple[StoredProgram, ...]
    companions: Mapping[str, bytes]  # files of the model beside its weights, such as its tokenizer

    @contextmanager
    def source_with_tokenizer(self) -> Iterator[PretrainedModel | None]:
        """The source, in a temporary folder with the stored tokenizer if there is one: tokenizers are read by files."""
        if self.source is None or TOKENIZER not in self.companions:
            yield self.source
            return
        with TemporaryDirectory(prefix="nxpipe-") as name:
            folder = Path(name) / "model"
            folder.mkdir()
            for path, data in self.companions.items():
                (folder / path).write_bytes(data)
            yield replace(self.source, folder=folder)

    @property
    def core(self) -> str:
        return core_of(self.manifest)

    def inputs(self, stored: StoredProgram) -> tuple[Arrays, str]:
        """The default inputs of a program, and a description of their source."""
        if stored.inputs is not None:
            require_inputs(stored, self.manifest.model.id)
            return stored.inputs, "the stored inputs"
        from nxpipe.emulator.capture import example_inputs

        if stored.program.degree > 1:
            raise ModelSourceError(
                f"{self.manifest.model.id}: it has no stored inputs, which a program of "
                f"{stored.program.degree} ranks needs; build it again without --no-verify"
            )
        random = example_inputs(stored.program.whole, self.source.config if self.source else {}, seed=0)
        return random, "random inputs: none are stored"


def require_inputs(stored: StoredProgram, model: str) -> None:
    """Raise ProgramInvalid for stored inputs that the program does not take: they are not trusted."""
    from nxpipe.emulator.errors import InputsInvalid

    try:
        stored.program.require_inputs(stored.inputs or {})
    except InputsInvalid as error:
        raise ProgramInvalid(
            f"{model} {stored.executable.name}: invalid stored inputs: {error}; build it again"
        ) from error


def read_artifact(published: "Published", store: "Store", step: Step, *, weights: bool = True) -> StoredArtifact:
    """The artifact, on request without its weights: devices load them from a file."""
    from nxpipe.emulator.ir.types import DType, TensorType
    from nxpipe.pipeline.verify.comparison import require_memory

    manifest = published.manifest
    require_instructions(manifest)
    unknown = sorted({tensor.dtype for tensor in manifest.weights} - set(DType))
    if unknown:
        raise ProgramInvalid(f"{manifest.model.id}: unknown type of weights {unknown[0]}; build the model again")
    kinds = {tensor.name: TensorType(tensor.shape, DType(tensor.dtype)) for tensor in manifest.weights}
    if weights:
        require_memory(manifest.model.id, kinds)
    with step(f"read {len(manifest.blobs())} blobs" if weights else f"read the programs of {manifest.name}"):
        arrays = _weights(manifest, kinds, store) if weights else {}
        files = {file.path: store.read_blob(file.blob) for file in manifest.files}
        evidence = complete_evidence(manifest, store.evidence(published.manifest_digest))
        programs = tuple(_stored(manifest, executable, files, evidence, store) for executable in manifest.executables)
    companions = {path: data for path, data in files.items() if path == Path(path).name}  # not graphs and tables
    return StoredArtifact(manifest, _source(manifest, files), arrays, programs, companions)


def _weights(manifest: "Manifest", kinds: Mapping[str, "TensorType"], store: "Store") -> Arrays:
    import numpy as np

    from nxpipe.artifact_store.weights import read_weights

    return {
        tensor.name: np.frombuffer(data, kinds[tensor.name].dtype.stored).reshape(tensor.shape)
        for tensor, data in read_weights(store.blobs, manifest.weights)
    }


def _stored(
    manifest: "Manifest",
    executable: "StoredExecutable",
    files: Mapping[str, bytes],
    evidence: "Evidence | None",
    store: "Store",
) -> StoredProgram:
    where = f"{manifest.model.id} {executable.name}"
    instructions = read_instructions(manifest, executable, store)
    program = _program(instructions, executable, files, where)
    require_compiled_from(program, instructions, where)
    compared = evidence.of(executable.name) if evidence else None
    inputs = stored_arrays(store, compared.inputs) if compared else None
    outputs = stored_arrays(store, compared.answers) if compared else None
    return StoredProgram(executable, program, instructions, inputs, outputs)


def _program(
    instructions: "Executable", executable: "StoredExecutable", files: Mapping[str, bytes], where: str
) -> "CompiledGraph":
    """The published graph. The shards of its tensors come from the compiled program."""
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.ir.decoding import decode
    from nxpipe.emulator.isa.program import Role

    graph = decode(files[artifact_files.graph(executable.name)])
    if graph.key != executable.graph_key:
        raise ProgramInvalid(
            f"{where}: its graph has key {graph.key[:12]}, and the manifest has {executable.graph_key[:12]}; build "
            "the model again"
        )
    weights, states = (instructions.pieces(role) for role in (Role.PARAMETER, Role.STATE))
    return CompiledGraph(graph, graph, executable.tensor_parallel, weights, states)


def stored_arrays(store: "Store", blob: "Blob") -> Arrays:
    """The inputs or answers of evidence; ProgramInvalid for a blob that has none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(sorted(load(store.read_blob(blob)).items()))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProgramInvalid(
            f"blob {blob.sha256} of its evidence is not a safetensors file ({error}); verify the artifact again"
        ) from error


def _source(manifest: "Manifest", files: Mapping[str, bytes]) -> PretrainedModel | None:
    """The model, whose class is built from the stored configuration; None without one."""
    if "config.json" not in files:
        return None
    config = json_of(files["config.json"])
    return PretrainedModel(manifest.model.id, manifest.model.revision, config, manifest.model.task, None)


@dataclass(frozen=True)
class ArtifactFolder:
    """A fetched folder, read as a store with one artifact. Its evidence is that of `origin`, the store that it came
    from; without one, it has none."""

    path: Path
    manifest: "Manifest"
    manifest_digest: str
    origin: "Store | None"
    _files: "Mapping[Blob, str]"

    @classmethod
    def open(cls, path: Path, origin: "Store | None" = None) -> "ArtifactFolder":
        from nxpipe.artifact_store.documents import Blob
        from nxpipe.artifact_store.errors import StoreError
        from nxpipe.artifact_store.fetch.folder import MANIFEST, files_of
        from nxpipe.artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest

        try:
            document = read_file(path / MANIFEST, limit=MAX_MANIFEST_BYTES)
            manifest = Manifest.from_bytes(document)
            files = files_of(manifest)
        except (OSError, DocumentInvalid, StoreError) as fault:
            raise ProgramInvalid(
                f"{path} is no folder with a fetched artifact ({fault}); fetch one with nxpipe store fetch"
            ) from fault
        return cls(path, manifest, Blob.of(document).sha256, origin, {blob: name for name, blob in files.items()})

    def read_blob(self, blob: "Blob") -> bytes:
        """The bytes of a file, which must be those of the manifest; of evidence, those of the store."""
        if blob not in self._files:
            if self.origin is not None:
                return self.origin.read_blob(blob)
            raise ProgramInvalid(
                f"{self.path} has programs for Neuron devices alone; fetch it with --programs emulator"
            )
        file = self.path / self._files[blob]
        try:
            data = file.read_bytes()
        except OSError as fault:
            raise ProgramInvalid(f"{file}: {fault.strerror}; fetch the artifact again") from fault
        if type(blob).of(data) != blob:
            raise ProgramInvalid(f"{file} is damaged; fetch the artifact again")
        return data

    def evidence(self, manifest: str) -> "Sequence[Evidence]":
        return self.origin.evidence(manifest) if self.origin is not None else ()

    def weights(self) -> Arrays:
        """The weights, mapped into memory and not copied."""
        from nxpipe.artifact_store.fetch.folder import WEIGHTS
        from nxpipe.emulator.run.devices.session import WeightsFile
        from nxpipe.emulator.run.status import RuntimeFault

        try:
            return WeightsFile(self.path / WEIGHTS) if self.manifest.weights else {}
        except RuntimeFault as fault:
            raise ProgramInvalid(f"{self.path}: {fault}") from fault
