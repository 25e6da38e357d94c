"""`nxpipe completion`: completion scripts for shells; and what completes artifacts, channels, models, fleets, programs.

A completion must be fast and silent. It reads nxpipe.toml and a store in a folder as plain files, without validation
and without the libraries of the product; a store in S3 is not read. What is missing or malformed completes nothing.
"""

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from nxpipe.pipeline.cli.main import COMPLETE, Command, cli
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console

_Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

# Readline splits words at these characters, and would complete the part of MODEL@KEY after @ as a word of its own.
_WORDBREAKS: Final = "COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}\n"


@click.command(cls=Command)
@click.argument("shell", metavar="SHELL", type=Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def completion(console: Console, shell: str) -> None:
    """Print a shell completion script.

    Source it in the start-up file of SHELL, or save it where the shell loads completions from. It completes commands
    and options, the artifacts and channels of a store in a folder, the models and fleets of nxpipe.toml, programs,
    phases, targets, tasks and regions.

    \\b
    Example:
      nxpipe completion bash > ~/.local/share/bash-completion/completions/nxpipe
    """
    kind = get_completion_class(shell)
    assert kind is not None
    console.page((_WORDBREAKS if shell == "bash" else "") + kind(cli, {}, "nxpipe", COMPLETE).source())


def _completer(find: Callable[[click.Context], Iterable[str]]) -> _Completer:
    """A completion function of the words that `find` yields. Without a valid store or configuration it has no words: a
    message would appear in the line that the user types."""

    @wraps(find)
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(word) for word in dict.fromkeys(find(ctx)) if word.startswith(incomplete)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return []

    return complete


def _document(ctx: click.Context) -> dict[str, Any]:
    path = _config_path(ctx)
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _config_path(ctx: click.Context) -> Path:
    return Path(ctx.params.get("config_path") or os.environ.get("NXPIPE_CONFIG") or "nxpipe.toml")


def _names(ctx: click.Context, table: str) -> list[str]:
    """The names of the tables of an array in nxpipe.toml."""
    return [str(each["name"]) for each in _document(ctx).get(table, ()) if "name" in each]


def _store(ctx: click.Context) -> Path:
    """The folder of the store; ValueError for a store elsewhere."""
    url, start = ctx.params.get("store") or os.environ.get("NXPIPE_STORE_URL"), Path()
    if not url:
        start = _config_path(ctx).parent
        url = str(_document(ctx).get("store", {}).get("url", "file://.nxpipe/store"))
    folder = url.removeprefix("file://")
    if "://" in folder:
        raise ValueError(url)
    return start / Path(folder).expanduser()


def _published(ctx: click.Context) -> Iterator[tuple[str, Path]]:
    """The name of each artifact, and its manifest. A folder has a hyphen where the model's id may have a slash."""
    for folder in sorted((_store(ctx) / "neuron-artifacts").iterdir()):
        manifests = sorted(folder.glob("*/manifest.json"))
        model = folder.name
        if "-" in model and manifests:
            model = str(json.loads(manifests[0].read_bytes())["model"]["id"])
        yield from ((f"{model}@{each.parent.name[:12]}", each) for each in manifests)


def _artifacts(ctx: click.Context) -> Iterator[str]:
    names = [name for name, _ in _published(ctx)]
    models = [name.rpartition("@")[0] for name in names]
    yield from (model for model in dict.fromkeys(models) if models.count(model) == 1)  # names that are not ambiguous
    yield from names


def _channels(ctx: click.Context) -> Iterator[str]:
    yield from _folders(_store(ctx) / "channels")
    document = _document(ctx)
    yield from document.get("channels", {})
    yield from (str(fleet["channel"]) for fleet in document.get("fleets", ()) if "channel" in fleet)


def _folders(folder: Path) -> list[str]:
    return sorted(each.name for each in os.scandir(folder)) if folder.is_dir() else []


def _programs(ctx: click.Context) -> Iterator[str]:
    """The programs of the artifacts that the line names already, else of all. click does not parse the arguments of a
    line that ends in an option without its value, so the words come from the shell."""
    words = os.environ.get("COMP_WORDS", "").split()
    published = list(_published(ctx))
    named = [manifest for name, manifest in published if any(_names_artifact(word, name) for word in words)]
    for manifest in named or [manifest for _, manifest in published]:
        yield from (str(each["name"]) for each in json.loads(manifest.read_bytes())["executables"])


def _names_artifact(word: str, name: str) -> bool:
    """True for MODEL, and for MODEL@KEY with a prefix of the key."""
    return word == name.rpartition("@")[0] or ("@" in word and name.startswith(word))


def _instances(ctx: click.Context) -> Iterator[str]:
    from nxpipe.emulator.hardware import INSTANCES

    yield from dict.fromkeys(each.family for each in INSTANCES.values())
    yield from INSTANCES


def _models_or_artifacts(ctx: click.Context) -> Iterator[str]:
    yield from _names(ctx, "models")
    yield from _artifacts(ctx)


def _channels_or_artifacts(ctx: click.Context) -> Iterator[str]:
    yield from _channels(ctx)
    yield from _artifacts(ctx)


complete_artifacts = _completer(_artifacts)
complete_channels = _completer(_channels)
complete_channels_or_artifacts = _completer(_channels_or_artifacts)
complete_endpoints = _completer(lambda ctx: _names(ctx, "endpoints"))
complete_fleets = _completer(lambda ctx: _names(ctx, "fleets"))
complete_instances = _completer(_instances)
complete_models = _completer(lambda ctx: _names(ctx, "models"))
complete_models_or_artifacts = _completer(_models_or_artifacts)
complete_pins = _completer(lambda ctx: _folders(_store(ctx) / "pins"))
complete_programs = _completer(_programs)
