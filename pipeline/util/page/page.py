"""The page of every report: skeleton, header, sections, tiles, tables. It makes no request, and its policy allows none.

A page is complete without its script, which sorts and filters tables.
"""

import base64
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from nxpipe.pipeline.util.page.html import Child, Markup, tag, text

_STYLE: Final = Path(__file__).with_name("page.css")
_SCRIPT: Final = Path(__file__).with_name("page.js")
_FEW: Final = 3  # columns of a table that fit any screen
_SOME: Final = 6  # columns that fit a tablet's
CONTENTS: Final = 4  # sections from which on a page lists them

NOT_MEASURED: Final = "not measured"


@dataclass(frozen=True)
class Section:
    title: Child
    body: Child
    class_: str | None = None


@dataclass(frozen=True)
class Cell:
    """A cell of a table with the figure to sort it by; `long` is text that takes the width of a card."""

    child: Child
    value: float | None = None
    long: bool = False


@dataclass(frozen=True)
class Site:
    """Where a page stands in a site: (title, address) of the main pages, the address of its own, and the way from it to
    the top of the site, such as `../`."""

    links: Sequence[tuple[str, str]]
    here: str
    root: str = ""


Row: TypeAlias = "Sequence[Child | Cell]"


def sheet(
    title: str,
    kind: str,
    lead: Child,
    sections: Iterable[Section | None],
    *,
    script: bool = False,
    site: Site | None = None,
) -> bytes:
    """A page of a kind, such as "Build report": what leads it, and its sections."""
    style, source = _STYLE.read_text(), _SCRIPT.read_text() if script else ""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, source)),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    shown = [section for section in sections if section is not None]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        _top(kind, site),
        tag("main", lead, _contents(shown), _sections(shown), id="main"),
        tag("script", Markup(source)) if source else None,
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode("utf-8", "replace")


def _top(kind: str, site: Site | None) -> Markup:
    links = None
    if site:
        items = [
            tag("li", tag("a", name, href=address, aria_current="page" if address == site.here else None))
            for name, address in site.links
        ]
        links = tag("nav", tag("ul", items), aria_label="Site")
    parts = (tag("span", "nxpipe", class_="brand"), tag("span", kind, class_="kind"), links)
    return tag("header", tag("div", parts), class_="top")


def _contents(sections: Sequence[Section]) -> Markup | None:
    if len(sections) < CONTENTS:
        return None
    items = [tag("li", tag("a", each.title, href=f"#s{number}")) for number, each in enumerate(sections, 1)]
    return tag("nav", tag("ul", items), aria_label="On this page", class_="toc")


def _sections(sections: Sequence[Section]) -> list[Markup]:
    return [
        tag("section", tag("h2", each.title), each.body, id=f"s{number}", class_=each.class_)
        for number, each in enumerate(sections, 1)
    ]


def _policy(style: str, script: str) -> str:
    """A Content-Security-Policy for this style and this script only: an unescaped text of a model could still not
    run."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def heading(title: Child, *facts: Child, verdict: Markup | None = None) -> Markup:
    """The title of a page with its verdict, and lines of facts below it."""
    lines = [tag("p", fact, class_="about") for fact in facts if fact]
    return tag("div", tag("h1", tag("span", title), verdict), lines, class_="lead")


def joined(*facts: str | None) -> str:
    """Facts in one line; those without a text are left out."""
    return " · ".join(filter(None, facts))


def verdict(word: str, kind: str) -> Markup:
    """`kind`: good, bad, warn or wait."""
    return tag("span", word, class_=f"verdict {kind}")


def pill(word: Child, kind: str) -> Markup:
    """A state in a table; `kind`: good, bad, warn, info or wait."""
    return tag("span", text(word), class_=f"pill {kind}")


def tiles(figures: Iterable[tuple[str, str]]) -> Markup:
    """Figures, each with its label."""
    return tag("div", [tag("div", tag("strong", figure), tag("span", label)) for figure, label in figures],
               class_="tiles")  # fmt: skip


def two(figure: Child, small: Child) -> Markup:
    """A figure above a remark."""
    return tag("span", figure, tag("small", small) if small else None)


def definitions(facts: Mapping[str, Child]) -> Markup:
    return tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in facts.items()])


def bullets(items: Iterable[Child]) -> Markup:
    return tag("ul", [tag("li", item) for item in items])


def note(sentence: Child) -> Markup | None:
    return tag("p", sentence, class_="about") if sentence else None


def moment(time: str) -> str:
    """An ISO time in UTC, to the second."""
    return f"{time[:19].replace('T', ' ')} UTC"


def table(
    columns: Sequence[str],
    rows: Iterable[Row],
    caption: str,
    *,
    words: Collection[str] = (),
    sortable: bool = False,
) -> Markup:
    """A table whose first column names the rows. All others are figures, but for `words`.

    The most important columns come first: on a narrow screen each row becomes a card.
    """
    width = "few" if len(columns) <= _FEW else "some" if len(columns) <= _SOME else "many"
    numeric = [number > 0 and name not in words for number, name in enumerate(columns)]
    heads = [
        tag("th", name, scope="col", class_="number" if figure else None)
        for name, figure in zip(columns, numeric, strict=True)
    ]
    labels = columns if width != "few" else (None,) * len(columns)
    body = [
        tag("tr", [_cell(*each) for each in zip(row, labels, numeric, range(len(columns)), strict=True)])
        for row in rows
    ]
    built = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", tag("tr", heads)),
        tag("tbody", body),
        class_=f"{width} sortable" if sortable else width,
    )
    return tag("div", built, class_="wide", role="group", aria_label=caption, tabindex=0)


def _cell(cell: "Child | Cell", label: str | None, numeric: bool, column: int) -> Markup:
    given = cell if isinstance(cell, Cell) else Cell(cell)
    if column == 0:
        return tag("th", given.child, scope="row", data_value=given.value)
    classes = " ".join(filter(None, ("number" if numeric else "", "long" if given.long else "")))
    return tag("td", given.child, class_=classes or None, data_label=label, data_value=given.value)
