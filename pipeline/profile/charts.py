"""Charts of a profile as inline SVG: shares, activity of the engines over time, roofline, memory over time.

Positions across are in percent, so that a chart fits any width and its text keeps its size. Colours are classes of the
shared style sheet. Every chart has a title; the figures are also in a table or a caption.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from nxpipe.pipeline.build.report.html import Markup, tag
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
_ROOFLINE: Final = 230  # pixels
_POINTS: Final = 400


def time_text(ps: float) -> str:
    """4.91 ms, 12.3 us."""
    if ps >= _PS_OF_MS:
        return f"{ps / _PS_OF_MS:,.2f} ms"
    return f"{ps / 1e6:,.1f} us" if ps >= 1e6 else f"{ps / 1e3:,.0f} ns"


def resource_class(resource: str) -> str:
    return f"r-{resource.replace(' ', '-')}" if not resource[-1:].isdigit() else "r-dma"


def shares_bar(shares: Mapping[str, int], total: int, height: int = 10, label: str = "critical path") -> Markup:
    """A bar with a part for each resource, as wide as its share of the total."""
    begun, parts = 0, []
    for resource, ps in sorted(shares.items(), key=lambda item: (-item[1], item[0])):
        parts.append(_rect(begun, ps, total, 0, height, class_=resource_class(resource)))
        begun += ps
    figures = (f"{resource} {ps / max(total, 1):.0%}" for resource, ps in shares.items() if ps)
    described = f"{label}: {', '.join(figures)}"
    return tag("svg", tag("title", described), parts, class_="shares", height=height, role="img", aria_label=described)


def _rect(begin: float, width: float, total: float, y: float, height: int, **attributes: str | float) -> Markup:
    """A rectangle whose begin and width are shares of a total."""
    return tag("rect", x=_percent(begin, total), width=_percent(width, total), y=y, height=height, **attributes)


def activity(profile: "Profile") -> Markup:
    """A row for each engine and queue; the stronger the colour, the busier."""
    engines, total = list(profile.trace.by_engine), profile.latency_ps
    height = _ROW * len(engines) + _AXIS
    names = [tag("text", engine.value, x=0, y=row * _ROW + 13) for row, engine in enumerate(engines)]
    rows = [_activity_row(profile, engine, row * _ROW) for row, engine in enumerate(engines)]
    repeated = [
        _rect(begin, end - begin, total, 0, height - _AXIS, class_="repeat") for begin, end in _repeated(profile)
    ]
    description = "busy share of each engine over the program's time"
    drawn = (tag("title", description), repeated, rows, list(_time_axis(total, height)))
    bars = tag("svg", drawn, class_="bars", height=height, role="img", aria_label=description)
    caption = tag("figcaption", "The stronger the colour, the busier. Grey behind it: iterations that repeat.")
    labels = tag("svg", names, class_="names", width=84, height=height, aria_hidden="true")
    return tag("figure", labels, bars, caption, class_="timeline activity")


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
                cells.append(_rect(first, position - first, _BINS, y, _ROW - 4, fill_opacity=shade, class_=drawn))
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
    step = _nice(total / _PS_OF_MS / 4)
    for number in range(int(total / _PS_OF_MS / step) + 1):
        share = number * step * _PS_OF_MS / total
        x = f"{100 * share:.3f}%"
        yield tag("line", x1=x, x2=x, y1=0, y2=height - _AXIS + 4)
        yield tag("text", f"{number * step:g} ms", x=x, y=height - 4, text_anchor="end" if share > 0.9 else None)


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least the step."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


def roofline(profile: "Profile", points: Sequence[tuple[str, float, float]]) -> Markup:
    """Points (label, operations per byte of HBM, operations per ns) below the roofs, with logarithmic axes."""
    rates = profile.rates
    ridge = rates["flops"] / rates["hbm"]
    low = math.floor(math.log10(min([intensity for _, intensity, _ in points] + [ridge / 10])))
    high = math.ceil(math.log10(max([intensity for _, intensity, _ in points] + [ridge * 10])))
    top = math.ceil(math.log10(rates["flops"]))
    bottom = math.floor(math.log10(min([rate for *_, rate in points] + [rates["hbm"] * 10.0**low])))

    def x(intensity: float) -> str:
        return f"{100 * (math.log10(intensity) - low) / (high - low):.2f}%"

    def y(rate: float) -> float:
        return round((_ROOFLINE - _AXIS) * (top - math.log10(rate)) / (top - bottom), 1)

    ends = (10.0**low, 10.0**high)
    grid = [tag("line", x1=x(10.0**n), x2=x(10.0**n), y1=0, y2=_ROOFLINE - _AXIS) for n in range(low, high + 1)]
    ticks = [
        tag("text", f"{10.0**n:g}", x=x(10.0**n), y=_ROOFLINE - 4,
            text_anchor="start" if n == low else "end" if n == high else "middle")
        for n in range(low, high + 1)
    ]  # fmt: skip
    roofs = [
        tag("line", x1=x(ends[0]), y1=y(rates["hbm"] * ends[0]), x2=x(ridge), y2=y(rates["flops"]), class_="roof"),
        tag("line", x1=x(ridge), y1=y(rates["flops"]), x2=x(ends[1]), y2=y(rates["flops"]), class_="roof"),
        tag(
            "text",
            f"{rates['flops'] / 1e3:.0f} TFLOP/s, 16 bits",
            x="100%",
            y=y(rates["flops"]) + 14,
            text_anchor="end",
        ),
        tag(
            "text",
            f"HBM {rates['hbm']:.0f} GB/s",
            x=x(ends[0]),
            y=min(y(rates["hbm"] * ends[0]) + 16, _ROOFLINE - _AXIS - 4),
        ),
    ]
    marks = [
        tag("svg",
            tag("title", f"{label}: {intensity:,.1f} operations per byte, {rate / 1e3:.2f} TFLOP/s"),
            tag("circle", cx=9, cy=9, r=8, class_="point" if number else "point whole"),
            tag("text", str(number) if number else "P", x=9, y=13, text_anchor="middle"),
            x=x(intensity), y=y(rate) - 9, width=18, height=18, class_="mark")
        for number, (label, intensity, rate) in reversed(list(enumerate(points)))
    ]  # fmt: skip
    description = "roofline: operations per second over operations per byte of HBM, both axes logarithmic"
    chart = tag(
        "svg",
        tag("title", description),
        grid,
        ticks,
        roofs,
        marks,
        class_="roofline",
        height=_ROOFLINE,
        role="img",
        aria_label=description,
    )
    return tag("figure", chart, tag("figcaption", "Across: operations per byte of HBM. Up: operations per second."),
               class_="chart")  # fmt: skip


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
    chart = tag(
        "svg",
        tag("title", description),
        shape,
        class_="memory",
        height=70,
        viewBox="0 0 1000 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )
    return tag("figure", tag("figcaption", description), chart, class_="chart")


def _percent(part: float, total: float) -> str:
    return f"{100 * part / max(total, 1):.3f}%"
