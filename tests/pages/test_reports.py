"""Figures of reports: what is beyond a threshold, how far the weights of two artifacts differ, what is drawn."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.artifact_store.channel.change import Author, Requirements, promote
from nxpipe.artifact_store.weights import Elements
from nxpipe.pipeline.artifacts import difference
from nxpipe.pipeline.artifacts.bench import served_comparisons
from nxpipe.pipeline.build.report.figures import beyond, drift, memory_parts
from nxpipe.pipeline.build.report.html import page as build_page
from nxpipe.pipeline.build.report.result_pages import verify_page
from nxpipe.pipeline.util.exit_codes import OK
from nxpipe.pipeline.util.page.charts import Bar, Curve, Scale, bars, plot
from nxpipe.pipeline.util.page.html import tag
from nxpipe.pipeline.util.page.page import Cell, table
from tests.build_report.test_document import Page
from tests.pages.samples import HOSTILE, build_report, failed_report, verified
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish

__all__ = ["nxpipe"]

TENSORS = {"model.layers.0.up": [3.0, 4.0], "model.layers.0.down": [0.0, 0.0], "model.layers.1.up": [1.0, 0.0],
           "head.weight": [2.0, 0.0]}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def published(store: Store, note: str, ms: float, **changed: list[float]) -> Published:
    values = TENSORS | {name.replace("__", "."): value for name, value in changed.items()}
    arrays = {name: np.array(value, np.float32) for name, value in values.items()}
    elements = {
        name: Elements(name, "float32", array.shape, array.view(np.uint8).data) for name, array in arrays.items()
    }
    return publish(store, note, {16: ms}, weights=elements)


def serve(store: Store, *artifacts: Published) -> None:
    promote(store, "production", artifacts, Author("ann", "because"), Requirements())


# Changes against a channel


def test_weights_drift_is_the_norm_of_the_difference_over_the_norm_before_by_layer(store: Store) -> None:
    before = published(store, "one", 1.0)
    after = published(store, "two", 1.0, model__layers__0__up=[3.0, 4.5], head__weight=[0.0, 0.0])
    found: Mapping[str, Any] = difference.weights_drift(before.manifest, after.manifest, store)
    assert (found["equal"], found["changed"], found["only_in_one"]) == (2, 2, 0)
    assert {group["group"]: group["relative"] for group in found["groups"]} == {
        "model.layers.0": pytest.approx(0.1),
        "head": pytest.approx(1.0),
    }


def test_equal_weights_are_not_read_and_too_many_bytes_are_not_either(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = published(store, "one", 1.0), published(store, "two", 1.0)
    monkeypatch.setattr(difference, "_DRIFT_BYTES", 8)
    assert difference.weights_drift(before.manifest, after.manifest, store)["groups"] == []
    other = published(store, "three", 1.0, head__weight=[1.0, 1.0])
    found = difference.weights_drift(before.manifest, other.manifest, store)
    assert found["groups"] is None
    assert "16 bytes would be read" in str(found["why"])
    assert "Weights drift: not measured, 1 tensors changed" in str(drift(found, "x"))


def test_a_build_is_compared_with_what_each_channel_serves(store: Store) -> None:
    before, after = published(store, "one", 1.0), published(store, "two", 1.5, head__weight=[2.0, 1.0])
    assert served_comparisons(after.manifest, store) == []
    serve(store, before)
    (found,) = served_comparisons(after.manifest, store)
    assert (found["channel"], found["artifact"], found["same"]) == ("production", before.name, False)
    assert found["programs"] == [{"program": "forward-b1-s16", "before_ns": 1e6, "after_ns": 1.5e6}]
    serve(store, after)
    assert [each["same"] for each in served_comparisons(after.manifest, store)] == [True]


# Accuracy and memory


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"cosine": 0.5}, ["cosine"]),
        ({"max_relative": math.nan}, ["relative error"]),
        ({"max_relative": 0.06, "kl": 1.0, "top1": 0.1}, ["relative error", "KL", "top-1"]),
        ({"kl": None, "top1": None}, []),
    ],
)
def test_a_figure_is_beyond_its_threshold_if_it_is_worse_or_not_a_number(
    changed: dict[str, Any], wrong: list[str]
) -> None:
    figures = {"cosine": 0.9999, "max_relative": 0.01, "kl": 1e-6, "top1": 1.0} | changed
    allowed = {"min_cosine": 0.999, "max_relative_error": 0.05, "max_kl": 0.01, "min_top1": 0.9}
    assert beyond(figures, allowed) == wrong
    assert beyond(figures, {}) == []


def test_the_parts_of_memory_add_up_to_the_footprint() -> None:
    (_, cell) = next((a, c) for a in build_report()["artifacts"] for c in a["cells"])
    footprint = cell["predicted"]["footprint"]
    assert sum(size for *_, size in memory_parts(footprint)) == footprint["total"]


def test_a_build_report_has_its_figures_and_an_older_document_says_what_is_not_measured() -> None:
    said = Page(build_page(build_report())).said()
    for words in ("Predicted latency", "Accuracy", "12 outputs of 24 beyond a threshold", "Engine utilization",
                  "Memory of a rank", "HBM traffic", "Weights drift by group of tensors", "11.1% faster"):  # fmt: skip
        assert words in said, words
    older = build_report()
    del older["thresholds"]
    for artifact in older["artifacts"]:
        del artifact["served"]
        for cell in artifact["cells"]:
            del cell["accuracy"]
            for name in ("busy_ns", "critical_path_ns", "footprint", "moved_bytes"):
                del cell["predicted"][name]
    said = Page(build_page(older)).said()
    assert said.count("Not measured: ") == 5
    assert "Predicted latency" in said
    assert "Predicted latency" not in Page(build_page(failed_report())).said()


def test_a_verification_shows_the_first_layer_beyond_and_nothing_for_layers_that_were_not_compared() -> None:
    said = Page(verify_page([verified(passed=False)])).said()
    assert "1 of 1 failed" in said
    assert "model.layers.6 is the first layer beyond the thresholds" in said
    document = verified(passed=True)
    del document["emulated"]["matmult"]["layers"]
    assert "nxpipe verify --layers compares every layer" in Page(verify_page([document])).said()


# Charts and tables


def test_a_scale_keeps_its_ends_and_a_logarithm_has_powers_of_ten() -> None:
    linear = Scale.over([2.0, 8.0], "x")
    assert (linear.at(0.0), linear.at(-1.0), linear.at(100.0)) == (0.0, 0.0, 1.0)
    assert linear.ticks() == [0.0, 2.0, 4.0, 6.0, 8.0]
    log = Scale.over([3e-4, 0.05, math.nan, math.inf, 0.0], "x", log=True)
    assert log.ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert log.at(1e-9) == 0.0
    assert Scale.over([], "x").at(0.5) == pytest.approx(0.5, abs=0.1)
    assert Scale.over([64.0], "x", log=True, marks=[64.0]).at(64.0) == pytest.approx(0.5)


def test_series_differ_by_their_marks_and_their_names_are_text() -> None:
    lines = [Curve(f"{HOSTILE}{number}", [(1.0, 1.0), (2.0, 3.0)]) for number in range(4)]
    drawn = plot(HOSTILE, HOSTILE, Scale.over([1, 2], "x"), Scale.over([1, 3], HOSTILE), lines=lines)
    page = Page(drawn.encode())
    names = {name for name, said in page.elements if (said.get("class") or "").startswith("point")}
    assert names == {"circle", "rect", "polygon"}
    assert "script" not in {name for name, _ in page.elements}
    assert "3 at 2" in page.said()


def test_a_bar_longer_than_the_chart_is_cut_at_its_end() -> None:
    drawn = bars("t", "", [Bar("x", [("s0", 1.0)], (0.5, math.inf)), Bar("y", [("s0", 0.5)])])
    shares = [float(share) for share in re.findall(r'"([0-9.]+)%"', drawn)]
    assert max(shares) <= 100.0


def test_the_first_column_names_its_row_and_each_cell_its_column() -> None:
    rows = [("a", Cell("1 ms", 1.0), "<b>", "z")]
    page = Page(table(("name", "time", "text", "more"), rows, "caption", words=("text",)).encode())
    heads = [said["scope"] for name, said in page.elements if name == "th"]
    assert heads == ["col"] * 4 + ["row"]
    cells = [said for name, said in page.elements if name == "td"]
    assert [said["data-label"] for said in cells] == ["time", "text", "more"]
    assert [said.get("class") for said in cells] == ["number", None, "number"]
    assert cells[0]["data-value"] == "1.0"
    assert "<b>" in page.said()
    assert str(tag("p", "a", data_x=None)) == "<p>a</p>"


# Commands


def test_bench_writes_a_page_of_the_document_that_it_prints(
    nxpipe: InProcess, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    serve(store, published(store, "one", 1.0))
    now = published(store, "two", 1.02)
    words = ("bench", name_of(now), "--against", "production", "--store", str(tmp_path / "store"))
    answer = nxpipe(*words, "--html", "bench.html", "--json")
    assert answer.code == OK.number, answer.err
    (row,) = json.loads(answer.out)
    assert (row["phase"], row["batch"], row["sequence"]) == ("forward", 1, 16)
    said = Page(Path("bench.html").read_bytes()).said()
    assert "no regression" in said
    assert "2.0% slower" in said
    assert "nxpipe bench --measured shows" in said
