"""`nxpipe explain`, which is `nxpipe store explain` too."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.build.nearness import difference_table, differences_as_json
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import axis_option, check_model_options, model_options
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.parameters import Numbers, TargetList
from nxpipe.pipeline.cli.store_url import open_the_store
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.util.console import Console, table
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.util.garbage import no_collection
from nxpipe.pipeline.util.state_folder import state_folder

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.index.nearest import Near
    from nxpipe.artifact_store.index.segments import Report
    from nxpipe.pipeline.build.explaining import Answer, ProgramAnswer
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.models.spec import ModelSpec


@click.command(cls=Command)
@click.argument("model", required=False)
@model_options("explain", target=TargetList(), tp="1", degrees=Numbers(64))
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
    help="The compiler of the build.  [default: that of nxpipe.toml, else emulator]",
)
@click.option("--no-verify", is_flag=True, help="Explain a build that verifies nothing.")
@click.option("--after", metavar="PASS", help="Print the programs after this pass, or after `capture`, instead.")
@click.option("--passes", "listed", is_flag=True, help="List the passes in their order, without a model.")
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
    **options: Any,
) -> None:
    """Explain a cache hit or miss of a build, field by field.

    MODEL is the name of a model in nxpipe.toml; without it and --model-id, all of them are explained, each as
    `nxpipe build` would build it. For a cache miss, the nearest artifact and program are shown, with every field that
    differs. MODEL may also be an artifact of the store (MODEL@KEY, or a key), which is compared with the others.

    With --after it prints the programs as they are after one of the compiler's passes. A pass that runs a second time
    is listed with its number: fold_constants, fold_constants:2. At --tp above 1 it is the program of every rank.

    \b
    Example:
      nxpipe explain bert
      nxpipe explain --model-id bert-base-uncased --weights random:0 --autocast all
      nxpipe explain --model-id ./my-llama --tp 8 --after shard
      nxpipe store explain bert-base-uncased@4e9ce0 --nearest 3
    """
    if listed:
        _list_passes(ctx.obj)
        return
    check_model_options(ctx, options["model_id"], options)
    if model is not None and (options["model_id"] or options["names"]):
        raise click.UsageError("MODEL, --model-id and --only each select what to explain; pass one of them", ctx)
    query = _Query(model, options, config_path)
    if after is not None:
        _print_programs(ctx.obj, query.specs(), after)
        return
    with no_collection():
        opened = open_the_store(store, config_path, ctx.obj)
        answers = list(query.answers(opened, count, ctx.obj.detail))
    if ctx.obj.json:
        ctx.obj.data([_as_json(answer) for answer in answers])
    else:
        ctx.obj.page("\n\n".join(section for answer in answers for section in _page(answer, opened.url)))


@dataclass(frozen=True)
class _Query:
    """The builds to explain, or an artifact of the store."""

    model: str | None
    options: Mapping[str, Any]
    config_path: Path

    @cached_property
    def config(self) -> "Config":
        missing_ok = self.options["model_id"] is not None or self.model is not None
        return load_config(self.config_path, os.environ, missing_ok=missing_ok)

    @property
    def is_stored(self) -> bool:
        """The name can only be an artifact's; then the configuration is not read, and may be broken."""
        from nxpipe.pipeline.cli.named import is_artifact

        if self.model is None:
            return False
        return is_artifact(self.model) or self.model not in [model.name for model in self.config.models]

    def specs(self) -> "tuple[ModelSpec, ...]":
        from nxpipe.pipeline.build.matrix import specs_of_options

        names = (self.model,) if self.model else self.options["names"]
        return specs_of_options(self.options, self.config, names, self.config_path.parent)

    def answers(self, store: "Store", count: int, report: "Report") -> "Iterator[Answer]":
        from nxpipe.pipeline.build.explaining import of_artifact, of_request
        from nxpipe.pipeline.build.plan import make_plan
        from nxpipe.pipeline.build.timings import Timings
        from nxpipe.pipeline.compile.spec import BuildSpec
        from nxpipe.pipeline.models.thresholds import Thresholds

        if self.is_stored:
            yield of_artifact(store.resolve(str(self.model)), store, count, report)
            return
        timings = Timings.kept_in(state_folder(self.config_path))
        for one in make_plan(self.specs(), store, Thresholds.of(self.config), timings).artifacts:
            yield of_request(BuildSpec.of(one.asked), one, store, count, report)


def _page(answer: "Answer", url: str) -> Iterator[str]:
    headline = for_terminal(f"{short_name(answer.model, answer.key)} {'is' if answer.is_hit else 'is not'} in {url}")
    if answer.is_hit and answer.programs:
        yield headline
    else:
        yield headline if answer.nearest else f"{headline}, and no other artifact is to compare it with"
        yield from map(_compared, answer.nearest)
    if answer.programs:
        rows = [(one.cell.shape.name, one.cell.state, _reason(one)) for one in answer.programs]
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


def _reason(program: "ProgramAnswer") -> str:
    cell, near = program.cell, program.nearest
    if cell.fault:
        return cell.fault.message
    if near is None:
        return cell.why
    stored = f"{near.shape.name} of {near.artifact.published.name}"
    return f"the nearest is {stored}" if near.differences else f"the same as {stored}, whose step result was collected"


def _as_json(answer: "Answer") -> dict[str, object]:
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


def _program_as_json(program: "ProgramAnswer") -> dict[str, object]:
    cell, near = program.cell, program.nearest
    return {
        "program": cell.shape.name,
        "key": cell.key,
        "state": cell.state,
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
    from nxpipe.pipeline.compile.frontend import pass_names

    listed = pass_names()
    console.data(listed) if console.json else console.result(*listed)


def _print_programs(console: Console, specs: "Sequence[ModelSpec]", after: str) -> None:
    from nxpipe.pipeline.compile.frontend import compile_shape, pass_names
    from nxpipe.pipeline.compile.spec import BuildSpec

    if after not in pass_names():
        raise click.BadParameter(f"no pass {after!r}; the passes are {', '.join(pass_names())}", param_hint="--after")
    documents = []
    for each in specs:
        spec = BuildSpec.without_weights(each)
        for shape in spec.shapes:
            with console.step(f"compile {shape.name}"):
                program = compile_shape(spec, shape, until=after)
            graph, padding = program.graph, program.padding
            document = {"model": each.model_id, "program": shape.name, "after": after, "graph": str(graph)}
            documents.append(document | {"padding": asdict(padding)})
            if not console.json:
                padded = f"; padded with zeros: {padding}" if padding else ""
                head = f"{each.model_id} {shape.name} after {after}: {len(graph.nodes)} nodes{padded}"
                console.page(f"{for_terminal(head)}\n{graph}\n")
    if console.json:
        console.data(documents)
