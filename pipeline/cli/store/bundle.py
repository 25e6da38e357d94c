"""`nxpipe store export` and `nxpipe store import`: an artifact as an OCI image layout, and folders of runtimes."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import Label, config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice, Count
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.progress import Progress
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.artifacts.recipes import ImportRequest

# Those of pipeline.artifacts.contract, which loads pydantic.
RUNTIMES: Final = ("nxpipe", "vllm-nxdi", "vllm-neuron", "optimum", "torchscript")


@click.command("export", cls=Command)
@click.argument("name", metavar="ARTIFACT", shell_complete=complete_artifacts)
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
    ARTIFACT is a model's id, MODEL@KEY, or a key.

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
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE.tar|FOLDER")
@click.option(
    "--runtime",
    type=Choice(RUNTIMES),
    help="PATH is a folder that this serving runtime compiled, with nxpipe: a fetched folder.",
)
@click.option("--model-id", metavar="ID", help="The model's id in the store.  [default: the name of its folder]")
@click.option("--name", type=Label("contract"), help="The contract's name.  [default: the runtime's]")
@click.option("--target", metavar="TARGET", help="What the folder was compiled for, if it does not say, as in trn2.")
@click.option("--lnc", type=Count(1, 8), help="Physical cores of a logical one.  [default: the target's]")
@click.option(
    "--pin", "pins", multiple=True, metavar="P=V", help="A package's exact version, as torch=2.9.0; repeatable."
)
@click.option(
    "--model-files",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="vLLM: the model's configuration, tokenizer, weights, if they are not in PATH.",
)
@click.option(
    "--nki-binaries",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="vllm-neuron: its NKI kernels, of /var/tmp/nki-intermediate-cache.",
)
@click.option(
    "--serve-flags", default="", metavar="TEXT", help="vllm-neuron: the flags of vllm serve that compiled PATH."
)
@click.option(
    "--command", default="", metavar="TEXT", help="The server's command, for a folder that vLLM does not serve."
)
@click.option("--key", metavar="KEY", help="Sign the artifact of a folder with this key: file:PATH or kms:ARN.")
@store_option
@config_option
@click.pass_context
def import_(
    ctx: click.Context,
    /,
    path: Path,
    runtime: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
    **stated: Any,
) -> None:
    """Import and publish an exported artifact, or a folder that a serving runtime compiled.

    Without --runtime, PATH was written by `nxpipe store export`. Checks every byte against its digest; the artifact
    becomes visible only when it is complete. Its signatures are imported too; those of keys in [signing] of nxpipe.toml
    must be valid. Promotion checks whether they suffice. An interrupted import is resumed by the same command.

    With --runtime, checks that the runtime would load the folder without compiling, derives the environment and the
    arguments of its server, stores the files (safetensors by tensor, shared with other artifacts), and publishes them
    as an artifact with a contract, which `nxpipe agent` serves.

    \b
    Example:
      nxpipe store import bert.tar --store s3://my-artifacts/nxpipe
      nxpipe store import ./traced --runtime torchscript --target inf2 --pin torch=2.9.0 --pin torch-neuronx=2.9.0.2.11
    """
    console: Console = ctx.obj
    if runtime is None:
        for name in (*stated, "key"):
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-').rstrip('s')} requires --runtime", ctx)
        _import_bundle(console, path, store, config_path)
    else:
        _import_folder(console, _request(runtime, path, **stated), key, store, config_path)


def _import_bundle(console: Console, bundle: Path, store: str | None, config_path: Path) -> None:
    from nxpipe.artifact_store.bundle.archive import Bundled
    from nxpipe.pipeline.artifacts.signing import known_keys
    from nxpipe.pipeline.config import load_config

    opened = open_configured_store(store, config_path, console)
    known = known_keys(load_config(config_path, os.environ, missing_ok=True), config_path.parent)
    bundled = Bundled.read(bundle, known)
    with Progress(console, f"import {bundled.manifest.model.id}", bundled.size_bytes) as progress:
        published = bundled.publish(opened, progress.sent)
    if console.json:
        console.data(_summary(published))
    else:
        console.result(f"imported  {published.name}  {published.target}")


def _request(runtime: str, path: Path, pins: tuple[str, ...], serve_flags: str, **stated: Any) -> "ImportRequest":
    from nxpipe.pipeline.artifacts.recipes import ImportRequest

    pairs = [pin.partition("=") for pin in pins]
    for package, _, version in pairs:
        if not package or not version:
            raise click.BadParameter(f"{package!r} has no version; write it as torch=2.9.0", param_hint="--pin")
    by_package = {package.lower().replace("_", "-"): version for package, _, version in pairs}
    return ImportRequest(runtime, path, pins=by_package, flags=serve_flags, **stated)


def _import_folder(
    console: Console, request: "ImportRequest", key: str | None, store: str | None, config_path: Path
) -> None:
    from nxpipe.artifact_store.trust.signatures import Signatures
    from nxpipe.pipeline.artifacts.payload import publish_draft, publish_own
    from nxpipe.pipeline.artifacts.recipes import draft
    from nxpipe.pipeline.artifacts.signing import builder_id, chosen_signer
    from nxpipe.pipeline.config import load_config

    opened = open_configured_store(store, config_path, console)
    imported = publish_own(opened, request) if request.runtime == "nxpipe" else publish_draft(opened, draft(request))
    published, contract = imported.published, imported.contract
    if key is not None:
        signer = chosen_signer(key, load_config(config_path, os.environ, missing_ok=True), config_path.parent)
        Signatures(opened).add(published, signer, builder_id())
    if console.json:
        console.data(
            {
                **_summary(published),
                "contract": contract.model_dump(exclude={"trees"}),
                "trees": {
                    tree.name: {"destination": tree.destination, "files": len(tree.files)} for tree in contract.trees
                },
                "files": imported.files,
                "bytes_in_files": imported.bytes_in_files,
            }
        )
    else:
        console.result(f"imported  {published.name}  {published.target}  contract {contract.name}")
        console.say(f"  {imported.files} files, {human_bytes(imported.bytes_in_files)}")
        console.say(f"  {shlex.join(contract.argv) or 'the server is the command of the fleet'}")


def _summary(published: "Published") -> dict[str, object]:
    return {
        "request_key": published.request_key,
        "manifest_digest": published.manifest_digest,
        "model": published.model_id,
        "target": published.target,
        "size_bytes": published.size_bytes,
        "published_at": published.published_at,
    }
