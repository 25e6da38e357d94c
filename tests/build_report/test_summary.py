"""The end of a build in words: nothing that is missing goes unnamed, and each has a way out."""

from dataclasses import replace
from pathlib import Path

import pytest

from nxpipe.pipeline.build.events import Ended, Fault
from nxpipe.pipeline.build.report.reasons import missing, tallied
from nxpipe.pipeline.build.report.summary import summary
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.util.escape import unstyled
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
        Ended(broken.cells[0].key, 2.0),
        Ended(broken.cells[1].key, 2.0, fault=TOO_LARGE),
        Ended(broken.cells[2].key, 2.0, fault=TOO_LARGE),
        Ended(full.cells[0].key, 2.0, fault=NO_SPACE),
    ]
    assert said(results(of, done, attempts={full.cells[0].key: 3}))[1:] == [
        "",
        "failed does-not-fit: it needs 19.2 GB and a core holds 16 GB; pass --tp 4",
        "  acme/model-0, forward-b1-s{128,256}",
        "  way out: Use the tensor-parallel degree or the target that `nxpipe check` reports.",
        "",
        "failed system: no space left on the disk; free some",
        "  acme/model-1, forward-b1-s64  (3 attempts)",
        "  way out: Mend what the message names, then run the same command again: what is there is not built again.",
        "",
        "not tried: it was not tried after another had failed",
        "  acme/model-1, forward-b1-s{128,256}",
        "  acme/model-2, forward-b1-s{64,128,256}",
        "  way out: Mend that one and run the same command again, or run it with `--keep-going`.",
        "",
        "waiting: it is made and kept, but its artifact cannot be published without the others",
        "  acme/model-0, forward-b1-s64",
        "  way out: Mend the others; this one is not made again.",
    ]
    assert untried.key not in {each.key for each in done}


def test_an_interrupted_build_says_so_of_what_it_did_not_come_to() -> None:
    of = results(matrix(1, [1], [64]), interrupted=True)
    lines = said(of)
    assert lines[0].startswith("interrupted: 1 program: 1 not tried; 0 of 1 artifact published")
    assert lines[2] == "not tried: the build was interrupted before its turn"
    assert lines[4] == "  way out: Run the same command again; it resumes."


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_not_tried_again_has_not_failed_and_is_told_with_what_it_met(interrupted: bool) -> None:
    of = matrix(1, [1], [64, 128])
    flaky, broken = (one.key for _, one in of.cells())
    done = [Ended(flaky, 2.0, fault=NO_SPACE), Ended(broken, 2.0, fault=TOO_LARGE)]
    lines = said(results(of, done, interrupted=interrupted, put_off={flaky}))
    assert "2 programs: 1 failed, 1 not retried;" in lines[0]
    why, way_out = (
        ("the build was interrupted before another attempt was over", "Run the same command again; it resumes.")
        if interrupted
        else (
            "it was not tried again after another had failed",
            "Mend that one and run the same command again, or run it with `--keep-going`.",
        )
    )
    assert lines[6:] == [
        f"not retried: {why}; its last attempt met: {NO_SPACE.message}",
        "  acme/model-0, forward-b1-s64",
        f"  way out: {way_out}",
    ]


def test_what_was_ended_by_a_limit_is_told_of_the_options_that_raise_it() -> None:
    one = cell("m", shape())
    fault = Fault("limit", "TimedOut", "it took more than 60 s", 30)
    assert (
        "`--timeout` or `--memory-limit`"
        in said(results(plan(artifact("m", one)), [Ended(one.key, 60, fault=fault)]))[-1]
    )


def test_an_artifact_that_could_not_be_published_is_missing_with_all_its_cells() -> None:
    of = matrix(1, [1], [64, 128])
    done = [*(Ended(one.key, 1.0) for _, one in of.cells()), Ended(of.artifacts[0].key, 0.1, fault=NO_SPACE)]
    (lack,) = missing(results(of, done))
    assert (lack.reason.became, lack.cells, [lot.name for lot in lack.lots]) == ("failed", 2, ["forward-b1-s{64,128}"])


def test_reasons_that_differ_only_in_the_bucket_they_name_are_one() -> None:
    def refused(bucket: int) -> Fault:
        return Fault("deterministic", "BuildRefused", f"a bucket of {bucket} tokens, and 512 at most", 11)

    cells = [cell("m", shape(bucket), "refused", fault=refused(bucket)) for bucket in (1024, 2048)]
    of = results(plan(replace(artifact("m", *cells), key="")))
    (lack,) = missing(of)
    assert lack.reason.text == "a bucket of N tokens, and 512 at most"
    assert [lot.name for lot in lack.lots] == ["forward-b1-s{1024,2048}"]
    (alone,) = missing(results(plan(artifact("m", cells[0]))))
    assert alone.reason.text == "a bucket of 1024 tokens, and 512 at most"


@pytest.mark.parametrize("state", ["published", "committed"])
def test_what_the_store_had_is_found_or_waits_for_its_artifact(state: str) -> None:
    of = matrix(1, [1], [64], state)  # type: ignore[arg-type]
    assert tallied(results(of)) == ({"found": 1} if state == "published" else {"waiting": 1})
