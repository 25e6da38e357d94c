"""Results as text and as HTML: equal figures, and no text of a model becomes markup or a control sequence."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.util.display import BarsPart, Displayed, Part, SharesPart, TablePart, as_html

HOSTILE = '<script>alert(1)</script> "&amp; \x1b[31mred\r\u202e'
TEXTS = st.one_of(st.text(max_size=12), st.just(HOSTILE))


class Tags(HTMLParser):
    """The tags and the text of a fragment; every tag must be closed by its own end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


OURS = {"div", "style", "p", "pre", "table", "thead", "tbody", "tr", "th", "td", "span"} | {
    *("svg", "rect", "line", "text", "title")
}
DRAWN = {"class", "scope", "height", "role", "aria-label", "x", "y", "width", "rx", "fill", "x1", "x2", "y1", "y2"} | {
    *("stroke", "stroke-dasharray", "style")
}


@given(TEXTS, st.lists(st.tuples(TEXTS, st.floats(-1, 1e9), TEXTS), max_size=4), st.none() | st.floats(0, 10))
def test_no_text_becomes_markup_or_moves_the_cursor(
    title: str, bars: list[tuple[str, float, str]], limit: float | None
) -> None:
    parts: list[Part] = [
        title,
        TablePart(title, (title, "b"), [(label, shown) for label, _, shown in bars]),
        BarsPart(title, bars, limit),
        SharesPart(title, [(label, value) for label, value, _ in bars], 1e9),
    ]
    tags = Tags(as_html(parts))
    assert tags.open == []
    assert tags.seen <= OURS
    assert tags.attributes <= DRAWN

    class Result(Displayed):
        def display(self) -> Iterator[Part]:
            yield from parts

    assert all(character.isprintable() or character == "\n" for character in str(Result()))
    assert repr(Result()) == str(Result())


def test_a_table_is_aligned_and_its_figures_are_in_both_forms() -> None:
    part = TablePart("Programs", ("program", "time"), [("prefill-b1-s16", "1.25 ms"), ("decode", "0.5 ms")])
    assert part.text().splitlines() == [
        "Programs",
        "PROGRAM            TIME",
        "prefill-b1-s16  1.25 ms",
        "decode           0.5 ms",
    ]
    assert re.findall(r"<td[^>]*>(.*?)</td>", part.html()) == ["prefill-b1-s16", "1.25 ms", "decode", "0.5 ms"]
    assert '<td class="number">1.25 ms</td>' in part.html()
    assert '<td class="number">2 x inf2.xlarge</td>' not in TablePart("", ("a",), [("2 x inf2.xlarge",)]).html()


def test_bars_have_lengths_in_proportion_and_those_beyond_the_limit_another_colour() -> None:
    html = BarsPart("Memory", [("tp 1", 20.0, "20 GiB"), ("tp 2", 10.0, "10 GiB")], limit=16.0).html()
    (first, first_colour), (second, second_colour) = re.findall(r'<rect .*?width="([0-9.]+)%" .*?fill="(#\w+)"', html)
    assert float(first) == 2 * float(second)
    assert first_colour != second_colour


def test_shares_fill_the_bar_and_the_smallest_are_not_in_the_legend() -> None:
    part = SharesPart("critical path", [("dma", 60.0), ("tensor", 39.9), ("gather", 0.1)], 100.0)
    widths = [float(width) for width in re.findall(r'width="([0-9.]+)%"', part.html())]
    assert widths == [60.0, 39.9, 0.1]
    assert part.text() == "critical path: dma 60%, tensor 40%"
