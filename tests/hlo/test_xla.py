"""Modules become protos and run on XLA's CPU: equal bytes, states in place, ranks together, errors in a sentence."""

import sys

import numpy as np
import pytest

from nxpipe.emulator.errors import ExecutionError, MissingTensor, ToolMissing, WrongTensor
from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import LoadedModule, proto_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, SliceUpdate
from tests.hlo.blocks import attention_block


def counter() -> Graph:
    """A state of which one row is replaced by its sum with the input."""
    builder = GraphBuilder()
    state = builder.input("state", TensorType((4, 3), DType.FLOAT32))
    row = builder.input("row", TensorType((1, 3), DType.FLOAT32))
    updated = builder.add(SliceUpdate((2, 0), (3, 3), (1, 1)), state, row)
    builder.output("sum", builder.add(Binary("add"), updated, updated))
    builder.output("state", updated)
    return builder.build()


def test_equal_modules_have_equal_protos_with_the_names_of_the_interface() -> None:
    """Equal but for the number of the module in its process, which the canonical form leaves out."""
    text = module_of(attention_block(), 2).text
    first, second = (_without_id(proto_of(text)) for _ in range(2))
    assert first == second
    assert all(name in first for name in (b"neff_input_names", b"cache", b"all-gather"))


def _without_id(proto: bytes) -> bytes:
    """A module without its field 5, a number of one byte that is absent if 0."""
    kept, place = b"", 0
    while place < len(proto):
        start, tag = place, proto[place]
        value, place = _number(proto, place + (2 if tag & 0x80 else 1))
        place += value if tag & 7 == 2 else 0
        kept += b"" if tag == 5 << 3 else proto[start:place]
    return kept


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while data[place] & 0x80:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


def test_a_state_is_updated_where_it_lies_in_the_memory_of_the_device() -> None:
    module = module_of(counter())
    loaded = LoadedModule(module.text, module.interface, {})
    resident = loaded.place([{"state": np.zeros((4, 3), np.float32)}])
    places = []
    for step in range(3):
        before = resident["state"]
        loaded.step({"row": np.full((1, 3), step, np.float32)}, resident)
        places += resident["state"].addresses
        assert before.array.is_deleted()
    assert len(set(places)) == 1
    np.testing.assert_array_equal(loaded.read(resident)[0]["state"][2], [2, 2, 2])


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    module = module_of(counter())
    loaded = LoadedModule(module.text, module.interface, {})
    state = np.zeros((4, 3), np.float32)
    with pytest.raises(MissingTensor, match="input 'row' is missing"):
        loaded.run({"state": state})
    with pytest.raises(WrongTensor, match="'row' is float32"):
        loaded.run({"state": state, "row": np.zeros(3, np.float32)})


def test_a_module_that_xla_does_not_compile_is_an_error_of_ours() -> None:
    module = module_of(counter())
    broken = module.text.replace("stablehlo.add", "stablehlo.subtract_all")
    with pytest.raises(ExecutionError, match="XLA does not"):
        LoadedModule(broken, module.interface, {})
    with pytest.raises(ExecutionError, match="XLA does not"):
        proto_of(broken)


def test_without_jaxlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxlib", None)
    with pytest.raises(ToolMissing, match=r"needs jaxlib, which is not installed; run pip install 'nxpipe\[neuron\]'"):
        proto_of("module {}")


def test_writing_a_module_imports_no_jaxlib() -> None:
    import subprocess

    program = (
        "import sys\n"
        "from nxpipe.emulator.hlo.module import module_of\n"
        "import nxpipe.emulator.hlo.xla\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')]\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
