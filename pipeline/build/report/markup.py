"""HTML that cannot be anything else: whatever is not markup of ours is text."""

from collections.abc import Iterable
from typing import TypeAlias

from nxpipe.pipeline.util.escape import for_html

Child: TypeAlias = "Markup | str | int | Iterable[Child] | None"
_EMPTY = frozenset({"meta", "rect", "line"})


class Markup(str):
    """Text that was made here, and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """`class_` and `data_value` are spelled `class` and `data-value`; an attribute that is None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{for_html(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{said}/>")
    return Markup(f"<{name}{said}>{text(children)}</{name}>")


def text(child: Child) -> Markup:
    """A child as it stands in a page."""
    if isinstance(child, Markup):
        return child
    if child is None:
        return Markup()
    if isinstance(child, str | int):
        return Markup(for_html(str(child)))
    return Markup("".join(map(text, child)))
