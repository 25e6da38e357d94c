"""`nxpipe bench`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.artifact_store.errors import ChannelEmpty, NotFound
from nxpipe.artifact_store.names import SHOWN
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.parameters import Percentage
from nxpipe.pipeline.cli.store_url import open_the_store
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.util.console import Console, table
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.exit_codes import REGRESSION

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.bench import Line
    from nxpipe.pipeline.cli.named import Named
    from nxpipe.pipeline.models.spec import ModelSpec

_COLUMNS: Final = ("artifact", "program", "tp", "predicted", "before", "change")


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--against",
    metavar="CHANNEL|ARTIFACT",
    help="Hold them against what this channel serves now, or against this artifact: MODEL@KEY, or a key.",
)
@click.option("--allow-empty", is_flag=True, help="Go on if nothing was promoted to the channel of --against yet.")
@click.option(
    "--threshold",
    type=Percentage(),
    default="5%",
    show_default=True,
    help="How much slower than before a program may be predicted to be.",
)
@store_option
@config_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    against: str | None,
    allow_empty: bool,
    threshold: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Show how fast programs are predicted to be, and hold that against a channel.

    MODEL is the name of a model in nxpipe.toml, whose artifacts must have been built; or an artifact: MODEL@KEY, or a
    key. Without one it is every model of nxpipe.toml. A program is held against that of the same phase, batch, bucket
    and degree in what the channel serves of the same model and target. The time is predicted when a program is
    compiled, from the documented costs of its instructions: nothing is run. With a program that is predicted to be
    slower by more than the threshold, the exit code is 16. A channel that the store does not hold is an error, unless
    a fleet or [signing] of nxpipe.toml names it, or --allow-empty is given.

    \b
    Example:
      nxpipe bench
      nxpipe bench bert --against production --threshold 2%
      nxpipe bench bert-base-uncased@4e9ce0 --against bert-base-uncased@a41f07
    """
    from nxpipe.pipeline.artifacts.bench import bench as compare

    console: Console = ctx.obj
    opened = open_the_store(store, config_path, console)
    artifacts = list(_artifacts(models, opened, config_path))
    rival = _rival(against, opened, config_path, allow_empty) if against is not None else None
    lines = [line for one in artifacts for line in compare(one, rival.beside(one) if rival else None, opened)]
    if console.json:
        console.data([line.document(threshold) for line in lines])
    elif lines:
        console.page(table(_COLUMNS, [_cells(line, threshold) for line in lines]))
    if rival:
        _say_what_is_not_served(console, artifacts, rival)
    slower = [line for line in lines if line.is_regression(threshold)]
    if slower:
        console.complain(_sentence(slower, threshold))
        ctx.exit(REGRESSION.number)


def _rival(word: str, store: "Store", config_path: Path, allow_empty: bool) -> "Named":
    """Before the first release there is nothing to hold against; but a misspelt channel would hold nothing for ever."""
    from nxpipe.pipeline.artifacts.known import declared
    from nxpipe.pipeline.cli.named import named, nothing_yet

    try:
        return named(word, store, config_path)
    except ChannelEmpty:
        if allow_empty or word in declared(load_config(config_path, os.environ, missing_ok=True)):
            return nothing_yet(word)
        raise


def _artifacts(words: Sequence[str], store: "Store", config_path: Path) -> "Iterator[Manifest]":
    """Those that are named; else those that a build of nxpipe.toml makes."""
    from nxpipe.pipeline.build.matrix import specs_of_config
    from nxpipe.pipeline.cli.named import artifact, is_artifact

    if words and all(map(is_artifact, words)):  # a configuration that is broken stands in nobody's way
        yield from (artifact(word, store) for word in words)
        return
    config = load_config(config_path, os.environ, missing_ok=bool(words))
    described = [model.name for model in config.models]
    for word in words or described:
        if word not in described:
            yield artifact(word, store)
            continue
        for asked in specs_of_config(config, (word,), config_path.parent):
            yield _built(asked, store)


def _built(asked: "ModelSpec", store: "Store") -> "Manifest":
    key = BuildSpec.of(asked).request_key
    published = store.find(key)
    if published is None:
        raise NotFound(
            f"{asked.name} for {asked.target} is not built as nxpipe.toml describes it: {store.url} holds no "
            f"{key[:SHOWN]}; run `nxpipe build --only {asked.name}` first, or see why by `nxpipe explain {asked.name}`"
        )
    return published.manifest


def _cells(line: "Line", threshold: float) -> tuple[str, ...]:
    now, before = line.program, line.before
    return (
        line.artifact,
        now.name,
        str(now.degree),
        _milliseconds(now.ns),
        _milliseconds(before.ns if before else None),
        _change(line, threshold),
    )


def _change(line: "Line", threshold: float) -> str:
    if line.change is None:
        return "" if line.against is None else line.verdict(threshold)
    text = f"{line.change:+.1%}"
    return style(text, fg="red") if line.is_regression(threshold) else text


def _milliseconds(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f} ms"


def _say_what_is_not_served(console: Console, artifacts: "Sequence[Manifest]", rival: "Named") -> None:
    for one in artifacts:
        if rival.beside(one) is None:
            console.say(f"channel {rival.word} serves nothing of {one.model.id} for {one.target} yet")


def _sentence(slower: "Sequence[Line]", threshold: float) -> str:
    worst = max(slower, key=lambda line: line.change or 0.0)
    count = f"{len(slower)} program{' is' if len(slower) == 1 else 's are'}"
    return (
        f"{count} predicted to be slower by more than {100 * threshold:g}%: {worst.program.name} of {worst.artifact} "
        f"by {worst.change:.1%}; `nxpipe diff {worst.against} {worst.artifact}` shows what changed"
    )
