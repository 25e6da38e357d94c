"""`nxpipe profile`: summary, trace, page and differences of programs; names of a model stay text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nxpipe.emulator.executable.executable import Executable, to_bytes
from nxpipe.pipeline.util.exit_codes import OK, USAGE
from tests.build_report.test_document import Page
from tests.core.hands import with_waits
from tests.isa.assembler import program
from tests.isa.test_utilization import THERE_AND_BACK, TILE
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

HOSTILE = '</style><script>alert(1)</script>\x1b[31m\u202e"&<img src=x onerror=alert(1)> ::error::x (linear)'
EXAMPLE = with_waits(program(THERE_AND_BACK))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return _written("sums.nxe")


def _written(name: str, notes: Sequence[str] = EXAMPLE.notes) -> str:
    Path(name).write_bytes(to_bytes(Executable(replace(EXAMPLE, notes=tuple(notes)))))
    return name


def profiled(nxpipe: InProcess, *words: str) -> list[dict[str, Any]]:
    answer = nxpipe("profile", *words, "--json")
    assert answer.code == OK.number, answer.err
    documents: list[dict[str, Any]] = json.loads(answer.out)
    return documents


def test_a_profile_as_data_adds_up_to_the_time_of_the_program(nxpipe: InProcess, file: str) -> None:
    (found,) = profiled(nxpipe, file)
    total = found["this_program"]["latency_ns"]
    assert sum(found["total"]["critical_path_ns"].values()) == pytest.approx(total)
    for parts in (found["operators"], found["modules"]):
        assert sum(ns for part in parts.values() for ns in part["critical_path_ns"].values()) == pytest.approx(total)
    gaps = sum(gap["ns"] for gap in found["gaps"])
    assert gaps + found["busy_ns"][found["busiest"]] == pytest.approx(total)
    assert found["aws_compiler"] == {"covered": False, "reason": found["aws_compiler"]["reason"]}
    assert set(found["modules"]) == {"layers.0.up", "layers.0.down"}
    moved = sum(each["bytes"] for each in found["dma"]["transfers"])
    assert moved == sum(each["bytes"] for each in found["dma"]["descriptors"]) == 5 * TILE + 3 * TILE // 2


def test_a_summary_tells_the_two_predictions_apart(nxpipe: InProcess, file: str) -> None:
    said = nxpipe("profile", file).out
    assert re.search(r"^this program +[0-9.,]+ us, bound by dma for \d+% of it; [0-9.]+ x its floor of", said, re.M)
    assert re.search(r"^AWS's compiler +not covered \(a file names no model", said, re.M)
    assert "changes that would help most, each an upper bound" in said


def test_a_model_is_profiled_without_weights_and_beside_it_the_time_of_awss_compiler(
    nxpipe: InProcess, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama)
    (found,) = profiled(nxpipe, "--model-id", str(llama), "--phases", "decode", "--buckets", "16")
    assert (found["program"], found["target"]) == ("decode-b1-s16", "inf2.xlarge")
    aws = found["aws_compiler"]
    assert aws["covered"]
    assert aws["low_ms"] < aws["ms"] < aws["high_ms"]
    assert "model.layers.1.mlp.down_proj" in found["modules"]
    assert {"linear", "rms_norm", "attention"} <= set(found["operators"])


# The trace


def _checked(trace: Mapping[str, Any]) -> None:
    """Every rule of Chrome's trace format that the events must keep."""
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    named = {(row["pid"], row["tid"]) for row in trace["traceEvents"] if row["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[str, list[str]] = {}
    for row in trace["traceEvents"]:
        assert isinstance(row["name"], str)
        assert row["name"]
        assert all(isinstance(row[key], int) for key in ("pid", "tid"))
        assert row["ts"] >= 0
        match row["ph"]:
            case "M":
                assert row["name"] in ("process_name", "thread_name", "thread_sort_index")
            case "X":
                assert (row["pid"], row["tid"]) in named
                assert row["dur"] >= 0
                slices.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["dur"]))
            case "s" | "f":
                arrows.setdefault(row["id"], []).append(row["ph"])
                begins = [ts for ts, dur in slices[row["pid"], row["tid"]] if ts <= row["ts"] <= ts + dur]
                assert begins, "an arrow begins and ends in a slice"
            case "C":
                assert all(isinstance(value, int) for value in row["args"].values())
            case other:
                raise AssertionError(f"unknown phase {other}")
    for track in slices.values():
        ordered = sorted(track)
        assert all(begin + taken <= later + 1e-6 for (begin, taken), (later, _) in pairwise(ordered))
    assert all(phases == ["s", "f"] for phases in arrows.values())


def test_a_trace_keeps_the_rules_of_its_format(nxpipe: InProcess, file: str) -> None:
    (found,) = profiled(nxpipe, file, "--trace", "trace.json")
    trace = json.loads(Path("trace.json").read_text(encoding="ascii"))
    _checked(trace)
    events = trace["traceEvents"]
    ends = [row["args"]["begin_ps"] + row["args"]["duration_ps"] for row in events if row["ph"] == "X"]
    assert max(ends) / 1000 == found["this_program"]["latency_ns"]
    assert {row["name"] for row in events if row["ph"] == "C"} == {"SBUF in use", "PSUM in use", "HBM in use"}
    assert any(row["ph"] == "s" for row in events)


# The page


def test_a_page_requests_nothing_and_every_chart_has_a_title(nxpipe: InProcess, file: str) -> None:
    assert nxpipe("profile", file, "--html", "page.html").code == OK.number
    data = Path("page.html").read_bytes()
    page = Page(data)
    for name, attributes in page.elements:
        assert name not in ("script", "img", "link", "iframe", "object")
        assert not {"src", "style", "onload"} & attributes.keys()
        if name == "a":
            assert str(attributes["href"]).startswith("#")
        if name == "th":
            assert attributes["scope"] in ("col", "row")
    images = [number for number, (name, said) in enumerate(page.elements) if said.get("role") == "img"]
    assert images
    assert all(page.elements[number + 1][0] == "title" for number in images)
    (policy,) = (each["content"] for _, each in page.elements if each.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
    said = page.said()
    assert all(word in said for word in ("this program", "AWS's compiler", "Roofline", "By module", "Memory over time"))


def test_names_of_a_hostile_model_are_text_everywhere(nxpipe: InProcess, file: str) -> None:
    hostile = _written("hostile.nxe", ("", HOSTILE, f"a.{HOSTILE}"))
    answer = nxpipe("profile", hostile, "--html", "page.html", "--trace", "trace.json")
    assert answer.code == OK.number, answer.err
    assert all(character.isprintable() or character == "\n" for character in answer.out)
    assert not re.search("^::", answer.out, re.M)
    page = Path("page.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page
    _checked(json.loads(Path("trace.json").read_text()))


# Differences


def test_a_program_does_not_differ_from_itself(nxpipe: InProcess, file: str) -> None:
    (found,) = profiled(nxpipe, "--diff", file, file)
    lines = [line for kind, lines in found.items() if isinstance(lines, list) for line in lines]
    assert lines
    assert all(line["change"] == 0 and line["before"] == line["after"] for line in lines)
    assert "no figure differs" in nxpipe("profile", "--diff", file, file).out


def test_a_difference_names_what_moved_to_another_module(nxpipe: InProcess, file: str) -> None:
    other = _written("other.nxe", ("", "layers.0.up model.py:7", "layers.0.across"))
    (found,) = profiled(nxpipe, "--diff", file, other)
    (total,) = found["total_ns"]
    assert total["change"] == 0
    modules = {line["name"]: line["change"] for line in found["module_ns"]}
    assert modules["layers.0.down"] == -modules["layers.0.across"] < 0
    assert modules["layers.0.up"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--diff", "sums.nxe"), "--diff compares two programs, but 1 are given"),
        (("--diff", "sums.nxe", "sums.nxe", "--html", "x.html"), "--diff prints its result; remove --trace and --html"),
        (("sums.nxe", "--model-id", "bert"), "a program and --model-id or --only cannot be combined"),
        (("summs",), "there is no program, artifact or model 'summs'"),
        (("sums.nxe", "--buckets", "16"), "--buckets requires --model-id"),
        (("missing.nxe",), "missing.nxe"),
        ((), "nxpipe.toml does not exist"),
    ],
)
def test_a_wrong_command_is_one_sentence(nxpipe: InProcess, file: str, words: tuple[str, ...], said: str) -> None:
    answer = nxpipe("profile", *words)
    assert answer.code != OK.number
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    assert said in answer.err
    assert not Path("x.html").exists()
    assert answer.code == USAGE.number or words in ((), ("missing.nxe",))
