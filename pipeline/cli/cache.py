"""`nxpipe cache`: the persistent compile cache of the Neuron runtime."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Group
from nxpipe.pipeline.cli.options import Label, config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes, table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.backends.protocol import Backend
    from nxpipe.pipeline.artifacts.neuron_cache import ExportedEntry, ExportSelection


@click.group(cls=Group)
def cache() -> None:
    """Fill the persistent compile cache of Neuron instances.

    Frameworks that compile on first use, such as training with torch-neuronx, look up each graph in the folder or
    bucket of NEURON_COMPILE_CACHE_URL and load the compiled program on a cache hit.

    \b
    Example:
      nxpipe cache export --channel production --to /mnt/nxpipe-cache
      nxpipe cache ls /mnt/nxpipe-cache
    """


@cache.command()
@click.argument("names", metavar="[MODEL@KEY]...", nargs=-1)
@click.option("--to", "target", required=True, metavar="FOLDER|s3://BUCKET/PREFIX", help="The cache to fill.")
@click.option("--channel", type=Label("channel"), help="Export the artifacts that this channel serves.")
@store_option
@config_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    target: str,
    channel: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Write the cache entries of artifacts into a compile cache.

    Without names, exports the newest artifact of each model of nxpipe.toml for its target. An entry is a copy of the
    files that neuronx-cc left in its own cache for a program. Artifacts that earlier versions traced may have entries;
    builds compile without that cache today, and instances fetch programs whole. Existing files are never overwritten,
    and compilers may use the cache during the export.

    Exits with code 0 when all entries are in the cache. Programs without an entry are listed on stderr. It is an error
    if no program has an entry, or if another process left an entry unfinished; all other entries are written first.

    \b
    Example:
      nxpipe cache export --to s3://my-caches/neuron
      nxpipe cache export bert-base-uncased@4e9ce0 --to /mnt/nxpipe-cache
      nxpipe cache export --channel production --to /mnt/nxpipe-cache
    """
    if names and channel:
        raise click.UsageError("MODEL@KEY cannot be combined with --channel; pass one of them", ctx)
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.artifacts.neuron_cache import require_entries, require_exported
    from nxpipe.pipeline.artifacts.store_url import open_configured_store

    console: Console = ctx.obj
    opened = open_configured_store(store, config_path, console)
    selections = _select(opened, names, channel, config_path, console)
    require_entries(selections)
    for selection in selections:
        if selection.warning:
            console.say(f"  {selection.warning}")
    destination = open_store(target).backend
    exported = _export(opened, selections, destination, console)
    _show(console, destination.url, selections, exported)
    require_exported(exported, destination.url)


@cache.command()
@click.argument("target", metavar="FOLDER|s3://BUCKET/PREFIX")
@click.pass_obj
def ls(console: Console, target: str) -> None:
    """List the entries of a compile cache.

    A ready entry is a cache hit. A locked entry is being compiled, or its compiler was killed. A failed entry records a
    compiler error, which is not retried.

    \b
    Example:
      nxpipe cache ls /mnt/nxpipe-cache
      nxpipe cache ls s3://my-caches/neuron --json
    """
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.artifacts.neuron_cache import entries_in

    entries = list(entries_in(open_store(target).backend))
    if console.json:
        console.data(
            [{"entry": entry.folder, "state": entry.state.value, "size_bytes": entry.size} for entry in entries]
        )
    elif entries:
        console.page(
            table(
                ("state", "size", "entry"),
                [(entry.state.value, human_bytes(entry.size), entry.folder) for entry in entries],
            )
        )
    else:
        console.say(f"{target} has no compile cache entries.")


def _select(
    store: "Store", names: Sequence[str], channel: str | None, config_path: Path, console: Console
) -> "list[ExportSelection]":
    from nxpipe.pipeline.artifacts import neuron_cache
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.config import load_config

    if channel:
        config = load_config(config_path, os.environ, missing_ok=True)
        return neuron_cache.select_served(store, channel, trust_in(config, config_path.parent, store, console.say))
    if names:
        return neuron_cache.select_named(store, names)
    return neuron_cache.select_configured(store, load_config(config_path, os.environ), config_path.parent, console.say)


def _export(
    store: "Store", selections: "Sequence[ExportSelection]", destination: "Backend", console: Console
) -> "list[ExportedEntry]":
    from nxpipe.artifact_store.url import is_remote
    from nxpipe.pipeline.artifacts.neuron_cache import export_entries, remove_abandoned_files
    from nxpipe.pipeline.util.progress import watching

    entries = [entry for selection in selections for entry in selection.entries]
    # S3 resumes an interrupted upload; a folder keeps partial files, which are removed here.
    if not is_remote(destination.url):
        remove_abandoned_files(destination)
    with watching(console, f"export to {destination.url}", sum(entry.size for entry in entries)) as sent:
        return list(export_entries(store.blobs, entries, destination, sent))


def _show(
    console: Console, url: str, selections: "Sequence[ExportSelection]", exported: "Sequence[ExportedEntry]"
) -> None:
    names = [selection.name for selection in selections for _ in selection.entries]
    if console.json:
        rows = [
            {
                "artifact": name,
                "program": result.entry.program,
                "entry": result.entry.folder,
                "outcome": result.result.value,
                "why": result.why or None,
                "size_bytes": result.entry.size,
            }
            for name, result in zip(names, exported, strict=True)
        ]
        without = [
            {"artifact": selection.name, "programs": selection.without} for selection in selections if selection.without
        ]
        console.data({"cache": url, "entries": rows, "without_entry": without})
        return
    console.page(
        table(
            ("outcome", "size", "artifact", "program", "entry"),
            [
                (_outcome_text(result), human_bytes(result.entry.size), name, result.entry.program, result.entry.folder)
                for name, result in zip(names, exported, strict=True)
            ],
        )
    )


def _outcome_text(result: "ExportedEntry") -> str:
    return f"{result.result.value}, {result.why}" if result.why else result.result.value
