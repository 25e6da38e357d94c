"""The text at the end of a build: every missing artifact is named, with a remedy."""

from dataclasses import replace
from pathlib import Path

import pytest

from nxpipe.pipeline.build.jobs import CellStatus, Failure, FailureClass, JobFinished
from nxpipe.pipeline.build.report.summary import missing_groups, status_counts, summary
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.util.text import unstyled
from tests.build_report.world import NO_SPACE, TOO_LARGE, artifact, cell, course, ends, matrix, plan, results, shape


def said(of: Results, report: Path | None = None) -> list[str]:
    return [unstyled(line) for line in summary(of, report)]


def test_a_build_that_has_everything_says_so_in_a_line_and_where_to_read_more() -> None:
    of = matrix(2, [1], [64, 128])
    assert said(results(of, ends(course(of))), Path("builds/report.html")) == [
        "complete: 4 programs: 4 built; 2 of 2 artifacts published; 1:24 min with the executor local",
        "",
        "report: builds/report.html",
    ]


def test_every_missing_cell_is_named_below_its_reason_with_a_way_out() -> None:
    of = matrix(3, [1], [64, 128, 256])
    broken, full, untried = of.artifacts
    done = [
        JobFinished(broken.cells[0].key, 2.0),
        JobFinished(broken.cells[1].key, 2.0, failure=TOO_LARGE),
        JobFinished(broken.cells[2].key, 2.0, failure=TOO_LARGE),
        JobFinished(full.cells[0].key, 2.0, failure=NO_SPACE),
    ]
    assert said(results(of, done, attempts={full.cells[0].key: 3}))[1:] == [
        "",
        "failed does-not-fit: it needs 19.2 GB and a core holds 16 GB; pass --tp 4",
        "  acme/model-0, forward-b1-s{128,256}",
        "  fix: Use the tensor-parallel degree or the target that `nxpipe check` reports.",
        "",
        "failed system: no space left on the disk; free some",
        "  acme/model-1, forward-b1-s64  (3 attempts)",
        "  fix: Fix the cause that the message names, then run the same command again: cells in the store are not "
        "built again.",
        "",
        "not tried: not started after another cell had failed",
        "  acme/model-1, forward-b1-s{128,256}",
        "  acme/model-2, forward-b1-s{64,128,256}",
        "  fix: Fix the failed cell and run the same command again, or run it with `--keep-going`.",
        "",
        "blocked: it is built and in the store, but its artifact cannot be published without its other cells",
        "  acme/model-0, forward-b1-s64",
        "  fix: Fix the other cells; this one is not built again.",
    ]
    assert untried.key not in {entry.key for entry in done}


def test_an_interrupted_build_says_so_of_what_it_did_not_come_to() -> None:
    of = results(matrix(1, [1], [64]), interrupted=True)
    lines = said(of)
    assert lines[0].startswith("interrupted: 1 program: 1 not tried; 0 of 1 artifact published")
    assert lines[2] == "not tried: the build was interrupted before the job started"
    assert lines[4] == "  fix: Run the same command again; it resumes."


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_not_tried_again_has_not_failed_and_is_told_with_what_it_met(interrupted: bool) -> None:
    of = matrix(1, [1], [64, 128])
    flaky, broken = (value.key for _, value in of.cells())
    done = [JobFinished(flaky, 2.0, failure=NO_SPACE), JobFinished(broken, 2.0, failure=TOO_LARGE)]
    lines = said(results(of, done, interrupted=interrupted, retrying={flaky}))
    assert "2 programs: 1 failed, 1 not retried;" in lines[0]
    why, way_out = (
        ("the build was interrupted before the next attempt ended", "Run the same command again; it resumes.")
        if interrupted
        else (
            "not retried after another cell had failed",
            "Fix the failed cell and run the same command again, or run it with `--keep-going`.",
        )
    )
    assert lines[6:] == [
        f"not retried: {why}; its last attempt failed: {NO_SPACE.message}",
        "  acme/model-0, forward-b1-s64",
        f"  fix: {way_out}",
    ]


def test_what_was_ended_by_a_limit_is_told_of_the_options_that_raise_it() -> None:
    one = cell("m", shape())
    failure = Failure(FailureClass.LIMIT, "TimedOut", "it took more than 60 s", 30)
    assert (
        "`--timeout` or `--memory-limit`"
        in said(results(plan(artifact("m", one)), [JobFinished(one.key, 60, failure=failure)]))[-1]
    )


def test_an_artifact_that_could_not_be_published_is_missing_with_all_its_cells() -> None:
    of = matrix(1, [1], [64, 128])
    done = [
        *(JobFinished(value.key, 1.0) for _, value in of.cells()),
        JobFinished(of.artifacts[0].key, 0.1, failure=NO_SPACE),
    ]
    (lack,) = missing_groups(results(of, done))
    assert (lack.reason.status, lack.cells, [lot.name for lot in lack.groups]) == (
        CellStatus.FAILED,
        2,
        ["forward-b1-s{64,128}"],
    )


def test_reasons_that_differ_only_in_the_bucket_they_name_are_one() -> None:
    def refused(bucket: int) -> Failure:
        return Failure(FailureClass.DETERMINISTIC, "BuildRefused", f"a bucket of {bucket} tokens, and 512 at most", 11)

    cells = [cell("m", shape(bucket), CellStatus.REFUSED, failure=refused(bucket)) for bucket in (1024, 2048)]
    of = results(plan(replace(artifact("m", *cells), key="")))
    (lack,) = missing_groups(of)
    assert lack.reason.text == "a bucket of N tokens, and 512 at most"
    assert [lot.name for lot in lack.groups] == ["forward-b1-s{1024,2048}"]
    (alone,) = missing_groups(results(plan(artifact("m", cells[0]))))
    assert alone.reason.text == "a bucket of 1024 tokens, and 512 at most"


@pytest.mark.parametrize(
    ("planned", "at_the_end"),
    [(CellStatus.PUBLISHED, CellStatus.CACHED), (CellStatus.COMMITTED, CellStatus.BLOCKED)],
)
def test_what_the_store_had_is_cached_or_waits_for_its_artifact(planned: CellStatus, at_the_end: CellStatus) -> None:
    assert status_counts(results(matrix(1, [1], [64], planned))) == {at_the_end: 1}
