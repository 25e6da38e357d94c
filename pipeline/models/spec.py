"""Model specification: a model and its build options as the user wrote them, in nxpipe.toml or on the command line.

It is not resolved: `BuildSpec.of` (pipeline/compile/spec.py) does that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from nxpipe.emulator.hardware import INSTANCES, Instance, instance
from nxpipe.pipeline.config import Config, Model
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.program_file import SavedProgram, is_saved
from nxpipe.pipeline.models.source import Companions, ModelSource, looks_like_folder, resolve
from nxpipe.pipeline.models.weights import WeightsSource
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.util.text import did_you_mean

ALL: Final = "all"  # in place of an instance: every instance of the catalogue
_BUILD: Final = ("name", "axes", "backend", "verified")


@dataclass(frozen=True)
class ModelSpec:
    """Specification of one artifact: a model, its programs, a target and a tensor-parallel degree."""

    model_id: str
    revision: str | None
    task: str | None
    target: str
    tp: int | None  # None: 1 for a build, the smallest degree that fits for a check
    phases: tuple[str, ...] | None
    batches: tuple[int, ...]
    buckets: tuple[int, ...] | None  # None: 128, or as many tokens as the model has positions
    autocast: str
    autocast_type: str
    weights: WeightsSource = field(default_factory=lambda: WeightsSource.parse(None))
    name: str | None = None  # the model's name in nxpipe.toml
    axes: tuple[tuple[str, int], ...] = ()  # sizes of dynamic axes of an ONNX file
    backend: Backend = "emulator"
    verified: bool = True

    @classmethod
    def from_options(cls, model_id: str, options: Mapping[str, Any], **build: Any) -> "ModelSpec":
        """The model of a command line, from the values of its options; `build` are the fields that only a build has."""
        values = {option: options[option] for option in spec_options()}
        return cls(model_id, **values | {"weights": WeightsSource.parse(values["weights"])}, **build)

    @classmethod
    def from_config(cls, model: Model, root: Path, **build: Any) -> "ModelSpec":
        """A model of nxpipe.toml. Relative folders start at `root`, the folder of that file."""
        values = {option: getattr(model, option) for option in spec_options()}
        values["buckets"] = model.buckets if "buckets" in model.model_fields_set else None
        spec = cls.from_options(model.id or str(root / expanded(str(model.path))), values, name=model.name, **build)
        return replace(spec, weights=spec.weights.within(root))

    @property
    def kind(self) -> Literal["file", "folder", "hub"]:
        if is_saved(self.model_id):
            return "file"
        return "folder" if looks_like_folder(self.model_id) else "hub"

    @property
    def title(self) -> str:
        """The model's name in nxpipe.toml, else its id."""
        return self.name or self.model_id

    def targets(self) -> tuple[Instance, ...]:
        """The target instance; `all` is every instance of the catalogue."""
        return tuple(INSTANCES.values()) if self.target == ALL else (instance(self.target),)

    def look_up(self, *, weights: bool) -> ModelSource:
        """The model from a file, a folder or the hub; `weights` includes its checkpoint, if the specification
        uses it."""
        if self.kind == "file":
            return SavedProgram(expanded(self.model_id), dict(self.axes))
        files = weights and self.weights.kind == "checkpoint"
        return resolve(self.model_id, revision=self.revision, task=self.task, files=files)

    def shapes(self, source: ModelSource) -> tuple[Shape, ...]:
        return source.shapes(self.phases or source.default_phases, self.batches, self.buckets)

    def companions(self, source: ModelSource) -> Companions:
        """The files beside the model, or beside its weights if the model has none."""
        if self.kind == "file":
            return Companions()
        # Without its checkpoint, a snapshot of the hub has those files that another program happened to fetch.
        has_files = self.kind == "folder" or self.weights.kind == "checkpoint"
        folders = (source.folder if has_files else None, self.weights.folder)
        return Companions(tuple(folder for folder in folders if folder is not None))

    def absolute(self) -> "ModelSpec":
        """The same specification for a process in another working directory."""
        model_id = self.model_id if self.kind == "hub" else str(expanded(self.model_id).absolute())
        return replace(self, model_id=model_id, weights=self.weights.within(Path.cwd()))

    def document(self) -> dict[str, Any]:
        """JSON of the specification, for job documents and for `--json`."""
        options = {"model_id": self.model_id, **{option: getattr(self, option) for option in spec_options()}}
        build = {option: getattr(self, option) for option in _BUILD}
        return {"order": options | {"weights": self.weights.text}, **build}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "ModelSpec":
        options = {option: _tuples(value) for option, value in document["order"].items()}
        build = {option: _tuples(document[option]) for option in _BUILD}
        return cls.from_options(options["model_id"], options, **build)


def configured_models(config: Config, names: Sequence[str]) -> list[Model]:
    """The models of nxpipe.toml with these names (`--only`), else all."""
    known = [model.name for model in config.models]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise InputInvalid(f"--only {name}: nxpipe.toml describes no model {name!r}{hint}")
    return [model for model in config.models if not names or model.name in names]


def spec_options() -> list[str]:
    """The options that nxpipe.toml and the command line share: all but the model's name."""
    return [option.name for option in fields(ModelSpec) if option.name not in ("model_id", *_BUILD)]


def _tuples(value: Any) -> Any:
    """A JSON value with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def specs_of_options(
    options: Mapping[str, Any], config: Config, names: Sequence[str], root: Path
) -> tuple[ModelSpec, ...]:
    """Specifications of a command line: of its own model, or of those in nxpipe.toml."""
    model_id, verified = options["model_id"], not options["no_verify"]
    if model_id is None:
        return specs_of_config(config, names, root, backend=options["backend"], verified=verified)
    spec = ModelSpec.from_options(
        model_id,
        {**options, "target": options["target"][0], "tp": options["tp"][0]},
        axes=options["axes"],
        backend=options["backend"] or config.build.backend,
        verified=verified,
    )
    return _unique(_variants(spec, options["target"], options["tp"]))


def specs_of_config(
    config: Config, names: Sequence[str], root: Path, *, backend: Backend | None = None, verified: bool = True
) -> tuple[ModelSpec, ...]:
    """Specifications of all models in nxpipe.toml, or of the named ones; `backend` overrides the file's."""
    chosen = backend or config.build.backend
    return _unique(
        spec
        for model in configured_models(config, names)
        for first in [ModelSpec.from_config(model, root, backend=chosen, verified=verified)]
        for spec in (first, *(variant for also in model.also for variant in _variants(first, also.targets, also.tp)))
    )


def _unique(specs: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
    """The specifications without duplicates, which two options may cause."""
    return tuple(dict.fromkeys(specs))


def _variants(spec: ModelSpec, targets: Sequence[str], degrees: Sequence[int]) -> Iterator[ModelSpec]:
    for target in targets:
        for degree in degrees:
            yield replace(spec, target=target, tp=degree)
