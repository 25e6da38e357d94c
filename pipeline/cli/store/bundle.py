"""`nxpipe store export` and `nxpipe store import`: an artifact as an OCI image layout."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.progress import Progress


@click.command("export", cls=Command)
@click.argument("name")
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.tar|FOLDER",
    help="The destination, which must not exist.",
)
@store_option
@config_option
@click.pass_obj
def export(console: Console, name: str, target: Path, store: str | None, config_path: Path) -> None:
    """Export one artifact to a tar file or folder, for hosts without network access.

    Writes an OCI image layout with the artifact's manifest, blobs and signatures; equal artifacts give equal bytes.
    NAME is a model's id, MODEL@KEY, or a key.

    \b
    Example:
      nxpipe store export bert-base-uncased@4e9ce0 --to bert.tar
    """
    from nxpipe.artifact_store.bundle.archive import export_artifact

    opened = open_configured_store(store, config_path, console)
    published = opened.resolve(name)
    with Progress(console, f"export {published.model_id}", published.size_bytes) as progress:
        image = export_artifact(opened, published, target, progress.sent)
    if console.json:
        console.data(
            {
                "path": str(target),
                "request_key": published.request_key,
                "manifest_digest": published.manifest_digest,
                "blobs": len(image.blobs),
                "signatures": sorted(image.signatures),
            }
        )
    else:
        console.result(str(target))


@click.command("import", cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path), metavar="FILE.tar|FOLDER")
@store_option
@config_option
@click.pass_obj
def import_(console: Console, bundle: Path, store: str | None, config_path: Path) -> None:
    """Import and publish an artifact that `nxpipe store export` wrote.

    Checks every byte against its digest; the artifact becomes visible only when it is complete. Its signatures are
    imported too; those of keys in [signing] of nxpipe.toml must be valid. Promotion checks whether they suffice.
    An interrupted import is resumed by the same command.

    \b
    Example:
      nxpipe store import bert.tar --store s3://my-artifacts/nxpipe
    """
    from nxpipe.artifact_store.bundle.archive import Bundled
    from nxpipe.pipeline.artifacts.signing import known_keys
    from nxpipe.pipeline.config import load_config

    opened = open_configured_store(store, config_path, console)
    known = known_keys(load_config(config_path, os.environ, missing_ok=True), config_path.parent)
    bundled = Bundled.read(bundle, known)
    with Progress(console, f"import {bundled.manifest.model.id}", bundled.size_bytes) as progress:
        published = bundled.publish(opened, progress.sent)
    if console.json:
        console.data(
            {
                "request_key": published.request_key,
                "manifest_digest": published.manifest_digest,
                "model": published.model_id,
                "target": published.target,
                "size_bytes": published.size_bytes,
                "published_at": published.published_at,
            }
        )
    else:
        console.result(f"imported  {published.name}  {published.target}")
