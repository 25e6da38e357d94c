"""Branches and loops of ONNX: what is known now is taken and written out; nothing is decided at run time."""

from collections.abc import Callable, Sequence
from typing import Any

from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in
from nxpipe.emulator.capture.onnx.limits import LOOP_TURNS
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Concat

# Runs the body that an attribute holds on the values of its inputs, and gives those of its outputs.
Body = Callable[[Any, Sequence[Value]], list[Value]]


def branch(site: OnnxSite, run: Body, condition: Value) -> list[Value]:
    table = site.builder.table_of(condition)
    if table is None:
        raise NotExpressible("it decides by a tensor's value, which a compiled program cannot; use Where")
    return run(site.attribute("then_branch" if table.reshape(-1)[0] else "else_branch"), ())


def loop(site: OnnxSite, run: Body, trips: Value | None, condition: Value | None, *carried: Value) -> list[Value]:
    """As many iterations as the trip count says, or as the condition stays true, written out one after the other."""
    body = site.attribute("body")
    limit = None if trips is None else int(site.table("trip count", trips).item())
    goes_on = condition if condition is not None else site.builder.scalar(True)
    state, collected, count = list(carried), list[list[Value]](), 0
    while site.table("condition", goes_on).item() and (limit is None or count < limit):
        if count >= LOOP_TURNS:
            raise NotExpressible(f"it runs more than {LOOP_TURNS:,} times; use an operator on whole tensors")
        goes_on, *results = run(body, (site.builder.scalar(count, DType.INT64), goes_on, *state))
        state, found = results[: len(carried)], results[len(carried) :]
        collected.append(found)
        count += 1
    return [*state, *_stacked(site, collected, [0] * (len(body.output) - 1 - len(carried)), [0] * len(body.output))]


def scan(site: OnnxSite, run: Body, *operands: Value) -> list[Value]:
    """Steps along an axis, written out; what each step yields is put together again."""
    if site.opset < 9:
        raise NotExpressible("before operator set 9 it scans batches of different lengths; export for a newer one")
    body, scanned = site.attribute("body"), site.attribute("num_scan_inputs")
    if not 1 <= scanned <= len(operands):
        raise NotExpressible(f"it scans {scanned} of its {len(operands)} operands")
    state, inputs = list(operands[:-scanned]), operands[-scanned:]
    yields = len(body.output) - len(state)
    given = site.attribute("scan_input_axes", [0] * scanned)
    axes = [axis_in(axis, x.type.rank) for axis, x in zip(given, inputs, strict=True)]
    backwards = site.attribute("scan_input_directions", [0] * scanned)
    length, states = inputs[0].type.shape[axes[0]], len(state)
    collected: list[list[Value]] = []
    for step in range(length):
        now = [
            _step(site, x, axis, length - 1 - step if back else step)
            for x, axis, back in zip(inputs, axes, backwards, strict=True)
        ]
        results = run(body, (*state, *now))
        state = results[:states]
        collected.append(results[states:])
    into = site.attribute("scan_output_axes", [0] * yields)
    return [*state, *_stacked(site, collected, into, site.attribute("scan_output_directions", [0] * yields))]


def _step(site: OnnxSite, x: Value, axis: int, place: int) -> Value:
    shape = x.type.shape
    return site.reshape(site.slice(x, axis, place, place + 1), (*shape[:axis], *shape[axis + 1 :]))


def _stacked(
    site: OnnxSite, collected: Sequence[Sequence[Value]], axes: Sequence[int], backwards: Sequence[int]
) -> list[Value]:
    if axes and not collected:
        raise NotExpressible("it runs not even once, and so nobody knows the shape of what it would have put together")
    results = []
    for parts, wanted, back in zip(zip(*collected, strict=True), axes, backwards, strict=False):
        shape = parts[0].type.shape
        axis = axis_in(wanted, len(shape) + 1)
        rows = [site.reshape(part, (*shape[:axis], 1, *shape[axis:])) for part in parts]
        results.append(site.emit(Concat(axis), *(rows[::-1] if back else rows)))
    return results


CONTROL: dict[str, Callable[..., list[Value]]] = {"If": branch, "Loop": loop, "Scan": scan}
