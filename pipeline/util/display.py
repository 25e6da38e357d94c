"""Rich representations of results: tables and charts in a notebook, the same figures as tables elsewhere.

A result lists its parts (`display`). A notebook shows them as HTML by `_repr_html_`, with inline SVG and no script; a
prompt and `print` show them as text. All text is escaped: names of models and labels are untrusted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nxpipe.pipeline.util.text import for_html, for_terminal, is_numeric, table, unstyled

# Colours of middle lightness: a notebook has its own theme, which the style of an output cannot know.
_PALETTE: Final = ("#3f7fc4", "#d0892b", "#3c9a63", "#9878cc", "#bf5d98", "#c9503f", "#7b8594")
_STYLE: Final = """
.nxpipe{font-size:13px;line-height:1.45;margin:4px 0 10px;max-width:1000px}
.nxpipe p{margin:2px 0 6px}.nxpipe .title{font-weight:600;margin:10px 0 4px}
.nxpipe .scroll{overflow-x:auto}
.nxpipe table{border-collapse:collapse;margin:0 0 6px;font-size:13px}
.nxpipe table th,.nxpipe table td{text-align:left;vertical-align:top;padding:3px 14px 3px 0;background:none;border:0;
border-bottom:1px solid rgba(128,128,128,.35)}
.nxpipe table th{font-weight:600;opacity:.75}.nxpipe table .number{text-align:right;font-variant-numeric:tabular-nums}
.nxpipe .chart{display:block;width:100%;margin:2px 0 6px}
.nxpipe svg text{font:12px system-ui,sans-serif;fill:currentColor}
.nxpipe pre{white-space:pre-wrap;margin:2px 0 6px}
"""
_ROW: Final = 22  # pixels of a bar with its label
_LABEL: Final = 34  # percent of the width


@dataclass(frozen=True)
class TablePart:
    """A table with a title, which may be empty. Cells are unescaped text."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        rows = [[for_terminal(cell) for cell in row] for row in self.rows]
        lines = unstyled(table([for_terminal(name) for name in self.header], rows))
        if not any(self.header):
            lines = lines.partition("\n")[2]
        return f"{for_terminal(self.title)}\n{lines}" if self.title else lines

    def html(self) -> str:
        numbers = [is_numeric([row[column] for row in self.rows]) for column in range(len(self.header))]
        classes = [' class="number"' if number else "" for number in numbers]
        names = "".join(
            f'<th scope="col"{own}>{for_html(name)}</th>' for own, name in zip(classes, self.header, strict=True)
        )
        head = f"<thead><tr>{names}</tr></thead>" if any(self.header) else ""
        body = "".join(
            "<tr>"
            + "".join(f"<td{own}>{for_html(cell)}</td>" for own, cell in zip(classes, row, strict=True))
            + "</tr>"
            for row in self.rows
        )
        drawn = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
        return _titled(self.title, drawn)


@dataclass(frozen=True)
class BarsPart:
    """A bar for each figure: its label, its value, and the value as text. `limit` is drawn as a line. Figures that are
    `in_table` too are not repeated as text."""

    title: str
    bars: Sequence[tuple[str, float, str]]
    limit: float | None = None
    in_table: bool = False

    def text(self) -> str:
        if self.in_table:
            return ""
        rows = [(label, shown) for label, _, shown in self.bars]
        return TablePart(self.title, ("", ""), rows).text() if rows else ""

    def html(self) -> str:
        most = max([value for _, value, _ in self.bars] + [self.limit or 0.0, 1e-300]) * 1.02
        drawn = []
        for number, (label, value, shown) in enumerate(self.bars):
            y, width = number * _ROW, max(value, 0.0) / most * (100 - _LABEL - 14)
            colour = _PALETTE[5] if self.limit is not None and value > self.limit else _PALETTE[0]
            # A label of its own width: a long one is cut, and whole in its title.
            drawn.append(
                f'<svg y="{y}" width="{_LABEL - 1}%" height="{_ROW}"><title>{for_html(label)}</title>'
                f'<text x="0" y="14">{for_html(label)}</text></svg>'
            )
            drawn.append(
                f'<rect x="{_LABEL}%" y="{y + 4}" width="{width:.2f}%" height="13" rx="2" fill="{colour}"/>'
                f'<text x="{_LABEL + width + 0.8:.2f}%" y="{y + 14}">{for_html(shown)}</text>'
            )
        height = _ROW * len(self.bars)
        if self.limit is not None:
            x = f"{_LABEL + self.limit / most * (100 - _LABEL - 14):.2f}%"
            drawn.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="3 3"/>')
        return _titled(self.title, _svg(self.title, height, drawn))


@dataclass(frozen=True)
class SharesPart:
    """Parts of a whole as one bar, the largest first, with a legend; `total` is what 100 % is."""

    title: str
    shares: Sequence[tuple[str, float]]
    total: float

    def _sorted(self) -> list[tuple[str, float]]:
        whole = max(self.total, 1e-300)
        return [(name, value / whole) for name, value in sorted(self.shares, key=lambda each: -each[1]) if value > 0]

    def text(self) -> str:
        return f"{for_terminal(self.title)}: " + ", ".join(
            f"{for_terminal(name)} {share:.0%}" for name, share in self._sorted() if share >= 0.005
        )

    def html(self) -> str:
        begun, drawn, legend = 0.0, [], []
        for number, (name, share) in enumerate(self._sorted()):
            colour = _PALETTE[min(number, len(_PALETTE) - 1)]
            drawn.append(
                f'<rect x="{100 * begun:.3f}%" y="0" width="{100 * share:.3f}%" height="16" fill="{colour}">'
                f"<title>{for_html(name)} {share:.1%}</title></rect>"
            )
            begun += share
            if share >= 0.005:
                legend.append(f'<span style="color:{colour}">&#9632;</span> {for_html(name)} {share:.0%}')
        return _titled(self.title, _svg(self.text(), 16, drawn) + f"<p>{' &nbsp; '.join(legend)}</p>")


Part: TypeAlias = "str | TablePart | BarsPart | SharesPart"  # a text is a paragraph


class Displayed:
    """A mixin for results. The class gives its parts; a data class needs `repr=False`."""

    def display(self) -> Iterable[Part]:
        raise NotImplementedError

    def __str__(self) -> str:
        texts = (_paragraph(part) if isinstance(part, str) else part.text() for part in self.display())
        return "\n\n".join(filter(None, texts))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.display())


def as_html(parts: Iterable[Part]) -> str:
    """The parts as one element with its own style, which reaches nothing else of a notebook."""
    return f'<div class="nxpipe"><style>{_STYLE}</style>{"".join(_html(part) for part in parts)}</div>'


def _html(part: Part) -> str:
    if not isinstance(part, str):
        return part.html()
    return f"<pre>{for_html(part)}</pre>" if "\n" in part else f"<p>{for_html(part)}</p>"


def _paragraph(text: str) -> str:
    return "\n".join(map(for_terminal, text.split("\n")))


def _titled(title: str, drawn: str) -> str:
    return f'<p class="title">{for_html(title)}</p>{drawn}' if title else drawn


def _svg(label: str, height: int, drawn: Iterable[str]) -> str:
    return f'<svg class="chart" height="{height}" role="img" aria-label="{for_html(label)}">{"".join(drawn)}</svg>'
