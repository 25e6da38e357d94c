"""The runtime refuses with the statuses of the real one, and returns the outputs of the programs."""

import re
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier, Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.analysis.graph_memory import capacity, code_bytes
from nxpipe.emulator.hardware import INSTANCES, instance
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import Runnable, States, execute
from nxpipe.emulator.run.isa import SharedWeights
from nxpipe.emulator.run.model import Fast, Model
from nxpipe.emulator.run.runtime import Cores, Runtime
from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    CoresUnavailable,
    DeviceMemoryExhausted,
    InvalidLoad,
    LookupOutOfBounds,
    RequestTooLong,
    RuntimeClosed,
    RuntimeFault,
    Unloaded,
    WrongGeneration,
)
from tests.emulator.models import relative_error
from tests.runtime.models import TABLE, divided_product, llama, lookup, running_sum

INF2 = instance("inf2.xlarge")  # two cores
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "runtime.md").read_text()
BUCKETS = ((1, 4), (1, 8), (3, 8))


def ids(*shape: int) -> Array:
    return np.arange(np.prod(shape)).reshape(shape) % len(TABLE)


def lookups(runtime: Runtime) -> Model:
    return runtime.load([lookup(*bucket) for bucket in BUCKETS], {"table": TABLE})


# Loading


def test_a_core_belongs_to_one_model_at_a_time() -> None:
    with Runtime(INF2) as runtime:
        one, other = lookups(runtime), lookups(runtime)
        assert (one.cores, other.cores) == (range(1), range(1, 2))
        with pytest.raises(CoresUnavailable, match=r"0 of the 2 of inf2\.xlarge are free"):
            lookups(runtime)
        one.unload()
        assert lookups(runtime).cores == range(1)


def test_a_model_may_ask_for_its_cores() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([lookup(1, 4)], {"table": TABLE}, start=1)
        assert model.cores == range(1, 2)
        with pytest.raises(CoresUnavailable, match="NeuronCores 1 to 1"):
            runtime.load([lookup(1, 4)], {"table": TABLE}, start=1)
        with pytest.raises(CoresUnavailable):
            runtime.load([lookup(1, 4)], {"table": TABLE}, start=2)


def test_what_cannot_be_loaded_takes_no_core() -> None:
    with Runtime(INF2) as runtime:
        for _ in range(3):
            with pytest.raises(InvalidLoad, match="'table' is missing"):
                runtime.load([lookup(1, 4)], {})
        with pytest.raises(InvalidLoad, match=r"ranks \[1, 2\]|\[1, 2\] ranks"):
            runtime.load([lookup(1, 4), divided_product()], {"table": TABLE})
        with pytest.raises(InvalidLoad, match="no ranks"):
            runtime.load([], {})
        assert lookups(runtime).cores == range(1)


@given(st.sampled_from(sorted(INSTANCES)), st.lists(st.integers(1, 9), max_size=8))
def test_cores_are_never_shared_and_all_come_back(name: str, sizes: list[int]) -> None:
    cores = Cores(instance(name))
    every = instance(name).logical_cores
    had: list[range] = []
    for size in sizes:
        try:
            had.append(cores.take(size))
        except CoresUnavailable:
            continue
    taken = [core for group in had for core in group]
    assert len(set(taken)) == len(taken) == every - cores.free
    assert all(0 <= core < every for core in taken)
    if instance(name).compiler_target == "trn1":
        assert all(group.start % len(group) == 0 for group in had)
    for group in had:
        cores.give_back(group)
    assert cores.free == every


def test_ranks_of_trn1_begin_at_a_multiple_of_their_number() -> None:
    cores = Cores(instance("trn1.32xlarge"))
    assert (cores.take(1), cores.take(2), cores.take(8)) == (range(1), range(2, 4), range(8, 16))
    with pytest.raises(CoresUnavailable, match="begin at a multiple of 2"):
        cores.take(2, start=5)


class Large(Fast):
    """A program whose weights would fill a core."""

    @property
    def weights(self) -> Mapping[str, int]:
        return {"table": capacity(INF2) - code_bytes(INF2)}


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    code = lookup(1, 4)
    with Runtime(INF2) as runtime:
        room = f"{capacity(INF2) - code_bytes(INF2):,}"
        with pytest.raises(DeviceMemoryExhausted, match=rf"which have {room} \(table with {room}, and scratch with "):
            runtime.load([Large(code.program, code.ports)], {"table": TABLE})
        assert lookups(runtime).cores == range(1)


def test_weights_count_once_however_many_programs_read_them() -> None:
    with Runtime(INF2) as runtime:
        one = runtime.load([lookup(1, 8)], {"table": TABLE})
        several = runtime.load([lookup(1, 4), lookup(1, 8), lookup(1, 2)], {"table": TABLE})
        assert one.left == several.left < capacity(INF2) - code_bytes(INF2) - TABLE.nbytes


def test_states_take_memory_until_they_are_freed() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([running_sum(4)], {})
        before = model.left
        states = model.allocate()
        assert model.left == before - 16
        model.free(states)
        assert model.left == before
        with pytest.raises(Unloaded):
            model.execute({"x": np.ones(4, np.float32)}, states)


def test_states_that_do_not_fit_are_refused() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([running_sum(4)], {})
        model.left = 20
        model.allocate()
        with pytest.raises(DeviceMemoryExhausted, match="states take 16 bytes on each core, and 4 are left"):
            model.allocate()


def test_programs_must_agree_on_a_state() -> None:
    with Runtime(INF2) as runtime, pytest.raises(InvalidLoad, match="state 'total'"):
        runtime.load([running_sum(4), running_sum(5)], {})


class OfV3(Fast):
    @property
    def core(self) -> str:  # type: ignore[override]
        return "v3"


def test_a_program_for_another_generation_is_refused() -> None:
    code = lookup(1, 4)
    with Runtime(INF2) as runtime, pytest.raises(WrongGeneration, match=r"for NeuronCore-v3, and inf2\.xlarge has"):
        runtime.load([OfV3(code.program, code.ports)], {"table": TABLE})


def test_a_closed_runtime_and_an_unloaded_model_do_nothing_more() -> None:
    with Runtime(INF2) as runtime:
        model = lookups(runtime)
    with pytest.raises(RuntimeClosed):
        lookups(runtime)
    with pytest.raises(Unloaded):
        model.execute({"ids": ids(1, 4)})
    with pytest.raises(Unloaded):
        model.allocate()
    model.unload()  # again, for nothing


# Requests


@given(st.integers(1, 3), st.integers(1, 8))
def test_a_request_of_any_size_is_answered_as_by_a_program_of_its_size(batch: int, sequence: int) -> None:
    with Runtime(INF2) as runtime:
        request = {"ids": ids(batch, sequence)}
        answer = lookups(runtime).execute(request)
    own = execute(lookup(batch, sequence).program.graph, {"table": TABLE}, request)
    np.testing.assert_array_equal(answer["y"], own["y"])


class Watched:
    """A program that records its runs."""

    def __init__(self, inner: Fast, ran: list[Fast]) -> None:
        self._inner, self._ran = inner, ran

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> Runnable:
        loaded = self._inner.load(weights, shared_weights)
        watched = self

        class Watching:
            def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
                watched._ran.append(watched._inner)
                return loaded.run(inputs, states)

        return Watching()


@pytest.mark.parametrize(
    ("batch", "sequence", "bucket"),
    [(1, 1, (1, 4)), (1, 4, (1, 4)), (1, 5, (1, 8)), (2, 2, (3, 8)), (3, 8, (3, 8))],
)
def test_the_smallest_program_that_fits_is_taken(batch: int, sequence: int, bucket: tuple[int, int]) -> None:
    ran: list[Fast] = []
    codes = [Watched(lookup(*entry), ran) for entry in reversed(BUCKETS)]
    with Runtime(INF2) as runtime:
        runtime.load(codes, {"table": TABLE}).execute({"ids": ids(batch, sequence)})  # type: ignore[arg-type]
    assert ran[0].ports[0].type.shape == bucket


@pytest.mark.parametrize(("shape", "says"), [((1, 9), "a sequence of 9"), ((4, 2), "a batch of 4")])
def test_a_request_longer_than_the_longest_bucket_is_refused_never_cut(shape: tuple[int, int], says: str) -> None:
    with Runtime(INF2) as runtime, pytest.raises(RequestTooLong, match=f"{says}, and the model's largest"):
        lookups(runtime).execute({"ids": ids(*shape)})


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"ids": ids(4)}, "1 axes"),
        ({"ids": ids(1, 0)}, "at least 1"),
        ({"tokens": ids(1, 4)}, "no program takes tokens"),
        ({}, "no program takes nothing"),
        ({"ids": ids(1, 4), "more": ids(1, 4)}, "no program takes ids, more"),
        ({"ids": ids(1, 4).astype(np.float32)}, "declares i64"),
    ],
)
def test_a_request_that_no_program_takes_is_refused(request_: Mapping[str, Array], says: str) -> None:
    with Runtime(INF2) as runtime, pytest.raises(BadInput, match=says):
        lookups(runtime).execute(request_)


def test_a_fixed_axis_must_be_full() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([running_sum(4)], {})
        states = model.allocate()
        with pytest.raises(BadInput, match="3 long on axis 0, where the program has 4"):
            model.execute({"x": np.ones(3, np.float32)}, states)


def test_a_lookup_behind_its_table_is_out_of_bounds() -> None:
    with Runtime(INF2) as runtime, pytest.raises(LookupOutOfBounds, match="index 6"):
        lookups(runtime).execute({"ids": np.array([[6]])})


def test_a_core_runs_one_request_at_a_time() -> None:
    inside, leave = Event(), Event()

    class Slow(Fast):
        def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> Runnable:
            loaded = super().load(weights, shared_weights)

            class Waiting:
                def run(
                    self, inputs: Mapping[str, Array], states: States | None = None
                ) -> tuple[dict[str, Array], States]:
                    inside.set()
                    assert leave.wait(60)
                    return loaded.run(inputs, states)

            return Waiting()

    code = lookup(1, 4)
    with Runtime(INF2) as runtime:
        model = runtime.load([Slow(code.program, code.ports)], {"table": TABLE})
        first = Thread(target=model.execute, args=[{"ids": ids(1, 4)}])
        first.start()
        assert inside.wait(60)
        with pytest.raises(CoreBusy, match="NeuronCores 0 to 0"):
            model.execute({"ids": ids(1, 4)})
        leave.set()
        first.join()
        model.execute({"ids": ids(1, 4)})


# States


def test_states_begin_at_zero_and_stay_between_requests() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([running_sum(3)], {})
        one, other = model.allocate(), model.allocate()
        for turn in range(1, 4):
            answer = model.execute({"x": np.ones(3, np.float32)}, one)
            np.testing.assert_array_equal(answer["y"], np.full(3, turn))
            assert list(answer) == ["y"]
        np.testing.assert_array_equal(model.execute({"x": np.ones(3, np.float32)}, other)["y"], np.ones(3))
        with pytest.raises(BadInput, match="without states"):
            model.execute({"x": np.ones(3, np.float32)})


def test_states_of_another_model_are_refused() -> None:
    with Runtime(INF2) as runtime:
        one, other = runtime.load([running_sum(3)], {}), runtime.load([running_sum(3)], {})
        with pytest.raises(Unloaded, match="another model"):
            one.execute({"x": np.ones(3, np.float32)}, other.allocate())


@pytest.mark.parametrize("degree", [1, 2])
def test_a_decode_goes_on_with_what_the_smallest_prefill_filled(degree: int) -> None:
    """A prompt of three tokens in the bucket of four, and the same in that of ten, are one conversation."""
    codes, weights = llama(degree)
    prompt = {"input_ids": np.array([[5, 6, 7], [8, 9, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    result = []
    for loaded in (codes, codes[1:]):
        with Runtime(INF2) as runtime:
            model = runtime.load(loaded, weights)
            states = model.allocate()
            assert len(model.cores) == len(states.ranks) == degree
            answers = [model.execute(prompt, states)["logits"]]
            position = np.array([3, 2])
            for _ in range(3):
                token = answers[-1].argmax(-1)
                answers.append(model.execute({"input_ids": token, "position": position}, states)["logits"])
                position += 1
            result.append(np.stack(answers))
    assert relative_error(result[0], result[1]) < 1e-5


def test_ranks_together_answer_as_one() -> None:
    x, w = np.arange(24, dtype=np.float32).reshape(3, 8), np.arange(40, dtype=np.float32).reshape(5, 8)
    with Runtime(INF2) as runtime:
        model = runtime.load([divided_product()], {"w": w})
        assert model.cores == range(2)
        np.testing.assert_array_equal(model.execute({"x": x})["y"], x @ w.T)


# Copies


def test_copies_take_all_cores_and_answer_in_the_order_of_requests() -> None:
    with Runtime(INF2) as runtime:
        copies = runtime.replicate([lookup(1, 4)], {"table": TABLE})
        assert [model.cores for model in copies.models] == [range(1), range(1, 2)]
        requests = [{"ids": np.array([[number % 6, 0]])} for number in range(20)]
        for request, answer in zip(requests, copies.execute(requests), strict=True):
            np.testing.assert_array_equal(answer["y"], np.tanh(TABLE[request["ids"]]))
        copies.unload()
        assert lookups(runtime).cores == range(1)


def test_copies_run_beside_each_other() -> None:
    meeting = Barrier(2)

    class Meeting(Fast):
        def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> Runnable:
            loaded = super().load(weights, shared_weights)

            class Waiting:
                def run(
                    self, inputs: Mapping[str, Array], states: States | None = None
                ) -> tuple[dict[str, Array], States]:
                    meeting.wait(60)
                    return loaded.run(inputs, states)

            return Waiting()

    code = lookup(1, 4)
    with Runtime(INF2) as runtime:
        copies = runtime.replicate([Meeting(code.program, code.ports)], {"table": TABLE})
        assert len(copies.execute([{"ids": ids(1, 4)}] * 4)) == 4


def test_fewer_cores_than_copies_is_refused_and_leaves_nothing() -> None:
    with Runtime(INF2) as runtime:
        with pytest.raises(CoresUnavailable):
            runtime.replicate([lookup(1, 4)], {"table": TABLE}, copies=3)
        assert lookups(runtime).cores == range(1)
        with pytest.raises(CoresUnavailable):
            runtime.replicate([divided_product()], {"w": np.ones((5, 8), np.float32)})


# The page


def test_every_refusal_has_the_status_that_the_page_says() -> None:
    rows = re.findall(r"^\| (NRT_\w+) \| (\d+) \| `(\w+)` \|", PAGE, re.M)
    kinds = RuntimeFault.__subclasses__()
    kinds += [kind for parent in kinds for kind in parent.__subclasses__()]
    kinds = [kind for kind in kinds if kind.__module__ == RuntimeFault.__module__]  # devices have a page of their own
    assert {(kind.__name__, kind.status.name, kind.status.value) for kind in kinds} == {
        (kind, name, int(number)) for name, number, kind in rows
    }
    assert rows
