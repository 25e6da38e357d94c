"""`nxpipe device`: what neuron-ls, neuron-top and neuron-monitor show, of this machine's devices or of the emulator."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import DurationType
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid, NotReady

if TYPE_CHECKING:
    from nxpipe.emulator.hardware import Instance
    from nxpipe.pipeline.fleet.monitor.source import MonitorSettings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DEFAULT = "inf2.xlarge"
_NO_DRIVER = 1  # the exit code of AWS's tools


@dataclass(frozen=True)
class Machine:
    """The devices that a command shows: an emulated instance, or those of this machine."""

    instance: str | None
    hardware: bool
    folder: Path
    config_path: Path

    def is_emulated(self, ctx: click.Context) -> bool:
        """False for this machine's devices. Without a driver it ends the command as AWS's tools do."""
        from nxpipe.pipeline.fleet.monitor.source import has_devices

        if self.instance is not None and self.hardware:
            raise click.UsageError("--instance is of the emulator and cannot be combined with --hardware", ctx)
        found = has_devices(self.folder)
        if self.hardware and not found:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            ctx.obj.trace(
                f'time="{at}" level=fatal msg="Failed to load MLA system information" '
                'error="failed to discover Neuron devices"'
            )
            ctx.exit(_NO_DRIVER)
        return self.instance is not None or not (self.hardware or found)

    def emulated(self, console: Console) -> "tuple[Instance, list[dict[str, Any]]]":
        """The emulated instance, and the processes that use it: by --instance, else as they say, else as nxpipe.toml
        says."""
        from nxpipe.emulator.hardware import UnknownInstance, instance
        from nxpipe.emulator.run.counters import published
        from nxpipe.pipeline.fleet.monitor.emulated_instance import beyond

        processes = published()
        named = {process["instance"] for process in processes} - {""}
        name = self.instance or (named.pop() if len(named) == 1 else self._configured() or _DEFAULT)
        try:
            found = instance(name)
        except UnknownInstance as unknown:
            raise InputInvalid(str(unknown)) from unknown
        for pid, core in beyond(found, processes):
            console.say(f"  process {pid} uses core {core}, and {name} has {found.logical_cores}; pass --instance")
        return found, processes

    def _configured(self) -> str | None:
        """The first Neuron instance type of the fleets."""
        if not self.config_path.exists():
            return None
        from nxpipe.emulator.hardware import INSTANCES
        from nxpipe.pipeline.config import load_config

        fleets = load_config(self.config_path, os.environ, missing_ok=True).fleets
        types = (name for fleet in fleets for name in getattr(fleet, "instance_types", ()))
        return next((name for name in types if name in INSTANCES), None)

    @contextmanager
    def reports(
        self, ctx: click.Context, settings: "MonitorSettings", program: str | None
    ) -> "Iterator[Iterator[dict[str, Any]]]":
        """Reports of the emulated instance or of neuron-monitor."""
        from nxpipe.pipeline.fleet.monitor.source import monitor_reports, tool

        if program is None and self.is_emulated(ctx):
            from nxpipe.pipeline.fleet.monitor.emulated_instance import EmulatedMonitor

            yield iter(EmulatedMonitor(self.emulated(ctx.obj)[0], settings).reports())
            return
        with monitor_reports(program or tool("neuron-monitor"), settings) as reports:
            yield reports


def machine_options(function: _Function) -> Any:
    """Add --instance, --hardware, --devices and --config to a command, which takes them as `machine`."""

    @wraps(function)
    def command(*args: Any, **values: Any) -> Any:
        names = ("instance", "hardware", "devices", "config_path")
        return function(*args, machine=Machine(*(values.pop(name) for name in names)), **values)

    options = (
        click.option(
            "--instance",
            metavar="TYPE",
            help="Show an emulated instance of this type.  [default: the one that runs, then the first fleet's, then "
            "inf2.xlarge]",
        ),
        click.option(
            "--hardware", is_flag=True, help="Show this machine's devices.  [default: if it has any, else the emulator]"
        ),
        click.option(
            "--devices",
            type=click.Path(file_okay=False, path_type=Path),
            default="/dev",
            show_default=True,
            help="The folder of the Neuron devices.",
        ),
        config_option,
    )
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


monitor_option = click.option(
    "--monitor", "program", metavar="PROGRAM", help="The neuron-monitor to run.  [default: the installed one]"
)
once_option = click.option("--once", is_flag=True, help="Print one report, and exit.")


@click.group(cls=Group)
def device() -> None:
    """Show Neuron devices and their use, of this machine or of the emulator.

    \b
    Example:
      nxpipe device ls
      nxpipe device top --instance inf2.24xlarge
    """


@device.command(cls=Command)
@machine_options
@click.pass_context
def ls(ctx: click.Context, machine: Machine) -> None:
    """List devices, with the processes that use them, as neuron-ls does.

    Without devices on this machine, the list is of an emulated instance, and has the processes that execute programs on
    the emulator. --json has the document of `neuron-ls -j`.

    \b
    Example:
      nxpipe device ls
      nxpipe device ls --instance trn1.32xlarge --json
    """
    console: Console = ctx.obj
    if not machine.is_emulated(ctx):
        ctx.exit(_neuron_ls(console.json))
    from nxpipe.pipeline.fleet.monitor.emulated_instance import device_list

    devices = device_list(*machine.emulated(console))
    if console.json:
        console.data(devices)
    else:
        console.result(*_device_table(devices))


def _neuron_ls(as_json: bool) -> int:
    """Run AWS's program; its exit code."""
    from nxpipe.pipeline.fleet.monitor.source import tool

    program = tool("neuron-ls")
    try:
        return subprocess.run([program, *(["-j"] if as_json else [])], check=False).returncode
    except OSError as missing:
        raise NotReady(
            f"{program} cannot be started ({missing.strerror}); install aws-neuronx-tools, or pass --instance for the "
            "emulator"
        ) from missing


def _device_table(devices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from nxpipe.pipeline.util.text import for_terminal

    first = devices[0]
    yield f"instance-type: {first['instance_type']}"
    yield f"instance-id: {first['instance_id']}"
    yield f"logical-neuroncore-config: {first['logical_neuroncore_config']}"
    head = [("NEURON", "DEVICE"), ("NEURON", "CORES"), ("NEURON", "CORE IDS"), ("NEURON", "MEMORY")]
    head += [("CONNECTED", "DEVICES"), ("PCI", "BDF"), ("CPU", "AFFINITY"), ("NUMA", "NODE")]
    with_processes = any(device["neuron_processes"] for device in devices)
    if with_processes:
        head += [("", "PID"), ("", "COMMAND"), ("RUNTIME", "VERSION")]
    rows: list[Sequence[str]] = []
    for device in devices:
        cores = device["neuroncore_ids"]
        cells = [
            str(device["neuron_device"]),
            str(device["nc_count"]),
            f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0]),
            f"{device['memory_size'] >> 30} GB",
            ", ".join(map(str, device["connected_to"] or ())),
            device["bdf"],
            device["cpu_affinity"],
            device["numa_node"],
        ]
        processes = device["neuron_processes"]
        for number, process in enumerate(processes or [None]):
            own = (
                [str(process["pid"]), for_terminal(process["command"][:40]), process["neuron_runtime_version"]]
                if process
                else [""] * 3
            )
            rows.append([*(cells if number == 0 else [""] * len(cells)), *(own if with_processes else [])])
    yield from _framed(head, rows)


def _framed(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table with a frame and a head of two lines."""
    columns = [max(len(cell) for cell in (*titles, *column)) for titles, *column in zip(head, *rows, strict=True)]
    rule = "+".join(["", *("-" * (width + 2) for width in columns), ""])

    def line(cells: Sequence[str], *, centred: bool = False) -> str:
        fitted = (
            cell.center(width) if centred else cell.ljust(width) for cell, width in zip(cells, columns, strict=True)
        )
        return f"| {' | '.join(fitted)} |"

    yield rule
    for number in range(2):
        yield line([titles[number] for titles in head], centred=True)
    yield rule
    yield from map(line, rows)
    yield rule


@device.command(cls=Command)
@click.option(
    "-c",
    "--config-file",
    "settings_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A configuration of neuron-monitor.  [default: every group, every 5 s]",
)
@once_option
@monitor_option
@machine_options
@click.pass_context
def monitor(ctx: click.Context, machine: Machine, settings_path: Path | None, once: bool, program: str | None) -> None:
    """Print reports, as neuron-monitor does: one JSON document a line.

    Without devices on this machine, the reports are of an emulated instance. Utilization is then on the emulator's
    clock: the predicted duration of the executions, divided by the period.

    \b
    Example:
      nxpipe device monitor --once
      nxpipe device monitor -c monitor.json
    """
    from nxpipe.pipeline.fleet.monitor.source import MonitorSettings

    console: Console = ctx.obj
    settings = MonitorSettings.read(settings_path) if settings_path else MonitorSettings.every()
    with machine.reports(ctx, settings, program) as reports:
        for report in reports:
            console.data_line(report)
            if once:
                return


@device.command(cls=Command)
@click.option(
    "--period",
    type=DurationType(0.1, 3600, unit="s"),
    default="1s",
    show_default=True,
    help="The interval between two views.",
)
@once_option
@monitor_option
@machine_options
@click.pass_context
def top(ctx: click.Context, machine: Machine, period: float, once: bool, program: str | None) -> None:
    """Show the use of each core: utilization, memory, latency, as neuron-top does.

    On a terminal the view is rewritten until Ctrl-C; elsewhere each view is printed.

    \b
    Example:
      nxpipe device top
      nxpipe device top --once
    """
    from nxpipe.pipeline.fleet.monitor.report import ReportInvalid
    from nxpipe.pipeline.fleet.monitor.source import MonitorSettings

    console: Console = ctx.obj
    with machine.reports(ctx, MonitorSettings.every(period), program) as reports:
        shown = 0
        for report in reports:
            try:
                lines = list(_view(report))
            except ReportInvalid as wrong:
                console.say(f"invalid report ({wrong}); dropped")
                continue
            if console.json:
                console.data_line(report)
            elif console.live and not once:
                if shown:
                    console.clear_rows(shown)
                console.say(*lines)
                shown = len(lines)
            else:
                console.result(*lines)
            if once:
                return


def _view(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `top`: the host, then each core and each process on it."""
    from nxpipe.pipeline.fleet.monitor.report import hardware_labels, instance_labels, samples
    from nxpipe.pipeline.util.text import human_bytes, table

    figures: dict[tuple[str, str, str], float] = {}
    used: dict[tuple[str, str], float] = {}
    host: dict[str, float] = {}
    for measure, labels, value in samples(report):
        tag, core = labels.get("runtime_tag"), labels.get("neuroncore", "")
        if tag is None:
            host[" ".join((measure.key, *labels.values()))] = value
        elif measure.labels:  # the memory of a core
            used[tag, core] = used.get((tag, core), 0.0) + value
        else:
            figures[tag, core, " ".join((measure.key, labels.get("percentile", "")))] = value
    counts = hardware_labels(report)
    yield (
        f"{instance_labels(report)['instance_type'] or 'instance'}: devices {counts['neuron_device_count'] or '?'}, "
        f"vCPUs {host.get('vcpu user', 0.0):.0%} user and {host.get('vcpu system', 0.0):.0%} system, "
        f"memory {human_bytes(int(host.get('memory-used-bytes', 0)))} of "
        f"{human_bytes(int(host.get('memory-total-bytes', 0)))}"
    )
    pairs = sorted({(core, tag) for tag, core, _ in figures if core} | {(core, tag) for tag, core in used}, key=_order)
    if not pairs:
        yield "no process uses a core"
        return

    def cell(tag: str, core: str, key: str, show: Callable[[float], str]) -> str:
        value = figures.get((tag, core, key))
        return "-" if value is None else show(value)

    rows = [
        (
            core,
            tag,
            cell(tag, core, "utilisation ", lambda value: f"{value:.1%}"),
            cell(tag, core, "flops ", lambda value: f"{value / 1e12:.3g}"),
            human_bytes(int(used.get((tag, core), 0))),
            *(cell(tag, "", f"latency {rank}", lambda value: f"{value * 1e3:.2f} ms") for rank in ("p50", "p99")),
        )
        for core, tag in pairs
    ]
    yield from table(("core", "process", "utilization", "TFLOPS", "memory", "p50", "p99"), rows).splitlines()


def _order(pair: tuple[str, str]) -> tuple[int, str, str]:
    core, tag = pair
    return (int(core) if core.isdecimal() else 1 << 30, core, tag)
