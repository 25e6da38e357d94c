"""The emulated instance as the Neuron tools would show it: its devices as neuron-ls, its use as neuron-monitor.

The figures are the counters that processes publish while they execute programs on emulated cores
(`emulator.run.counters`). Utilization is on the emulator's clock: the predicted duration of the executions of a period,
divided by the period. Engines wait for one another, so each has a share of that time.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hardware import CORES, Instance
from nxpipe.emulator.run.counters import CATEGORIES, ECC, ERRORS, SUMMARIES, in_use, published
from nxpipe.pipeline.config.device_measures import RUNTIME_GROUPS
from nxpipe.pipeline.fleet.monitor.source import MonitorSettings

RUNTIME_VERSION: Final = "emulated"
_PERCENTILES: Final = (0, 1, 25, 50, 75, 99, 100)
# Names in neuron-monitor's reports. Documented are those of inf2 and trn2.
_DEVICE_TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "inf2": ("inferentia2", "v3"),
    "trn1": ("trainium", "v2"),
    "trn1n": ("trainium", "v2"),
    "trn2": ("trainium2", "v4"),
    "trn3": ("trainium3", ""),
}
_NO_INSTANCE: Final = (
    *("instance_name", "instance_id", "instance_availability_zone", "instance_availability_zone_id"),
    *("instance_region", "ami_id", "subnet_id"),
)
_STEPS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # of the kernel's clock, a second
_VCPU: Final = ("user", "nice", "system", "idle", "io_wait", "irq", "soft_irq")

Counters = Mapping[str, Any]  # what a process publishes


@dataclass(frozen=True)
class DeviceShape:
    """Devices and logical cores of an instance type."""

    instance: Instance

    @property
    def group(self) -> int:
        """Physical cores of a logical one."""
        return CORES[self.instance.core].lnc_default

    @property
    def cores(self) -> int:
        """Logical cores of a device."""
        return self.instance.cores_per_chip // self.group

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return self.instance.device_memory_gib // self.instance.chips << 30

    def connected(self, device: int) -> list[int] | None:
        """The neighbours of a device: of a torus up, left, down and right. A single device has none."""
        count = self.instance.chips
        if count == 1:
            return None
        if self.instance.topology == "torus2d_4x4":
            row, column = divmod(device, 4)
            near = ((row - 1, column), (row, column - 1), (row + 1, column), (row, column + 1))
            return [4 * (y % 4) + x % 4 for y, x in near]
        return list(dict.fromkeys(((device - 1) % count, (device + 1) % count)))


def device_list(instance: Instance, processes: Sequence[Counters]) -> list[dict[str, Any]]:
    """The document of `neuron-ls -j`."""
    shape, chips = DeviceShape(instance), instance.chips
    devices = []
    for device in range(chips):
        cores = range(device * shape.cores, (device + 1) * shape.cores)
        node, share = device * min(chips, 2) // chips, instance.vcpus // min(chips, 2)
        devices.append(
            {
                "instance_type": instance.name,
                "instance_id": "",
                "neuron_device": device,
                "bdf": f"0000:{0x10 + device:02x}:1e.0",
                "cpu_affinity": f"{node * share}-{(node + 1) * share - 1}",
                "numa_node": str(node) if chips > 1 else "-1",
                "connected_to": shape.connected(device),
                "nc_count": shape.cores,
                "logical_neuroncore_config": shape.group,
                "memory_size": shape.memory,
                "neuroncore_ids": list(cores),
                "neuron_processes": [
                    {
                        "pid": process["pid"],
                        "command": process["command"],
                        "neuron_runtime_version": RUNTIME_VERSION,
                    }
                    for process in processes
                    if any(core in cores for core in in_use(process))
                ],
            }
        )
    return devices


def beyond(instance: Instance, processes: Iterable[Counters]) -> list[tuple[int, int]]:
    """Processes, by number, with the last core that they use and that the instance lacks."""
    last = [(int(process["pid"]), max(in_use(process), default=-1)) for process in processes]
    return [(pid, core) for pid, core in last if core >= instance.logical_cores]


@dataclass(frozen=True)
class _Snapshot:
    """The counters of all processes and of the host at one time."""

    at: float
    processes: Mapping[int, Counters]
    times: Mapping[int, tuple[float, float]]  # seconds of user and system time by process
    host: Mapping[str, Sequence[float]]  # steps by vCPU, "" for all
    switches: int

    @classmethod
    def now(cls, folder: Path | None) -> "_Snapshot":
        processes = {int(process["pid"]): process for process in published(folder)}
        host, switches = _host_times()
        return cls(time.monotonic(), processes, {pid: _times_of(pid) for pid in processes}, host, switches)


@dataclass
class EmulatedMonitor:
    """The reports of an emulated instance. The first covers the time since the monitor was made."""

    instance: Instance
    settings: MonitorSettings = field(default_factory=MonitorSettings.every)
    folder: Path | None = None
    with_engines: bool = False  # with the utilization by engine, which neuron-monitor does not have
    _before: dict[str, _Snapshot] = field(default_factory=dict)
    _first: _Snapshot = field(init=False)
    _compiled: Mapping[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._first = _Snapshot.now(self.folder)
        self._compiled = {pid: int(process["compiled"]) for pid, process in self._first.processes.items()}

    def reports(self) -> "Iterable[dict[str, Any]]":
        """A report whenever a group is due."""
        shortest = self.settings.periods[0]
        due = time.monotonic() + shortest
        while True:
            time.sleep(max(due - time.monotonic(), 0.0))
            due += shortest
            yield self.report()

    def report(self) -> dict[str, Any]:
        """A report of the groups that are due."""
        now = _Snapshot.now(self.folder)
        due: dict[tuple[str, float], _Snapshot] = {}

        def since(group: str, period: float) -> _Snapshot | None:
            """The snapshot from which a group's period began; None if it has not ended."""
            before = self._before.get(f"{group} {period}", self._first)
            if now.at - before.at < 0.9 * period:  # a timer is never exact
                return None
            due[group, period] = now
            return before

        runtimes = self._runtimes(now, since)
        system = {
            group: self._of_system(group, before, now)
            for group, period in self.settings.system.items()
            if (before := since(group, period)) is not None
        }
        self._before |= {f"{group} {period}": snapshot for (group, period), snapshot in due.items()}
        return {
            "neuron_runtime_data": runtimes,
            "system_data": system,
            "instance_info": {**dict.fromkeys(_NO_INSTANCE, ""), "instance_type": self.instance.name, "error": ""},
            "neuron_hardware_info": hardware_info(self.instance),
        }

    def compiled(self) -> int:
        """Programs that the processes have compiled to be loaded, since the last call."""
        now = {int(process["pid"]): int(process["compiled"]) for process in published(self.folder)}
        before, self._compiled = self._compiled, now
        return sum(max(count - before.get(pid, 0), 0) for pid, count in now.items())

    def _runtimes(self, now: _Snapshot, since: Any) -> list[dict[str, Any]]:
        found = []
        for pid, process in now.processes.items():
            tag = process["tag"] or str(pid)
            groups: dict[str, float] = {}
            for settings in self.settings.runtimes:
                if settings.tag.search(tag):
                    groups |= settings.groups
            report = {
                group: self._of_runtime(group, pid, before, now)
                for group in RUNTIME_GROUPS
                if group in groups and (before := since(group, groups[group])) is not None
            }
            if report:
                found.append(
                    {"pid": pid, "address": str(pid), "neuron_runtime_tag": tag, "error": "", "report": report}
                )
        return found

    def _of_runtime(self, group: str, pid: int, before: _Snapshot, now: _Snapshot) -> dict[str, Any]:
        period, process, earlier = now.at - before.at, now.processes[pid], before.processes.get(pid)
        if earlier is not None and earlier["born"] != process["born"]:
            earlier = None
        if group == "neuroncore_counters":
            body = {"neuroncores_in_use": self._cores(process, earlier, period)}
        elif group == "execution_stats":
            body = _executions(process, earlier)
        elif group == "memory_used":
            body = self._memory(process)
        else:
            spent = zip(now.times[pid], before.times.get(pid, (0.0, 0.0)), strict=True)
            share = [100 * max(after - own, 0.0) / period / (os.cpu_count() or 1) for after, own in spent]
            body = {"vcpu_usage": {"user": round(share[0], 2), "system": round(share[1], 2)}}
        return {"period": period, **body, "error": ""}

    def _cores(self, process: Counters, earlier: Counters | None, period: float) -> dict[str, Any]:
        before = {core["core"]: core for core in earlier["cores"]} if earlier else {}
        cores: dict[str, Any] = {}
        for core in (each for each in process["cores"] if each["in_use"] or each["core"] in before):
            own = before.get(core["core"], {})
            busy = _percent(core["busy"] - own.get("busy", 0.0), period)
            flops = max(core["flops"] - own.get("flops", 0), 0)
            figures: dict[str, Any] = {
                "neuroncore_utilization": busy,
                "effective_flops": int(flops / period),
            }
            group = DeviceShape(self.instance).group
            if group > 1:
                physical = range(core["core"] * group, (core["core"] + 1) * group)
                figures["v3d"] = {f"nc_v3.{each}": {"neuroncore_utilization": busy} for each in physical}
            if self.with_engines:
                spent = own.get("engines", {})
                figures["engines"] = {
                    engine: _percent(seconds - spent.get(engine, 0.0), period)
                    for engine, seconds in sorted(core["engines"].items())
                }
            cores[str(core["core"])] = figures
        return cores

    def _memory(self, process: Counters) -> dict[str, Any]:
        shape, pid = DeviceShape(self.instance), int(process["pid"])
        cores = {str(core["core"]): core["memory"] for core in process["cores"] if core["in_use"]}
        host = _resident(pid)
        loaded = [
            {
                "name": program["name"],
                "uuid": program["digest"],
                "model_id": number,
                "is_running": True,
                "subgraphs": {"sg_00": _subgraph(program, core, core // shape.cores)},
            }
            for number, (program, core) in enumerate(
                ((program, core) for program in process["programs"] for core in program["cores"]), 1
            )
        ]
        return {
            "neuron_runtime_used_bytes": {
                "host": host,
                "neuron_device": sum(sum(memory.values()) for memory in cores.values()),
                "usage_breakdown": {
                    "host": {"application_memory": host, "constants": 0, "dma_buffers": 0, "tensors": 0},
                    "neuroncore_memory_usage": cores,
                },
            },
            "loaded_models": loaded,
        }

    def _of_system(self, group: str, before: _Snapshot, now: _Snapshot) -> dict[str, Any]:
        period = now.at - before.at
        if group == "vcpu_usage":
            usage = {vcpu: _usage(steps, before.host.get(vcpu, ())) for vcpu, steps in now.host.items()}
            average = usage.pop("", dict.fromkeys(_VCPU, 0.0))
            switches = max(now.switches - before.switches, 0)
            body: dict[str, Any] = {
                "average_usage": average,
                "usage_data": usage,
                "context_switch_count": switches,
            }
        elif group == "memory_info":
            body = _host_memory()
        else:
            body = {"neuron_devices": self._ecc(before, now)}
        return {"period": period, **body, "error": ""}

    def _ecc(self, before: _Snapshot, now: _Snapshot) -> list[dict[str, int]]:
        """Injected events of the period: devices of the emulator have none of their own."""
        sums = {(device, kind): 0 for device in range(self.instance.chips) for kind in ECC}
        for sign, snapshot in ((1, now), (-1, before)):
            for device, kind, count in (
                event for pid in now.processes if pid in snapshot.processes for event in snapshot.processes[pid]["ecc"]
            ):
                if (device, kind) in sums:
                    sums[device, kind] += sign * count
        return [
            {"neuron_device_index": device, **{kind: max(sums[device, kind], 0) for kind in ECC}}
            for device in range(self.instance.chips)
        ]


def hardware_info(instance: Instance) -> dict[str, Any]:
    shape = DeviceShape(instance)
    kind, version = _DEVICE_TYPES[instance.compiler_target]
    return {
        "neuron_device_type": kind,
        "neuron_device_version": version,
        "neuroncore_version": f"{instance.core}d" if shape.group > 1 else instance.core,
        "neuron_device_count": instance.chips,
        "neuron_device_memory_size": shape.memory,
        "neuroncore_per_device_count": shape.cores,
        "logical_neuroncore_config": shape.group,
        "error": "",
    }


def _executions(process: Counters, earlier: Counters | None) -> dict[str, Any]:
    def since(table: str, names: Iterable[str]) -> dict[str, int]:
        before = earlier[table] if earlier else {}
        return {name: max(process[table][name] - before.get(name, 0), 0) for name in names}

    count = process["executions"] - (earlier["executions"] if earlier else 0)
    recent = process["latencies"][-count:] if count > 0 else []
    return {
        "error_summary": since("errors", ERRORS),
        "execution_summary": since("summary", SUMMARIES),
        "latency_stats": {
            "total_latency": _percentiles([total for total, _ in recent]),
            "device_latency": _percentiles([device for _, device in recent if device is not None]),
        },
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """The nearest rank of each percentile; None without executions."""
    ranked = sorted(seconds)
    if not ranked:
        return None
    return {f"p{percent}": ranked[max(ceil(len(ranked) * percent / 100), 1) - 1] for percent in _PERCENTILES}


def _percent(seconds: float, period: float) -> float:
    return min(100 * max(seconds, 0.0) / period, 100.0) if period > 0 else 0.0


def _subgraph(program: Counters, core: int, device: int) -> dict[str, Any]:
    memory = {category: int(program["memory"].get(category, 0)) for category in CATEGORIES}
    own = {
        "constants": memory["constants"],
        "model_code": memory["model_code"],
        "runtime_memory": memory["runtime_memory"] + memory["model_shared_scratchpad"],
        "tensors": memory["tensors"],
    }
    host = {"application_memory": 0, "constants": 0, "dma_buffers": 0, "tensors": 0}
    return {
        "memory_used_bytes": {
            "host": 0,
            "neuron_device": sum(own.values()),
            "usage_breakdown": {"host": host, "neuron_device": own},
        },
        "neuroncore_index": core,
        "neuron_device_index": device,
    }


# The host. A kernel without /proc gives zeros.


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _times_of(pid: int) -> tuple[float, float]:
    """Seconds of user and system time of a process."""
    for line in _lines(f"/proc/{pid}/stat"):
        words = line.rpartition(")")[2].split()
        return int(words[11]) / _STEPS, int(words[12]) / _STEPS
    return 0.0, 0.0


def _resident(pid: int) -> int:
    """Bytes of a process in the host's memory."""
    for line in _lines(f"/proc/{pid}/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _host_times() -> tuple[dict[str, Sequence[float]], int]:
    """The time of each vCPU, and of all under "", in steps of the kernel's clock; and all context switches."""
    times, switches = dict[str, Sequence[float]](), 0
    for line in _lines("/proc/stat"):
        name, *words = line.split()
        if match := re.fullmatch("cpu([0-9]*)", name):
            times[match[1]] = [int(word) for word in words[: len(_VCPU)]]
        elif name == "ctxt":
            switches = int(words[0])
    return times, switches


def _usage(after: Sequence[float], before: Sequence[float]) -> dict[str, float]:
    """Percent of a vCPU's time."""
    spent = [own - earlier for own, earlier in zip(after, before or [0] * len(after), strict=True)]
    total = sum(spent) or 1
    return {kind: round(100 * max(steps, 0) / total, 2) for kind, steps in zip(_VCPU, spent, strict=True)}


def _host_memory() -> dict[str, int]:
    words = (line.replace(":", " ").split() for line in _lines("/proc/meminfo"))
    size = {word[0]: int(word[1]) * 1024 for word in words if len(word) == 3}
    total, swap = size.get("MemTotal", 0), size.get("SwapTotal", 0)
    return {
        "memory_total_bytes": total,
        "memory_used_bytes": total - size.get("MemAvailable", 0),
        "swap_total_bytes": swap,
        "swap_used_bytes": swap - size.get("SwapFree", 0),
    }
