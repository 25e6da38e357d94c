"""The nxpipe.toml of a new project. Its comments are the texts of the fields, so they cannot say something else."""

import os
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Final, get_args

from pydantic import ValidationError

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.messages import findings
from nxpipe.pipeline.config.models import Task
from nxpipe.pipeline.config.reference import tables
from nxpipe.pipeline.models.known import find
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.escape import for_json
from nxpipe.pipeline.util.files import expanded

_TEMPLATE: Final = Path(__file__).with_name("nxpipe.toml")
_ACCEPTED: Final = timedelta(days=180)
_ANY_MODEL: Final = "feature-extraction"  # the task that every model can be compiled for


class _Text(Template):
    """Placeholders may name a field: ${store.url} stands for its description."""

    idpattern = "[a-z_]+(?:[.][a-z_]+)?"


def configuration(root: Path, model_id: str, task: str | None) -> str:
    """A configuration of one model, which `nxpipe config check` accepts."""
    folder = expanded(model_id)
    source = "path" if folder.is_dir() else "id"
    last = (folder.resolve().name if folder.is_dir() else model_id).rpartition("/")[2]
    values = {
        "name": _slug(root.resolve().name, "project"),
        "model_name": _slug(last, "model"),
        "model": Path(os.path.relpath(folder, root)).as_posix() if folder.is_dir() else model_id,
        "task": task or _task_of(model_id, folder),
    }
    comments = _comments()
    comments["models.source"] = comments[f"models.{source}"]
    values["fleet_stack"] = f"{values['name']}-serve-{values['model_name']}*"
    quoted = {key: for_json(value) for key, value in values.items()}
    until = datetime.now(UTC).date() + _ACCEPTED
    text = _Text(_TEMPLATE.read_text(encoding="utf-8")).substitute(quoted, source=source, until=until, **comments)
    _refuse_what_check_would(text, model_id)
    return text


def _slug(text: str, otherwise: str) -> str:
    """The nearest name that the configuration allows."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return words[:40].strip("-") or otherwise


def _task_of(model_id: str, folder: Path) -> str:
    if folder.is_dir():
        return resolve(str(folder)).task
    known = find(model_id)
    return known.task if known is not None and known.task in get_args(Task) else _ANY_MODEL


def _comments() -> dict[str, str]:
    return {
        f"{path[0]}.{key}": fill(field.description or "", 118, subsequent_indent="# ")
        for path, _, table in tables(Config)
        if len(path) == 1
        for key, field in table.model_fields.items()
    }


def _refuse_what_check_would(text: str, model_id: str) -> None:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # such as of a lone surrogate
        raise ModelSourceError(f"{model_id!r} cannot be written into a configuration: {error}") from error
    try:
        Config.model_validate(document)
    except ValidationError as error:
        wrong = next(findings(error, Config))
        raise ModelSourceError(f"{model_id!r} cannot be used: found {wrong.found}, expected {wrong.allowed}") from error
