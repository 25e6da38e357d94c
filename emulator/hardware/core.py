"""Specifications of the NeuronCore generations with a public kernel interface: v2, v3 and v4.

Every figure is from the public Neuron documentation (SDK 2.32.0, August 2026): the core pages under
`about-neuron/arch/neuron-hardware`, the NKI architecture guides under `nki/guides/architecture`, and, for the usable
SBUF, the constants of AWS's open kernel compiler `nkipy`.

`None` means that the figure is not documented or that the generation lacks the feature; the comment states which. Never
replace `None` by a guess: a cost that needs such a figure is calibrated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class CoreSpec:
    """Capacities and rates of one physical NeuronCore. SBUF and PSUM sizes are bytes in one partition."""

    name: str
    nki_gen: int  # the number of the generation in NKI
    partitions: int

    sbuf: int
    sbuf_usable: int  # available to the compiler; the runtime reserves the rest
    vector_gpsimd_share_sbuf_port: bool  # true: the two engines alternate

    psum: int
    psum_banks: int
    psum_bank: int  # a tile starts at a bank
    psum_dtypes: tuple[str, ...]
    vector_scalar_share_psum_port: bool

    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    profile_base_ghz: float | None  # the clock that the profiler counts in

    vector_8bit_per_cycle: int  # elements of that width
    vector_16bit_per_cycle: int
    vector_32bit_per_cycle: int
    scalar_8bit_per_cycle: int
    scalar_16bit_per_cycle: int
    scalar_32bit_per_cycle: int
    gpsimd_32bit_per_cycle: int

    gpsimd_processors: int
    gpsimd_bits: int
    gpsimd_tcm_bytes: int  # tightly coupled memory of one processor
    gpsimd_partitions_per_processor: int
    gpsimd_dma_gb_s: float | None

    tflops_16bit: float  # BF16, FP16 and TF32; as printed for one core; the sum may differ from the chip's figure
    tflops_fp32: float
    tflops_fp8: float | None
    tflops_mx: float | None
    tflops_sparse: float | None

    pe_rows: int
    pe_cols: int
    max_stationary_free: int
    max_moving_free_fp32: int  # columns of one matmul when sums are FP32
    max_moving_free_bf16: int | None  # the same when sums are BF16
    fp32_cycle_factor: int

    dma_engines: int
    dma_queues_per_engine: int
    dma_engine_theoretical_gb_s: float
    dma_engine_peak_gb_s: float  # the highest rate in the tuning tables
    dma_hw_dge: bool  # hardware generates descriptors, not GpSimd or the runtime ahead of time
    dma_hw_dge_ns: float | None
    dma_qos_classes: int | None

    lnc_allowed: tuple[int, ...]  # numbers of physical cores that may act as one logical core
    lnc_default: int


@dataclass(frozen=True, kw_only=True)
class DmaTransfer:
    """Costs of a DMA beyond its bytes; equal for all generations as far as documented."""

    semaphore_to_start_ns: float
    packet_bytes: int
    collective_packet_bytes: int
    recommended_min_bytes_per_partition: int
    saturating_bytes_per_partition: int
    severe_below_bytes_per_partition: int
    partitions_per_engine: int
    max_compute_sources: int
    efficiency: tuple[tuple[int, float], ...]  # (bytes per partition, fraction of the rate at 32 KiB)


_V2 = CoreSpec(
    name="v2",
    nki_gen=2,
    partitions=128,
    sbuf=192 * KIB,
    sbuf_usable=180_224,
    vector_gpsimd_share_sbuf_port=True,
    psum=16 * KIB,
    psum_banks=8,
    psum_bank=2 * KIB,
    psum_dtypes=("float32",),
    vector_scalar_share_psum_port=True,
    tensor_ghz=2.8,
    vector_ghz=1.12,
    scalar_ghz=1.4,
    gpsimd_ghz=1.4,
    profile_base_ghz=1.4,
    vector_8bit_per_cycle=128,
    vector_16bit_per_cycle=128,
    vector_32bit_per_cycle=128,
    scalar_8bit_per_cycle=128,
    scalar_16bit_per_cycle=128,
    scalar_32bit_per_cycle=128,
    gpsimd_32bit_per_cycle=128,
    gpsimd_processors=8,
    gpsimd_bits=512,
    gpsimd_tcm_bytes=64 * KIB,  # documented for v2 and later
    gpsimd_partitions_per_processor=16,
    gpsimd_dma_gb_s=None,  # not documented
    tflops_16bit=92.0,
    tflops_fp32=23.0,
    tflops_fp8=92.0,
    tflops_mx=None,  # not supported
    tflops_sparse=None,  # not supported
    pe_rows=128,
    pe_cols=128,
    max_stationary_free=128,
    max_moving_free_fp32=512,
    max_moving_free_bf16=None,  # PSUM sums in FP32 only
    fp32_cycle_factor=4,
    dma_engines=16,
    dma_queues_per_engine=16,
    dma_engine_theoretical_gb_s=27.2,
    dma_engine_peak_gb_s=17.0,
    dma_hw_dge=False,
    dma_hw_dge_ns=None,  # not supported
    dma_qos_classes=None,  # round-robin
    lnc_allowed=(1,),
    lnc_default=1,
)

_V3 = replace(
    _V2,
    name="v3",
    nki_gen=3,
    sbuf=224 * KIB,
    sbuf_usable=212_984,
    vector_gpsimd_share_sbuf_port=False,
    vector_scalar_share_psum_port=False,
    tensor_ghz=2.4,
    vector_ghz=0.96,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    profile_base_ghz=1.2,
    vector_8bit_per_cycle=256,
    vector_16bit_per_cycle=512,
    vector_32bit_per_cycle=256,
    gpsimd_dma_gb_s=307.0,
    tflops_16bit=79.0,
    tflops_fp32=20.0,
    tflops_fp8=158.0,
    tflops_sparse=316.0,
    dma_engine_peak_gb_s=23.0,
    dma_hw_dge=True,
    dma_hw_dge_ns=600.0,
    lnc_allowed=(1, 2),
    lnc_default=2,
)

_V4 = replace(
    _V3,
    name="v4",
    nki_gen=4,
    sbuf=256 * KIB,
    sbuf_usable=245_752,
    psum_dtypes=("float32", "bfloat16"),
    vector_ghz=1.2,
    profile_base_ghz=None,  # not documented
    vector_8bit_per_cycle=512,
    vector_16bit_per_cycle=512,
    vector_32bit_per_cycle=256,
    scalar_8bit_per_cycle=256,
    scalar_16bit_per_cycle=256,
    scalar_32bit_per_cycle=128,
    gpsimd_dma_gb_s=None,  # not documented
    tflops_fp8=None,  # not documented for FP8 other than MX
    tflops_mx=315.0,
    tflops_sparse=315.0,
    max_moving_free_fp32=4096,
    max_moving_free_bf16=8192,
    dma_engine_theoretical_gb_s=38.4,
    dma_engine_peak_gb_s=33.0,
    dma_hw_dge_ns=None,  # not documented
    dma_qos_classes=4,
)

CORES: Mapping[str, CoreSpec] = MappingProxyType({core.name: core for core in (_V2, _V3, _V4)})

DMA_TRANSFER = DmaTransfer(
    semaphore_to_start_ns=1300.0,
    packet_bytes=4 * KIB,
    collective_packet_bytes=64 * KIB,
    recommended_min_bytes_per_partition=2 * KIB,
    saturating_bytes_per_partition=4 * KIB,
    severe_below_bytes_per_partition=256,
    partitions_per_engine=8,
    max_compute_sources=16,
    # Read from the plot in the DMA bandwidth guide, at 128 partitions; approximate.
    efficiency=(
        (32, 0.01),
        (64, 0.03),
        (128, 0.05),
        (256, 0.10),
        (512, 0.21),
        (1 * KIB, 0.42),
        (2 * KIB, 0.81),
        (4 * KIB, 0.97),
        (8 * KIB, 0.98),
        (16 * KIB, 0.99),
        (32 * KIB, 1.0),
    ),
)
