"""The hardware catalogue: consistent, frozen, explicit about unknown figures, and light to import."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.hardware import CORES, DMA_TRANSFER, INSTANCES, CoreSpec, Instance, UnknownInstance, instance

ROOT = Path(__file__).parents[2]

CATALOGUE = [pytest.param(entry, id=name) for name, entry in INSTANCES.items()]
CORE_SPECS = [pytest.param(core, id=name) for name, core in CORES.items()]

# Chips, physical cores, vCPUs, host GiB and device GiB as the instance pages' tables print them.
PRINTED_TOTALS = {
    "inf2.xlarge": (1, 2, 4, 16, 32),
    "inf2.8xlarge": (1, 2, 32, 128, 32),
    "inf2.24xlarge": (6, 12, 96, 384, 192),
    "inf2.48xlarge": (12, 24, 192, 768, 384),
    "trn1.2xlarge": (1, 2, 8, 32, 32),
    "trn1.32xlarge": (16, 32, 128, 512, 512),
    "trn1n.32xlarge": (16, 32, 128, 512, 512),
    "trn2.48xlarge": (16, 128, 192, 2048, 1536),
    "trn2u.48xlarge": (16, 128, 192, 2048, 1536),
    "trn3_gen1": (64, 512, 768, 8192, 9216),
    "trn3_gen2": (144, 1152, 2304, 27_648, 20_736),
}

# Device GiB, bandwidth in GB/s and BF16 TFLOPS of one chip as the chip pages print them.
PRINTED_PER_CHIP = {
    "Inferentia2": (32, 820, 190),
    "Trainium1": (32, 820, 190),
    "Trainium2": (96, 2900, 667),
    "Trainium3": (144, 4900, 671),
}


def test_every_instance_has_the_totals_that_its_page_prints() -> None:
    totals = {
        name: (entry.chips, entry.cores, entry.vcpus, entry.host_memory_gib, entry.device_memory_gib)
        for name, entry in INSTANCES.items()
    }
    assert totals == PRINTED_TOTALS


@pytest.mark.parametrize("entry", CATALOGUE)
def test_an_instance_is_its_chips_times_what_the_chip_page_prints(entry: Instance) -> None:
    memory, bandwidth, tflops = PRINTED_PER_CHIP[entry.chip]
    assert entry.device_memory_gib == memory * entry.chips
    assert entry.device_memory_gb_s == pytest.approx(bandwidth * entry.chips)
    assert entry.tflops_bf16 == pytest.approx(tflops * entry.chips, rel=0.003)  # the pages round to three digits


@pytest.mark.parametrize("entry", CATALOGUE)
def test_device_memory_divides_evenly_over_the_cores(entry: Instance) -> None:
    assert entry.device_memory_gib % entry.cores == 0 or entry.device_memory_gib * 2 % entry.cores == 0
    assert entry.cores % entry.chips == 0
    assert entry.chips % entry.servers == 0


@pytest.mark.parametrize("entry", CATALOGUE)
def test_names_families_targets_and_cores_agree(entry: Instance) -> None:
    assert entry.name.startswith(entry.family)
    assert entry.family.startswith(entry.compiler_target)
    assert entry.core in CORES
    assert (entry.topology == "single") == (entry.chips == 1)
    assert (entry.neuronlink_per_chip is None) == (entry.chips == 1)


def test_logical_cores_follow_the_default_grouping_of_the_generation() -> None:
    assert instance("trn2.48xlarge").logical_cores == 64
    assert instance("trn3_gen1").logical_cores == 256
    assert instance("inf2.48xlarge").logical_cores == instance("inf2.48xlarge").cores == 24


@pytest.mark.parametrize("core", CORE_SPECS)
def test_a_core_holds_as_much_as_its_page_prints(core: CoreSpec) -> None:
    printed_sbuf_mib = {"v2": 24, "v3": 28, "v4": 32}[core.name]
    assert core.sbuf * core.partitions == printed_sbuf_mib * 2**20
    assert core.psum * core.partitions == 2 * 2**20
    assert core.psum == core.psum_banks * core.psum_bank
    assert core.sbuf_usable < core.sbuf
    assert core.gpsimd_processors * core.gpsimd_partitions_per_processor == core.partitions
    assert core.lnc_default in core.lnc_allowed


@pytest.mark.parametrize("core", CORE_SPECS)
def test_the_array_at_its_clock_gives_the_printed_tensor_rate(core: CoreSpec) -> None:
    flop_per_cycle = 2 * core.pe_rows * core.pe_cols
    assert flop_per_cycle * core.tensor_ghz / 1000 == pytest.approx(core.tflops_16bit, rel=0.01)
    assert core.tflops_16bit / core.fp32_cycle_factor == pytest.approx(core.tflops_fp32, rel=0.02)


@pytest.mark.parametrize("core", CORE_SPECS)
def test_a_moving_tile_fills_whole_psum_banks_and_never_more_than_there_are(core: CoreSpec) -> None:
    assert core.max_moving_free_fp32 * 4 % core.psum_bank == 0
    assert core.max_moving_free_fp32 * 4 <= core.psum
    if core.max_moving_free_bf16 is None:
        assert "bfloat16" not in core.psum_dtypes
    else:
        assert core.max_moving_free_bf16 * 2 <= core.psum


def test_undocumented_figures_stay_none() -> None:
    assert instance("inf2.48xlarge").efa_interfaces is None
    assert instance("trn3_gen2").efa_interfaces is None
    assert CORES["v4"].profile_base_ghz is None
    assert CORES["v4"].dma_hw_dge_ns is None
    assert CORES["v4"].tflops_fp8 is None


def test_dma_efficiency_rises_with_the_size_of_a_transfer() -> None:
    sizes, rates = zip(*DMA_TRANSFER.efficiency, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert list(rates) == sorted(set(rates))
    assert rates[-1] == 1.0


def test_nothing_in_the_catalogue_can_be_changed() -> None:
    with pytest.raises(TypeError):
        cast("dict[str, Any]", INSTANCES)["inf2.xlarge"] = None
    with pytest.raises(TypeError):
        cast("dict[str, Any]", CORES)["v2"] = None
    records: tuple[Any, ...] = (*INSTANCES.values(), *CORES.values(), DMA_TRANSFER)
    for record in records:
        with pytest.raises(FrozenInstanceError):
            setattr(record, fields(record)[0].name, None)
        assert hash(record) == hash(pickle.loads(pickle.dumps(record)))


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("inf2.xlage", "inf2.xlarge"),
        ("inf2.24xl", "inf2.24xlarge"),
        ("TRN1.32XLARGE", "trn1.32xlarge"),
        ("ml.inf2.48xlarge", "inf2.48xlarge"),
        ("trn3-gen2", "trn3_gen2"),
    ],
)
def test_a_misspelt_instance_is_answered_with_the_nearest_name(typo: str, meant: str) -> None:
    with pytest.raises(UnknownInstance, match=meant) as caught:
        instance(typo)
    assert caught.value.nearest[0] == meant
    assert typo in str(caught.value)


def test_a_name_that_resembles_nothing_is_answered_with_the_whole_catalogue() -> None:
    with pytest.raises(UnknownInstance) as caught:
        instance("abacus")
    assert caught.value.nearest == ()
    assert all(name in str(caught.value) for name in INSTANCES)


def test_an_instance_without_published_figures_is_refused_and_says_so() -> None:
    with pytest.raises(UnknownInstance, match="publishes none of its figures") as caught:
        instance("trn2.3xlarge")
    assert "trn2.48xlarge" in caught.value.nearest


@given(st.text(max_size=40))
def test_any_other_name_is_a_lookup_error_with_one_sentence(name: str) -> None:
    if name in INSTANCES:
        assert instance(name).name == name
        return
    with pytest.raises(LookupError) as caught:
        instance(name)
    assert set(cast("UnknownInstance", caught.value).nearest) <= set(INSTANCES)


def test_importing_the_catalogue_loads_nothing_but_the_standard_library() -> None:
    script = (
        "import sys; import nxpipe.emulator.hardware; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"nxpipe", "__main__"}
