"""A model as the user names it, resolved to a configuration: a folder, a well-known public id, or the hub."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nxpipe.emulator.configuration import relevant
from nxpipe.pipeline.models.known import find, nearest
from nxpipe.pipeline.models.numbers import meant, spelled
from nxpipe.pipeline.models.task import task_of
from nxpipe.pipeline.util.errors import MissingSoftware, ModelSourceError
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, expanded, json_of, read_file

# NAME or OWNER/NAME; a repository of several models, as diffusion has them, is followed by the folder: unet, vae.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")
_LARGEST_CONFIG = 4 * MiB


@dataclass(frozen=True)
class ModelSource:
    """One model: its name, its configuration, and the folder of its files when there is one."""

    id: str
    revision: str | None
    config: Mapping[str, object]
    task: str
    folder: Path | None

    @property
    def dtype(self) -> str:
        """The type that the weights are kept in."""
        named = self.config.get("dtype", self.config.get("torch_dtype")) or "float32"
        return str(named).removeprefix("torch.")

    def relevant_config(self) -> dict[str, object]:
        """What of the configuration can change the graph: the same that the capture reads."""
        return {key: spelled(value) for key, value in relevant(self.config).items()}


def resolve(model_id: str, *, revision: str | None = None, task: str | None = None, files: bool = False) -> ModelSource:
    """Find a model by folder or hub id. `files` asks for its weights too, not only its configuration."""
    if looks_like_folder(model_id):
        folder = expanded(model_id)
        config = _read_config(folder)
        return ModelSource(folder.resolve().name, None, config, task or task_of(config), folder)
    if not _HUB_ID.fullmatch(model_id):
        raise ModelSourceError(
            f"{model_id!r} is neither a folder here nor a hub id; an id reads NAME, OWNER/NAME or "
            "OWNER/NAME/FOLDER, a folder must exist"
        )
    known = None if files or revision else find(model_id)
    if known is not None:
        return ModelSource(model_id, None, known.config, task or known.task, None)
    folder = _snapshot(model_id, revision, files=files)
    config = _read_config(folder)
    commit = folder.parent.name if _parts(model_id)[1] else folder.name
    return ModelSource(model_id, commit, config, task or task_of(config), folder)


def looks_like_folder(model_id: str) -> bool:
    return model_id.startswith((".", "/", "~")) or Path(model_id).is_dir()


def _read_config(folder: Path) -> dict[str, object]:
    try:
        return _parsed_config(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelSourceError(f"{folder / 'config.json'}: cannot be read ({reason}); mend its permissions") from error


def _parsed_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelSourceError(f"{folder}: no such folder; pass a folder with a config.json, or a hub id")
    if not path.is_file():
        raise ModelSourceError(f"{folder}: holds no config.json; {_where_instead(folder)}")
    try:
        config = meant(json_of(read_file(path, limit=_LARGEST_CONFIG)))
    except DocumentInvalid as error:
        raise ModelSourceError(f"{path}: {error}; save the configuration again") from error
    named = isinstance(config, dict) and isinstance(config.get("model_type", config.get("_class_name")), str)
    if not isinstance(config, dict) or not named:
        raise ModelSourceError(f'{path}: no "model_type"; it must be the config.json of a Hugging Face model')
    return config


def _where_instead(folder: Path) -> str:
    """Diffusers saves a pipeline as one folder a model."""
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if (folder / "model_index.json").is_file() and models:
        return f"it is a pipeline of several models: pass one of its folders {', '.join(models)}"
    return "pass the folder that save_pretrained() wrote"


# Beside its configuration: weights, and the tokenizer, with which a verification reads real text.
_FILES = (
    *("*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


def _snapshot(model_id: str, revision: str | None, *, files: bool) -> Path:
    """The hub's snapshot of a model: from the machine's cache, else from the network."""
    repository, folder = _parts(model_id)
    names = ["config.json", *_FILES] if files else ["config.json"]
    wanted = [f"{folder}/{name}" if folder else name for name in names]
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if files else "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingSoftware("huggingface_hub", "A model from the hub", "pip install 'nxpipe[compile]'") from error
    failure: Exception | None = None
    for offline in (True, False):
        try:
            snapshot = Path(
                snapshot_download(repository, revision=revision, allow_patterns=wanted, local_files_only=offline)
            )
        except Exception as error:  # the hub's client raises whatever its transport raises
            failure = error
            continue
        found = snapshot / folder
        if (found / "config.json").is_file() and (not files or any(found.glob("*.safetensors"))):
            return found
    raise _unreachable(model_id, failure, files=files)


def _parts(model_id: str) -> tuple[str, str]:
    """A hub id as its repository and the folder in it."""
    owner, _, rest = model_id.partition("/")
    name, _, folder = rest.partition("/")
    return (f"{owner}/{name}" if name else owner), folder


def _unreachable(model_id: str, failure: Exception | None, *, files: bool) -> ModelSourceError:
    what = "weights" if files else "configuration"
    why = f" ({type(failure).__name__})" if failure else ""
    close = nearest(model_id)
    hint = f"; did you mean {' or '.join(close[:2])}?" if close and not find(model_id) else ""
    other = (
        "pass --weights random:0 or a folder with the weights" if files else "pass a folder that holds its config.json"
    )
    return ModelSourceError(
        f"the {what} of {model_id!r} are neither on this machine nor to be had from the hub{why}; {other}{hint}"
    )
