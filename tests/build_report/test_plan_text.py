"""The text of a plan: every cell is named, and no line is redundant."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.build.jobs import CellStatus, Failure, FailureClass
from nxpipe.pipeline.build.plan import BuildPlan
from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
from nxpipe.pipeline.build.report.summary import brace_groups
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.util.text import plain, unstyled
from tests.build_report.world import artifact, cell, matrix, plan, shape


def table(of: BuildPlan) -> str:
    return unstyled(plan_table(of))


def expanded(name: str) -> set[str]:
    """The names after brace expansion by a shell."""
    parts = [_numbers(part) if number % 2 else [part] for number, part in enumerate(re.split(r"[{}]", name))]
    return {"".join(entry) for entry in itertools.product(*parts)}


def _numbers(inside: str) -> list[str]:
    if ".." not in inside:
        return inside.split(",")
    first, last, *step = map(int, inside.split(".."))
    return [str(number) for number in range(first, last + 1, *step)]


def test_a_plan_says_of_every_lot_of_cells_what_it_needs_and_why() -> None:
    title = "acme/tiny for inf2"
    too_long = Failure(
        FailureClass.DETERMINISTIC, "BuildRefused", "a bucket of 512 tokens was asked for, of 256 at most", 11
    )
    cells = [
        cell(title, shape(64), CellStatus.COMMITTED),
        cell(title, shape(128), why="weights: random:0 before random:1", seconds=30.0),
        cell(title, shape(256), why="weights: random:0 before random:1", seconds=60.0),
        cell(title, shape(512), CellStatus.REFUSED, failure=too_long),
    ]
    done = artifact("acme/done for inf2", cell("done", shape(64), CellStatus.PUBLISHED))
    assert table(plan(artifact(title, *cells), done)).splitlines() == [
        "  PROGRAM                STATUS     TIME       REASON",
        "acme/tiny for inf2: 4 programs, 1 committed, 2 queued, 1 refused",
        "  forward-b1-s64         committed",
        "  forward-b1-s{128,256}  queued     ~1:30 min  weights: random:0 before random:1",
        "  forward-b1-s512        refused               a bucket of 512 tokens was asked for, of 256 at most",
        "acme/done for inf2: 1 program, published",
        "",
        "5 programs of 2 artifacts: 2 cached, 2 to build, 1 refused; about 1:30 min of one worker's time.",
    ]


def test_what_nothing_like_was_timed_before_has_no_time() -> None:
    assert "no similar program was built before" in table(matrix(1, [1], [64, 128]))
    mixed = plan(artifact("m", cell("m", shape(64), seconds=5.0), cell("m", shape(128))))
    assert table(mixed).endswith("about 5.0 s of one worker's time, and 1 without an estimate.")
    assert table(matrix(1, [1], [64], CellStatus.PUBLISHED)).endswith("1 cached, 0 to build.")


def test_ten_thousand_cells_are_a_page_to_read() -> None:
    large = matrix(25, range(1, 21), range(64, 64 * 21, 64))
    assert len(list(large.cells())) == 10_000
    assert len(table(large).splitlines()) == 1 + 25 + 25 + 2


def test_cells_whose_reasons_differ_only_in_their_bucket_share_a_line() -> None:
    def refused(bucket: int) -> Failure:
        return Failure(FailureClass.DETERMINISTIC, "BuildRefused", f"a bucket of {bucket} tokens, and 5120 at most", 11)

    cells = [cell("m", shape(bucket), CellStatus.REFUSED, failure=refused(bucket)) for bucket in (512, 640, 704)]
    assert "forward-b1-s{512,640,704}  refused        a bucket of N tokens, and 5120 at most" in table(
        plan(artifact("m", *cells))
    )


@given(st.sets(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(1, 9), st.integers(1, 40)), min_size=1))
def test_a_name_of_many_cells_expands_to_those_and_no_other(shapes: set[tuple[str, int, int]]) -> None:
    every = [Shape(*entry) for entry in sorted(shapes)]
    found = brace_groups(every, lambda one: one, lambda one: None)
    for fold in found:
        assert expanded(fold.name) == {entry.name for entry in fold.members}
    assert sorted(member for fold in found for member in fold.members) == every


@pytest.mark.parametrize(
    "hostile", ["::error::x", "  ::set-output name=a::b", "a ##[add-mask]b", "\x1b[2Ja\rb\nc", "\ud800"]
)
def test_a_hostile_title_is_one_harmless_line_of_a_plan(hostile: str) -> None:
    shown = table(plan(artifact(hostile, cell("m", shape()))))
    line = shown.splitlines()[1]
    assert line.endswith(": 1 program, 1 queued")
    assert len(shown.splitlines()) == 5
    assert not line.lstrip().startswith("::")
    assert "##[" not in shown
    assert all(entry.isprintable() for entry in shown.splitlines())


@given(st.text())
def test_a_plain_text_is_one_line_that_commands_nobody(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable()
    assert "##[" not in shown
    assert not shown.lstrip().startswith("::")


def test_a_plan_as_json_has_every_cell_and_the_same_sums() -> None:
    refused = cell(
        "m", shape(512), CellStatus.REFUSED, failure=Failure(FailureClass.DETERMINISTIC, "BuildRefused", "too long", 11)
    )
    document = json.loads(json.dumps(plan_json(plan(artifact("m", cell("m", shape(64), seconds=2.5), refused)))))
    assert document["totals"] == {
        "cells": 2, "found": 0, "to_do": 1, "failed": 0, "refused": 1, "seconds": 2.5, "without_estimate": 0,
    }  # fmt: skip
    (one,) = document["artifacts"]
    assert [(entry["program"], entry["state"], entry["why"], entry["exit_code"]) for entry in one["cells"]] == [
        ("forward-b1-s64", "to do", "", None),
        ("forward-b1-s512", "refused", "too long", 11),
    ]
