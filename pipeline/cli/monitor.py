"""`nxpipe monitor`: the use of devices, of this machine or of the emulator, to stdout, Prometheus or CloudWatch."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nxpipe.pipeline.cli.completion import complete_fleets
from nxpipe.pipeline.cli.device import Machine, machine_options, monitor_option, once_option
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.param_types import Choice, Count, DurationType
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nxpipe.pipeline.fleet.monitor.report import MonitorReport

_Reports = Iterator[tuple[dict[str, Any], int]]  # with the programs that were compiled since the last one
_REGION = "us-east-1"  # whose prices are taken where neither the report nor nxpipe.toml names one


@click.command(cls=Command)
@click.option(
    "--to",
    "destination",
    type=Choice(["stdout", "prometheus", "cloudwatch"]),
    default="stdout",
    show_default=True,
    help="stdout: a table, or with --json a document a line; prometheus: an endpoint /metrics; cloudwatch: events in "
    "the embedded metric format.",
)
@click.option(
    "--period",
    type=DurationType(0.1, 3600, unit="s"),
    default="5s",
    show_default=True,
    help="The interval between reports.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="With --to prometheus: the address to listen on.")
@click.option(
    "--port",
    type=Count(0, 65535),
    default=8008,
    show_default=True,
    help="With --to prometheus: the port; 0: a free one.",
)
@click.option(
    "--fleet",
    metavar="NAME",
    shell_complete=complete_fleets,
    help="With --to cloudwatch: the serving fleet that the metrics belong to.",
)
@click.option(
    "--log",
    "group",
    metavar="NAME",
    help="With --to cloudwatch: write to this log group, on EC2 only.  [default: stdout, for a log driver]",
)
@click.option("--server", metavar="URL", help="Read the metrics of this server too: of nxpipe serve, or of vLLM.")
@click.option("--region", help="The region whose list prices apply.  [default: the instance's, then nxpipe.toml's]")
@once_option
@monitor_option
@machine_options
@click.pass_context
def monitor(
    ctx: click.Context,
    /,
    machine: Machine,
    destination: Literal["stdout", "prometheus", "cloudwatch"],
    period: float,
    host: str,
    port: int,
    fleet: str | None,
    group: str | None,
    server: str | None,
    region: str | None,
    once: bool,
    program: str | None,
) -> None:
    """Report the use, errors and cost of devices, to stdout, Prometheus or CloudWatch.

    The figures are utilization, memory, latency, executions, errors, ECC events, compile events and the cost so far.

    The source is neuron-monitor, or without devices on this machine the counters of processes that execute programs on
    the emulator. The emulator knows the utilization of each engine too. Runs until it is stopped.

    \b
    Example:
      nxpipe monitor --once
      nxpipe monitor --to prometheus --port 8008
      nxpipe monitor --to cloudwatch --fleet search --log /nxpipe/demo/search
    """
    if (fleet is None) == (destination == "cloudwatch"):
        raise click.UsageError("--to cloudwatch and --fleet belong together; pass both", ctx)
    if destination != "cloudwatch" and group is not None:
        raise click.UsageError("--log requires --to cloudwatch", ctx)
    if destination == "cloudwatch" and server is not None:
        raise click.UsageError("--server requires --to stdout or --to prometheus", ctx)
    console: Console = ctx.obj
    scrape = _scraper(console, server)
    with _reports(ctx, machine, period, program) as reports:
        first = _first_only(reports) if once else reports
        if destination == "cloudwatch":
            _to_cloudwatch(console, first, machine.config_path, fleet or "", group)
            return
        costed = _costed(first, machine, region)
        if destination == "prometheus":
            _to_prometheus(console, costed, scrape, listen=None if once else (host, port))
        else:
            _to_stdout(console, costed, scrape)


@contextmanager
def _reports(ctx: click.Context, machine: Machine, period: float, program: str | None) -> Iterator[_Reports]:
    from nxpipe.pipeline.fleet.monitor.source import Compilers, MonitorSettings, monitor_reports, tool

    compilers, settings = Compilers(Path("/proc")), MonitorSettings.every(period)
    compilers.begun()  # those that run already began in no period
    if program is None and machine.is_emulated(ctx):
        from nxpipe.pipeline.fleet.monitor.emulated_instance import EmulatedMonitor

        emulated = EmulatedMonitor(machine.emulated(ctx.obj)[0], settings, with_engines=True)
        yield ((report, emulated.compiled() + compilers.begun()) for report in emulated.reports())
        return
    with monitor_reports(program or tool("neuron-monitor"), settings) as reports:
        yield ((report, compilers.begun()) for report in reports)


def _first_only(reports: _Reports) -> _Reports:
    yield next(reports)


def _costed(reports: _Reports, machine: Machine, region: str | None) -> "Iterator[MonitorReport]":
    from nxpipe.pipeline.fleet.monitor.source import Costs, annotated, has_devices, uptime

    known = region or _configured_region(machine.config_path) or _REGION
    costs = Costs(known, uptime() if has_devices(machine.folder) else 0.0)
    return (annotated(report, compiled, costs) for report, compiled in reports)


def _configured_region(path: Path) -> str | None:
    if not path.exists():
        return None
    from nxpipe.pipeline.config import load_config

    return load_config(path, os.environ, missing_ok=True).project.region


def _scraper(console: Console, url: str | None) -> "Callable[[], list[Metric]]":
    """Reads the metrics of a server, if there is one; a server that does not answer is reported."""
    if url is None:
        return list
    from nxpipe.pipeline.fleet.monitor.prometheus import require_client, server_metrics
    from nxpipe.pipeline.util.errors import NotReady

    require_client()
    address = url

    def scrape() -> "list[Metric]":
        try:
            return server_metrics(address)
        except NotReady as silent:
            console.say(f"{silent}; continuing")
            return []

    return scrape


def _to_stdout(console: Console, reports: "Iterator[MonitorReport]", scrape: "Callable[[], list[Metric]]") -> None:
    from nxpipe.pipeline.fleet.monitor.report import ReportInvalid, instance_labels, samples
    from nxpipe.pipeline.util.text import table

    for report in reports:
        try:
            found, instance = list(samples(report)), instance_labels(report)
        except ReportInvalid as wrong:
            console.say(f"invalid report ({wrong}); dropped")
            continue
        figures = [(each.measure.prometheus, dict(each.labels), each.value, each.measure.shown_unit) for each in found]
        figures += [
            (sample.name, dict(sample.labels), sample.value, "")
            for family in scrape()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        ]
        if console.json:
            metrics = [dict(zip(("name", "labels", "value", "unit"), figure, strict=True)) for figure in figures]
            console.data_line({"time": round(time.time(), 3), "instance": instance, "metrics": metrics})
            continue
        rows = [(name, _listed(labels), f"{value:.6g}", unit) for name, labels, value, unit in figures]
        console.page(table(("metric", "of", "value", "unit"), rows))


def _listed(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def _to_prometheus(
    console: Console,
    reports: "Iterator[MonitorReport]",
    scrape: "Callable[[], list[Metric]]",
    *,
    listen: tuple[str, int] | None,
) -> None:
    """Serve the metrics, or without an address print them once."""
    from nxpipe.pipeline.fleet.monitor.prometheus import DeviceExporter
    from nxpipe.pipeline.fleet.monitor.report import ReportInvalid

    exporter = DeviceExporter()
    with ExitStack() as serving:
        if listen is not None:
            console.say(f"  metrics at {serving.enter_context(exporter.serve(*listen))}")
        for report in reports:
            try:
                exporter.update(report)
            except ReportInvalid as wrong:
                console.say(f"invalid report ({wrong}); dropped")
            exporter.server = scrape()
    if listen is None:
        console.page(exporter.exposition().decode().rstrip("\n"))


def _to_cloudwatch(console: Console, reports: _Reports, config_path: Path, fleet: str, group: str | None) -> None:
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.root import serving_fleet
    from nxpipe.pipeline.fleet.agent.group import this_instance
    from nxpipe.pipeline.fleet.agent.watch import FleetLog, PrintedLog, publish

    config = load_config(config_path, os.environ)
    dimensions = {"Project": config.project.name, "Fleet": serving_fleet(config, fleet, "--fleet").name}
    log: FleetLog | PrintedLog = PrintedLog(socket.gethostname(), console.result)
    if group is not None:
        instance = this_instance(os.environ)
        log = FleetLog.open(group, instance.id, instance.region)
    publish(reports, "the monitor", dimensions, log, console.say)
