"""Charts of a profile as inline SVG: activity of the engines over time, roofline, memory over time."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from nxpipe.pipeline.util.page.charts import (
    Marker,
    Roof,
    Scale,
    drawing,
    figure,
    nice,
    part,
    plot,
    resource_class,
    scrolling,
)
from nxpipe.pipeline.util.page.html import Markup, tag
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.emulator.analysis.memory_use import Usage
    from nxpipe.emulator.analysis.profile import Profile
    from nxpipe.emulator.isa.instruction import Engine

_PS_OF_MS: Final = 1e9
_BINS: Final = 160
_LEVELS: Final = 5
_ROW: Final = 20
_AXIS: Final = 22
_POINTS: Final = 400


def time_text(ps: float) -> str:
    """4.91 ms, 12.3 us."""
    if ps >= _PS_OF_MS:
        return f"{ps / _PS_OF_MS:,.2f} ms"
    return f"{ps / 1e6:,.1f} us" if ps >= 1e6 else f"{ps / 1e3:,.0f} ns"


def activity(profile: "Profile") -> Markup:
    """A row for each engine and queue; the stronger the colour, the busier."""
    engines, total = list(profile.trace.by_engine), profile.latency_ps
    height = _ROW * len(engines) + _AXIS
    names = [tag("text", engine.value, x=0, y=row * _ROW + 13) for row, engine in enumerate(engines)]
    rows = [_activity_row(profile, engine, row * _ROW) for row, engine in enumerate(engines)]
    repeated = [
        tag("rect", x=part(begin, total), width=part(end - begin, total), height=height - _AXIS, class_="repeat")
        for begin, end in _repeated(profile)
    ]
    description = "Busy share of each engine over the program's time; the table below has the totals."
    bars = drawing("Engines over time", description, repeated, rows, list(_time_axis(total, height)), height=height,
                   class_="bars")  # fmt: skip
    caption = tag("figcaption", "The stronger the colour, the busier. Grey behind it: iterations that repeat.")
    labels = tag("svg", names, class_="names", width=84, height=height, aria_hidden="true")
    return scrolling("Engines over time", labels, bars, caption, class_="timeline activity")


def _repeated(profile: "Profile") -> list[tuple[int, int]]:
    trace = profile.trace
    return [(trace.real(at), trace.real(at, after=True)) for at in trace.cuts]


def _activity_row(profile: "Profile", engine: "Engine", y: int) -> list[Markup]:
    levels = np.ceil(np.clip(_busy_shares(profile, engine), 0, 1) * _LEVELS - 1e-6).astype(int).tolist()
    cells, first = [], 0
    for position in range(1, _BINS + 1):
        if position == _BINS or levels[position] != levels[first]:
            if levels[first]:
                shade, drawn = levels[first] / _LEVELS, resource_class(engine.value)
                cells.append(tag("rect", x=part(first, _BINS), width=part(position - first, _BINS), y=y,
                                 height=_ROW - 4, fill_opacity=shade, class_=drawn))  # fmt: skip
            first = position
    return cells


def _busy_shares(profile: "Profile", engine: "Engine") -> "np.ndarray":
    """The busy share of an engine in each of equal parts of the program's time; while a period repeats, the share in
    the period."""
    trace, bins = profile.trace, np.zeros(_BINS)
    width = max(profile.latency_ps / _BINS, 1)

    def add(begin: float, end: float, share: float) -> None:
        edges = np.arange(int(begin // width), min(int(end // width), _BINS - 1) + 1)
        overlap = np.minimum((edges + 1) * width, end) - np.maximum(edges * width, begin)
        np.add.at(bins, edges, np.maximum(overlap, 0) * share / width)

    events = [trace.events[number] for number in trace.by_engine[engine]]
    for event in events:
        begin = trace.real(event.begin, after=True)
        add(begin, begin + event.end - event.begin, 1.0)
    for repetition in trace.repetitions:
        since, at = repetition.since, repetition.at
        busy = sum(max(min(event.end, at) - max(event.begin, since), 0) for event in events)
        add(repetition.real, repetition.real + repetition.elapsed, busy / (at - since))
    return bins


def _time_axis(total: int, height: int) -> Iterable[Markup]:
    total = max(total, 1)
    step = nice(total / _PS_OF_MS / 3)
    for number in range(int(total / _PS_OF_MS / step) + 1):
        share = number * step * _PS_OF_MS / total
        x = f"{100 * share:.3f}%"
        yield tag("line", x1=x, x2=x, y1=0, y2=height - _AXIS + 4)
        yield tag("text", f"{number * step:g} ms", x=x, y=height - 4, text_anchor="end" if share > 0.9 else None)


def roofline(profile: "Profile", points: Sequence[tuple[str, float, float]]) -> Markup:
    """Points (label, operations per byte of HBM, operations per ns) below the roofs, with logarithmic axes."""
    flops, hbm = profile.rates["flops"], profile.rates["hbm"]
    ridge = flops / hbm
    x = Scale.over([ridge / 10, ridge * 10, *(intensity for _, intensity, _ in points)],
                  "operations per byte of HBM", log=True, shown=lambda value: f"{value:g}")  # fmt: skip
    y = Scale.over([flops, hbm * x.low, *(rate for *_, rate in points)], "operations per second", log=True,
                  shown=_rate)  # fmt: skip
    roofs = [
        Roof(((x.low, hbm * x.low), (ridge, flops)), f"HBM {hbm:.0f} GB/s", "start"),
        Roof(((ridge, flops), (x.high, flops)), f"{flops / 1e3:.0f} TFLOP/s, 16 bits"),
    ]
    marks = [
        Marker(intensity, rate, str(number) if number else "P",
              f"{label}: {intensity:,.1f} operations per byte, {rate / 1e3:.2f} TFLOP/s", best=not number)
        for number, (label, intensity, rate) in reversed(list(enumerate(points)))
    ]  # fmt: skip
    return plot("Roofline", "", x, y, points=marks, roofs=roofs)


def _rate(per_ns: float) -> str:
    """1 TFLOP/s is 1,000 operations per ns."""
    return f"{per_ns / 1e3:g} T" if per_ns >= 1e3 else f"{per_ns:g} G"


def memory_chart(profile: "Profile", name: str, usage: "Usage") -> Markup:
    """The bytes in use over the program's time, as steps."""
    points, total = usage.points(profile.trace, _POINTS) or [(0, usage.peak)], max(profile.latency_ps, 1)
    top = max(usage.capacity or usage.peak, 1)
    ends = [at for at, _ in points[1:]] + [total]
    corners = "".join(
        f" {1000 * at / total:.2f},{100 - 100 * nbytes / top:.2f}"
        for (begin, nbytes), end in zip(points, ends, strict=True)
        for at in (begin, end)
    )
    of = f" of {human_bytes(usage.capacity)}" if usage.capacity else ""
    description = f"{name.upper()}: at most {human_bytes(usage.peak)}{of} in use"
    shape = tag("polygon", points=f"0,100{corners} 1000,100")
    area = tag("svg", shape, viewBox="0 0 1000 100", preserveAspectRatio="none", width="100%", height=70)
    return figure(description, drawing(description, "Bytes in use over the program's time.", area, height=70,
                                       class_="memory"))  # fmt: skip
