"""Outputs of commands on terminals of four widths, compared with the files in `golden`.

`GOLDEN=write pytest -m "" tests/terminal` writes the files; read their difference before you commit it.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.emulator.analysis.graph_memory import GraphMemory
from nxpipe.emulator.hardware import INSTANCES, instance
from nxpipe.pipeline.build.jobs import CellStatus
from nxpipe.pipeline.build.report.summary import show_artifacts
from nxpipe.pipeline.check.formats import as_text
from nxpipe.pipeline.check.report import Examination, Program, Report, fit_target, verdicts
from nxpipe.pipeline.cli import doctor
from nxpipe.pipeline.plan import serve_report
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import screen_width
from tests.build_report import world
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish

__all__ = ["nxpipe"]

WIDTHS: Final = (60, 80, 120, 200)
_GOLDEN: Final = Path(__file__).parent / "golden"
_BREAKABLE: Final = 32  # characters of a word that may be broken
_GIB: Final = 1 << 30

# What differs from run to run, replaced by text of the same width.
_VOLATILE: Final = (
    (r"\b\d{4}-\d\d-\d\d(?= \d\d:\d\d)", "2026-01-01"),
    (r"\b\d\d:\d\d:\d\d\b", "00:00:00"),
    (r"\b\d\d:\d\d\b", "00:00"),
    (r"(?<![.\d])\b(?=[a-f]*\d)[0-9a-f]{6,64}\b", lambda found: "0" * len(found[0])),  # digests, and pieces of them
    (r"for \d seconds?", "for 0 seconds"),
)


# Commands


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of three artifacts, two of them of one model, and a channel with a history."""
    monkeypatch.chdir(tmp_path)
    for name in ("NXPIPE_STORE_URL", "GITHUB_ACTIONS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "search"\n[store]\nurl = "file://store"\n')
    store = open_store("store")
    monkeypatch.setattr(Store, "url", property(lambda _: "file:///srv/models/.nxpipe/store"))
    return store


def _inputs(autocast: str, buckets: tuple[int, ...]) -> dict[str, object]:
    return {
        "model": "acme/tiny-bert",
        "options": {"autocast": autocast, "tensor_parallel": 1},
        "shapes": [["forward", 1, bucket] for bucket in buckets],
        "target": "inf2",
    }


def _filled(store: Store, nxpipe: InProcess) -> tuple[str, str]:
    old = publish(store, "old", {32: 0.41, 128: 1.2}, inputs=_inputs("matmult", (32, 128)))
    new = publish(store, "new", {32: 0.44, 128: 1.1, 512: 5.25}, inputs=_inputs("none", (32, 128, 512)))
    publish(store, "decoder", {2048: 12.5}, model="acme/llama-8b-instruct", target="trn2", phase="decode", degree=8)
    actor = ("--channel", "production", "--actor", "ann@acme.example")
    assert nxpipe("promote", name_of(old), *actor, "--reason", "first version").code == 0
    assert nxpipe("promote", name_of(new), *actor, "--reason", "longer requests, without autocast").code == 0
    return name_of(old), name_of(new)


@dataclass(frozen=True)
class Terminal:
    store: Store
    nxpipe: InProcess
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def printed(self, show: Callable[[], object]) -> str:
        self.capsys.readouterr()
        show()
        return self.capsys.readouterr().out


Shown: TypeAlias = Callable[[], str]
Output: TypeAlias = Callable[[Terminal], Shown]  # prepares what is shown once for each width


def _of_store(*words: str) -> Output:
    def prepare(terminal: Terminal) -> Shown:
        old, new = _filled(terminal.store, terminal.nxpipe)
        arguments = [{"OLD": old, "NEW": new}.get(word, word) for word in words]
        return lambda: terminal.nxpipe(*arguments).out

    return prepare


def _of_command(*words: str) -> Output:
    return lambda terminal: lambda: terminal.nxpipe(*words).out


# Documents of builds and checks


def _figures(ms: float, bound: str, moved: int, spilled: int) -> dict[str, Any]:
    return {
        "time": {"latency_ns": ms * 1e6, "bound_by": bound, "limited_by": None},
        "hbm": {"moved_bytes": moved, "ratio": 1.25},
        "spilled": {"bytes": spilled},
        "tensor_engine": {"utilisation": 0.73},
        "this_program": {"ms": ms + 0.094},
        "aws_compiler": {"in_short": f"{ms / 2:.2f} ms ({ms / 2.2:.2f} to {ms / 1.8:.2f})"},
    }


def _accuracy(cosine: str, relative: str) -> list[Mapping[str, str]]:
    return [{"output": "logits", "cosine": cosine, "max_relative": relative, "yardstick": "PyTorch fp32"}]


def _build(*, cached: bool) -> Output:
    def prepare(terminal: Terminal) -> Shown:
        published = publish(terminal.store, "built", {128: 0.2, 32: 0.1, 512: 4.8})
        status = CellStatus.PUBLISHED if cached else CellStatus.QUEUED
        cells = [world.cell("bert", world.shape(bucket), status) for bucket in (128, 32, 512)]
        plan = world.plan(world.artifact("bert", *cells))
        key = plan.artifacts[0].key
        results = world.results(plan, [] if cached else world.ends(world.course(plan)))
        figures = {
            "forward-b1-s128": _figures(0.2, "dma latency", 570_400, 0),
            "forward-b1-s32": _figures(0.1, "dma", 329_500, 0),
            "forward-b1-s512": _figures(4.8, "tensor engine", 470_100_000, 109_500_000),
        }
        verified = {
            "forward-b1-s128": _accuracy("0.9999998", "0.002175"),
            "forward-b1-s32": _accuracy("0.9999997", "0.001257"),
            "forward-b1-s512": _accuracy("0.9999912", "0.01302"),
        }

        shown = ({key: published}, {key: figures}, {key: verified}, results)
        return lambda: terminal.printed(lambda: show_artifacts(Console(), *shown))

    return prepare


def _check(*targets: str) -> Output:
    footprints = tuple(
        GraphMemory(degree, 16 * _GIB // degree, 4 * _GIB // degree, 9_000_000, 2_000_000, 310_000_000 // degree)
        for degree in (1, 2, 4, 8)
    )
    programs = (
        Program("prefill-b1-s1024", 1_873, 59_041, "a" * 64),
        Program("decode-b8-s1024", 2_011, 61_120, "b" * 64),
    )
    refused = {
        degree: f"the 8 units of model.layers.0.self_attn.k_proj.weight cannot be shared by {degree} ranks; degrees "
        "that work: 1, 2, 4, 8"
        for degree in (16, 24, 32, 64)
    }
    examination = Examination(programs, (), footprints, refused, whole=True)
    fits = tuple(fit_target(examination, instance(target), None) for target in targets)
    report = Report("acme/llama-8b-instruct", "text-generation", programs, True, fits, tuple(verdicts(fits, None)))

    return lambda terminal: lambda: terminal.printed(lambda: Console().page(as_text(report)))


def _doctor(terminal: Terminal) -> Shown:
    """What `doctor` says where neither the CDK command nor neuronx-cc is installed."""
    absent = {"cdk": None, "neuronx-cc, jaxlib": None}
    findings = [doctor.Requirement(need, absent.get(need.name, "1.2.3")) for need in doctor.NEEDS]
    terminal.monkeypatch.setattr(doctor, "examine", lambda: findings)
    return lambda: terminal.nxpipe("doctor").out


def _plan_serve(terminal: Terminal) -> Shown:
    """One plan, for all widths."""
    calls: list[tuple[Any, Any]] = []
    summary = serve_report.summary

    def recorded(plan: Any, comparison: Any, width: int) -> str:
        calls.append((plan, comparison))
        return summary(plan, comparison, width)

    terminal.monkeypatch.setattr(serve_report, "summary", recorded)
    asked = (
        *("plan", "serve", "--model-id", _LLAMA, "--rate", "20", "--prompt", "200", "--output", "40"),
        *("--ttft", "1s", "--tpot", "60ms@p90", "--region", "us-east-2", "--runtime", "nxdi"),
        *("--instance", "inf2.xlarge", "--instance", "trn1.32xlarge"),
    )
    assert terminal.nxpipe(*asked).code == 0
    ((plan, comparison),) = calls
    return lambda: terminal.printed(lambda: Console().page(summary(plan, comparison, screen_width() or 0)))


_LLAMA: Final = "meta-llama/Llama-2-7b-hf"
OUTPUTS: Final[Mapping[str, Output]] = {
    "build": _build(cached=False),
    "build-cached": _build(cached=True),
    "store-ls": _of_store("store", "ls"),
    "store-show": _of_store("store", "show", "NEW"),
    "check": _check("inf2.48xlarge"),
    "check-all": _check(*INSTANCES),
    "bench": _of_store("bench", "OLD", "NEW", "--against", "OLD", "--threshold", "10%"),
    "explain": _of_store("explain", "NEW"),
    "channel-show": _of_store("channel", "show", "production"),
    "channel-log": _of_store("channel", "log", "production"),
    "diff": _of_store("diff", "OLD", "NEW"),
    "doctor": _doctor,
    "help": _of_command("--help"),
    "help-build": _of_command("build", "-h"),
    "help-store": _of_command("store", "-h"),
}


@pytest.fixture
def terminal(
    store: Store, nxpipe: InProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    return Terminal(store, nxpipe, capsys, monkeypatch)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_as_recorded_at_every_width_and_no_word_is_broken(name: str, terminal: Terminal) -> None:
    _judge(name, terminal, OUTPUTS[name](terminal))


PLANS: Final[Mapping[str, Output]] = {
    "plan-serve": _plan_serve,
    "plan-train": _of_command("plan", "train", "--model-id", _LLAMA, "--tokens", "10B", "--count", "2"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_as_recorded_at_every_width(name: str, terminal: Terminal) -> None:
    _judge(name, terminal, PLANS[name](terminal))


def _judge(name: str, terminal: Terminal, show: Shown) -> None:
    outputs = {}
    for columns in WIDTHS:
        terminal.monkeypatch.setenv("COLUMNS", str(columns))
        outputs[columns] = _stable(show())
        assert outputs[columns].strip()
        assert [line for line in outputs[columns].splitlines() if len(line) > columns] == []
    whole = set(_words(outputs[max(WIDTHS)]))
    for columns, text in outputs.items():
        broken = set(_words(text)) - whole - _OWN_WORDS
        assert {word for word in broken if not _is_piece(word, whole)} == set(), columns
    _compare(name, "".join(f"== {columns} columns\n{text.rstrip()}\n\n" for columns, text in outputs.items()))


def _words(text: str) -> Iterator[str]:
    yield from (word.strip(",.:;") for word in text.casefold().split())


# Of the line below a table without some of its columns, of an example that goes on, and of widths.
_OWN_WORDS: Final = {*_words("Not shown in columns: A wider terminal or --json has them. \\"), *map(str, WIDTHS)}


def _is_piece(word: str, whole: Iterable[str]) -> bool:
    """True for a piece of a word that is longer than a column need be."""
    return any(word in long for long in whole if len(long) > _BREAKABLE)


def _stable(text: str) -> str:
    for pattern, replacement in _VOLATILE:
        text = re.sub(pattern, replacement, text)
    return text


def _compare(name: str, text: str) -> None:
    path = _GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()
