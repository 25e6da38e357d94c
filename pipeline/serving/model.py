"""A served model: an artifact's programs, weights and files, opened on the emulator.

It is read from a store, or from the folder that `store fetch` and the agent write.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.serving.programs import Decoder, DecoderPrograms, Session
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Scheduler
from nxpipe.pipeline.serving.text import Files, Text, json_object
from nxpipe.pipeline.util.errors import ProgramInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, read_file
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.stored_artifact import StoredArtifact, StoredProgram, read_artifact

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.numerics import Array
    from nxpipe.emulator.run.model import Code
    from nxpipe.pipeline.verify.execution import ExecutionOptions

_GENERATION: Final = "generation_config.json"


class EmulatedSession:
    """Programs on emulated cores, with one set of states."""

    def __init__(
        self, programs: Iterable[StoredProgram], weights: "Mapping[str, Array]", execution: "ExecutionOptions"
    ) -> None:
        from nxpipe.emulator.run.isa import Resident, SharedWeights

        shared: SharedWeights = {}
        self._programs = {stored.executable.name: stored for stored in programs}
        self._codes = {name: _code(stored, execution) for name, stored in self._programs.items()}
        self._loaded = {name: code.load(weights, shared) for name, code in self._codes.items()}
        types = {name: type_ for code in self._codes.values() for name, type_ in code.states.items()}
        ranks = max((code.ranks for code in self._codes.values()), default=1)
        self._states = [Resident(types) for _ in range(ranks)]
        self._latencies: dict[str, float | None] = {}

    def run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        states = [resident.only(self._codes[program].states) for resident in self._states]
        outputs, after = self._loaded[program].run(inputs, states)
        for resident, updated in zip(self._states, after, strict=True):
            resident.take(updated)
        return outputs

    def latency_ms(self, program: str) -> float | None:
        """The predicted duration of one execution on the emulated cores."""
        if program not in self._latencies:
            from nxpipe.emulator.schedule.timeline import latency_ns

            nanoseconds = latency_ns(self._programs[program].instructions.program)
            self._latencies[program] = None if nanoseconds is None else nanoseconds / 1e6
        return self._latencies[program]

    def close(self) -> None:
        self._loaded = {}


def _code(stored: StoredProgram, execution: "ExecutionOptions") -> "Code":
    from nxpipe.emulator.run.isa import Isa
    from nxpipe.emulator.run.model import Fast

    if execution.mode == "fast":
        return Fast(stored.program, stored.instructions.ports)
    return Isa(stored.instructions, order=execution.order)


@dataclass(frozen=True)
class ServedModel:
    """An artifact with its text, and the programs that it can be served by."""

    artifact: StoredArtifact
    files: Files

    @classmethod
    def read(cls, published: "Published", store: "Store", step: Step) -> "ServedModel":
        artifact = read_artifact(published, store, step)
        return cls(artifact, _text_files(published.manifest, store.read_blob))

    @classmethod
    def read_folder(cls, path: Path, step: Step) -> "ServedModel":
        """The artifact in a folder that a fetch has filled. Weights are mapped into memory, not copied."""
        from nxpipe.artifact_store.fetch.folder import WEIGHTS
        from nxpipe.emulator.run.devices.session import WeightsFile
        from nxpipe.emulator.run.status import RuntimeFault

        folder = _Folder.open(path)
        artifact = read_artifact(folder, folder, step, weights=False)  # type: ignore[arg-type]  # what is read of both
        try:
            weights = WeightsFile(path / WEIGHTS) if folder.manifest.weights else {}
        except RuntimeFault as fault:
            raise ProgramInvalid(f"{path}: {fault}") from fault
        return cls(replace(artifact, weights=weights), _text_files(folder.manifest, folder.read_blob))

    @property
    def name(self) -> str:
        return self.artifact.manifest.model.id

    @property
    def config(self) -> Mapping[str, Any]:
        return self.artifact.source.config if self.artifact.source else {}

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
        return any(each.phase == "decode" for each in self.artifact.manifest.executables)

    def forward_session(self, execution: "ExecutionOptions") -> Session:
        """The forward programs, loaded on emulated cores."""
        forward = [each for each in self.artifact.programs if each.executable.phase == "forward"]
        return EmulatedSession(forward, self.artifact.weights, execution)

    def scheduler(self, execution: "ExecutionOptions", rows: int | None = None, *, smallest: bool = False) -> Scheduler:
        """A scheduler over the decoder's programs of a batch size, loaded on emulated cores."""
        programs = DecoderPrograms.of(self.name, self.artifact.manifest.executables, rows, smallest=smallest)
        stored = [each for each in self.artifact.programs if each.executable.name in programs.names]
        session: Session = EmulatedSession(stored, self.artifact.weights, execution)
        return Scheduler(Decoder(programs, session), self.text, end_tokens=self.end_tokens)


@dataclass(frozen=True)
class _Folder:
    """A fetched folder, read as a store with one artifact."""

    path: Path
    manifest: "Manifest"
    manifest_digest: str
    _files: "Mapping[Blob, str]"

    @classmethod
    def open(cls, path: Path) -> "_Folder":
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
        return cls(path, manifest, Blob.of(document).sha256, {blob: name for name, blob in files.items()})

    def read_blob(self, blob: "Blob") -> bytes:
        data = (self.path / self._files[blob]).read_bytes()
        if type(blob).of(data) != blob:
            raise ProgramInvalid(f"{self.path / self._files[blob]} is damaged; fetch the artifact again")
        return data

    def evidence(self, _: str) -> tuple[()]:
        """A folder has no evidence."""
        return ()


def _text_files(manifest: "Manifest", read: "Callable[[Blob], bytes]") -> Files:
    """The small files of an artifact: those that describe its text, not its programs."""
    return {
        file.path: read(file.blob) for file in manifest.files if not file.path.startswith(("graphs/", "constants/"))
    }
