"""HTML as a tree of tags: every text is escaped unless it is `Markup`."""

from collections.abc import Iterable
from typing import Final, TypeAlias

from nxpipe.pipeline.util.text import for_html

Child: TypeAlias = "Markup | str | int | Iterable[Child] | None"
_EMPTY: Final = frozenset({"circle", "input", "line", "link", "meta", "path", "polygon", "polyline", "rect"})


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
