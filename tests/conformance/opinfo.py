"""PyTorch's operator database as a judge: its samples, traced, imported, emulated and compared with PyTorch."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nxpipe.emulator.capture.aten.base import _IMPORTERS
from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.errors import CaptureError, UnsupportedOperators
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)

# PyTorch's own relative tolerances (float16: two units in the last place instead of one), of the largest magnitude in
# a tensor: where PyTorch keeps an operator whole and we compute in steps, small results inherit errors of large ones.
_TOLERANCE = {torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
_ABSOLUTE = 1e-5

# Types of the graph; the hardware cannot hold results of other types.
_HELD = {getattr(torch, dtype.value) for dtype in DType if hasattr(torch, dtype.value)}
_NO_TYPE = "the hardware has no such element type"

_POSITIONS = {"argsort", "sort", "topk"}
# Operators with unspecified contents, in PyTorch too: only their types can be compared.
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "new_empty"}


@dataclass
class Verdict:
    """The results of one operator's samples."""

    passed: int = 0
    wider: int = 0  # passed samples that agree with PyTorch in float64 but not in their own type
    unsupported: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)  # number of passed samples by operator of the graph


@cache
def operators() -> dict[str, Any]:
    """The entries of the database whose operator the compiler imports, by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    ours = {name.partition(".")[0] for name in _IMPORTERS}
    return {
        f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name: entry
        for entry in op_db
        if {entry.aten_name, entry.name.rpartition(".")[2]} & ours
    }


def judge(entry: Any, dtype: torch.dtype, most: int | None, verdict: Verdict) -> None:
    """Run up to `most` samples of one type, and record each result."""
    if dtype not in entry.supported_dtypes("cpu"):
        return
    torch.manual_seed(0)
    with _quiet():
        for number, sample in enumerate(islice(entry.sample_inputs("cpu", dtype), most)):
            try:
                used, wider = _judge_sample(entry, sample)
            except (CaptureError, UnsupportedOperators) as reason:
                verdict.unsupported[_short(reason)] += 1
            except _PyTorchRefuses:
                continue
            except Exception as fault:
                verdict.failed.append(f"{dtype} sample {number}: {type(fault).__name__}: {str(fault)[:300]}")
            else:
                verdict.passed += 1
                verdict.wider += wider
                verdict.used.update(used)


def judged(most: int | None, workers: int | None = None) -> Iterator[tuple[str, Verdict]]:
    """All operators and types, run by several processes; yields each operator as soon as it is done."""
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        waiting = {pool.submit(_judged, name, most) for name in operators()}
        for done in as_completed(waiting):
            yield done.result()


def _judged(name: str, most: int | None) -> tuple[str, Verdict]:
    verdict = Verdict()
    for dtype in DTYPES:
        judge(operators()[name], dtype, most, verdict)
    return name, verdict


class _PyTorchRefuses(Exception):
    """PyTorch itself does not run this sample."""


def _judge_sample(entry: Any, sample: Any) -> tuple[set[str], bool]:
    """The graph's operators, and whether only PyTorch in float64 agrees."""
    call = (sample.input, sample.args, sample.kwargs)
    leaves, spec = pytree.tree_flatten(call)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = {f"x{place}": leaves[place].detach().clone() for place in places}
    module = _Call(entry.op, leaves, spec, places)
    try:
        with torch.no_grad():
            expected = module(**{name: tensor.clone() for name, tensor in tensors.items()})
    except Exception as refusal:
        raise _PyTorchRefuses from refusal
    foreign = {leaf.dtype for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)} - _HELD
    if foreign:
        raise CaptureError(f"the result is {', '.join(sorted(map(_name, foreign)))}: {_NO_TYPE}")
    graph = run_passes(capture_module(module, tensors), PassOptions())
    found = execute(graph, {}, {name: _numpy(tensor) for name, tensor in tensors.items() if name in graph.inputs})
    wanted = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    assert len(found) == len(wanted), f"{len(found)} results, where PyTorch has {len(wanted)}"
    pairs = []
    for (name, array), theirs in zip(found.items(), wanted, strict=True):
        assert graph.outputs[name].type.dtype == _name(theirs.dtype), "another element type"
        ours = torch.from_numpy(array).to(theirs.dtype)
        assert ours.shape == theirs.shape
        if entry.name not in _UNINITIALISED and not _is_another_order(entry, leaves[0], ours, theirs):
            pairs.append((ours, theirs))
    wider = False
    try:
        for ours, theirs in pairs:
            _agree(ours, theirs)
    except AssertionError:
        if len(pairs) < len(wanted) or not _agrees_with_wider(pairs, module, tensors):
            raise
        wider = True
    return {node.op.name for node in graph.nodes}, wider


def _agrees_with_wider(pairs: list[tuple[Any, Any]], module: Any, tensors: dict[str, Any]) -> bool:
    """Whether the result agrees with PyTorch in float64, within the tolerance of the narrow type."""
    wider = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            exact = [leaf for leaf in pytree.tree_leaves(module(**wider)) if isinstance(leaf, torch.Tensor)]
    except Exception:  # PyTorch has this operator in narrow types only
        return False
    try:
        for (ours, theirs), true in zip(pairs, exact, strict=True):
            _agree(ours, true.to(theirs.dtype))
    except AssertionError:
        return False
    return True


def _agree(ours: Any, theirs: Any) -> None:
    tolerance = _TOLERANCE.get(theirs.dtype)
    if tolerance is None or not theirs.numel():
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        return
    largest = theirs.float().nan_to_num(posinf=0, neginf=0).abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=_ABSOLUTE + tolerance * largest, equal_nan=True)


def _is_another_order(entry: Any, given: Any, ours: Any, theirs: Any) -> bool:
    """Whether positions from a sort differ only among equal elements, whose order is unspecified."""
    if entry.name not in _POSITIONS or theirs.dtype is not torch.int64 or ours.ndim != given.ndim:
        return False
    axes = range(given.ndim)
    return any(
        torch.equal(given.gather(axis, ours), given.gather(axis, theirs)) for axis in axes if _fits(given, ours, axis)
    )


def _fits(given: Any, positions: Any, axis: int) -> bool:
    others = all(positions.shape[other] <= given.shape[other] for other in range(given.ndim) if other != axis)
    return others and bool(((positions >= 0) & (positions < given.shape[axis])).all())


class _Call(torch.nn.Module):
    """A call of an operator as a module whose inputs are the tensors among the arguments."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], spec: Any, places: list[int]) -> None:
        super().__init__()
        self._function, self._spec, self._places = function, spec, places
        self._leaves = [None if place in places else leaf for place, leaf in enumerate(leaves)]

    def forward(self, **tensors: Any) -> Any:
        leaves = list(self._leaves)
        for place in self._places:
            leaves[place] = tensors[f"x{place}"]
        given, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._function(given, *args, **kwargs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numpy(tensor: Any) -> Array:
    exact = tensor.float() if tensor.is_floating_point() else tensor
    return np.asarray(exact.numpy())


def _short(reason: Exception) -> str:
    if isinstance(reason, UnsupportedOperators):
        first = reason.findings[0]
        return f"{first.operator}: {first.advice}"
    return str(reason).split("\n")[0][:160]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
