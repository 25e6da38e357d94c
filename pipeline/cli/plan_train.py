"""`nxpipe plan train`: layouts, instances, time and money of a training run."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.param_types import Amount, Choice, Count, DurationType, PriceRegion, Share
from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import page_width

if TYPE_CHECKING:
    from nxpipe.emulator.hardware.instance import Instance
    from nxpipe.pipeline.plan.training import TrainingJob
    from nxpipe.pipeline.plan.training_cost import TrainingChoice, TrainingDemand, TrainingPlan
    from nxpipe.pipeline.plan.training_files import ImportedTraining
    from nxpipe.pipeline.plan.training_memory import TrainingLayout

_FILE: Final = click.Path(dir_okay=False, writable=True, path_type=Path)
_READ: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_TYPES: Final = ("trn1.32xlarge", "trn2.48xlarge")
_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)
_SEQUENCE: Final = 4096
_BATCH: Final = 1024


class _Tokens(click.ParamType[float]):
    """A number of tokens, with a unit of thousands: 15T, 100B, 500M, 2k."""

    name = "TOKENS"
    _FORM: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMBT]?)", re.ASCII)
    _UNITS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = self._FORM.fullmatch(str(value))
        count = float(match[1]) * self._UNITS[match[2]] if match else 0.0
        if not 1 <= count <= 1e18:
            self.fail(f"{value!r} is not a number of tokens, as in 500M, 100B or 15T", param, ctx)
        return count


@click.command(cls=Command)
@click.option("--model-id", metavar="ID|FOLDER", help="A hub id, or a folder with a config.json; a decoder.")
@click.option(
    "--from",
    "source",
    type=_READ,
    metavar="FILE",
    help="Also judge the layout of NxD Training's YAML, or of Hugging Face's TrainingArguments as JSON or YAML.",
)
@click.option("--tokens", type=_Tokens(), help="Tokens to train on, as in 100B.  [default: the steps of --from]")
@click.option("--sequence-length", type=Count(1, 1 << 24), help=f"[default: that of --from, or {_SEQUENCE}]")
@click.option("--batch", type=Count(1, 1 << 24), help=f"Sequences of a step.  [default: those of --from, or {_BATCH}]")
@click.option(
    "--instance",
    "instances",
    multiple=True,
    metavar="TYPE",
    help=f"An instance type to consider; repeatable.  [default: {', '.join(_TYPES)}]",
)
@click.option(
    "--count",
    "counts",
    multiple=True,
    type=Count(1, 512),
    help=f"A number of instances; repeatable.  [default: that of --from, or {', '.join(map(str, _COUNTS))}]",
)
@click.option(
    "--precision",
    type=Choice(["mixed", "bf16-sr", "fp32"]),
    help="Types of weights and AdamW's state; mixed has fp32 master weights.  [default: of --from, or mixed]",
)
@click.option(
    "--zero1/--no-zero1", default=None, help="Shard AdamW's state over replicas.  [default: of --from, or yes]"
)
@click.option(
    "--flash/--no-flash", default=None, help="Attention that keeps no matrix of scores.  [default: of --from, or yes]"
)
@click.option("--region", type=PriceRegion(), default="us-east-2", show_default=True, help="The region of the prices.")
@click.option(
    "--purchase",
    "purchases",
    multiple=True,
    type=Choice([each.value for each in Purchase]),
    help="How instances may be bought; repeatable.  [default: on-demand, spot, capacity-block]",
)
@click.option("--deadline", type=DurationType(unit="d"), help="The longest expected time, as in 5d.")
@click.option("--budget", type=Amount(above=True), metavar="DOLLARS", help="The highest expected cost.")
@click.option(
    "--spot-interruptions",
    type=Share(100.0),
    default="20%",
    show_default=True,
    help="The share of spot instances that EC2 interrupts in a month; its advisor names 5% to over 20%.",
)
@click.option(
    "--checkpoint-seconds",
    type=DurationType(unit="s"),
    help="To write a checkpoint.  [default: its bytes at 1 GB/s of each instance]",
)
@click.option(
    "--restart-seconds",
    type=DurationType(zero=True, unit="s"),
    default="15m",
    show_default=True,
    help="From an interruption until the run goes on.",
)
@click.option("--explain", is_flag=True, help="Also print the parts of memory, of a step, and every way of buying.")
@click.option(
    "--out", type=_FOLDER, metavar="FOLDER", help="Write the files that launch the imported or cheapest plan."
)
@click.option("--zone", metavar="ZONE", help="The availability zone of --out's fleet.  [default: the region's first]")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page with charts; it needs no network.")
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Plan a training run: layout, instances, tokens a second, hours and dollars.

    Every layout of tensor, pipeline and data parallelism that fits the memory of a core is timed: products as AWS's
    compiler takes them, bubbles of 1F1B, collectives, gradients, optimizer. Plans are ranked by cost; checkpoints on
    the spot market are Daly's, capacity blocks have the lengths that EC2 sells. docs/reference/planning.md has the
    method.

    \b
    Example:
      nxpipe plan train --model-id meta-llama/Llama-3.1-8B --tokens 100B
      nxpipe plan train --model-id meta-llama/Llama-2-70b-hf --tokens 1T --instance trn1.32xlarge --count 32 --explain
      nxpipe plan train --model-id meta-llama/Llama-3.1-8B --from hf_llama3_8B_config.yaml --out launch
    """
    from nxpipe.pipeline.config.prices import load_prices
    from nxpipe.pipeline.plan.training import instance_of
    from nxpipe.pipeline.plan.training_cost import plan_training
    from nxpipe.pipeline.plan.training_files import ImportedTraining, read_training

    console: Console = ctx.obj
    imported = read_training(options["source"]) if options["source"] else ImportedTraining("")
    types = options["instances"] or (_default_types(imported))
    instances = [instance_of(name) for name in dict.fromkeys(types)]
    counts = sorted({*options["counts"]} or ({imported.instances} if imported.instances else {*_COUNTS}))
    job = _job(options, imported, instances, counts)
    demand = _demand(ctx, options, imported, job)
    prices = load_prices()
    with console.step(f"time the layouts of {job.model}"):
        found = plan_training(job, demand, instances, counts, prices)
        if options["source"]:
            given = _given(options["source"], imported, job, instances[0], counts, demand)
            found = replace(found, given=given)
    _show(console, found, options["explain"])
    _write(console, found, options)
    if (found.given is None or not found.given.candidate.fits) if options["source"] else found.best is None:
        ctx.exit(exit_codes.NO_PLAN.number)


def _default_types(imported: "ImportedTraining") -> tuple[str, ...]:
    """Types with as many ranks as an imported configuration has devices."""
    from nxpipe.pipeline.plan.training import instance_of

    return tuple(name for name in _TYPES if imported.devices in (None, instance_of(name).logical_cores)) or _TYPES


def _job(
    options: dict[str, Any], imported: "ImportedTraining", instances: "list[Instance]", counts: list[int]
) -> "TrainingJob":
    from nxpipe.pipeline.plan.training import TrainingJob
    from nxpipe.pipeline.plan.training_memory import Precision

    name, architecture = _model(options["model_id"], imported)
    sequences = options["batch"] or imported.sequences
    if sequences is None and imported.accumulation is not None:
        replicas = counts[0] * instances[0].logical_cores // ((imported.tp or 1) * (imported.pp or 1))
        if len(counts) > 1:
            raise InputInvalid(
                f"{options['source']}: gradient_accumulation_steps gives a step's sequences only for one number of "
                "instances; pass --count"
            )
        sequences = (imported.micro or 1) * imported.accumulation * max(replicas, 1)
    precision = Precision(options["precision"]) if options["precision"] else imported.precision
    return TrainingJob(
        model=name,
        architecture=architecture,
        tokens=options["sequence_length"] or imported.tokens or _SEQUENCE,
        sequences=sequences or _BATCH,
        precision=precision or Precision.MIXED,
        zero1=_first(options["zero1"], imported.zero1, True),
        sequence_parallel=_first(imported.sequence_parallel, True),
        flash=_first(options["flash"], imported.flash, True),
    )


def _first(*flags: bool | None) -> bool:
    return next(flag for flag in flags if flag is not None)


def _model(name: str | None, imported: "ImportedTraining") -> tuple[str, Any]:
    """The model's name and architecture, with the sizes that an imported configuration sets."""
    from nxpipe.pipeline.plan.candidates import planned_model

    sizes = dict(imported.sizes or {})
    if name is not None:
        return name, {**planned_model(name).architecture, **_consistent(sizes)}
    missing = [key for key in ("layers", "hidden", "heads", "intermediate", "vocab") if key not in sizes]
    if missing:
        where = f"--from has no {missing[0]} of the model" if imported.kind else "no model is given"
        raise InputInvalid(f"{where}; pass --model-id")
    if sizes["hidden"] % sizes["heads"]:
        raise InputInvalid(f"--from: {sizes['heads']} heads do not divide a hidden size of {sizes['hidden']}")
    known = {"kind": "decoder", "kv_heads": sizes["heads"], "head_dim": sizes["hidden"] // sizes["heads"]}
    return "the imported model", {**known, "gated": True, **sizes}


def _consistent(sizes: dict[str, int]) -> dict[str, int]:
    """Depths override those of a model; its widths stay those of its config.json, which the libraries read too."""
    return {key: sizes[key] for key in ("layers",) if key in sizes}


def _demand(
    ctx: click.Context, options: dict[str, Any], imported: "ImportedTraining", job: "TrainingJob"
) -> "TrainingDemand":
    from nxpipe.pipeline.plan.training_cost import OFFERED, Checkpoints, TrainingDemand

    tokens = options["tokens"]
    if tokens is None:
        if imported.steps is None:
            raise click.UsageError("--tokens: how many tokens to train on? Pass --tokens, as in --tokens 100B", ctx)
        tokens = float(imported.steps * job.sequences * job.tokens)
    if options["spot_interruptions"] >= 1:
        raise click.UsageError("--spot-interruptions is a share of the instances below 100%, as in 20%", ctx)
    return TrainingDemand(
        tokens=tokens,
        region=options["region"],
        purchases=tuple(Purchase(each) for each in dict.fromkeys(options["purchases"])) or OFFERED,
        checkpoints=Checkpoints(
            monthly=options["spot_interruptions"],
            seconds=options["checkpoint_seconds"],
            restart=options["restart_seconds"],
        ),
        deadline=options["deadline"] * 24 if options["deadline"] else None,
        budget=options["budget"],
    )


def _given(
    path: Path,
    imported: "ImportedTraining",
    job: "TrainingJob",
    instance: "Instance",
    counts: list[int],
    demand: "TrainingDemand",
) -> "TrainingChoice":
    """The imported layout on its instances; InputInvalid says which rule it breaks."""
    from nxpipe.pipeline.config.prices import load_prices
    from nxpipe.pipeline.plan.training import TrainingClock, candidate, reason_against
    from nxpipe.pipeline.plan.training_cost import choice_of
    from nxpipe.pipeline.predict.work import NotPredicted

    count = imported.instances or counts[0]
    if imported.devices not in (None, instance.logical_cores):
        raise InputInvalid(
            f"{path}: {imported.devices} devices of an instance are not the {instance.logical_cores} ranks of "
            f"{instance.name}; pass --instance"
        )
    layout = _layout(imported, job, count * instance.logical_cores)
    if refusal := reason_against(job, instance, count, layout):
        raise InputInvalid(f"{path}: {refusal}; correct the layout, or leave --from out to see those that can run")
    try:
        return choice_of(candidate(TrainingClock.of(job, instance), count, layout), demand, load_prices())
    except NotPredicted as fault:
        raise InputInvalid(f"{path}: {fault}") from fault


def _layout(imported: "ImportedTraining", job: "TrainingJob", ranks: int) -> "TrainingLayout":
    from nxpipe.pipeline.plan.training_memory import Recompute, TrainingLayout

    tp, pp = imported.tp or 1, imported.pp or 1
    return TrainingLayout(
        tp=tp,
        pp=pp,
        dp=max(ranks // (tp * pp), 1),
        micro=imported.micro or 1,
        sequences=job.sequences,
        interleave=imported.interleave or 1,
        recompute=imported.recompute or Recompute.SELECTIVE,
        precision=job.precision,
        zero1=job.zero1,
        sequence_parallel=job.sequence_parallel and tp > 1,
        flash=job.flash,
    )


def _show(console: Console, found: "TrainingPlan", explained: bool) -> None:
    from nxpipe.pipeline.plan.training_report import document, explanation, summary

    if console.json:
        console.data(document(found))
        return
    console.page(summary(found, page_width(100)))
    if explained and (text := explanation(found)):
        console.page("\n" + text)


def _write(console: Console, found: "TrainingPlan", options: dict[str, Any]) -> None:
    if options["html"] is not None:
        from nxpipe.pipeline.plan.training_report import page
        from nxpipe.pipeline.util.files import write_whole

        write_whole(options["html"], page(found))
        console.say(f"  page: {options['html']}")
    if options["out"] is not None:
        _launch(console, found, options)


def _launch(console: Console, found: "TrainingPlan", options: dict[str, Any]) -> None:
    """All files of a launch or none: a folder that has one of them is refused."""
    from nxpipe.pipeline.plan.serve_files import name_of
    from nxpipe.pipeline.plan.training_cost import block_days, block_end
    from nxpipe.pipeline.plan.training_files import Launch, launch_files
    from nxpipe.pipeline.util.errors import WouldOverwrite
    from nxpipe.pipeline.util.files import FileChange, write_changes

    chosen, folder = found.given or found.best, options["out"]
    if chosen is None:
        raise InputInvalid(f"--out {folder}: there is no plan to launch; see the reasons above")
    offer = chosen.cheapest(found.demand)
    purchase = offer.purchase if offer else Purchase.ON_DEMAND
    if purchase is Purchase.SPOT and chosen.candidate.count > 1:
        raise InputInvalid(
            f"--out {folder}: AWS Batch, which runs a training fleet, runs no multi-node jobs on spot instances; pass "
            "--purchase on-demand, or --count 1"
        )
    block = None
    if purchase is Purchase.CAPACITY_BLOCK and offer is not None:
        block = block_end(datetime.now(UTC).date() + timedelta(days=1), block_days(offer.hours[1])[0])
    launch = Launch(
        project=name_of(found.job.model),
        model_id=options["model_id"] or "",
        nodes=chosen.candidate.count,
        region=found.demand.region,
        zone=options["zone"] or f"{found.demand.region}a",
        purchase=purchase,
        steps=chosen.candidate.steps(found.demand.tokens),
        block=block,
    )
    if not launch.model_id:
        raise InputInvalid("--out: nxpipe.toml needs the model of the fleet; pass --model-id")
    files = launch_files(chosen.candidate, launch)
    if existing := [name for name in files if (folder / name).exists()]:
        raise WouldOverwrite(f"{folder / existing[0]} exists; move it away, or pass another folder to --out")
    write_changes([FileChange(folder, name, None, text) for name, text in files.items()])
    for name in files:
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    console.say(
        f"  launch files: {folder}; `nxpipe config check --config {folder / 'nxpipe.toml'}` validates the fleet"
    )
