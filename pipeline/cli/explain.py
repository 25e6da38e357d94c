"""`nxpipe explain`, also `nxpipe store explain`: cache hits and misses, and programs after a compiler pass.

`nxpipe stats`: how many hits and misses there were, and the time that hits saved.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.build.explain import difference_table, differences_as_json
from nxpipe.pipeline.build.jobs import PLAN_WORDS
from nxpipe.pipeline.build.report.program_table import by_size
from nxpipe.pipeline.cli.completion import complete_models_or_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, model_options
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice, Count, Numbers, TargetList
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.files import state_folder
from nxpipe.pipeline.util.text import Column, duration_text, for_terminal, table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.index.leaves import Difference
    from nxpipe.artifact_store.index.nearest import NearestArtifact
    from nxpipe.artifact_store.index.segments import Report
    from nxpipe.pipeline.build.explain import CacheLookup, ProgramLookup
    from nxpipe.pipeline.build.statistics import CacheFigures, CacheStatistics
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.models.spec import ModelSpec


@click.command(cls=Command)
@click.argument("model", required=False, shell_complete=complete_models_or_artifacts)
@model_options("explain", target=TargetList(), tp="1", degrees=Numbers(64))
@click.option(
    "--nearest",
    "count",
    type=Count(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="The number of artifacts to compare with.",
)
@click.option(
    "--backend",
    type=Choice(get_args(Backend)),
    help="The compiler of the build.  [default: [build] backend of nxpipe.toml, else emulator]",
)
@click.option("--no-verify", is_flag=True, help="Explain a build without verification.")
@click.option("--after", metavar="PASS", help="Print the programs after this pass or back-end step, or `capture`.")
@click.option("--passes", "listed", is_flag=True, help="List the passes and back-end steps in order.")
@store_option
@config_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    model: str | None,
    options: ModelOptions,
    count: int,
    backend: str | None,
    no_verify: bool,
    after: str | None,
    listed: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Explain cache hits and misses of a build, field by field.

    MODEL is the name of a model in nxpipe.toml; without MODEL and --model-id, all models of the file are explained. A
    cache miss shows the nearest artifact and program in the store and every field of the cache key that differs. MODEL
    may also be an artifact of the store (MODEL@KEY or a key), which is compared with the others. For programs in the
    store it shows the predicted times, what bounds them, and their distance from the floor; `nxpipe profile` has the
    details.

    --after prints the programs after one compiler pass. A pass that runs twice is listed twice: fold_constants,
    fold_constants:2. With --tp above 1, all ranks run the printed program.

    \b
    Example:
      nxpipe explain bert
      nxpipe explain --model-id bert-base-uncased --weights random:0 --autocast all
      nxpipe explain --model-id ./my-llama --tp 8 --after shard
      nxpipe explain --model-id ./my-llama --after emit_kernels
      nxpipe store explain bert-base-uncased@4e9ce0 --nearest 3
    """
    if listed:
        _list_passes(ctx.obj)
        return
    options.require_applicable()
    if model is not None and (options.model_id or options.names):
        raise click.UsageError("MODEL, --model-id and --only cannot be combined; pass one of them", ctx)
    subject = _Subject(model, options, options.build_values(backend, no_verify), config_path)
    if after is not None:
        _print_programs(ctx.obj, subject.specs(), after)
        return
    opened = open_configured_store(store, config_path, ctx.obj)
    lookups = [(lookup, _predictions(lookup, opened)) for lookup in subject.lookups(opened, count, ctx.obj.detail)]
    if ctx.obj.json:
        ctx.obj.data([_as_json(lookup) | {"predictions": predictions} for lookup, predictions in lookups])
    else:
        pages = (_page(lookup, opened.url, predictions) for lookup, predictions in lookups)
        ctx.obj.page("\n\n".join(section for page in pages for section in page))


_TIMES: Final = (
    Column("program"),
    Column("device time"),
    Column("bound by"),
    Column("of its floor", drop=2),
    Column(THIS_PROGRAM, drop=1),
    Column(PREDICTED, drop=3, whole=True),
)


@dataclass(frozen=True)
class _Subject:
    """The builds to explain, or an artifact of the store."""

    model: str | None
    options: ModelOptions
    values: Mapping[str, Any]
    config_path: Path

    @cached_property
    def config(self) -> "Config":
        missing_ok = self.options.model_id is not None or self.model is not None
        return load_config(self.config_path, os.environ, missing_ok=missing_ok)

    @property
    def is_stored(self) -> bool:
        """True for an artifact; one that has the form of an artifact name needs no valid configuration."""
        from nxpipe.pipeline.artifacts.lookup import is_artifact

        if self.model is None:
            return False
        return is_artifact(self.model) or self.model not in [model.name for model in self.config.models]

    def specs(self) -> "tuple[ModelSpec, ...]":
        from nxpipe.pipeline.models.spec import specs_of_options

        names = (self.model,) if self.model else self.options.names
        return specs_of_options(self.values, self.config, names, self.config_path.parent)

    def lookups(self, store: "Store", count: int, report: "Report") -> "Iterator[CacheLookup]":
        from nxpipe.pipeline.build.cache import Timings
        from nxpipe.pipeline.build.explain import look_up_artifact, look_up_request
        from nxpipe.pipeline.build.plan import make_plan
        from nxpipe.pipeline.compile.spec import BuildSpec
        from nxpipe.pipeline.models.thresholds import Thresholds

        if self.is_stored:
            yield look_up_artifact(store.resolve(str(self.model)), store, count, report)
            return
        timings = Timings.kept_in(state_folder(self.config_path))
        for artifact in make_plan(self.specs(), store, Thresholds.of(self.config), timings).artifacts:
            yield look_up_request(BuildSpec.of(artifact.spec), artifact, store, count, report)


def _predictions(lookup: "CacheLookup", store: "Store") -> dict[str, Any]:
    """For each program of an artifact in the store, the predicted time, what limits it, and its distance from the
    floor, as in the build report."""
    from nxpipe.pipeline.build.report.document import prediction_of
    from nxpipe.pipeline.build.report.summary import figures_of

    published = store.find(lookup.key) if lookup.is_hit else None
    figures = figures_of(published.manifest, store) if published else {}
    return {program: found for program in figures if (found := prediction_of(figures, program))}


def _prediction_row(program: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    factor, aws, whole = found.get("over_floor"), found.get("aws_compiler", {}), found.get("this_program", {})
    return (
        program,
        f"{found['latency_ns'] / 1e6:.3f} ms",
        found.get("limited_by") or found["bound_by"],
        f"{factor:.1f} x" if factor else "-",
        f"{whole['ms']:.3f} ms" if whole else "-",
        aws.get("in_short", "-"),
    )


def _page(lookup: "CacheLookup", url: str, predictions: Mapping[str, Any]) -> Iterator[str]:
    headline = for_terminal(f"{short_name(lookup.model, lookup.key)} {'is' if lookup.is_hit else 'is not'} in {url}")
    if lookup.is_hit and lookup.programs:
        yield headline
    else:
        yield headline if lookup.nearest else f"{headline}; there is no other artifact to compare with"
        yield from map(_difference_section, lookup.nearest)
    if lookup.programs:
        rows = [(program.cell.shape.name, program.cell.status.value, _reason(program)) for program in lookup.programs]
        yield table(("program", "state", "why"), rows)
    if predictions:
        yield table(_TIMES, [_prediction_row(name, predictions[name]) for name in sorted(predictions, key=by_size)])
    yield from _program_differences(lookup)


def _program_differences(lookup: "CacheLookup") -> Iterator[str]:
    """The differences of each program from its nearest one in the store: one table for programs that differ alike, and
    none for those that differ as the artifact does."""
    shown = {(for_terminal(nearest.published.name), tuple(nearest.differences)) for nearest in lookup.nearest}
    alike: dict[tuple[str, tuple[Difference, ...]], list[str]] = {}
    for program in lookup.programs:
        if (nearest := program.nearest) and nearest.differences:
            name = for_terminal(nearest.artifact.published.name)
            pair = program.cell.shape.name, nearest.shape.name
            whole = pair[0] if pair[0] == pair[1] else f"{pair[0]} beside {pair[1]}"
            if (name, nearest.differences) not in shown:
                alike.setdefault((name, nearest.differences), []).append(whole)
    for (artifact, differences), names in alike.items():
        count = len(differences)
        verb = "differs" if len(names) == 1 else "differ"
        yield (
            f"{', '.join(names)} {verb} from {artifact} in {count} field{'' if count == 1 else 's'}\n"
            f"{difference_table(differences, 'stored', 'wanted')}"
        )


def _difference_section(nearest: "NearestArtifact") -> str:
    count = len(nearest.differences)
    return (
        f"{for_terminal(nearest.published.name)} differs in {count} of {nearest.fields} fields\n"
        f"{difference_table(nearest.differences, 'stored', 'wanted')}"
    )


def _reason(program: "ProgramLookup") -> str:
    cell, nearest = program.cell, program.nearest
    if cell.failure:
        return cell.failure.message
    if nearest is None:
        return cell.why
    stored = f"{nearest.shape.name} of {nearest.artifact.published.name}"
    return (
        f"cache miss: nearest program {stored}"
        if nearest.differences
        else f"same key as {stored}, whose result was garbage-collected"
    )


def _as_json(lookup: "CacheLookup") -> dict[str, object]:
    return {
        "model": lookup.model,
        "request_key": lookup.key,
        "in_store": lookup.is_hit,
        "nearest": [
            {
                "request_key": nearest.published.request_key,
                "model": nearest.published.model_id,
                "target": nearest.published.target,
                "fields": nearest.fields,
                "differences": differences_as_json(nearest.differences, "stored", "wanted"),
            }
            for nearest in lookup.nearest
        ],
        "programs": [_program_as_json(program) for program in lookup.programs],
    }


def _program_as_json(program: "ProgramLookup") -> dict[str, object]:
    cell, nearest = program.cell, program.nearest
    return {
        "program": cell.shape.name,
        "key": cell.key,
        "state": PLAN_WORDS[cell.status],
        "in_store": program.is_hit,
        "why": _reason(program),
        "nearest": None
        if nearest is None
        else {
            "request_key": nearest.artifact.published.request_key,
            "program": nearest.shape.name,
            "differences": differences_as_json(nearest.differences, "stored", "wanted"),
        },
    }


# Passes


def _list_passes(console: Console) -> None:
    from nxpipe.pipeline.compile.frontend import backend_steps, pass_names

    listed = [*pass_names(), *backend_steps()]
    console.data(listed) if console.json else console.result(*listed)


def _print_programs(console: Console, specs: "Sequence[ModelSpec]", after: str) -> None:
    from nxpipe.pipeline.compile.frontend import backend_steps, compile_shape, lowered_text, pass_names
    from nxpipe.pipeline.compile.spec import BuildSpec

    known = [*pass_names(), *backend_steps()]
    if after not in known:
        raise click.BadParameter(f"unknown pass {after!r}; the passes are {', '.join(known)}", param_hint="--after")
    is_lowered = after in backend_steps()
    documents = []
    for model_spec in specs:
        spec = BuildSpec.without_weights(model_spec)
        for shape in spec.shapes:
            with console.step(f"compile {shape.name}"):
                program = compile_shape(spec, shape, until=None if is_lowered else after)
                text = lowered_text(spec, program.graph, after) if is_lowered else str(program.graph)
            kind = "lowered" if is_lowered else "graph"
            document = {"model": model_spec.model_id, "program": shape.name, "after": after, kind: text}
            documents.append(document | {"padding": asdict(program.padding)})
            if not console.json:
                padded = f"; padded with zeros: {program.padding}" if program.padding else ""
                headline = f"{model_spec.model_id} {shape.name} after {after}: {len(program.graph.nodes)} nodes{padded}"
                console.page(f"{for_terminal(headline)}\n{text}\n")
    if console.json:
        console.data(documents)


@click.command(cls=Command)
@click.option("--store", metavar="URL", help="Only builds with this store.  [default: all of this user's builds]")
@config_option
@click.pass_obj
def stats(console: Console, store: str | None, config_path: Path) -> None:
    """Show the hits and misses of the build cache, and the time that hits saved, by model and by week.

    Counts the programs of this user's builds on this machine, which `nxpipe build` and `nxpipe release` record in
    $XDG_STATE_HOME/nxpipe/builds.jsonl. A hit saves the time that the program took when it was built, here or, as the
    build's report in the store says, elsewhere. Times are those of the compiling processes, added up.

    \b
    Example:
      nxpipe stats
      nxpipe stats --store s3://my-artifacts/nxpipe --json
    """
    from nxpipe.pipeline.build.cache import BuildLog
    from nxpipe.pipeline.build.statistics import CacheStatistics, times_in_reports, valid_entries

    url = _url_of(store, config_path)
    entries = valid_entries(BuildLog.of_user().entries(), url)
    statistics = CacheStatistics.of(entries, times_in_reports(_opener(store or None, config_path)))
    if console.json:
        console.data({"store": url, **statistics.document()})
    elif not entries:
        console.say(f"No builds{f' with {url}' if url else ''} are recorded yet; run nxpipe build.")
    else:
        console.page(_stats_text(statistics))


def _url_of(store: str | None, config_path: Path) -> str | None:
    """The URL of a store as builds record it."""
    if not store:
        return None
    from nxpipe.artifact_store.url import anchored
    from nxpipe.pipeline.artifacts.store_url import store_url

    return anchored(store_url(store, config_path), Path.cwd())


def _opener(store: str | None, config_path: Path) -> "Callable[[str], Store | None]":
    """Opens a store for its reports: that of --store or of nxpipe.toml, or a folder. No other network is used."""
    from nxpipe.artifact_store.url import is_remote, open_store
    from nxpipe.pipeline.artifacts.store_url import store_url

    def opened(url: str) -> "Store | None":
        if is_remote(url) and url != store_url(store, config_path):
            return None
        return open_store(url) if is_remote(url) or Path(url.removeprefix("file://")).is_dir() else None

    return opened


def _stats_text(statistics: "CacheStatistics") -> str:
    def rows(figures: "Iterable[CacheFigures]") -> list[tuple[str, ...]]:
        return [
            (
                each.name,
                *map(str, (each.builds, each.hits, each.misses)),
                f"{each.hit_rate:.0%}",
                duration_text(each.seconds_spent),
                duration_text(each.seconds_saved),
            )
            for each in figures
        ]

    columns, total = ("builds", "hits", "misses", "hit rate", "time spent", "time saved"), statistics.total
    unknown = f"; the time of {total.hits_without_time} hits is not known" if total.hits_without_time else ""
    return "\n\n".join(
        (
            table(("model", *columns), rows(statistics.models.values())),
            table(("week", *columns), rows(sorted(statistics.weeks.values(), key=lambda week: week.name))),
            f"{total.hits} of {total.hits + total.misses} programs came from the cache ({total.hit_rate:.0%}), which "
            f"saved {duration_text(total.seconds_saved)}; {duration_text(total.seconds_spent)} were spent{unknown}.",
        )
    )
