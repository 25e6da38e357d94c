"""Plots as SVG: panels of cumulative shares over minutes, written directly to avoid a plotting library."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_WIDTH, _HEIGHT = 330, 220  # size of a panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 40, 12, 34
_MINUTES: Final = 60
_COLOURS: Final = {
    "ours": "#0b6e4f",
    "kayenta": "#c1666b",
    "kayenta-peek": "#d4a24c",
    "fixed": "#7a7a7a",
    "tuned": "#3d5a80",
}
_STYLE: Final = "font-family='sans-serif' font-size='11' fill='#333'"


@dataclass(frozen=True)
class Curve:
    title: str
    rule: str
    minutes: tuple[int | None, ...]  # minute of the rollback of each run, or None


@dataclass(frozen=True)
class Panel:
    title: str
    curves: tuple[Curve, ...]


def drawn(title: str, panels: Sequence[Panel]) -> str:
    columns = 2
    rows = -(-len(panels) // columns)
    width, height = columns * (_WIDTH + 20) + 20, rows * (_HEIGHT + 20) + 76
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='20' y='24' {_STYLE.replace('11', '15')}>{title}</text>",
        *_legend(panels[0], 46),
    ]
    for at, panel in enumerate(panels):
        x, y = 20 + at % columns * (_WIDTH + 20), 60 + at // columns * (_HEIGHT + 20)
        parts.append(f"<g transform='translate({x} {y})'>{''.join(_panel(panel))}</g>")
    return "\n".join([*parts, "</svg>", ""])


def _legend(panel: Panel, y: int) -> list[str]:
    parts, x = [], 20
    for curve in panel.curves:
        parts.append(f"<rect x='{x}' y='{y - 7}' width='16' height='4' fill='{_COLOURS[curve.rule]}'/>")
        parts.append(f"<text x='{x + 21}' y='{y}' {_STYLE}>{curve.title}</text>")
        x += 36 + round(5.8 * len(curve.title))
    return parts


def _panel(panel: Panel) -> list[str]:
    parts = [f"<text x='{_LEFT}' y='{_TOP - 12}' {_STYLE}>{panel.title}</text>"]
    for share in (0, 25, 50, 75, 100):
        y = _y(share / 100)
        parts.append(f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_WIDTH - _RIGHT}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{share} %</text>")
    for minute in range(0, _MINUTES + 1, 15):
        parts.append(f"<text x='{_x(minute):.1f}' y='{_HEIGHT - 14}' text-anchor='middle' {_STYLE}>{minute} min</text>")
    return parts + [_line(curve) for curve in reversed(panel.curves)]


def _line(curve: Curve) -> str:
    points, before = [], 0.0
    for minute in range(_MINUTES + 1):
        share = sum(1 for entry in curve.minutes if entry is not None and entry <= minute) / len(curve.minutes)
        points += [f"{_x(minute):.1f},{_y(before):.1f}", f"{_x(minute):.1f},{_y(share):.1f}"]
        before = share
    width = 2.6 if curve.rule == "ours" else 1.6
    return f"<polyline points='{' '.join(points)}' fill='none' stroke='{_COLOURS[curve.rule]}' stroke-width='{width}'/>"


def _x(minute: float) -> float:
    return _LEFT + minute / _MINUTES * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
