"""`nxpipe store fetch`: an artifact as a folder, from the store or from the cache of this machine."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.artifacts.store_url import offline_index, open_configured_store, open_offline_store
from nxpipe.pipeline.cli.completion import complete_artifacts, complete_channels, complete_endpoints
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.progress import Progress
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.fetch.folder import Fetched
    from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
    from nxpipe.artifact_store.fetch.selection import Selection
    from nxpipe.artifact_store.manifest import Manifest


@click.command(cls=Command)
@click.argument("name", metavar="[ARTIFACT]", required=False, shell_complete=complete_artifacts)
@click.option(
    "--channel", metavar="NAME", shell_complete=complete_channels, help="Fetch the artifact that this channel serves."
)
@click.option("--model", metavar="ID", help="With --channel: the artifact of this model.")
@click.option("--target", help="With --channel: the artifact for this target, as in inf2.")
@click.option(
    "--to", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="A new or empty folder."
)
@click.option(
    "--endpoint",
    metavar="NAME",
    shell_complete=complete_endpoints,
    help="Fail unless this SageMaker endpoint of nxpipe.toml can run the programs.",
)
@click.option(
    "--programs",
    type=Choice(["device", "emulator"]),
    help="The programs to fetch: those for Neuron devices, which is the default if there are any, or the emulator's.",
)
@click.option("--offline", is_flag=True, help="Use only this machine's cache, and report its age.")
@store_option
@config_option
@click.pass_context
def fetch(
    ctx: click.Context,
    /,
    name: str | None,
    channel: str | None,
    model: str | None,
    target: str | None,
    folder: Path,
    endpoint: str | None,
    programs: str | None,
    offline: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Fetch an artifact into a folder, verified and ready to serve.

    ARTIFACT is a model's id, MODEL@KEY, or a key (at least six hex digits). Writes manifest.json, executables/,
    weights.safetensors and files/; the manifest is written last, so a folder with a manifest is complete.
    Of an artifact with programs for Neuron devices, a folder gets these and not the emulator's.
    Existing files are not fetched again, and an interrupted fetch is resumed.

    With --channel, the channel's log must be complete, not older than the last one that this machine read, and signed
    as [signing] of nxpipe.toml requires; this holds with --offline too.

    With --endpoint, the artifact must be one that the endpoint can run: of its model, for its instance type, and of
    the neuronx back end unless the endpoint is a rehearsal. SageMaker runs no agent that would refuse it later.

    \b
    Example:
      nxpipe store fetch bert-base-uncased --to ./served
      nxpipe store fetch --channel production --model bert-base-uncased --to /srv/model --offline
      nxpipe store fetch acme/rank@71f0aa --endpoint rank --to ./served
    """
    if (name is None) == (channel is None):
        raise click.UsageError("pass either ARTIFACT or --channel", ctx)
    if channel is None and (model or target):
        raise click.UsageError("--model and --target require --channel", ctx)
    console: Console = ctx.obj
    request = _FetchRequest(name, channel, model, target, folder, endpoint, programs, config_path, console)
    local = None
    if offline:
        local = request.from_store(open_offline_store(store, config_path), None)
    elif name and _is_whole_key(name):
        # A key names immutable content: a complete local copy needs no network.
        with suppress(StoreError):
            local = request.from_store(open_offline_store(store, config_path), None)
    selection, fetched = local or request.from_store(
        open_configured_store(store, config_path, console), offline_index(store, config_path)
    )
    if console.json:
        console.data(_as_json(selection, fetched))
        return
    console.result(str(folder))
    console.say(_as_text(selection, fetched, channel, offline))


@dataclass(frozen=True)
class _FetchRequest:
    name: str | None
    channel: str | None
    model: str | None
    target: str | None
    folder: Path
    endpoint: str | None
    programs: str | None
    config_path: Path
    console: Console

    def from_store(self, store: "Store", index: "OfflineIndex | None") -> "tuple[Selection, Fetched]":
        from nxpipe.artifact_store.fetch.folder import Programs, size_of
        from nxpipe.artifact_store.fetch.folder import fetch as fetch_folder
        from nxpipe.artifact_store.fetch.selection import by_name
        from nxpipe.pipeline.artifacts.lookup import served_by

        if self.channel is not None:
            say = self.console.say
            selection = served_by(self.channel, self.model, self.target, store, self.config_path, say, index)
        else:
            selection = by_name(store, self.name or "", index)
        if self.endpoint is not None:
            self._require_runnable(self.endpoint, selection.manifest)
        manifest, programs = selection.manifest, Programs(self.programs) if self.programs else None
        with Progress(self.console, f"fetch {manifest.model.id}", size_of(manifest, programs)) as progress:
            return selection, fetch_folder(store.blobs, manifest, self.folder, progress.sent, programs)

    def _require_runnable(self, name: str, manifest: "Manifest") -> None:
        from nxpipe.artifact_store.errors import Refused
        from nxpipe.pipeline.artifacts.channels import endpoint_fault
        from nxpipe.pipeline.config import load_config

        config = load_config(self.config_path, os.environ)
        if fault := endpoint_fault(config, self.config_path.parent, name, manifest):
            raise Refused(fault)


def _is_whole_key(name: str) -> bool:
    from nxpipe.artifact_store.layout import is_key

    return is_key(name.rpartition("@")[2])


def _as_json(selection: "Selection", fetched: "Fetched") -> dict[str, object]:
    return {
        "folder": str(fetched.folder),
        "model": selection.manifest.model.id,
        "target": selection.manifest.target,
        "key": selection.manifest.request_key,
        "manifest_digest": fetched.manifest,
        "bytes_written": fetched.bytes_written,
        "seen_seconds_ago": selection.seen_ago,
        "generation": selection.generation,
    }


def _as_text(selection: "Selection", fetched: "Fetched", channel: str | None, offline: bool) -> str:
    """What was fetched, why this artifact, and what of it was not in the folder yet."""
    manifest = selection.manifest
    wrote = f"wrote {human_bytes(fetched.bytes_written)}" if fetched.bytes_written else "up to date"
    age = f", last seen {_ago(selection.seen_ago)}" if offline and selection.seen_ago is not None else ""
    served = f", which {channel} serves in generation {selection.generation}" if channel else ""
    return f"  {manifest.name} for {manifest.target}{served}: {wrote}{age}"


def _ago(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "less than a minute ago"
