"""The page that a report becomes: one file that asks for nothing elsewhere, in the style that all reports have."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.build.report.markup import Markup, tag

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
    """When it began."""
    return f"{report['began_at'][:19].replace('T', ' ')} UTC"


def _policy(style: str, script: str) -> str:
    """Nothing but these very words: a text that got past all escaping would still do nothing."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(words: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(words.encode()).digest()).decode()}"
