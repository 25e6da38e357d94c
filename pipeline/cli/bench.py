"""`nxpipe bench`: predicted latency against a baseline, which is a channel or an artifact."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.artifact_store.errors import ChannelEmpty, NotFound
from nxpipe.artifact_store.names import SHOWN
from nxpipe.pipeline.artifacts.store_url import open_configured_store, open_uncached_store
from nxpipe.pipeline.cli.completion import complete_channels_or_artifacts, complete_models_or_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import (
    config_option,
    device_option,
    html_option,
    limit_option,
    require_device_for_limit,
    store_option,
    write_page,
)
from nxpipe.pipeline.cli.param_types import Share
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.predict.constants import (
    PREDICTED,
    THIS_PROGRAM,
    ExecutionTime,
    ProgramTime,
    execution_times,
    predict_artifact,
)
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import REGRESSION
from nxpipe.pipeline.util.text import Column, did_you_mean, style, table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.evidence import Timing
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.bench import BenchLine
    from nxpipe.pipeline.artifacts.calibration import Calibration
    from nxpipe.pipeline.artifacts.lookup import Match
    from nxpipe.pipeline.models.spec import ModelSpec

_COLUMNS: Final = (
    Column("  program"),
    Column("tp", drop=6),
    Column("device time"),
    Column("before"),
    Column("change"),
)
_MEASURED: Final = (
    Column("p50"),
    Column("p99", drop=2),
    Column("p50/predicted", drop=1),
    Column("clock", drop=5),
    Column("p50 before", drop=3),
)
_OTHER_TIMES: Final = (Column(THIS_PROGRAM, drop=4), Column(PREDICTED, drop=5, whole=True))


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_models_or_artifacts)
@click.option(
    "--against",
    metavar="CHANNEL|ARTIFACT",
    shell_complete=complete_channels_or_artifacts,
    help="The baseline: a channel's current artifacts, or one artifact (MODEL@KEY or a key).",
)
@click.option("--allow-empty", is_flag=True, help="Accept a channel of --against that has no generation yet.")
@click.option(
    "--threshold",
    type=Share(100.0),
    default="5%",
    show_default=True,
    help="The largest predicted slowdown against the baseline.",
)
@click.option(
    "--calibration",
    "calibration_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show the predictions times the factors in a file of `nxpipe calibrate`, beside the predictions.",
)
@html_option
@click.option("--measured", is_flag=True, help="Show the times in the device evidence beside the predictions.")
@device_option
@limit_option
@store_option
@config_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    against: str | None,
    allow_empty: bool,
    threshold: float,
    calibration_path: Path | None,
    html_path: Path | None,
    measured: bool,
    device: str | None,
    limit: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Show the predicted latency of programs and compare it with a baseline.

    MODEL is the name of a model in nxpipe.toml, whose artifacts must be built, or an artifact (MODEL@KEY or a key);
    default: every model of nxpipe.toml. A program is compared with the baseline's program of the same phase, batch,
    bucket and degree for the same model and target. The device time of a program follows from the documented costs of
    its instructions; only it is compared. `this program` adds the host's call and copies and what collectives cost each
    execution. `AWS's compiler` is predicted by fitted constants, with an interval. None of them runs anything.
    --measured adds p50 and p99 on devices, as `nxpipe prove` found them; --device measures them now, on this machine's
    devices, and neither verifies nor stores anything. They decide nothing. Exits with code 16 if a device time is
    longer than the baseline's by more than the threshold. An unknown channel is an error, unless a fleet, [channels] or
    [signing] of nxpipe.toml names it, or --allow-empty is given.

    --calibration adds the predictions times the factors of their phases in a file of `nxpipe calibrate`, which must be
    of the artifacts' target and compiler; the raw predictions are compared.

    \b
    Example:
      nxpipe bench
      nxpipe bench bert --against production --threshold 2%
      nxpipe bench bert --calibration inf2.calibration.json
      nxpipe bench bert --measured
      nxpipe bench bert --device
      nxpipe bench bert --against production --html bench.html
      nxpipe bench bert-base-uncased@4e9ce0 --against bert-base-uncased@a41f07
    """
    from nxpipe.pipeline.artifacts.bench import bench as compare

    console: Console = ctx.obj
    if measured and device is not None:
        raise click.UsageError("--measured and --device cannot be combined: one shows stored times, one new ones", ctx)
    require_device_for_limit(ctx, device)
    opened = (open_uncached_store if device else open_configured_store)(store, config_path, console)
    artifacts = list(_artifacts(models, opened, config_path))
    calibrated = _calibration(calibration_path, artifacts, opened, console)
    baseline = _baseline(against, opened, config_path, allow_empty, console) if against is not None else None
    new = (
        {artifact.digest: _measure(artifact, opened, device, limit, console) for artifact in artifacts}
        if device
        else {}
    )
    shown = measured or device is not None
    lines = [
        replace(line, program=replace(line.program, measured=new[artifact.digest][line.program.name])) if new else line
        for artifact in artifacts
        for line in compare(artifact, baseline.beside(artifact) if baseline else None, opened, measured=shown)
    ]
    aws = {
        (artifact.name, name): time
        for artifact in artifacts
        for name, time in predict_artifact(artifact, opened).items()
    }
    whole = {
        (artifact.name, name): time
        for artifact in artifacts
        for name, time in execution_times(artifact, artifact_files.read(artifact, opened)).items()
    }
    shapes = {(artifact.name, each.name): each for artifact in artifacts for each in artifact.executables}
    documents = [
        line.document(threshold, measured=shown)
        | _corrected(line, calibrated)
        | _predictions(line, whole, aws)
        | shapes[line.artifact, line.program.name].model_dump(include={"phase", "batch", "sequence"})
        for line in lines
    ]
    if html_path is not None:
        from nxpipe.pipeline.build.report.result_pages import bench_page

        write_page(html_path, bench_page(documents, 100 * threshold), console)
    if console.json:
        console.data(documents)
    elif lines:
        columns = (*_COLUMNS, *_MEASURED) if shown else _COLUMNS
        rows = [(*_cells(line, threshold), *(_measured(line) if shown else ())) for line in lines]
        if calibrated:
            columns = (*columns, Column("calibrated (rehearsal)" if calibrated.rehearsal else "calibrated"))
            times = [_milliseconds(calibrated.calibrated_ns(line.program)) for line in lines]
            rows = [(*row, time) for row, time in zip(rows, times, strict=True)]
        pairs = [(_whole(line, whole), str(aws[line.artifact, line.program.name])) for line in lines]
        rows = [(*row, *pair) for row, pair in zip(rows, pairs, strict=True)]
        console.page(table((*columns, *_OTHER_TIMES), _under_artifacts(lines, rows)))
    if measured:
        _note_unproven(console, lines)
    if baseline:
        _note_unserved(console, artifacts, baseline)
    slower = [line for line in lines if line.is_regression(threshold)]
    if slower:
        console.complain(_sentence(slower, threshold), code=REGRESSION)
        ctx.exit(REGRESSION.number)


def _under_artifacts(lines: "Sequence[BenchLine]", rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The rows below a heading for each artifact."""
    for name, group in groupby(zip(lines, rows, strict=True), lambda pair: pair[0].artifact):
        yield (style(name, bold=True),)
        yield from (row for _, row in group)


def _measure(artifact: "Manifest", store: "Store", device: str, limit: float, console: Console) -> "dict[str, Timing]":
    """The times of an artifact's programs on this machine's devices."""
    from nxpipe.pipeline.util.progress import watching
    from nxpipe.pipeline.verify.prove import ProveOptions, measure

    return measure(artifact, store, ProveOptions(device, limit=limit), console.step, partial(watching, console))


def _baseline(name: str, store: "Store", config_path: Path, allow_empty: bool, console: Console) -> "Match":
    """The baseline. An empty channel must be declared: a comparison with a misspelt channel would never fail."""
    from nxpipe.artifact_store.channel.log import channels
    from nxpipe.pipeline.artifacts.channels import declared_channels
    from nxpipe.pipeline.artifacts.lookup import empty_channel, find_match

    try:
        return find_match(name, store, config_path)
    except ChannelEmpty:
        if name in declared_channels(load_config(config_path, os.environ, missing_ok=True)):
            return empty_channel(name)
        if not allow_empty:
            raise
        if similar := did_you_mean(name, channels(store.backend)):
            console.say(f"Warning: {name} has no generation, so nothing is compared{similar}")
        return empty_channel(name)


def _artifacts(names: Sequence[str], store: "Store", config_path: Path) -> "Iterator[Manifest]":
    """The named artifacts, else the artifacts of the models in nxpipe.toml."""
    from nxpipe.pipeline.artifacts.lookup import artifact, is_artifact
    from nxpipe.pipeline.models.spec import specs_of_config

    if names and all(map(is_artifact, names)):  # needs no valid configuration
        yield from (artifact(name, store) for name in names)
        return
    config = load_config(config_path, os.environ, missing_ok=bool(names))
    configured = [model.name for model in config.models]
    for name in names or configured:
        if name not in configured:
            yield artifact(name, store)
            continue
        for spec in specs_of_config(config, (name,), config_path.parent):
            yield _built(spec, store)


def _built(spec: "ModelSpec", store: "Store") -> "Manifest":
    key = digest_of(BuildSpec.of(spec).key_inputs())
    published = store.find(key)
    if published is None:
        raise NotFound(
            f"{spec.name} for {spec.target} is not built with its current options: {store.url} has no "
            f"{key[:SHOWN]}; run `nxpipe build --only {spec.name}`, or see the cause with `nxpipe explain {spec.name}`"
        )
    return published.manifest


def _cells(line: "BenchLine", threshold: float) -> tuple[str, ...]:
    now, before = line.program, line.before
    return (
        f"  {now.name}",
        str(now.degree),
        _milliseconds(now.ns),
        _milliseconds(before.ns if before else None),
        _change(line, threshold),
    )


def _change(line: "BenchLine", threshold: float) -> str:
    if line.change is None:
        return "" if line.against is None else line.verdict(threshold)
    text = f"{line.change:+.1%}"
    return style(text, fg="red") if line.is_regression(threshold) else text


def _measured(line: "BenchLine") -> Iterator[str]:
    now, before = line.program.measured, line.before.measured if line.before else None
    ratio = line.program.ratio
    yield from (_measured_time(now.p50_ms if now else None), _measured_time(now.p99_ms if now else None))
    yield from ("-" if ratio is None else f"{ratio:.3g}", now.clock if now else "-")
    yield _measured_time(before.p50_ms if before else None)


def _measured_time(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f} ms"


def _calibration(
    path: Path | None, artifacts: "Sequence[Manifest]", store: "Store", console: Console
) -> "Calibration | None":
    """The calibration in a file, which must be one of each artifact's target and cost model."""
    if path is None:
        return None
    from nxpipe.pipeline.artifacts.calibration import read_calibration

    calibration = read_calibration(path)
    for artifact in artifacts:
        calibration.require_for(artifact, store)
    if calibration.rehearsal:
        console.say(f"{path} is of a rehearsal: its factors are those of a stand-in, not of a device")
    return calibration


def _corrected(line: "BenchLine", calibration: "Calibration | None") -> dict[str, object]:
    if calibration is None:
        return {}
    of = calibration.model_dump(include={"instance_type", "clock", "rehearsal"})
    return {"calibrated_ns": calibration.calibrated_ns(line.program), "calibration": of}


def _predictions(
    line: "BenchLine",
    whole: "Mapping[tuple[str, str], ExecutionTime]",
    aws: "Mapping[tuple[str, str], ProgramTime]",
) -> dict[str, object]:
    """The time of this program with the host and collectives, and that of `AWS's compiler` for its configuration."""
    own = whole.get((line.artifact, line.program.name))
    return {
        "this_program": own.document() if own else None,
        "aws_compiler": aws[line.artifact, line.program.name].document(),
    }


def _whole(line: "BenchLine", whole: "Mapping[tuple[str, str], ExecutionTime]") -> str:
    own = whole.get((line.artifact, line.program.name))
    return _milliseconds(own.ms * 1e6 if own else None)


def _note_unproven(console: Console, lines: "Sequence[BenchLine]") -> None:
    measured = {line.artifact for line in lines if line.program.measured}
    for artifact in dict.fromkeys(line.artifact for line in lines if line.artifact not in measured):
        console.say(
            f"{artifact} has no device evidence; on an instance with Neuron devices, run: nxpipe prove {artifact}"
        )


def _milliseconds(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f} ms"


def _note_unserved(console: Console, artifacts: "Sequence[Manifest]", baseline: "Match") -> None:
    for artifact in artifacts:
        if baseline.beside(artifact) is None:
            console.say(f"channel {baseline.word} serves no {artifact.model.id} for {artifact.target} yet")


def _sentence(slower: "Sequence[BenchLine]", threshold: float) -> str:
    worst = max(slower, key=lambda line: line.change or 0.0)
    subject = f"{len(slower)} program{' is' if len(slower) == 1 else 's are'}"
    return (
        f"{subject} predicted to be slower by more than {100 * threshold:g}%: {worst.program.name} of {worst.artifact} "
        f"by {worst.change:.1%}; `nxpipe diff {worst.against} {worst.artifact}` shows the change"
    )
