"""The product speaks the field's language: no word in names, texts, comments and docs that only this project would use.

`docs/glossary.md` has the terms to use instead. A word that a stored format or an interface of AWS fixes is in FIXED.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT

# What to write instead: the subject and the term, such as "the client", "the caller", "the reference", "the remedy".
REFUSED: Final = frozenset(
    [
        "whoever",
        "whomever",
        "nobody",
        "somebody",
        "everybody",
        "someone",
        "whatever",
        "wherever",
        "yardstick",
        "house",
        "rooms",
        "room",
        "door",
        "doors",
        "mend",
        "mends",
        "mended",
        "mending",
        "stranger",
        "strangers",
        "told",
        "tell",
        "tells",
        "telling",
        "said",
        "asked",
        "believe",
        "believes",
        "believed",
        "belief",
    ]
)
# Words that a stored format, a file of AWS or a third party's name fixes, by the file that holds them.
FIXED: Final[dict[str, frozenset[str]]] = {
    "stacks/rollout/state_machine.py": frozenset(["tell", "told"]),  # state names and paths of running executions
    # Fields of job, plan and report documents, and a word of event lines.
    "pipeline/build/jobs.py": frozenset({"asked", "said"}),
    "pipeline/build/report/document.py": frozenset({"asked", "yardstick"}),
    "pipeline/build/report/figures.py": frozenset({"asked"}),
    "pipeline/build/report/result_pages.py": frozenset({"yardstick"}),
    "pipeline/ui/pages.py": frozenset({"asked", "yardstick"}),
    "pipeline/build/report/html.py": frozenset({"asked"}),
    "pipeline/build/report/plan_text.py": frozenset({"asked"}),
    # A field of the rollout's state, and texts of decision records, which form a digest chain.
    "pipeline/canary/handler.py": frozenset({"asked", "nobody"}),
    "pipeline/canary/judge.py": frozenset({"asked"}),
    # A key input of an emission.
    "pipeline/compile/frontend.py": frozenset({"room"}),
    # A key input of evidence, and a field of evidence.
    "pipeline/compile/spec.py": frozenset({"yardstick"}),
    "pipeline/models/thresholds.py": frozenset({"yardstick"}),
    "pipeline/verify/evidence.py": frozenset({"yardstick"}),
    "pipeline/verify/replay.py": frozenset({"yardstick"}),
    "pipeline/verify/prove.py": frozenset({"yardstick"}),
    "docs/reference/store-format.md": frozenset({"yardstick"}),  # the evidence document
    "pipeline/cli/infra/templates.py": frozenset({"mend"}),  # --json
    "pipeline/cli/store/fsck.py": frozenset({"mended"}),  # --json
    "pipeline/cli/store/listing.py": frozenset({"yardstick"}),  # the evidence document
    "pipeline/cli/verify.py": frozenset({"yardstick"}),  # --json
    "artifact_store/backends/s3_connection.py": frozenset({"tell"}),  # a method of file objects
    "artifact_store/evidence.py": frozenset({"yardstick"}),  # a field of a stored document
    "artifact_store/fetch/partial.py": frozenset({"nobody"}),  # in file names of existing caches
    "artifact_store/maintenance/doctor.py": frozenset({"told"}),  # a probe's name in JSON output
    # A list of such words: participles and pronouns that are no names for modules.
    "benchmarks/structure.py": frozenset({"asked", "nobody", "said", "somebody", "told", "whatever", "whoever"}),
    # Names of tests, which draw the commit's sample.
    "tests/localaws/DIVERGENCES.md": frozenset({"asked"}),
    "tests/localaws/test_divergences.py": frozenset({"asked"}),
    "tests/localaws/test_fleet_behaviour.py": frozenset({"nobody", "tells", "told"}),
    "tests/localaws/test_formation.py": frozenset({"nobody", "tells"}),
    "tests/localaws/test_machines.py": frozenset({"asked", "nobody", "said", "whatever"}),
    "tests/localaws/test_moto_patches.py": frozenset({"asked", "nobody", "tells", "whoever"}),
}

AREAS: Final = (
    "app.py",
    "artifact_store",
    "emulator",
    "pipeline",
    "stacks",
    "nxpipe/api.py",
    "nxpipe/results.py",
    "nxpipe/store.py",
    "docs",
    "README.md",
    "tests/localaws",
    "benchmarks",
)
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def files_of(area: str) -> list[Path]:
    top = ROOT / area
    return [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.md")])


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """The names, strings and comments of a module, or the lines of a page, with their line numbers."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


def offences(path: Path) -> list[str]:
    place = path.relative_to(ROOT).as_posix()
    allowed = FIXED.get(place, frozenset())
    return [
        f"{place}:{line}: {word}"
        for first, text in texts_of(path)
        for line, part in enumerate(text.splitlines(), first)
        for word in map(str.lower, _WORD.findall(part))
        if word in REFUSED - allowed
    ]


@pytest.mark.parametrize("area", AREAS)
def test_no_word_needs_a_dictionary_of_this_project(area: str) -> None:
    assert [offence for path in files_of(area) for offence in offences(path)] == []


def test_a_word_inside_a_name_is_found() -> None:
    assert [word for word in map(str.lower, _WORD.findall("whatIsAsked_told MENDED")) if word in REFUSED] == [
        "asked",
        "told",
        "mended",
    ]
