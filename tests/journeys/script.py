"""The form of a journey's script, and its run.

A script is a page that can be read: prose, and steps below headings. A heading `##` names what must hold, in the words
of the review (14 journeys of people who try nxpipe); its steps are the commands, and what is expected of them:

    ## the artifact has its tokenizer
    $ nxpipe run sentiment --text 'this movie is great'
    > --json                      the command goes on
    = 2                           its exit code; 0 if no line says so
    ~ POSITIVE|NEGATIVE           a regular expression that both streams together match somewhere
    ! without a tokenizer         one that they match nowhere
    & KEY @(\\w{12})               one whose group is noted; KEY in later commands stands for it
    @ classifier sentiment        before the next command: a function of `given.py`, and its words
    ? the reason                  the finding does not hold yet; its failure is expected, and shown

A regular expression is one line; `~` and `!` ignore how a line is wrapped. Text in other lines is a comment.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.user import Done

_KINDS: Final = "$>=~!&@?"


@dataclass
class Step:
    """One command and what it must give; or, without a command, what the user has beforehand."""

    line: int
    command: str = ""
    given: list[str] = field(default_factory=list)
    code: int = 0
    expected: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    noted: list[tuple[str, str]] = field(default_factory=list)

    def faults(self, done: Done, fill_in: Callable[[str], str]) -> list[str]:
        """What the command did otherwise; `fill_in` replaces what was noted."""
        text = done.out + done.err
        flat = re.sub(r"\s+", " ", text)
        found = [] if done.code == self.code else [f"exit code {done.code}, expected {self.code}"]
        found += [f"nothing matches {one}" for one in map(fill_in, self.expected) if not _found(one, text, flat)]
        found += [f"{one} matches" for one in map(fill_in, self.refused) if _found(one, text, flat)]
        return found


@dataclass
class Finding:
    """What must hold, and the steps that show it."""

    title: str
    steps: list[Step] = field(default_factory=list)
    not_yet: str = ""


def _found(pattern: str, text: str, flat: str) -> bool:
    return bool(re.search(pattern, text, re.MULTILINE) or re.search(pattern, flat))


def findings_of(path: Path) -> list[Finding]:
    result: list[Finding] = []
    given: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("## "):
            result.append(Finding(line[3:]))
            continue
        kind, space, rest = line[:1], line[1:2], line[2:]
        if kind not in _KINDS or not kind or space != " ":
            continue
        assert result, f"{path.name}:{number}: a step needs a heading"
        steps = result[-1].steps
        if kind == "@":
            given.append(rest)
        elif kind == "?":
            result[-1].not_yet = rest
        elif kind == "$":
            steps.append(Step(number, rest, given))
            given = []
        else:
            assert steps, f"{path.name}:{number}: '{kind}' needs a command"
            _add(steps[-1], kind, rest)
    assert all(finding.steps for finding in result), f"{path.name}: a heading without a command"
    return result


def _add(step: Step, kind: str, rest: str) -> None:
    if kind == ">":
        step.command += f"\n{rest}"
    elif kind == "=":
        step.code = int(rest)
    elif kind == "&":
        name, _, pattern = rest.partition(" ")
        step.noted.append((name, pattern))
    else:
        (step.expected if kind == "~" else step.refused).append(rest)
