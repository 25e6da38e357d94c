"""`nxpipe prove`: evidence that an artifact runs on Neuron devices."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import DEVICES, Label, config_option, key_option, limit_option, store_option
from nxpipe.pipeline.cli.param_types import Choice, Count, DurationType
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.artifact_store.evidence import Compared, Evidence
    from nxpipe.artifact_store.trust.keys import Signer
    from nxpipe.pipeline.config import Config

_COLUMNS = ("program", "output", "cosine", "max rel", "p50", "p99", "clock")


@click.command(cls=Command)
@click.argument("artifact", shell_complete=complete_artifacts)
@click.option(
    "--channel",
    type=Label("channel"),
    help="Replay only emulated evidence that this channel trusts by its signatures.",
)
@click.option(
    "--runs",
    type=Count(20),
    default=100,
    show_default=True,
    metavar="N",
    help="The number of timed runs of each program.",
)
@click.option(
    "--device",
    type=Choice(DEVICES),
    default="auto",
    show_default=True,
    help="The library that drives the devices; auto is nrtpy if it is installed, else libnrt.",
)
@limit_option
@click.option(
    "--on",
    "place",
    type=Choice(["local", "batch"]),
    default="local",
    show_default=True,
    help="This machine, or a job on AWS Batch in a queue of [prove].",
)
@click.option(
    "--start-limit",
    type=DurationType(1, unit="s"),
    default="30m",
    show_default=True,
    help="With --on batch: end the job if no instance runs it within this time.",
)
@key_option("the evidence")
@store_option
@config_option
@click.pass_obj
def prove(
    console: Console,
    artifact: str,
    channel: str | None,
    runs: int,
    device: str,
    limit: float,
    place: str,
    start_limit: float,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Run an artifact on this machine's Neuron devices, and store the evidence.

    Each program runs on the inputs of the artifact's emulated evidence, on all of its ranks, and its outputs are
    compared with the evidence's. Then it is measured. If all outputs are within the thresholds of [verify] in
    nxpipe.toml, one document of kind `device` is stored, and signed if a key is configured. If not, nothing is stored,
    and the command exits with code 12. A device that is missing or fails is code 31. ARTIFACT is an artifact of the
    store, as MODEL@KEY; it must be of backend neuronx. Needs nxpipe[devices], and neither PyTorch nor neuronx-cc.
    NEURON_RT_VISIBLE_CORES selects the cores.

    With --on batch the command runs as one AWS Batch job, on the smallest instance type of [prove] that the artifact
    fits. Its highest cost is printed first. The evidence is signed here: the job has no key. Ctrl-C ends the job.

    \b
    Example:
      nxpipe prove bert-base-uncased@4e9ce0 --store s3://my-artifacts/nxpipe
      nxpipe prove my-llama@a41f07 --channel production --runs 500
      nxpipe prove my-llama@a41f07 --on batch
    """
    from nxpipe.pipeline.artifacts.signing import trusted_evidence
    from nxpipe.pipeline.artifacts.store_url import open_uncached_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.util.progress import watching
    from nxpipe.pipeline.verify.prove import ProveOptions
    from nxpipe.pipeline.verify.prove import prove as prove_artifact

    if place == "batch" and channel is not None:
        raise click.UsageError("--channel cannot be combined with --on batch; a job has no signing policy")
    config = load_config(config_path, os.environ, missing_ok=True)
    opened = open_uncached_store(store, config_path, console)
    signer = _signer(key, config, config_path.parent)
    trusts = trusted_evidence(channel, config, config_path.parent, opened)
    published = opened.resolve(artifact)
    options = ProveOptions(device, runs, limit)
    if place == "batch":
        from nxpipe.pipeline.fleet.batch_prove import Pace, prove_on_batch

        evidence = prove_on_batch(published, opened, config, options, console.say, Pace(start=start_limit))
    else:
        evidence = prove_artifact(
            published, opened, Thresholds.of(config), options, console.step, partial(watching, console), trusts
        )
    if signer is not None:
        from nxpipe.artifact_store.trust.policy import sign_evidence
        from nxpipe.pipeline.artifacts.signing import builder_id

        sign_evidence(opened, published, signer, builder_id(), [evidence])
    _show(published, evidence, signer, console)


def _signer(key: str | None, config: "Config", folder: Path) -> "Signer | None":
    """The key, opened before the devices run; None without one."""
    if key is None and not config.signing.key:
        return None
    from nxpipe.pipeline.artifacts.signing import chosen_signer

    return chosen_signer(key, config, folder)


def _show(published: "Published", evidence: "Evidence", signer: "Signer | None", console: Console) -> None:
    if console.json:
        console.data(
            {
                "manifest_digest": evidence.manifest,
                "evidence": evidence.digest,
                "kind": evidence.kind,
                "signed_by": signer.public.key_id if signer else None,
                "programs": [compared.model_dump() for compared in evidence.programs],
            }
        )
        return
    console.page(table(_COLUMNS, [row for compared in evidence.programs for row in _rows(compared)]))
    signed = f", signed by key {signer.public.key_id}" if signer else ", not signed"
    console.result(f"{published.name}  evidence {evidence.digest[:12]} of kind {evidence.kind}{signed}")


def _rows(compared: "Compared") -> Sequence[Sequence[str]]:
    """The worst output of a program, and its durations."""
    worst = max(compared.outputs, key=lambda figures: figures.max_relative)
    timing = compared.timing
    durations = (f"{timing.p50_ms:.3f} ms", f"{timing.p99_ms:.3f} ms", timing.clock) if timing else ("", "", "")
    return [(compared.program, worst.output, f"{worst.cosine:.7f}", f"{worst.max_relative:.3g}", *durations)]
