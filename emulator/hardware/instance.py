"""Specifications of the instance types with NeuronCores of generation v2 and later.

Figures are from the public Neuron documentation (SDK 2.32.0, August 2026, `about-neuron/arch/neuron-hardware`:
inf2-arch, trn1-arch, trn2-arch, trn3-arch) and are for a whole instance unless the name states otherwise. `None` means
not documented. Two inconsistencies are kept as printed: the HBM rate of inf2 and trn1 is in GB/s on one page and in
GiB/s on another, and the NeuronLink column of trn1 has no unit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nxpipe.emulator.hardware.core import CORES

GIB = 1 << 30
CODE_PER_PHYSICAL_CORE = 96 << 20  # bytes of instructions and their rings, from the runtime's documentation

CompilerTarget = Literal["inf2", "trn1", "trn1n", "trn2", "trn3"]
Topology = Literal["single", "ring", "torus2d_4x4", "switched"]

# The degrees of the public tensor-parallel library. None are published for Trn3, which has the core grouping of Trn2.
_DEGREES: Mapping[CompilerTarget, tuple[int, ...]] = MappingProxyType(
    {
        "inf2": (1, 2, 4, 8, 24),
        "trn1": (1, 2, 8, 16, 32),
        "trn1n": (1, 2, 8, 16, 32),
        "trn2": (1, 2, 4, 8, 16, 32, 64),
        "trn3": (1, 2, 4, 8, 16, 32, 64),
    }
)


@dataclass(frozen=True)
class Bandwidth:
    """A rate in the printed unit; `None` if the documentation prints no unit."""

    figure: float
    unit: Literal["GB/s", "GiB/s"] | None


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An EC2 instance type, or a Trn3 UltraServer, whose servers have no documented EC2 size name."""

    name: str
    family: str
    compiler_target: CompilerTarget
    core: Literal["v2", "v3", "v4"]
    chip: str
    chips: int
    cores_per_chip: int
    vcpus: int
    host_memory_gib: int
    device_memory_gib: int
    device_memory_gb_s: float
    tflops_bf16: float
    tflops_fp32: float
    topology: Topology
    servers: int = 1
    tflops_fp8: float | None = None
    tflops_mx: float | None = None
    tflops_sparse: float | None = None
    neuronlink_per_chip: Bandwidth | None = None
    neuronlink_between_instances_per_chip: Bandwidth | None = None
    ultraserver_nodes: int | None = None
    pcie_intra_server_gb_s: float | None = None
    pcie_inter_server_gb_s: float | None = None
    pcie_inter_rack_gb_s: float | None = None
    efa_interfaces: int | None
    efa_gbps: float | None
    network_gbps_at_most: float | None = None

    @property
    def cores(self) -> int:
        """The number of physical cores."""
        return self.chips * self.cores_per_chip

    @property
    def logical_cores(self) -> int:
        """The number of logical cores with the default grouping of the generation."""
        return self.cores // CORES[self.core].lnc_default

    @property
    def core_memory(self) -> int:
        """Bytes of HBM behind one logical core."""
        return self.device_memory_gib * GIB // self.logical_cores

    @property
    def core_code(self) -> int:
        """Bytes that programs' code takes on one logical core."""
        return CODE_PER_PHYSICAL_CORE * CORES[self.core].lnc_default

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that fit one instance."""
        return tuple(degree for degree in _DEGREES[self.compiler_target] if degree <= self.logical_cores)


class UnknownInstance(LookupError):
    """A name that is not in the catalogue, or whose figures are not published."""

    def __init__(self, name: str, nearest: tuple[str, ...]) -> None:
        self.name = name
        self.nearest = nearest
        if name in _NAMED_ONLY:
            problem = f"the Neuron documentation names the instance {name} but publishes none of its figures"
        elif _is_generation(name):
            problem = f"{name!r} is a chip generation"
        elif _GPU.match(name):
            problem = f"{name!r} is no Neuron instance"
        else:
            problem = f"unknown Neuron instance {name!r}"
        super().__init__(f"{problem}; {_remedy(name, nearest)}")


def instance(name: str) -> Instance:
    """The catalogue entry with this name; raises UnknownInstance."""
    try:
        return INSTANCES[name]
    except KeyError:
        raise UnknownInstance(name, _nearest(name)) from None


def _nearest(name: str) -> tuple[str, ...]:
    """The names that were probably meant: the instances of a generation, else the most similar names."""
    from difflib import get_close_matches  # imported only for an error

    wanted = name.strip().lower()
    wanted = _CHIPS.get(wanted, wanted)
    if _GPU.match(wanted):
        return ()
    begun = tuple(known for known in INSTANCES if known.startswith(wanted)) if len(wanted) > 3 else ()
    return begun or tuple(get_close_matches(wanted, INSTANCES, n=3, cutoff=0.6))


def _is_generation(name: str) -> bool:
    wanted = name.strip().lower()
    return wanted in _CHIPS or wanted in {known.family for known in INSTANCES.values()} | set(_CHIPS.values())


def _remedy(name: str, nearest: tuple[str, ...]) -> str:
    if not nearest:
        return f"known are {', '.join(INSTANCES)}"
    if _is_generation(name):
        return f"choose {' or '.join(nearest)}"
    return f"did you mean {' or '.join(nearest)}?"


_CHIPS = {"inferentia2": "inf2", "trainium": "trn1", "trainium1": "trn1", "trainium2": "trn2", "trainium3": "trn3"}
_GPU = re.compile(r"(g[0-9]|p[0-9]|inf1)[a-z]*(\.|$)")


# Names in AWS's manifests and headers without any published figure, not even the number of chips.
_NAMED_ONLY = frozenset({"trn2.3xlarge", "trn2.12xlarge", "trn2n.48xlarge"})


def _inf2(size: str, *, chips: int, vcpus: int, host_memory_gib: int) -> Instance:
    """Inf2 sizes are multiples of one Inferentia2 chip: 2 cores, 32 GiB at 820 GB/s, 190 TFLOPS in BF16."""
    return Instance(
        name=f"inf2.{size}",
        family="inf2",
        compiler_target="inf2",
        core="v2",
        chip="Inferentia2",
        chips=chips,
        cores_per_chip=2,
        vcpus=vcpus,
        host_memory_gib=host_memory_gib,
        device_memory_gib=32 * chips,
        device_memory_gb_s=820.0 * chips,
        tflops_bf16=190.0 * chips,
        tflops_fp32=47.5 * chips,
        topology="ring" if chips > 1 else "single",
        neuronlink_per_chip=Bandwidth(192.0, "GiB/s") if chips > 1 else None,  # a single chip has no NeuronLink
        efa_interfaces=None,
        efa_gbps=None,
    )


def _trn1_32xlarge(family: Literal["trn1", "trn1n"], *, neuronlink: float, efa_interfaces: int) -> Instance:
    """The two Trn1 sizes with 16 chips differ in their links only: trn1n has twice the NeuronLink and EFA rates."""
    return Instance(
        name=f"{family}.32xlarge",
        family=family,
        compiler_target=family,
        core="v2",
        chip="Trainium1",
        chips=16,
        cores_per_chip=2,
        vcpus=128,
        host_memory_gib=512,
        device_memory_gib=512,
        device_memory_gb_s=13_120.0,
        tflops_bf16=3040.0,
        tflops_fp32=760.0,
        topology="torus2d_4x4",
        neuronlink_per_chip=Bandwidth(neuronlink, None),
        efa_interfaces=efa_interfaces,
        efa_gbps=100.0 * efa_interfaces,
    )


def _trn2_48xlarge(family: Literal["trn2", "trn2u"]) -> Instance:
    """A Trn2 server; a trn2u is the same server as one of four in an UltraServer."""
    in_ultraserver = family == "trn2u"
    return Instance(
        name=f"{family}.48xlarge",
        family=family,
        compiler_target="trn2",
        core="v3",
        chip="Trainium2",
        chips=16,
        cores_per_chip=8,
        vcpus=192,
        host_memory_gib=2048,
        device_memory_gib=1536,
        device_memory_gb_s=46_400.0,
        tflops_bf16=10_700.0,
        tflops_fp32=2900.0,
        tflops_fp8=20_800.0,
        tflops_sparse=41_000.0,
        topology="torus2d_4x4",
        neuronlink_per_chip=Bandwidth(1024.0, "GB/s"),
        neuronlink_between_instances_per_chip=Bandwidth(256.0, "GB/s") if in_ultraserver else None,
        ultraserver_nodes=4 if in_ultraserver else None,
        efa_interfaces=16,
        efa_gbps=3200.0,
    )


_TRN1_2XLARGE = Instance(
    name="trn1.2xlarge",
    family="trn1",
    compiler_target="trn1",
    core="v2",
    chip="Trainium1",
    chips=1,
    cores_per_chip=2,
    vcpus=8,
    host_memory_gib=32,
    device_memory_gib=32,
    device_memory_gb_s=820.0,
    tflops_bf16=190.0,
    tflops_fp32=47.5,
    topology="single",
    efa_interfaces=None,
    efa_gbps=None,
    network_gbps_at_most=25.0,  # printed in the EFA column, as "up to"
)

# Trn3 is documented by UltraServer only; these two are the documented names of racks, not EC2 names of servers.
_TRN3_GEN1 = Instance(
    name="trn3_gen1",
    family="trn3",
    compiler_target="trn3",
    core="v4",
    chip="Trainium3",
    chips=64,
    cores_per_chip=8,
    servers=4,
    vcpus=768,
    host_memory_gib=8192,
    device_memory_gib=9216,
    device_memory_gb_s=313_600.0,
    tflops_bf16=42_944.0,
    tflops_fp32=11_712.0,
    tflops_mx=161_088.0,
    topology="switched",
    neuronlink_per_chip=Bandwidth(2048.0, "GiB/s"),
    efa_interfaces=None,
    efa_gbps=12_800.0,
)

_TRN3_GEN2 = Instance(
    name="trn3_gen2",
    family="trn3",
    compiler_target="trn3",
    core="v4",
    chip="Trainium3",
    chips=144,
    cores_per_chip=8,
    servers=36,
    vcpus=2304,
    host_memory_gib=27_648,
    device_memory_gib=20_736,
    device_memory_gb_s=705_600.0,
    tflops_bf16=96_624.0,
    tflops_fp32=26_352.0,
    tflops_mx=362_448.0,
    topology="switched",
    neuronlink_per_chip=Bandwidth(2048.0, "GiB/s"),
    pcie_intra_server_gb_s=256.0,
    pcie_inter_server_gb_s=320.0,
    pcie_inter_rack_gb_s=128.0,
    efa_interfaces=None,
    efa_gbps=28_800.0,
)

_ALL = (
    _inf2("xlarge", chips=1, vcpus=4, host_memory_gib=16),
    _inf2("8xlarge", chips=1, vcpus=32, host_memory_gib=128),
    _inf2("24xlarge", chips=6, vcpus=96, host_memory_gib=384),
    _inf2("48xlarge", chips=12, vcpus=192, host_memory_gib=768),
    _TRN1_2XLARGE,
    _trn1_32xlarge("trn1", neuronlink=384.0, efa_interfaces=8),
    _trn1_32xlarge("trn1n", neuronlink=768.0, efa_interfaces=16),
    _trn2_48xlarge("trn2"),
    _trn2_48xlarge("trn2u"),
    _TRN3_GEN1,
    _TRN3_GEN2,
)

INSTANCES: Mapping[str, Instance] = MappingProxyType({entry.name: entry for entry in _ALL})
