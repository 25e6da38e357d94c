"""HTML markup and pages: every text is escaped unless it is `Markup`."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.util.escape import for_html

Child: TypeAlias = "Markup | str | int | Iterable[Child] | None"
_EMPTY = frozenset({"meta", "rect", "line"})


class Markup(str):
    """HTML made by `tag`; it is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """`class_` and `data_value` are spelled `class` and `data-value`; an attribute that is None is left out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{for_html(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{text(children)}</{name}>")


def text(child: Child) -> Markup:
    """A child as HTML."""
    if isinstance(child, Markup):
        return child
    if child is None:
        return Markup()
    if isinstance(child, str | int):
        return Markup(for_html(str(child)))
    return Markup("".join(map(text, child)))


_STYLE: Final = Path(__file__).with_name("page.css")


def sheet(title: str, sections: Iterable[Markup], script: str = "") -> bytes:
    style = _STYLE.read_text()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", sections), tag("script", Markup(script)) if script else None)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode("utf-8", "replace")


def moment(report: Mapping[str, Any]) -> str:
    """Time at which it began."""
    return f"{report['began_at'][:19].replace('T', ' ')} UTC"


def _policy(style: str, script: str) -> str:
    """Allows this style and this script only: a text that escaped all escaping would still do nothing."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
