"""Blocks of commands of the documentation, and those that no test executes.

A block that is not executed has a comment with the reason on the line before it, `<!-- not executed: REASON -->`; the
reasons are the table "Blocks that are not executed" of docs/testing.md. Readers of the page do not see the comment.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

# The guides of a deployment, in the order in which tests/localaws/test_walk.py executes them in one repository.
WALK: Final = tuple(
    ROOT / "docs/guides" / f"{name}.md"
    for name in (
        "deploying",
        "operating",
        "rollout",
        "build-farm",
        "training-fleets",
        "sagemaker",
        "kubernetes",
        "deleting",
    )
)
_BLOCK: Final = (
    r"(?:^<!-- not executed: (?P<reason>[^\n]*) -->\n)?^```(?P<kind>sh|bash|shell|console)\n(?P<text>.*?)^```$"
)


@dataclass(frozen=True)
class Block:
    """A block of commands of a page, and the reason why it is left out."""

    page: Path
    line: int
    kind: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the output that the page shows; of a `console` block, each is its own."""
        if self.kind != "console":
            return [(self.text, [])]
        result: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                result.append((line[2:], []))
            else:
                result[-1][1].append(line)
        return result


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    text = page.read_text() if text is None else text
    assert not re.search(r"^ +```", text, re.MULTILINE), f"{page.name}: a block begins at the start of a line"
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["kind"], found["text"], found["reason"])
        for found in re.finditer(_BLOCK, text, re.DOTALL | re.MULTILINE)
    ]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def left_out() -> Counter[tuple[str, str]]:
    """How many blocks of a page are not executed for a reason."""
    blocks = [block for page in pages() for block in blocks_of(page)]
    return Counter((str(block.page.relative_to(ROOT)), block.reason) for block in blocks if block.reason)
