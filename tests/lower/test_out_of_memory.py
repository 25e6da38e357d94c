"""Programs that do not fit are refused with the numbers, the largest tensors and a remedy."""

import pytest

from nxpipe.emulator.analysis.graph_memory import data_capacity, footprints
from nxpipe.emulator.analysis.program_memory import footprint, require_capacity
from nxpipe.emulator.capture import CaptureRequest
from nxpipe.emulator.compile import compile_program, emit
from nxpipe.emulator.errors import OutOfMemory
from nxpipe.emulator.hardware import CORES, instance
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Origin
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Pool
from nxpipe.emulator.passes import PassOptions

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
SEVENTY_BILLION = LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
}


def _decode(config: dict[str, object], dtype: str = "bfloat16", length: int = 64) -> CaptureRequest:
    return CaptureRequest(config, "text-generation", "decode", 1, length, dtype)


@pytest.mark.sample(4)
def test_weights_that_no_core_holds_are_refused_by_name_with_what_would_help() -> None:
    target = instance("inf2.48xlarge")
    program = compile_program(_decode(SEVENTY_BILLION), PassOptions(target=target.name))
    with pytest.raises(OutOfMemory) as caught:
        emit(program, target.core, hbm_bytes=data_capacity(target))
    fault = caught.value
    assert fault.capacity == data_capacity(target) == (16 << 30) - (96 << 20)
    assert fault.need > 128 << 30
    assert fault.largest[0].nbytes == 80 * 8192 * 28672 * 2
    message = str(fault)
    assert f"needs {fault.need:,} bytes of HBM behind each core, and {fault.capacity:,} are available" in message
    assert "model.layers.0.mlp.down_proj.weight up to model.layers.79.mlp.down_proj.weight" in message
    assert "80 x bf16[28672,8192], 37,580,963,840 bytes" in message
    assert "--tp above 1" in message


def test_a_cache_for_too_long_a_bucket_is_refused_by_name() -> None:
    program = compile_program(_decode(LLAMA | {"max_position_embeddings": 1 << 16}, length=1 << 16), PassOptions())
    with pytest.raises(OutOfMemory) as caught:
        emit(program, "v2", hbm_bytes=8 << 20)
    message = str(caught.value)
    assert "the largest tensors are state cache.0.key up to cache.2.key (3 x bf16[1,2,65536,8]" in message
    assert "make the batch or the longest bucket smaller" in message
    assert "--tp" not in message


def test_what_fits_exactly_fits() -> None:
    program = emit(compile_program(_decode(LLAMA), PassOptions()), "v2").program
    need = footprint(program).total
    require_capacity(program, need)
    with pytest.raises(OutOfMemory, match=f"needs {need:,} bytes"):
        require_capacity(program, need - 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("degree", [1, 2])
def test_the_check_before_a_build_counts_the_weights_and_states_that_the_program_has(degree: int) -> None:
    program = compile_program(_decode(LLAMA), PassOptions(target="inf2.xlarge", tensor_parallel=degree))
    (checked,), _ = footprints([program.whole], [degree])
    built = footprint(emit(program, "v2").program).by_role
    assert (built[Role.PARAMETER], built[Role.STATE]) == (checked.weights, checked.state)


@pytest.mark.parametrize("core", ["v2", "v3"])
def test_a_tile_that_no_partition_holds_is_refused_with_its_node(core: str) -> None:
    """A window of which one row alone is larger than a partition."""
    b = GraphBuilder()
    x = b.input("x", TensorType((1, 2, 70_000), DType.FLOAT32))
    window = Pool("max_pool", (60_000,), (1,), (0,), (0,), (1,))
    b.output("y", b.add(window, x, origin=Origin("encoder.pool", "model.py:7")))
    with pytest.raises(OutOfMemory) as caught:
        lower(b.build(), core)
    fault = caught.value
    assert fault.memory == "each partition of SBUF"
    assert fault.need > fault.capacity <= CORES[core].sbuf_usable
    assert str(fault).startswith("max_pool at encoder.pool model.py:7, for a tile of 2 x [1, 1, 60000] float32, needs ")
    assert "its operand 0 (f32[1,2,70000], 560,000 bytes); its result (f32[1,2,10001], 80,008 bytes)" in str(fault)
    assert "a smaller bucket" in str(fault)
