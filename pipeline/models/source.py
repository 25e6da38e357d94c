"""Model sources: a Hugging Face model by folder or hub id. The other source is a program file (program_file.py).

Both implement `ModelSource`; code outside this package depends on that protocol only.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from nxpipe.emulator.configuration import relevant
from nxpipe.pipeline.models.catalogue import find, nearest
from nxpipe.pipeline.models.configuration import (
    Shape,
    all_phases,
    cache_capacity,
    decode_floats,
    default_phases,
    encode_floats,
    shapes_of,
    task_of,
)
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE
from nxpipe.pipeline.models.versions import LIBRARIES, library_version, optional_versions
from nxpipe.pipeline.models.weights import Arrays, Weights, WeightsSource, sha256_of_file
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware, ModelSourceError
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, expanded, json_of, read_file
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.types import TensorType


DEFAULT_BUCKET: Final = 128
# NAME or OWNER/NAME; OWNER/NAME/FOLDER for a repository of several models: unet, vae.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")
_LARGEST_CONFIG = 4 * MiB
_RELATIVE_POSITIONS: Final = "relative_attention_num_buckets"  # such a model has no table of positions


class ModelSource(Protocol):
    """A resolved model. `shape` is one program, `siblings` all programs that are served together: they share a KV
    cache, whose length depends on the longest."""

    @property
    def id(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    @property
    def task(self) -> str: ...

    @property
    def config(self) -> Mapping[str, object]:
        """The model's config.json; empty for a saved program."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder of the model's files, if it has more than its configuration."""
        ...

    @property
    def reference(self) -> str:
        """The implementation that computes the reference outputs."""
        ...

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases in which the model is served."""
        ...

    @property
    def default_phases(self) -> tuple[str, ...]:
        """The phases of a specification that names none."""
        ...

    def shapes(
        self, phases: Iterable[str], batches: Iterable[int], buckets: tuple[int, ...] | None
    ) -> tuple[Shape, ...]:
        """The shapes of the programs; `buckets` None: the default bucket."""
        ...

    def check_shapes(self, shapes: Iterable[Shape]) -> None:
        """Raise BuildRefused for a phase or a sequence length that the model does not have."""
        ...

    def identity(self) -> dict[str, object]:
        """Everything that determines the names and types of the parameters."""
        ...

    def key_inputs(self, shapes: Iterable[Shape]) -> dict[str, object]:
        """Everything that can change the captured graphs, with the libraries that capture them and without weights."""
        ...

    def relevant_config(self) -> dict[str, object]: ...

    def open_weights(self, weights: WeightsSource) -> Weights: ...

    def capture_request(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "CaptureRequest | None":
        """The model class, configuration and static shapes to trace; None for a saved graph."""
        ...

    def capture(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Graph": ...

    def parameters(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Mapping[str, TensorType]": ...

    def outputs(self, shape: Shape, siblings: Iterable[Shape], weights: Arrays, inputs: Arrays) -> Arrays:
        """The outputs of the reference."""
        ...


@dataclass(frozen=True)
class PretrainedModel:
    """A Hugging Face model: its name, its configuration, and the folder of its files, if it has one."""

    id: str
    revision: str | None
    config: Mapping[str, object]
    task: str
    folder: Path | None

    reference = DEFAULT_REFERENCE

    @property
    def dtype(self) -> str:
        """The dtype in which the weights are stored."""
        named = self.config.get("dtype", self.config.get("torch_dtype")) or "float32"
        return str(named).removeprefix("torch.")

    @property
    def phases(self) -> tuple[str, ...]:
        return all_phases(self.task)

    @property
    def default_phases(self) -> tuple[str, ...]:
        return default_phases(self.task)

    def relevant_config(self) -> dict[str, object]:
        """The entries of the configuration that the capture reads: the others cannot change the graph."""
        return {key: encode_floats(value) for key, value in relevant(self.config).items()}

    def shapes(
        self, phases: Iterable[str], batches: Iterable[int], buckets: tuple[int, ...] | None
    ) -> tuple[Shape, ...]:
        longest = min(DEFAULT_BUCKET, longest_sequence(self) or DEFAULT_BUCKET)
        return shapes_of(phases, batches, buckets or (max(longest, 1),))

    def check_shapes(self, shapes: Iterable[Shape]) -> None:
        longest = longest_sequence(self)
        for shape in shapes:
            if shape.phase not in self.phases:
                raise BuildRefused(
                    f"{self.id}: phase {shape.phase!r} cannot be built for task {self.task}; "
                    f"its phases are {' and '.join(self.phases)}"
                )
            if longest is not None and shape.sequence > longest:
                raise BuildRefused(
                    f"{self.id}: bucket {shape.sequence} exceeds the model's positions up to {longest}; "
                    f"pass --buckets of at most {longest}"
                )

    def identity(self) -> dict[str, object]:
        return {"config": self.relevant_config(), "task": self.task}

    def key_inputs(self, shapes: Iterable[Shape]) -> dict[str, object]:
        # Diffusers writes a `_class_name` where transformers writes a model_type.
        libraries = (*LIBRARIES, "diffusers") if "_class_name" in self.config else LIBRARIES
        return {
            **self.identity(),
            "shapes": [[shape.phase, shape.batch, shape.sequence] for shape in sorted(shapes)],
            "libraries": {name: library_version(name) for name in libraries} | optional_versions(),
        }

    def open_weights(self, weights: WeightsSource) -> Weights:
        return weights.open(self.folder)

    def capture_request(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "CaptureRequest":
        from nxpipe.emulator.capture import CaptureRequest

        request = CaptureRequest(self.config, self.task, shape.phase, shape.batch, shape.sequence, self.dtype)
        capacity = cache_capacity(shape, siblings)
        return request if capacity is None else replace(request, capacity=capacity)

    def capture(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Graph":
        from nxpipe.emulator.capture import capture

        return capture(self.capture_request(shape, siblings))

    def parameters(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Mapping[str, TensorType]":
        from nxpipe.emulator.capture import parameter_specs

        return parameter_specs(self.capture_request(shape, siblings))

    def outputs(self, shape: Shape, siblings: Iterable[Shape], weights: Arrays, inputs: Arrays) -> Arrays:
        from nxpipe.emulator.capture import reference_outputs

        return reference_outputs(self.capture_request(shape, siblings), weights, inputs)


def resolve(
    model_id: str, *, revision: str | None = None, task: str | None = None, files: bool = False
) -> PretrainedModel:
    """Find a model by folder or hub id. `files` includes its weights and tokenizer, not only its configuration."""
    _require_readable_kind(model_id)
    if looks_like_folder(model_id):
        folder = expanded(model_id)
        config = _read_config(folder)
        return PretrainedModel(folder.resolve().name, None, config, task or task_of(config), folder)
    if not _HUB_ID.fullmatch(model_id):
        raise ModelSourceError(
            f"{model_id!r} is neither a folder nor a hub id; an id is NAME, OWNER/NAME or "
            "OWNER/NAME/FOLDER, a folder must exist"
        )
    known = None if files or revision else find(model_id)
    if known is not None:
        return PretrainedModel(model_id, None, known.config, task or known.task, None)
    folder = _snapshot(model_id, revision, files=files)
    config = _read_config(folder)
    commit = folder.parent.name if _parts(model_id)[1] else folder.name
    return PretrainedModel(model_id, commit, config, task or task_of(config), folder)


_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def _require_readable_kind(model_id: str) -> None:
    """Refuse a file that is no model: by its suffix, say what to pass instead."""
    path = expanded(model_id)
    if not path.is_file() or not (path.suffix or model_id.startswith((".", "/", "~"))):
        return
    if path.suffix in _PICKLES:
        raise ModelSourceError(
            f"{path.name} is a pickle, which nxpipe never loads; export the model instead: "
            f'torch.export.save(torch.export.export(model, args), "{path.stem}.pt2")'
        )
    if path.name == "config.json" or path.suffix == ".safetensors":
        raise ModelSourceError(f"{path.name} is one file of a model; pass its folder: {path.parent}")
    raise ModelSourceError(f"{path.name} is no model; pass a folder with a config.json, a .pt2 or an .onnx file")


def _folders_beside(folder: Path) -> list[str]:
    """Folders of models beside a missing one, for a suggestion."""
    try:
        return [each.name for each in folder.parent.iterdir() if (each / "config.json").is_file()]
    except OSError:
        return []


def looks_like_folder(model_id: str) -> bool:
    return model_id.startswith((".", "/", "~")) or Path(model_id).is_dir()


def _read_config(folder: Path) -> dict[str, object]:
    try:
        return _parsed_config(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelSourceError(f"{folder / 'config.json'}: cannot be read ({reason}); correct its mode") from error


def _parsed_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    if not folder.is_dir():
        hint = did_you_mean(folder.name, _folders_beside(folder)) or "; pass a folder with a config.json, or a hub id"
        raise ModelSourceError(f"{folder}: no such folder{hint}")
    if not path.is_file():
        raise ModelSourceError(f"{folder}: holds no config.json; {_config_advice(folder)}")
    try:
        config = decode_floats(json_of(read_file(path, limit=_LARGEST_CONFIG)))
    except DocumentInvalid as error:
        raise ModelSourceError(f"{path}: {error}; save the configuration again") from error
    named = isinstance(config, dict) and isinstance(config.get("model_type", config.get("_class_name")), str)
    if not isinstance(config, dict) or not named:
        raise ModelSourceError(f'{path}: no "model_type"; it must be the config.json of a Hugging Face model')
    return config


def _config_advice(folder: Path) -> str:
    """Advice for a folder without a configuration: Diffusers saves a pipeline as one folder for each model."""
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if (folder / "model_index.json").is_file() and models:
        return f"it is a pipeline of several models: pass one of its folders {', '.join(models)}"
    return "pass the folder that save_pretrained() wrote"


_COMPANIONS: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.jinja")
_MOST_TEMPLATES: Final = 64
_OBJECTS: Final = ("generation_config.json", "tokenizer_config.json")
_LARGEST_COMPANION: Final = 64 * MiB
_COMPANION_PARTS: Final = 4_000_000  # a tokenizer.json of 262,144 tokens and 514,906 merges has 1.9 million
# Files beside the configuration: weights, companions, and the vocabularies of rarer tokenizers, which a verification
# reads.
_FILES: Final = (
    *("*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab*"),
    *(*_COMPANIONS, f"{_TEMPLATES}/*.jinja"),
)


@dataclass(frozen=True)
class Companions:
    """The files that travel with a model to its server: tokenizer, chat templates, settings of generation and of the
    processor. They are those of the first folder that has any."""

    folders: tuple[Path, ...] = ()

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file, by its path in the folder."""
        return {name: self._digest(path) for name, path in self._paths().items()}

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Each file; ModelSourceError for one that is malformed."""
        for name, path in self._paths().items():
            yield name, self._content(name, path)

    def check(self) -> None:
        """Raise ModelSourceError for a malformed file."""
        for _ in self.contents():
            pass

    def _paths(self) -> dict[str, Path]:
        return next(filter(None, map(_companions_in, self.folders)), {})

    def _digest(self, path: Path) -> str:
        try:
            if (size := path.stat().st_size) > _LARGEST_COMPANION:
                raise _unusable(path, f"has {size:,} bytes; the limit is {_LARGEST_COMPANION:,}")
            return sha256_of_file(path)
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error.strerror or error})") from error

    def _content(self, name: str, path: Path) -> bytes:
        try:
            data = read_file(path, limit=_LARGEST_COMPANION)
            value = json_of(data, parts=_COMPANION_PARTS) if name.endswith(".json") else None
        except DocumentInvalid as error:
            raise _unusable(path, str(error)) from error
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error.strerror or error})") from error
        if name in _OBJECTS and not isinstance(value, dict):
            raise _unusable(path, "not a JSON object")
        return data


def _companions_in(folder: Path) -> dict[str, Path]:
    """The companion files of a folder, by path in it; a link counts even if its target is gone."""
    try:
        present = set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208 - names only
        below = os.listdir(folder / _TEMPLATES) if (folder / _TEMPLATES).is_dir() else []  # noqa: PTH208
    except OSError as error:
        raise ModelSourceError(f"{folder}: cannot be read ({error.strerror or error}); correct its mode") from error
    templates = sorted(name for name in below if name.endswith(".jinja"))
    _require_template_names(folder / _TEMPLATES, templates)
    names = [name for name in _COMPANIONS if name in present] + [f"{_TEMPLATES}/{name}" for name in templates]
    return {name: folder / name for name in names}


def _require_template_names(folder: Path, names: list[str]) -> None:
    if len(names) > _MOST_TEMPLATES:
        raise ModelSourceError(f"{folder}: holds {len(names):,} templates; the limit is {_MOST_TEMPLATES}; remove some")
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.lower(), name)
        if other != name:
            raise ModelSourceError(f"{folder}: {other} and {name} differ in case only; rename one")
        if not _TEMPLATE_NAME.fullmatch(name):
            raise ModelSourceError(f"{folder}: {name!r} has characters other than A-Z, a-z, 0-9, _, . and -; rename it")


def _unusable(path: Path, why: str) -> ModelSourceError:
    return ModelSourceError(f"{path}: {why}; save the file again, or remove it")


def _snapshot(model_id: str, revision: str | None, *, files: bool) -> Path:
    """The folder of the hub's snapshot of a model, from the machine's cache or from the network."""
    repository, folder = _parts(model_id)
    names = ["config.json", *_FILES] if files else ["config.json"]
    patterns = [f"{folder}/{name}" if folder else name for name in names]
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if files else "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingSoftware("huggingface_hub", "A model from the hub", "pip install 'nxpipe[compile]'") from error
    failure: Exception | None = None
    bare: Path | None = None  # weights only, as a library that loads a model fetches it
    for offline in (True, False):
        try:
            snapshot = Path(
                snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=offline)
            )
        except Exception as error:  # the hub's client raises the errors of its transport
            failure = error
            continue
        model_folder = snapshot / folder
        if (model_folder / "config.json").is_file() and (not files or any(model_folder.glob("*.safetensors"))):
            if not files or not offline or _companions_in(model_folder):
                return model_folder
            bare = model_folder
    if bare is not None:
        return bare
    raise _unreachable(model_id, failure, files=files)


def _parts(model_id: str) -> tuple[str, str]:
    """A hub id as its repository and the folder in it."""
    owner, _, path = model_id.partition("/")
    name, _, folder = path.partition("/")
    return (f"{owner}/{name}" if name else owner), folder


def _unreachable(model_id: str, failure: Exception | None, *, files: bool) -> ModelSourceError:
    missing = "weights" if files else "configuration"
    why = f" ({type(failure).__name__})" if failure else ""
    similar = nearest(model_id)
    hint = f"; did you mean {' or '.join(similar[:2])}?" if similar and not find(model_id) else ""
    beside = did_you_mean(model_id, _folders_beside(Path(model_id)))
    if beside and not files:
        hint = beside.replace("mean '", "mean './")
    to_pass = "--weights random:0 or a folder with the weights" if files else "a folder with its config.json"
    return ModelSourceError(
        f"cannot find the {missing} of {model_id!r}: not in the local cache, and the hub is unreachable or has "
        f"none{why}; pass {to_pass}, or go online{hint}"
    )


def longest_sequence(model: PretrainedModel) -> int | None:
    """The number of positions of the model, from its configuration or that of its text part; None if it has no
    limit."""
    text = model.config.get("text_config")
    for config in (model.config, text if isinstance(text, dict) else {}):
        for key in ("max_position_embeddings", "n_positions"):
            value = config.get(key)
            if isinstance(value, int) and _RELATIVE_POSITIONS not in config:
                return value
    return None
