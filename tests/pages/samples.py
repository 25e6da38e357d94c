"""One page of each kind, from documents that have every figure and some text of a hostile model."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import store_report
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.channel.change import Author, Requirements, promote
from nxpipe.pipeline.artifacts.channel_log import ChannelView
from nxpipe.pipeline.build.report.document import ArtifactFigures, BuildHost, report_document
from nxpipe.pipeline.build.report.html import page as build_page
from nxpipe.pipeline.build.report.result_pages import bench_page, verify_page
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.release.report import html_page as release_page
from nxpipe.pipeline.ui.site import StoreSite, export
from tests.artifact_store.samples import publish_verified, put
from tests.build_report.world import BEGAN, NO_SPACE, TOO_LARGE, after, course, ends, matrix, over, results
from tests.canary.samples import plan_with
from tests.pages.rollout_records import store_rollout
from tests.pipeline.command import nxpipe
from tests.pipeline.conftest import BERT as BERT_CONFIG
from tests.pipeline.conftest import write_model
from tests.plan.test_assess import PORTFOLIO
from tests.plan.test_serve_command import SMALL as SERVING_PLAN
from tests.plan.test_training_command import SMALL as TRAINING_PLAN

HOSTILE: Final = "</style><script>alert(1)</script>\"'<b>&amp; a-name-that-is-much-longer-than-a-phone-is-wide-x" * 2
_ABOUT: Final = BuildHost(2, 8_000_000_000, "Linux x86_64", {"nxpipe": "0.1.0", "compiler": "ab" * 32})
_ALLOWED: Final = Thresholds(0.999, 0.05, 0.01, 0.9)


def write_pages(folder: Path) -> list[Path]:
    """The pages, each in a file, and the site of a store."""
    made = {
        "build": build_page(build_report()),
        "build-failed": build_page(failed_report()),
        "release": release_page(release_report()),
        "verify": verify_page([verified(passed=True), verified(passed=False)]),
        "bench": bench_page([benched("forward-b1-s64", 1.12), benched("forward-b4-s64", None)], 5.0),
    }
    for name, data in made.items():
        (folder / f"{name}.html").write_bytes(data)
    export(site_of(folder / "store"), folder / "site")
    return sorted([*folder.glob("*.html"), *(folder / "site").rglob("*.html")])


# Pages that commands write


def write_command_pages(folder: Path) -> list[Path]:
    """The pages of plans, an assessment and a profile, each written by its command."""
    model = write_model(folder / "model", dict(BERT_CONFIG))
    (folder / "portfolio.toml").write_text(PORTFOLIO)
    commands = {
        "plan-serve": (*SERVING_PLAN, "--gpu", "p5en.48xlarge"),
        "plan-train": TRAINING_PLAN,
        "assess": ("assess", "portfolio.toml"),
        "profile": ("profile", "--model-id", str(model), "--weights", "random:0", "--buckets", "16,64"),
    }
    for name, words in commands.items():
        answer = nxpipe(*words, "--html", f"{name}.html", cwd=folder)
        assert answer.code == 0, answer.err
    return [folder / f"{name}.html" for name in commands]


# Reports of builds


def build_report() -> dict[str, Any]:
    """A complete build of two models, with all figures and a channel."""
    of = matrix(2, [1, 4], [64, 128, 256])
    figures = {
        each.key: ArtifactFigures(
            {item.shape.name: _figures(item.shape.batch, item.shape.sequence) for item in each.cells},
            {item.shape.name: {"reference": "PyTorch fp32", "outputs": _outputs()} for item in each.cells},
            [_served()],
        )
        for each in of.artifacts
    }
    return report_document(over(after(of, course(of))), figures, _ABOUT, Path("/home/user"), _ALLOWED)


def failed_report() -> dict[str, Any]:
    of = matrix(2, [1], [64, 128, 256])
    failing, flaky = (entry.key for entry in of.artifacts[1].cells[1:])
    done = ends(course(of, failures={failing: TOO_LARGE, flaky: NO_SPACE}))
    return report_document(results(of, done, retrying={flaky}), None, _ABOUT, Path("/home/user"))


def _figures(batch: int, bucket: int) -> dict[str, Any]:
    """The figures of a program, as utilisation.json and the predictions have them."""
    ns, size = 1e4 * batch * math.sqrt(bucket), 1_000_000 * batch
    busy = {"tensor": 0.3 * ns, "vector": 0.2 * ns, "scalar": 0.1 * ns, "gpsimd": 0.01 * ns, "dma": 0.7 * ns}
    kinds = {"code": 20_000, "constant": 5000, "input": 100, "output": 100, "parameter": size, "scratch": 500_000,
             "state": 300_000}  # fmt: skip
    return {
        "in_short": "figures",
        "time": {"latency_ns": ns, "bound_by": "dma", "limited_by": "dma", "over_floor": 3.5, "busy_ns": busy,
                 "critical_path_ns": {"tensor": 0.2 * ns, "dma": 0.5 * ns, "dma latency": 0.3 * ns}},
        "hbm": {"moved_bytes": 3 * size, "compulsory_bytes": 2 * size},
        "spilled": {"bytes": size // 2},
        "footprint": kinds | {"total": sum(kinds.values())},
        "this_program": {"ms": 1.2 * ns / 1e6, "device_ms": ns / 1e6, "host_ms": 0.09, "collectives_ms": 0.0},
        "aws_compiler": {"covered": True, "ms": ns / 2e6, "low_ms": ns / 3e6, "high_ms": ns / 1e6}
        if bucket > 64 else {"covered": False, "reason": HOSTILE},
    }  # fmt: skip


def _outputs() -> list[dict[str, Any]]:
    good = {
        "max_absolute": 1e-3,
        "mean_absolute": 1e-4,
        "max_relative": 4e-3,
        "cosine": 0.99999,
        "kl": 1e-6,
        "top1": 1.0,
    }
    state = {**good, "kl": None, "top1": None, "max_relative": 0.2, "cosine": 0.99}
    return [{"output": "logits", **good}, {"output": HOSTILE, **state}]


def _served() -> dict[str, Any]:
    programs = [{"program": "forward-b1-s64", "before_ns": 9e4, "after_ns": 8e4}]
    groups = [{"group": f"model.layers.{number}", "tensors": 4, "relative": 0.01 * number} for number in range(5)]
    drift = {"equal": 3, "changed": 20, "only_in_one": 0, "groups": groups}
    return {"channel": "production", "artifact": "acme/model-0@aaaaaaaaaaaa", "same": False, "programs": programs,
            "drift": drift}  # fmt: skip


# Releases, comparisons, predicted times


def release_report() -> dict[str, Any]:
    rows = [{"artifact": HOSTILE, "program": "forward-b1-s64", "fate": "built", "seconds": 12.5}] * 3
    near = [{"output": HOSTILE, "max_relative": "0.3", "cosine": "0.9", "max_absolute": "1", "mean_absolute": "1"}]
    compared = [{"artifact": "a", "program": "forward-b1-s64", "against": "PyTorch fp32", "near": near}]
    gates: Sequence[tuple[Any, ...]] = (
        ("check", "passed", 0, "2 models fit", []),
        ("build", "passed", 0, "18 programs: 18 built", rows),
        ("verify", "passed", 0, "1 comparison within thresholds", compared),
        ("bench", "failed", 16, HOSTILE, [benched("forward-b1-s64", 1.12)]),
        ("promote", "waiting", 0, "", []),
    )
    named = ("gate", "state", "code", "sentence", "figures")
    return {
        "verdict": "not released", "exit_code": 16, "began_at": BEGAN, "seconds": 49.2, "channel": "production",
        "from": "staging", "store": "s3://models/nx", "reason": HOSTILE, "threshold": 0.05,
        "artifacts": [{"name": "bert", "model_id": "bert", "target": "inf2", "manifest": "ab" * 32}],
        "gates": [dict(zip(named, gate, strict=True)) | {"seconds": 1.3} for gate in gates],
        "way_back": ["nxpipe rollback --channel production --to 3 --expect 4"], "versions": {"nxpipe": "0.1.0"},
        "thresholds": vars(_ALLOWED),
    }  # fmt: skip


def verified(*, passed: bool) -> dict[str, Any]:
    """A document of `nxpipe verify --json`; one that failed has a layer that is not a number."""
    errors = [1e-4 * 2**number for number in range(6)] + [1e-2 if passed else math.nan]
    layers = [{**_outputs()[0], "output": f"model.layers.{n}", "max_relative": e} for n, e in enumerate(errors)]
    result = {"outputs": _outputs()[:1] if passed else _outputs(), "layers": layers,
              "first_layer_beyond": None if passed else "model.layers.6"}  # fmt: skip
    return {
        "model": "acme/model", "program": "prefill-b1-s64", "autocast_type": "bf16", "mode": "fast",
        "slice_layers": None, "inputs": "sample texts", "thresholds": vars(_ALLOWED), "passed": passed,
        "yardstick": "PyTorch fp32", "emulated": {"matmult": result}, "beside": {"PyTorch bf16": result},
    }  # fmt: skip


def benched(program: str, change: float | None) -> dict[str, Any]:
    """A document of `nxpipe bench --json`."""
    before = 1e5 if change else None
    return {
        "artifact": "bert@aaaaaaaaaaaa", "target": "inf2", "program": program, "tensor_parallel": 1,
        "predicted_ns": 1e5 * (change or 1), "against": "bert@bbbbbbbbbbbb" if change else None, "before_ns": before,
        "change": change and change - 1, "verdict": "regression" if change else "alone", "phase": "forward",
        "batch": 1, "sequence": 64, "this_program": {"ms": 0.2},
        "aws_compiler": {"covered": True, "ms": 0.2, "low_ms": 0.1, "high_ms": 0.3},
        "measured": {"p50_ms": 0.2, "p99_ms": 0.3, "clock": "device"}, "measured_ratio": 1.5,
    }  # fmt: skip


# A store


def site_of(folder: Path) -> StoreSite:
    """The site of a new store with artifacts, a channel, reports and two rollouts."""
    store = open_store(str(folder))
    fill(store)
    return StoreSite(ChannelView.of(store, folder / "nxpipe.toml", lambda _: None))


def fill(store: Store) -> None:
    made = [publish_verified(store, put(store, name, request=name)) for name in ("a", "b")]
    for artifact in made:
        promote(store, "production", [artifact], Author("ann <ann@example.com>", HOSTILE), Requirements())
    data = canonical_json(build_report())
    store_report(store, made[0].manifest_digest, BEGAN, html=b"<script>alert(1)</script>", json=data)
    store_report(store, made[1].manifest_digest, BEGAN, html=b"", json=b'{"format": "of another version"}')
    plan = plan_with()
    assert store_rollout(store, plan, "search", "good-1", 0) == "advance"
    assert store_rollout(store, plan, "search", "bad-2", 6) == "roll_back"


def links(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every link of the pages in a folder."""
    from html.parser import HTMLParser

    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [str(value) for name, value in attrs if name in ("href", "src")]

    for path in sorted(folder.rglob("*.html")):
        reader = Reader()
        reader.feed(path.read_text())
        yield from ((path, link) for link in reader.found)
