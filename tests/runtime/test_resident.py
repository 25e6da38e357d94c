"""Resident data of a core between requests: one copy of each weight for all programs, and states in place."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.core.memory import Storage, get, put
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Buffer, Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.isa import Isa, Resident, SharedWeights
from nxpipe.emulator.run.runtime import Runtime
from nxpipe.emulator.run.status import BadInput, ExecutionFailed, Unloaded
from tests.runtime.models import running_sum
from tests.runtime.test_isa import copying, gathering, perceptron, stored

INF2 = instance("inf2.xlarge")
NAMES = ("a", "b", "c")
TYPES = {name: TensorType((3, 2), DType.FLOAT32) for name in NAMES}
WEIGHTS = {"up": np.ones((40, 24), np.float32), "down": np.ones((24, 40), np.float32)}


class Read(dict[str, Array]):
    """Weights that count their reads."""

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__(weights)
        self.times = Counter[str]()

    def __getitem__(self, name: str) -> Array:
        self.times[name] += 1
        return super().__getitem__(name)


def test_a_weight_is_loaded_once_for_all_programs_that_keep_it_alike() -> None:
    weights = Read(WEIGHTS)
    with Runtime(INF2) as runtime:
        model = runtime.load([stored(perceptron(batch)) for batch in (2, 5, 9)], weights)
        assert weights.times == {"up": 1, "down": 1}
        for rows in (2, 4, 8):
            np.testing.assert_allclose(model.execute({"x": np.ones((rows, 24), np.float32)})["y"], 40.0)


def test_each_rank_has_its_own_piece_on_the_shelf() -> None:
    shelf: SharedWeights = {}
    for _ in range(2):
        Isa(gathering()).load({"w": np.arange(12, dtype=np.float32).reshape(4, 3)}, shelf)
    ((first, second),) = shelf.values()
    assert not np.shares_memory(first.cells, second.cells)


@given(st.data())
def test_states_are_found_whatever_layout_a_program_wants_them_in(data: st.DataObject) -> None:
    """Beside plain arrays: programs that read all, write some, and keep them together or apart, their axes turned."""
    resident, plain = Resident(TYPES), {name: np.zeros((3, 2), np.float32) for name in NAMES}
    for turn in range(1, data.draw(st.integers(1, 6)) + 1):
        buffers = data.draw(st.sampled_from(((), *LAYOUTS)))
        changed = data.draw(st.sampled_from([name for buffer in buffers for name in buffer.names] or NAMES))
        plain[changed] = turn + np.arange(6, dtype=np.float32).reshape(3, 2)
        if not buffers:
            resident.take({changed: plain[changed]})
        for buffer in buffers:
            storage = resident.storage(buffer)
            assert storage is resident.storage(buffer)
            for index, name in enumerate(buffer.names):
                if name == changed:
                    put(storage, buffer, index, plain[changed])
                np.testing.assert_array_equal(get(storage, buffer, index), plain[name])
        for name in NAMES:
            np.testing.assert_array_equal(resident[name], plain[name])


def _together(*groups: tuple[str, ...], order: tuple[int, ...] = ()) -> tuple[Buffer, ...]:
    shape = (2, 3) if order else (3, 2)
    return tuple(Buffer(Role.STATE, names, DType.FLOAT32, shape, order, 64 * turn) for turn, names in enumerate(groups))


LAYOUTS = (
    _together(NAMES),
    _together(("a", "c"), ("b",)),
    _together(("b", "a")),
    _together(("a",), ("b",), ("c",), order=(1, 0)),
)


def test_a_state_is_worked_on_where_it_is() -> None:
    """After the first request none of it is copied to the core or from it."""
    with Runtime(INF2) as runtime:
        model = runtime.load([stored(running_sum(300))], {})
        states = model.allocate()
        x = np.ones(300, np.float32)
        model.execute({"x": x}, states)
        (before,) = _storages(states.ranks[0])
        for turn in (2, 3):
            np.testing.assert_array_equal(model.execute({"x": x}, states)["y"], turn * x)
        (after,) = _storages(states.ranks[0])
        assert after is before
        np.testing.assert_array_equal(states.ranks[0]["total"], 3 * x)


def test_a_program_that_goes_wrong_leaves_states_that_nobody_may_use() -> None:
    """What was refused before it ran leaves them as they were."""
    racing = copying(waits=False)
    source, target = racing.program.buffers
    program = replace(racing.program, buffers=(source, replace(target, role=Role.STATE)))
    ports = tuple(replace(port, role=Role.STATE) if port.name == "y" else port for port in racing.ports)
    with Runtime(INF2) as runtime:
        model = runtime.load([Isa(Executable(program, ports))], {})
        before, states = model.left, model.allocate()
        with pytest.raises(BadInput):
            model.execute({"x": np.ones((4, 8), np.int64)}, states)
        with pytest.raises(ExecutionFailed):
            model.execute({"x": np.ones((4, 8), np.float32)}, states)
        assert model.left == before
        with pytest.raises(Unloaded):
            model.execute({"x": np.ones((4, 8), np.float32)}, states)


def _storages(resident: Resident) -> Iterator[Storage]:
    return iter(resident._storages.values())
