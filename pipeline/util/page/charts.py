"""Charts as inline SVG: lines and points between axes, bars with parts, intervals along an axis, shares of a whole.

Positions across are in percent, so that a chart fits any width and its text keeps its size. Colours are classes of the
style sheet; series differ by their marks and dashes too. Every chart has a title and a description for screen readers,
and its figures are also in a table or in its own text.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from nxpipe.pipeline.util.page.html import Child, Markup, tag

HEIGHT: Final = 240  # pixels of a plot
AXIS: Final = 22  # pixels of the names below an axis
_BAR: Final = 12
_GUTTER: Final = 62  # pixels of the names beside an axis
_EXTENT: Final = 1000  # units of a drawing that is stretched
SERIES: Final = 8  # colours


def plain_number(value: float) -> str:
    """Three digits, in thousands above 10,000: 0.0125, 3.5, 128, 32k."""
    return f"{value / 1000:,.3g}k" if value >= 10_000 else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Scale:
    """A range of figures, linear or logarithmic, and how they are written."""

    low: float
    high: float
    label: str
    log: bool = False
    shown: Callable[[float], str] = plain_number
    marks: Sequence[float] = ()  # in place of round figures

    @classmethod
    def over(
        cls,
        values: Iterable[float],
        label: str,
        *,
        log: bool = False,
        shown: Callable[[float], str] = plain_number,
        marks: Sequence[float] = (),
    ) -> Self:
        """An axis for all values: a linear one begins at zero, a logarithmic one at a power of ten, or near the least
        value if the figures to mark are given."""
        known = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
        if not log:
            return cls(min(0.0, *known), 1.08 * max(0.0, *known) or 1.0, label, shown=shown, marks=marks)
        low, high = min(known), max(known)
        if not marks:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        low, high = (low, high) if high > low else (low / 2, high * 2)
        return cls(low / 1.001, high * 1.001, label, log=True, shown=shown, marks=marks)

    def at(self, value: float) -> float:
        """The place of a value, from 0 to 1; one beyond the axis is at its end."""
        low, high, value = (map(math.log, (self.low, self.high, max(value, self.low)))) if self.log else (
            self.low, self.high, value)  # fmt: skip
        return min(max((value - low) / ((high - low) or 1), 0.0), 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        if self.marks:
            return list(self.marks[:: -(-len(self.marks) // most)])
        if self.log:
            first, last = (round(math.log10(end)) for end in (self.low, self.high))
            powers = range(first, last + 1, max(1, -(-(last - first) // most)))
            return [10.0**power for power in powers]
        step = nice((self.high - self.low) / most)
        numbers = range(math.ceil(self.low / step - 1e-9), int(self.high / step + 1e-9) + 1)
        return [number * step for number in numbers]


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least the step."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def part(value: float, whole: float) -> str:
    return percent(value / max(whole, 1e-12))


def drawing(title: str, description: str, *shapes: Child, height: int, class_: str | None = None) -> Markup:
    """An SVG with its name for screen readers."""
    return tag("svg", tag("title", title), tag("desc", description), shapes, height=height, role="img", class_=class_)


def figure(caption: Child, *content: Child, title: str = "", class_: str = "chart") -> Markup:
    named = tag("figcaption", tag("strong", title) if title else None, caption)
    return tag("figure", named, content, class_=class_)


def scrolling(label: str, *content: Child, class_: str) -> Markup:
    """A chart that has a least width, and scrolls on narrower screens, by the keyboard too."""
    return tag("div", tag("figure", content), class_=class_, role="group", aria_label=label, tabindex=0)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """(class of a colour, label) of each part of a bar."""
    return tag("ul", [tag("li", _swatch(colour), f" {label}") for colour, label in entries], class_="legend")


def _swatch(colour: str) -> Markup:
    return tag("svg", tag("rect", width=10, height=10, rx=2, class_=colour), width=10, height=10, aria_hidden="true")


# Lines and points


@dataclass(frozen=True)
class Curve:
    """A series; its points are (across, up) in the units of the axes."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Marker:
    """A point with a mark of one or two letters."""

    x: float
    y: float
    mark: str
    title: str
    best: bool = False


@dataclass(frozen=True)
class Roof:
    """A line between two points that limits the plot, and its name at its end."""

    ends: tuple[tuple[float, float], tuple[float, float]]
    name: str
    anchor: str = "end"


def plot(
    title: str,
    note: str,
    x: Scale,
    y: Scale,
    *,
    lines: Sequence[Curve] = (),
    points: Sequence[Marker] = (),
    roofs: Sequence[Roof] = (),
    height: int = HEIGHT,
) -> Markup:
    """Lines, points and limits between two axes."""
    inner = height - AXIS
    described = f"Across: {x.label}. Up: {y.label}. {_in_words(lines, x, y)}".strip()
    area = drawing(
        title,
        described,
        list(_grid(x, y, inner)),
        [_roof(roof, x, y, inner) for roof in roofs],
        _curves(lines, x, y, inner),
        [_marks(line, number, x, y, inner) for number, line in enumerate(lines)],
        [_point(point, x, y, inner) for point in points],
        height=height,
        class_="area",
    )
    names = [
        tag("text", y.shown(value), x=_GUTTER - 8, y=round(_down(y, value, inner) + 4, 1), text_anchor="end")
        for value in y.ticks()
    ]
    beside = tag("svg", names, width=_GUTTER, height=height, aria_hidden="true")
    across = f"Across: {x.label}{', logarithmic' if x.log else ''}. Up: {y.label}{', logarithmic' if y.log else ''}."
    return figure(
        f"{across} {note}".strip(),
        beside,
        area,
        _series(lines) if len(lines) > 1 or (lines and lines[0].name) else None,
        title=title,
        class_="chart plot",
    )


def _in_words(lines: Sequence[Curve], x: Scale, y: Scale) -> str:
    """The figures of the lines."""
    return "; ".join(
        f"{line.name}: {', '.join(f'{y.shown(up)} at {x.shown(across)}' for across, up in line.points)}"
        for line in lines
    )


def _down(axis: Scale, value: float, height: float) -> float:
    return 8 + (height - 8) * (1 - axis.at(value))


def _grid(x: Scale, y: Scale, height: int) -> Iterator[Markup]:
    for value in y.ticks():
        down = round(_down(y, value, height), 1)
        yield tag("line", x1="0", x2="100%", y1=down, y2=down)
    ticks = x.ticks()
    for value in ticks:
        at = x.at(value)
        yield tag("line", x1=percent(at), x2=percent(at), y1=height, y2=height + 4)
        anchor = "start" if at < 0.03 else "end" if at > 0.95 else "middle"
        yield tag("text", x.shown(value), x=percent(at), y=height + AXIS - 4, text_anchor=anchor)
    yield tag("line", x1="0", x2="100%", y1=height, y2=height, class_="zero")


def _curves(lines: Sequence[Curve], x: Scale, y: Scale, height: int) -> Markup | None:
    """The lines in a drawing that is stretched to the width; their strokes are not."""
    drawn = [
        tag("polyline", points=" ".join(f"{_EXTENT * x.at(across):.1f},{_down(y, up, height):.1f}"
                                        for across, up in line.points), class_=f"s{number % SERIES}")
        for number, line in enumerate(lines)
        if len(line.points) > 1
    ]  # fmt: skip
    return tag("svg", drawn, viewBox=f"0 0 {_EXTENT} {height}", preserveAspectRatio="none", width="100%",
               height=height) if drawn else None  # fmt: skip


def _marks(line: Curve, number: int, x: Scale, y: Scale, height: int) -> list[Markup]:
    return [
        tag("svg", tag("title", f"{line.name}: {y.shown(up)} at {x.shown(across)}"), _shape(number),
            x=percent(x.at(across)), y=round(_down(y, up, height), 1), overflow="visible")
        for across, up in line.points
    ]  # fmt: skip


def _shape(number: int) -> Markup:
    """The mark of a series, around the origin: series differ by shape as well as by colour."""
    class_ = f"point s{number % SERIES}"
    match number % 4:
        case 0:
            return tag("circle", r=5, class_=class_)
        case 1:
            return tag("rect", x=-4.5, y=-4.5, width=9, height=9, class_=class_)
        case 2:
            return tag("polygon", points="0,-6 5.5,4.5 -5.5,4.5", class_=class_)
        case _:
            return tag("polygon", points="0,-6 6,0 0,6 -6,0", class_=class_)


def _series(lines: Sequence[Curve]) -> Markup:
    items = [
        tag("li", tag("svg", tag("svg", _shape(number), x=6, y=6, overflow="visible"), width=13, height=13,
                      aria_hidden="true"), f" {line.name}")
        for number, line in enumerate(lines)
    ]  # fmt: skip
    return tag("ul", items, class_="legend")


def _point(point: Marker, x: Scale, y: Scale, height: int) -> Markup:
    return tag(
        "svg",
        tag("title", point.title),
        tag("circle", r=8, class_="point best" if point.best else "point s0"),
        tag("text", point.mark, y=4, text_anchor="middle"),
        x=percent(x.at(point.x)),
        y=round(_down(y, point.y, height), 1),
        overflow="visible",
        class_="mark",
    )


def _roof(roof: Roof, x: Scale, y: Scale, height: int) -> list[Markup]:
    (x1, y1), (x2, y2) = roof.ends
    end = roof.ends[1] if roof.anchor == "end" else roof.ends[0]
    down = _down(y, end[1], height)
    return [
        tag("line", x1=percent(x.at(x1)), y1=round(_down(y, y1, height), 1), x2=percent(x.at(x2)),
            y2=round(_down(y, y2, height), 1), class_="roof"),
        tag("text", roof.name, x=percent(x.at(end[0])), y=round(min(down + 16, height - 6), 1),
            text_anchor=roof.anchor),
    ]  # fmt: skip


# Bars


@dataclass(frozen=True)
class Bar:
    """A bar with its name and figures above it. `parts` are (class of a colour, length); `interval` a line over it."""

    text: str
    parts: Sequence[tuple[str, float]]
    interval: tuple[float, float] | None = None


def bars(
    title: str,
    note: str,
    rows: Sequence[Bar],
    *,
    most: float | None = None,
    key: Sequence[tuple[str, str]] = (),
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Bars from zero to the largest figure, or to `most`; `limit` is a line with its name across all bars."""
    ends = [sum(length for _, length in row.parts) for row in rows]
    if most is None:
        reach = [min(row.interval[1], 3 * end) for row, end in zip(rows, ends, strict=True) if row.interval]
        most = 1.05 * max([*ends, *reach, *([limit[0]] if limit else []), 1e-12])
    items = [tag("li", tag("span", row.text), _bar(row, most, limit[0] if limit else None)) for row in rows]
    about = joined_sentences(note, f"The line across all rows: {limit[1]}." if limit else "")
    return figure(about, tag("ul", items, class_="bar-list"), legend(key) if key else None, title=title)


def joined_sentences(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _bar(row: Bar, most: float, limit: float | None) -> Markup:
    """The shape of a bar, whose text is beside it."""
    drawn = [tag("rect", y=1, width="100%", height=_BAR, rx=2, class_="track")]
    begun = 0.0
    for colour, length in row.parts:
        at, width = percent(min(begun / most, 1)), percent(min(length / most, 1))
        drawn.append(tag("rect", x=at, y=1, width=width, height=_BAR, class_=colour))
        begun += length
    if row.interval:
        low, high = (percent(min(end / most, 1.0)) for end in row.interval)
        drawn.append(tag("line", x1=low, x2=high, y1=7, y2=7, class_="interval"))
    if limit is not None:
        drawn.append(_limit(limit / most))
    return tag("svg", drawn, height=_BAR + 2, aria_hidden="true")


def _limit(share: float) -> Markup:
    at = percent(min(share, 1.0))
    return tag("line", x1=at, x2=at, y1=0, y2=_BAR + 2, class_="limit")


@dataclass(frozen=True)
class Dot:
    """A figure along an axis, with an interval; one that fails is a cross in place of a circle."""

    text: str
    value: float | None
    interval: tuple[float, float] | None = None
    fails: bool = False


def dots(
    title: str, note: str, rows: Sequence[Dot], axis: Scale, *, limits: Sequence[tuple[float, str]] = ()
) -> Markup:
    """A row for each figure, below its name; limits are lines through all rows."""
    items = [tag("li", tag("span", row.text), _dot(row, axis, [value for value, _ in limits])) for row in rows]
    names = []
    for value in axis.ticks():
        at = axis.at(value)
        anchor = "start" if at < 0.03 else "end" if at > 0.95 else "middle"
        names.append(tag("text", axis.shown(value), x=percent(at), y=14, text_anchor=anchor))
    below = tag("svg", names, height=AXIS, aria_hidden="true")
    about = joined_sentences(f"Across: {axis.label}{', logarithmic' if axis.log else ''}.", note,
                             *(f"The line across all rows: {name}." for _, name in limits))  # fmt: skip
    return figure(about, tag("ul", items, class_="bar-list"), below, title=title)


def _dot(row: Dot, axis: Scale, limits: Sequence[float]) -> Markup:
    drawn = []
    for value in axis.ticks():
        at = percent(axis.at(value))
        drawn.append(tag("line", x1=at, x2=at, y1=0, y2=_BAR + 2, class_=None if value else "zero"))
    if row.interval:
        low, high = (percent(axis.at(end)) for end in row.interval)
        drawn.append(tag("line", x1=low, x2=high, y1=7, y2=7, class_="interval"))
    if row.value is not None:
        cross = tag("polygon", points="-6,-4 -4,-6 0,-2 4,-6 6,-4 2,0 6,4 4,6 0,2 -4,6 -6,4 -2,0", class_="k-bad")
        mark = cross if row.fails else tag("circle", r=5, class_="point k-good")
        drawn.append(tag("svg", mark, x=percent(axis.at(row.value)), y=7, overflow="visible"))
    drawn += [_limit(axis.at(value)) for value in limits]
    return tag("svg", drawn, height=_BAR + 2, aria_hidden="true")


# Shares and activity


def share_bar(parts: Sequence[tuple[str, str, float]], label: str, *, total: float | None = None,
              height: int = 10) -> Markup:  # fmt: skip
    """One bar of (class of a colour, name, amount); what is left of the total stays empty."""
    whole = total if total is not None else sum(amount for *_, amount in parts)
    begun, drawn = 0.0, []
    for colour, name, amount in parts:
        drawn.append(tag("svg", tag("title", f"{name} {amount / max(whole, 1e-12):.0%}"),
                         tag("rect", width="100%", height=height, class_=colour),
                         x=part(begun, whole), width=part(amount, whole), height=height))  # fmt: skip
        begun += amount
    figures = ", ".join(f"{name} {amount / max(whole, 1e-12):.0%}" for _, name, amount in parts if amount)
    return tag("svg", tag("title", f"{label}: {figures}"), drawn, class_="shares", height=height, role="img")


def resource_class(resource: str) -> str:
    """The colour of an engine, a queue or another resource of a core."""
    return f"r-{resource.replace(' ', '-')}" if not resource[-1:].isdigit() else "r-dma"


def resource_shares(shares: Mapping[str, float], total: float, label: str, height: int = 10) -> Markup:
    """A bar with a part for each resource, the largest first, as wide as its share of the total."""
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return share_bar([(resource_class(name), name, amount) for name, amount in ordered if amount], label,
                     total=max(total, 1), height=height)  # fmt: skip
