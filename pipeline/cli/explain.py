"""`nxpipe explain`, which is `nxpipe store explain` too."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.build.explain import difference_table, differences_as_json
from nxpipe.pipeline.build.jobs import PLAN_WORDS
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.order_options import order_options
from nxpipe.pipeline.cli.parameters import Numbers, TargetList
from nxpipe.pipeline.cli.store_url import open_the_store
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.saved import axis_option
from nxpipe.pipeline.util.console import Console, table
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.util.garbage import no_collection
from nxpipe.pipeline.util.state_folder import state_folder

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.index.nearest import Near
    from nxpipe.artifact_store.index.segments import Report
    from nxpipe.pipeline.build.asked import Asked
    from nxpipe.pipeline.build.explain import CacheLookup, ProgramLookup
    from nxpipe.pipeline.config import Config


@click.command(cls=Command)
@click.argument("model", required=False)
@order_options("explain", target=TargetList(), tp="1", degrees=Numbers(64))
@click.option(
    "--nearest",
    "count",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="How many artifacts to compare with.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    help="Whose compiler the build is for.  [default: what nxpipe.toml says, else emulator]",
)
@click.option("--no-verify", is_flag=True, help="Explain a build that verifies nothing.")
@click.option("--after", metavar="PASS", help="Print the programs after this pass, or after `capture`, instead.")
@click.option("--passes", "listed", is_flag=True, help="List the passes, in their order, and look at no model.")
@axis_option
@store_option
@config_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    model: str | None,
    store: str | None,
    config_path: Path,
    count: int,
    after: str | None,
    listed: bool,
    **said: Any,
) -> None:
    """Say why a build is answered by the store or not, field by field.

    MODEL is the name of a model in nxpipe.toml; without it and --model-id, all of them are explained, each as
    `nxpipe build` would ask for it. For what is not in the store, the artifact and the program are shown that were
    asked for in the words most like these, with every field that differs. MODEL may be an artifact of the store too
    (MODEL@KEY, or a key), which is then compared with the others.

    With --after it prints the programs as they are after one of the compiler's passes. A pass that runs a second time
    is listed with its turn: fold_constants, fold_constants:2. At --tp above 1 the program is that of every rank.

    \b
    Example:
      nxpipe explain bert
      nxpipe explain --model-id bert-base-uncased --weights random:0 --autocast all
      nxpipe explain --model-id ./my-llama --tp 8 --after shard
      nxpipe store explain bert-base-uncased@4e9ce0 --nearest 3
    """
    from nxpipe.pipeline.build.matrix import refuse_idle_words

    if listed:
        _list_passes(ctx.obj)
        return
    refuse_idle_words(ctx, said)
    if model is not None and (said["model_id"] or said["names"]):
        raise click.UsageError("MODEL, --model-id and --only each say what to explain; pass one of them", ctx)
    wanted = _Wanted(model, said, config_path)
    if after is not None:
        _print_programs(ctx.obj, wanted.asked(), after)
        return
    with no_collection():
        opened = open_the_store(store, config_path, ctx.obj)
        answers = list(wanted.answers(opened, count, ctx.obj.detail))
    if ctx.obj.json:
        ctx.obj.data([_as_json(answer) for answer in answers])
    else:
        ctx.obj.page("\n\n".join(section for answer in answers for section in _page(answer, opened.url)))


@dataclass(frozen=True)
class _Wanted:
    """What is to be explained: builds, or an artifact that the store holds."""

    model: str | None
    said: Mapping[str, Any]
    config_path: Path

    @cached_property
    def config(self) -> "Config":
        missing_ok = self.said["model_id"] is not None or self.model is not None
        return load_config(self.config_path, os.environ, missing_ok=missing_ok)

    @property
    def is_stored(self) -> bool:
        """What can only be an artifact needs no configuration, which may be broken."""
        from nxpipe.pipeline.cli.named import is_artifact

        if self.model is None:
            return False
        return is_artifact(self.model) or self.model not in [model.name for model in self.config.models]

    def asked(self) -> "tuple[Asked, ...]":
        from nxpipe.pipeline.build.matrix import of_words

        names = (self.model,) if self.model else self.said["names"]
        return of_words(self.said, self.config, names, self.config_path.parent)

    def answers(self, store: "Store", count: int, report: "Report") -> "Iterator[CacheLookup]":
        from nxpipe.pipeline.build.cache import Timings
        from nxpipe.pipeline.build.explain import look_up_artifact, look_up_request
        from nxpipe.pipeline.build.plan import make_plan
        from nxpipe.pipeline.verify.verify import Thresholds

        if self.is_stored:
            yield look_up_artifact(store.resolve(str(self.model)), store, count, report)
            return
        timings = Timings.kept_in(state_folder(self.config_path))
        for one in make_plan(self.asked(), store, Thresholds.of(self.config), timings).artifacts:
            yield look_up_request(one.asked.request(), one, store, count, report)


def _page(answer: "CacheLookup", url: str) -> Iterator[str]:
    headline = for_terminal(f"{short_name(answer.model, answer.key)} {'is' if answer.is_hit else 'is not'} in {url}")
    if answer.is_hit and answer.programs:
        yield headline
    else:
        yield headline if answer.nearest else f"{headline}, and no other artifact is to compare it with"
        yield from map(_compared, answer.nearest)
    if answer.programs:
        rows = [(one.cell.shape.name, one.cell.status.value, _reason(one)) for one in answer.programs]
        yield table(("program", "state", "why"), rows)
    for program in answer.programs:
        if (near := program.nearest) and near.differences:
            count = len(near.differences)
            yield (
                f"{program.cell.shape.name}: {near.shape.name} of {for_terminal(near.artifact.published.name)} differs "
                f"in {count} field{'' if count == 1 else 's'}\n{difference_table(near.differences, 'stored', 'wanted')}"
            )


def _compared(near: "Near") -> str:
    count = len(near.differences)
    return (
        f"{for_terminal(near.published.name)} differs in {count} of {near.fields} fields\n"
        f"{difference_table(near.differences, 'stored', 'wanted')}"
    )


def _reason(program: "ProgramLookup") -> str:
    cell, near = program.cell, program.nearest
    if cell.failure:
        return cell.failure.message
    if near is None:
        return cell.why
    stored = f"{near.shape.name} of {near.artifact.published.name}"
    return f"the nearest is {stored}" if near.differences else f"the same as {stored}, whose part is no longer kept"


def _as_json(answer: "CacheLookup") -> dict[str, object]:
    return {
        "model": answer.model,
        "request_key": answer.key,
        "in_store": answer.is_hit,
        "nearest": [
            {
                "request_key": near.published.request_key,
                "model": near.published.model_id,
                "target": near.published.target,
                "fields": near.fields,
                "differences": differences_as_json(near.differences, "stored", "wanted"),
            }
            for near in answer.nearest
        ],
        "programs": [_program_as_json(program) for program in answer.programs],
    }


def _program_as_json(program: "ProgramLookup") -> dict[str, object]:
    cell, near = program.cell, program.nearest
    return {
        "program": cell.shape.name,
        "key": cell.key,
        "state": PLAN_WORDS[cell.status],
        "in_store": program.is_hit,
        "why": _reason(program),
        "nearest": None
        if near is None
        else {
            "request_key": near.artifact.published.request_key,
            "program": near.shape.name,
            "differences": differences_as_json(near.differences, "stored", "wanted"),
        },
    }


# Passes


def _list_passes(console: Console) -> None:
    from nxpipe.emulator.passes import PASSES
    from nxpipe.pipeline.compile.after_pass import labels

    listed = labels(PASSES)
    console.data(listed) if console.json else console.result(*listed)


def _print_programs(console: Console, asked: "Sequence[Asked]", after: str) -> None:
    from nxpipe.emulator.passes import PASSES
    from nxpipe.pipeline.compile.after_pass import labels, programs

    known = labels(PASSES)
    if after not in known:
        raise click.BadParameter(f"there is no pass {after!r}; there are {', '.join(known)}", param_hint="--after")
    answers = []
    for one in asked:
        model, steps = one.order.model_id, PASSES[: known.index(after)]
        for program, graph, padding in programs(one, steps, console.step):
            said = {"model": model, "program": program, "after": after, "graph": str(graph)}
            answers.append(said | {"padding": asdict(padding)})
            if not console.json:
                padded = f"; padded with zeros: {padding}" if padding else ""
                head = f"{model} {program} after {after}: {len(graph.nodes)} nodes{padded}"
                console.page(f"{for_terminal(head)}\n{graph}\n")
    if console.json:
        console.data(answers)
