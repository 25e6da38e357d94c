"""`nxpipe plan`: the group, and `serve`: instances, fleets and money for a model that is served."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from nxpipe.pipeline.cli.completion import complete_instances
from nxpipe.pipeline.cli.main import Command, LazyGroup
from nxpipe.pipeline.cli.options import config_option, write_page
from nxpipe.pipeline.cli.param_types import Amount, Choice, Count, PriceRegion, Share
from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import write_whole
from nxpipe.pipeline.util.text import page_width

if TYPE_CHECKING:
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.config.prices import Prices
    from nxpipe.pipeline.plan.candidates import PlannedModel
    from nxpipe.pipeline.plan.gpus import GpuMeasurement
    from nxpipe.pipeline.plan.serve import Objective, ServingDemand, ServingPlan
    from nxpipe.pipeline.plan.serve_report import GpuComparison
    from nxpipe.pipeline.plan.traffic import Traffic

_FILE: Final = click.Path(dir_okay=False, writable=True, path_type=Path)
_READ: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_INSTANCES: Final = ("inf2", "trn1", "trn2")  # families: all their types
_RUNTIMES: Final = ("nxdi", "vllm-neuron", "nxpipe")
_WEEK_COST: Final = 5000.0

PLAN_COMMANDS = {
    "serve": (
        "nxpipe.pipeline.cli.plan:serve",
        "Plan a serving fleet: instances, layout, batch, size and cost at the objectives.",
    ),
    "support": (
        "nxpipe.pipeline.cli.plan:support",
        "Say which layouts of a model fit an instance type, and which runtimes serve it.",
    ),
    "train": (
        "nxpipe.pipeline.cli.plan_train:train",
        "Plan a training run: layout, instances, tokens a second, hours and dollars.",
    ),
}


@click.group(cls=LazyGroup, homes=PLAN_COMMANDS)
def plan() -> None:
    """Plan which instances, how many and at what cost, with intervals; needs no AWS account and no weights.

    \b
    Example:
      nxpipe plan serve --model-id meta-llama/Llama-3.1-8B --rate 20 --prompt 1k --output 256 --ttft 1s --tpot 50ms
    """


class ObjectiveType(click.ParamType["Objective"]):
    """An objective: a time, and the percentile of the requests that must keep it."""

    name = "TIME[@pN]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "Objective":
        from nxpipe.pipeline.plan.serve import Objective

        try:
            return Objective.parse(str(value))
        except InputInvalid as error:
            self.fail(str(error), param, ctx)


_TRAFFIC: Final = (
    click.option("--rate", "--rps", "rate", type=Amount(above=True), help="Requests a second.  [default: the log's]"),
    click.option(
        "--arrivals",
        type=Choice(["poisson", "constant", "bursty"]),
        default="poisson",
        show_default=True,
        help="The process by which requests arrive.",
    ),
    click.option("--prompt", default="1k", show_default=True, metavar="TOKENS", help="Lengths of prompts."),
    click.option("--output", default="256", show_default=True, metavar="TOKENS", help="Lengths of answers."),
    click.option("--log", type=_READ, metavar="FILE", help="A request log instead: JSONL or CSV."),
)
_OBJECTIVES: Final = (
    click.option("--ttft", type=ObjectiveType(), help="The time to the first token; p95 unless @pN says otherwise."),
    click.option("--tpot", type=ObjectiveType(), help="The time between tokens, for each request on average."),
    click.option(
        "--availability",
        type=Share(),
        default="99.9%",
        show_default=True,
        help="The share of the time in which enough instances run, if each fails by itself; one may always be lost.",
    ),
    click.option(
        "--certain",
        is_flag=True,
        help="Choose layouts by the slow end of the predicted times, so that they meet the objectives there too.",
    ),
    click.option("--budget", type=Amount(above=True), metavar="DOLLARS", help="A month at most."),
)
_BOUGHT: Final = (
    click.option(
        "--instance",
        "instances",
        multiple=True,
        metavar="TYPE|FAMILY",
        shell_complete=complete_instances,
        help=f"Instance types to consider; repeatable.  [default: {', '.join(_INSTANCES)}]",
    ),
    click.option(
        "--purchase",
        "purchases",
        multiple=True,
        type=Choice([each.value for each in Purchase]),
        help="How instances may be bought; repeatable.  [default: on demand, or as EC2 sells the type]",
    ),
    click.option("--region", type=PriceRegion(), help="Of the prices.  [default: [project] region of nxpipe.toml]"),
    click.option(
        "--runtime",
        "runtimes",
        multiple=True,
        type=Choice(_RUNTIMES),
        help="Servers to consider; repeatable.  [default: all that exist for the chip]",
    ),
    click.option(
        "--spot-interruptions",
        type=Share(100.0),
        default="20%",
        show_default=True,
        help="Of one spot instance, a month.",
    ),
    click.option("--rollouts", type=Amount(), default=4.0, show_default=True, help="Rollouts a month."),
)
_GPUS: Final = (
    click.option("--gpu", "gpus", multiple=True, metavar="TYPE", help="Compare with this GPU instance; repeatable."),
    click.option("--no-gpu", is_flag=True, help="Do not compare with GPUs that have public measurements."),
    click.option(
        "--measured",
        type=_READ,
        metavar="FILE",
        help="Your measurement of a GPU instance: the result of vllm bench serve, AIPerf or guidellm.",
    ),
    click.option("--measured-instance", metavar="TYPE", help="The instance type that --measured is of."),
    click.option(
        "--migration-weeks",
        type=Amount(above=True),
        help="Weeks of an engineer that a migration takes.",
    ),
    click.option(
        "--week-cost",
        type=Amount(above=True),
        default=_WEEK_COST,
        show_default=True,
        metavar="DOLLARS",
        help="Of such a week.",
    ),
    click.option(
        "--overrun", type=Share(100.0), default="50%", show_default=True, help="By which a migration may take longer."
    ),
)
_WRITTEN: Final = (
    click.option("--explain", is_flag=True, help="Also print what bounds each program, and all simulated layouts."),
    click.option("--out", type=_FILE, metavar="FILE", help="Write an nxpipe.toml that carries the cheapest plan out."),
    click.option("--html", type=_FILE, metavar="FILE", help="Write a page with charts; it needs no network."),
)


def _with(options: Sequence[Any]) -> Any:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.command(cls=Command)
@click.option(
    "--model-id", required=True, metavar="ID|FOLDER|NAME", help="A hub id, a folder, or a name in nxpipe.toml."
)
@_with((*_TRAFFIC, *_OBJECTIVES, *_BOUGHT, *_GPUS, *_WRITTEN))
@config_option
@click.pass_context
def serve(ctx: click.Context, /, model_id: str, config_path: Path, **options: Any) -> None:
    """Plan a serving fleet: instances, layout, batch, size and cost at the objectives.

    Every layout that fits is simulated with one of three schedulers over the predicted times of AWS's compiler; the
    load at which the objectives are just met gives the size of a fleet that may lose one host. Costs have the interval
    of the predictions; where two overlap, they are too close to call. GPUs with public measurements of the model, or
    with your own, are set beside the plan. docs/reference/planning.md has the method.

    \b
    Example:
      nxpipe plan serve --model-id meta-llama/Llama-3.1-8B --rate 20 --prompt 1k --output 256 --ttft 1s --tpot 50ms
      nxpipe plan serve --model-id ./my-llama --log requests.jsonl --ttft 800ms@p99 --instance inf2 --purchase spot
      nxpipe plan serve --model-id my-llama --rate 5 --tpot 40ms --out plan.toml --html plan.html
      nxpipe plan serve --model-id mistralai/Mistral-7B-v0.1 --rate 5 --measured bench.json \\
        --measured-instance p4d.24xlarge --migration-weeks 6
    """
    console: Console = ctx.obj
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.prices import load_prices
    from nxpipe.pipeline.plan.candidates import instances_of
    from nxpipe.pipeline.plan.serve import plan_serving

    config = load_config(config_path, os.environ, missing_ok=True)
    model = _model(model_id, config, config_path.parent)
    demand = _demand(ctx, options, config)
    own = _measured(ctx, options, demand)
    instances = instances_of(options["instances"] or _INSTANCES)
    prices = load_prices()
    with console.step(f"simulate {model.name} on {', '.join(each.name for each in instances)}"):
        found = plan_serving(model, demand, instances, prices, runtimes=_chosen(options["runtimes"]))
    comparison = _comparison(options, found, prices, own)
    _show(console, found, comparison, options["explain"])
    _write(console, found, comparison, options, config)
    if found.best is None:
        ctx.exit(exit_codes.NO_PLAN.number)


def _model(name: str, config: "Config", root: Path) -> "PlannedModel":
    from nxpipe.pipeline.plan.candidates import planned_model
    from nxpipe.pipeline.util.files import expanded

    listed = next((model for model in config.models if model.name == name), None)
    if listed is not None:
        return planned_model(listed.id or str(root / expanded(str(listed.path))), listed.name)
    return planned_model(name)


def _demand(ctx: click.Context, options: dict[str, Any], config: "Config") -> "ServingDemand":
    from nxpipe.pipeline.plan.serve import ServingDemand

    traffic, rate = _traffic(ctx, options)
    if not 0 < options["availability"] < 1:
        raise click.UsageError("--availability is a share of the time between 0% and 100%, as in 99.9%", ctx)
    return ServingDemand(
        traffic,
        rate,
        options["ttft"],
        options["tpot"],
        options["availability"],
        options["budget"],
        options["region"] or config.project.region or "us-east-1",
        tuple(Purchase(each) for each in dict.fromkeys(options["purchases"])),
        options["spot_interruptions"],
        options["rollouts"],
        sum(
            (config.rollout.bake_min for _ in config.rollout.steps), start=type(config.rollout.bake_min)()
        ).total_seconds()
        / 3600,
        certain=options["certain"],
    )


def _traffic(ctx: click.Context, options: dict[str, Any]) -> "tuple[Traffic, float]":
    """The requests, and how many arrive in a second."""
    from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Traffic, read_log

    if options["log"] is not None:
        given = [name for name in ("prompt", "output", "arrivals") if _is_given(ctx, name)]
        if given:
            raise click.UsageError(f"--log has lengths and arrivals of its own; remove --{given[0]}", ctx)
        traffic = read_log(options["log"])
    else:
        prompts, outputs = (LengthDistribution.parse(options[name]) for name in ("prompt", "output"))
        traffic = Traffic(prompts, outputs, Arrivals(options["arrivals"]))
    rate = options["rate"] or traffic.rate
    if rate is None:
        what = "the log has no times" if options["log"] else "it is not given"
        raise click.UsageError(
            f"--rate: how many requests arrive in a second? {what}; pass --rate, as in --rate 20", ctx
        )
    return traffic, rate


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _chosen(names: Sequence[str]) -> "Sequence[Any]":
    from nxpipe.pipeline.plan.candidates import RUNTIMES

    return [each for each in RUNTIMES if not names or each.scheduling.value in names]


def _measured(ctx: click.Context, options: dict[str, Any], demand: "ServingDemand") -> "list[GpuMeasurement]":
    """The user's own measurement; GPU types are known before anything is simulated."""
    from nxpipe.pipeline.plan.gpus import gpu_table, own_measurement
    from nxpipe.pipeline.plan.load_tests import read_load_tests

    if (options["measured"] is None) != (options["measured_instance"] is None):
        raise click.UsageError("--measured and --measured-instance belong together; pass both", ctx)
    for name in options["gpus"]:
        gpu_table().require(name)
    if options["measured"] is None:
        return []
    return [own_measurement(read_load_tests(options["measured"]), options["measured_instance"], demand)]


def _comparison(
    options: dict[str, Any], found: "ServingPlan", prices: "Prices", own: "list[GpuMeasurement]"
) -> "GpuComparison":
    from nxpipe.pipeline.plan.gpus import Migration
    from nxpipe.pipeline.plan.serve_report import GpuComparison, compare_with_gpus

    weeks = options["migration_weeks"]
    migration = Migration(weeks, options["week_cost"], options["overrun"]) if weeks else None
    if options["no_gpu"] and not own and not options["gpus"]:
        return GpuComparison(migration=migration)
    return compare_with_gpus(found, prices, options["gpus"], own, migration)


def _show(console: Console, found: "ServingPlan", comparison: "GpuComparison", explained: bool) -> None:
    from nxpipe.pipeline.plan.serve_report import document, explanation, summary

    if console.json:
        console.data(document(found, comparison))
        return
    console.page(summary(found, comparison, page_width(100)))
    if explained:
        console.page("\n" + explanation(found))


def _write(
    console: Console, found: "ServingPlan", comparison: "GpuComparison", options: dict[str, Any], config: "Config"
) -> None:
    if options["html"] is not None:
        from nxpipe.pipeline.plan.serve_page import plan_page

        write_page(options["html"], plan_page(found, comparison), console)
    if options["out"] is not None:
        from nxpipe.pipeline.plan.serve_files import configuration

        if found.best is None:
            raise InputInvalid(f"--out {options['out']}: there is no plan to carry out; see the reasons above")
        project = "" if config.project.name == "unnamed" else config.project.name
        write_whole(options["out"], configuration(found, found.best, project=project))
        console.say(f"  plan: {options['out']}; `nxpipe config check --config {options['out']}` validates it")


@click.command(cls=Command)
@click.argument("model_id", metavar="MODEL")
@click.argument("instances", nargs=-1, required=True, metavar="INSTANCE...", shell_complete=complete_instances)
@click.option("--tokens", type=Count(1, 1 << 20), default=2048, show_default=True, help="Prompt and answer.")
@config_option
@click.pass_context
def support(ctx: click.Context, /, model_id: str, instances: tuple[str, ...], tokens: int, config_path: Path) -> None:
    """Say which layouts of a model fit an instance type, and which runtimes serve it.

    \b
    Example:
      nxpipe plan support meta-llama/Llama-3.1-70B inf2.48xlarge trn2.48xlarge
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.plan.candidates import Lengths, candidates, instances_of
    from nxpipe.pipeline.util.text import table

    console: Console = ctx.obj
    config = load_config(config_path, os.environ, missing_ok=True)
    model = _model(model_id, config, config_path.parent)
    found, refused = candidates(model, instances_of(instances), Lengths(tokens, tokens))
    rows: dict[tuple[str, str, int], Any] = {}
    for each in found:  # batches rise: the last is the largest that fits
        rows[each.instance.name, each.runtime.name, each.tp] = each
    if console.json:
        layouts = [
            {"instance": c.instance.name, "runtime": c.runtime.name, "state": c.runtime.state, "tp": c.tp}
            | {"copies": c.copies, "largest_batch": c.replica.rows}
            for c in rows.values()
        ]
        reasons = [{"instance": r.instance, "what": r.what, "reason": r.reason} for r in refused]
        console.data({"model": model.name, "tokens": tokens, "layouts": layouts, "refused": reasons})
    else:
        header = ("instance", "runtime", "tp", "copies", "largest batch", "state")
        lines = [
            (c.instance.name, c.runtime.name, str(c.tp), str(c.copies), str(c.replica.rows), c.runtime.state)
            for c in rows.values()
        ]
        console.page("\n".join([*([table(header, lines)] if lines else []), *(f"not possible: {r}" for r in refused)]))
    if not found:
        ctx.exit(exit_codes.NO_PLAN.number)
