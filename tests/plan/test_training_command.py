"""`nxpipe plan train`: its report in text, as JSON and as a page."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.util.text import unstyled
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

LLAMA = "meta-llama/Llama-2-7b-hf"
ASKED = ("plan", "train", "--model-id", LLAMA, "--tokens", "10B")
SMALL = (*ASKED, "--count", "2", "--count", "4")


def document(nxpipe: InProcess, *arguments: str) -> dict[str, Any]:
    answer = nxpipe(*arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_tables_fit_the_terminal(columns: int, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [unstyled(line) for line in nxpipe(*SMALL).out.splitlines()]
    start = next(n for n, line in enumerate(lines) if line.startswith("INSTANCES"))
    rows = lines[start : lines.index("", start)]
    assert len(rows) > 4
    assert max(map(len, rows)) <= columns


def test_plans_are_ranked_by_cost_and_each_has_its_price_date_and_interval(nxpipe: InProcess) -> None:
    found = document(nxpipe, *SMALL)
    costs = []
    for choice in found["choices"]:
        bought = next(each for each in choice["offers"] if each["purchase"] == choice["bought"])
        costs.append(bought["dollars"]["expected"])
        assert bought["dollars"]["low"] <= bought["dollars"]["expected"] <= bought["dollars"]["high"]
        assert bought["date"].startswith("20")
        assert bought["source"]
        assert choice["memory_bytes"]["total"] <= choice["rank_bytes"]
        assert sum(choice["step_seconds"].values()) == pytest.approx(2 * choice["step_seconds"]["total"])
        steps = -(-10e9 // (1024 * 4096))
        assert next(each for each in choice["offers"] if each["purchase"] == "on-demand")["hours"][
            "expected"
        ] == pytest.approx(steps * choice["step_seconds"]["total"] / 3600)
    assert len(costs) == 4
    assert costs == sorted(costs)


def test_prices_and_their_absence_are_said_with_dates(nxpipe: InProcess) -> None:
    text = nxpipe(*SMALL, "--instance", "trn2.48xlarge", "--purchase", "on-demand").out
    assert "unknown" in text
    assert "$0" not in text
    assert "Prices of us-east-2, dated 2026-" in text
    assert "No training on trn2 is published: its interval is twice as wide" in text


def test_types_whose_intervals_overlap_are_too_close_to_call(nxpipe: InProcess) -> None:
    found = document(nxpipe, *SMALL)
    close = {each["instance"] for each in found["choices"] if each["too_close_to_call"]}
    assert close == {"trn2.48xlarge"}


def test_explain_has_the_parts_of_memory_of_a_step_and_every_way_of_buying(nxpipe: InProcess) -> None:
    text = nxpipe(*ASKED, "--instance", "trn1.32xlarge", "--count", "4", "--explain").out
    for part in ("optimizer", "activations", "pipeline bubble", "tensor parallel collectives", "NEXT LAYOUTS"):
        assert part in text
    for way in ("on-demand", "spot", "capacity-block", "savings-plan-1y", "reserved-3y"):
        assert way in text
    assert "a checkpoint takes" in text
    assert "(Daly)" in text


def test_more_interruptions_and_slower_checkpoints_cost_more(nxpipe: InProcess) -> None:
    asked = (*ASKED, "--instance", "trn1.32xlarge", "--count", "8", "--purchase", "spot")
    costs = [
        document(nxpipe, *asked, *more)["choices"][0]["offers"][1]["dollars"]["expected"]
        for more in (
            ("--spot-interruptions", "0%"),
            (),
            ("--spot-interruptions", "60%"),
            ("--spot-interruptions", "60%", "--checkpoint-seconds", "1200"),
        )
    ]
    assert costs == sorted(costs)
    assert len(set(costs)) == 4


def test_precision_and_zero1_change_the_memory_that_is_reported(nxpipe: InProcess) -> None:
    asked = (*ASKED, "--instance", "trn2.48xlarge", "--count", "4")
    mixed, sr, whole = (
        document(nxpipe, *asked, *more)["choices"][0] for more in ((), ("--precision", "bf16-sr"), ("--no-zero1",))
    )
    assert sr["layout"]["precision"] == "bf16-sr"
    assert not whole["layout"]["zero1"]
    assert mixed["layout"]["zero1"]


class Links(HTMLParser):
    """What a page would load, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [
            str(value) for name, value in attrs if name in ("src", "href", "data") and not str(value).startswith("#")
        ]


def test_the_page_loads_nothing_and_has_the_plans(nxpipe: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert nxpipe(*SMALL, "--html", str(path)).code == 0
    text = path.read_text()
    page = Links()
    page.feed(text)
    assert page.loads == []
    assert "script" not in page.tags
    assert {"svg", "table"} <= page.tags
    assert "width=device-width" in text
    assert "prefers-color-scheme" in text
    for found in document(nxpipe, *SMALL)["choices"]:
        assert f"{found['instances']} × {found['instance']}" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tokens", "many"), "'many' is not a number of tokens, as in 500M"),
        (("--tokens", "0"), "'0' is not a number of tokens"),
        (("--tokens", "1B", "--instance", "inf2.48xlarge"), "inf2.48xlarge is no instance type that trains"),
        (("--tokens", "1B", "--spot-interruptions", "100%"), "a share of the instances below 100%"),
        ((), "--tokens: how many tokens to train on?"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(
    arguments: tuple[str, ...], sentence: str, nxpipe: InProcess
) -> None:
    answer = nxpipe("plan", "train", "--model-id", LLAMA, *arguments)
    assert answer.code == 2
    assert sentence in answer.err
    assert answer.out == ""


def test_models_that_are_not_planned_are_refused(nxpipe: InProcess) -> None:
    assert "a plan is for decoders" in nxpipe("plan", "train", "--model-id", "bert-base-uncased", "--tokens", "1B").err
    assert "no model is given; pass --model-id" in nxpipe("plan", "train", "--tokens", "1B").err


def test_nothing_that_fits_is_exit_code_18_with_the_reasons(nxpipe: InProcess) -> None:
    answer = nxpipe(
        *("plan", "train", "--model-id", "meta-llama/Meta-Llama-3.1-405B", "--tokens", "1B"),
        *("--instance", "trn1.32xlarge", "--count", "1"),
    )
    assert answer.code == 18
    assert "Not possible:" in answer.out
    assert "GiB of a rank's 16.0 GiB" in answer.out
