"""Parts of docs/reference/isa.md, for comparison with the code."""

import re
from collections.abc import Iterator

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "isa.md").read_text()
EXAMPLES = re.findall(r"^```nxasm\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
EXAMPLE: str = EXAMPLES[0]


def table(*header: str) -> list[list[str]]:
    """The rows below a header with this start, without code marks."""
    lines = PAGE.splitlines()
    start = next(number for number, line in enumerate(lines) if cells(line)[: len(header)] == list(header))
    return list(_rows(lines[start + 2 :]))


def _rows(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip("`") for cell in cells(line)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def sections() -> dict[str, str]:
    """The section of each instruction."""
    found = re.split(r"^### (\w+)\n", PAGE, flags=re.MULTILINE)
    return {name: body.partition("\n## ")[0] for name, body in zip(found[1::2], found[2::2], strict=True)}
