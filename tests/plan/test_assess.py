"""Assessment of a portfolio: decisions follow from objectives, bills and intervals, and every figure has its date."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.plan.assessment import (
    AssessedWorkload,
    GpuFleet,
    MigrationDecision,
    Portfolio,
    PortfolioFile,
    Workload,
    assess,
    phases,
    portfolio_of,
)
from nxpipe.pipeline.util.errors import InputInvalid
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

PORTFOLIO = """
[portfolio]
name = "Acme <b>"
engineer_week = 6000
horizon_months = 24
instances = ["inf2.xlarge", "inf2.48xlarge"]
[[workloads]]
name = "chat"
model = "meta-llama/Llama-3.1-8B"
requests_per_second = 4
prompt_tokens = 600
output_tokens = 150
ttft_ms = 2000
tpot_ms = 80
gpu = { instance = "p4d.24xlarge", count = 4, monthly = 64000 }
[[workloads]]
name = "search"
model = "bert-base-uncased"
requests_per_second = 800
prompt_tokens = 128
latency_ms = 40
gpu = { instance = "g5.xlarge", count = 24 }
[[workloads]]
name = "own"
model = "acme/own-model"
requests_per_second = 2
prompt_tokens = 300
output_tokens = 30
gpu = { instance = "g6.xlarge", count = 2 }
"""


def test_a_portfolio_becomes_a_table_a_page_and_a_checklist(nxpipe: InProcess, tmp_path: Path) -> None:
    file, page, notes = tmp_path / "portfolio.toml", tmp_path / "a.html", tmp_path / "a.md"
    file.write_text(PORTFOLIO)
    answer = nxpipe("assess", str(file), "--html", str(page), "--markdown", str(notes))
    assert answer.code == 0, answer.err
    for words in (
        "2 move, 1 wait, 0 stay",
        "prices of 2026-07-20",
        "Pilot: chat",
        "Roll-out: search",
        "Look again: own",
        "months",
    ):
        assert words in answer.out
    assert "Running On-Demand Inf instances | ________ | ________ |" in notes.read_text()
    html = page.read_text()
    assert "Acme &lt;b&gt;" in html
    assert "<b>" not in html.replace("<b></b>", "")
    assert "<script" not in html
    assert "http://" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")


def search(rate: float = 800.0, monthly: float | None = None, **changes: object) -> Workload:
    gpu = GpuFleet(instance="g5.xlarge", count=24, monthly=monthly)
    fields = {"name": "search", "model": "bert-base-uncased", "requests_per_second": rate, "prompt_tokens": 128}
    return Workload.model_validate({**fields, "latency_ms": 40.0, "gpu": gpu, **changes})


def assessed(workload: Workload, **changes: object) -> AssessedWorkload:
    portfolio = Portfolio.model_validate({"instances": ("inf2.xlarge", "inf2.48xlarge"), **changes})

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an encoder needs no simulation")

    found = assess(PortfolioFile(portfolio, (workload,)), load_prices(), refuse, lambda _: None)  # type: ignore[arg-type]
    return found.workloads[0]


ORDER = [MigrationDecision.STAY, MigrationDecision.WAIT, MigrationDecision.MOVE]


@given(st.floats(100, 1e6), st.floats(100, 1e6))
def test_a_dearer_gpu_fleet_is_never_less_worth_leaving(one: float, other: float) -> None:
    cheap, dear = (assessed(search(monthly=bill)).decision for bill in sorted((one, other)))
    assert ORDER.index(cheap) <= ORDER.index(dear)


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_more_traffic_never_costs_less(one: float, other: float) -> None:
    few, many = (assessed(search(rate)).fleet for rate in sorted((one, other)))
    assert few is not None
    assert many is not None
    assert (few.monthly.nominal or 0) <= (many.monthly.nominal or 0)


@given(st.floats(5, 500), st.floats(5, 500))
def test_a_tighter_latency_never_costs_less(one: float, other: float) -> None:
    tight, loose = (assessed(search(latency_ms=limit)).fleet for limit in sorted((one, other)))
    if tight is not None:
        assert loose is not None
        assert (loose.monthly.nominal or 0) <= (tight.monthly.nominal or 0)


def test_a_move_pays_within_the_horizon_at_the_slow_end_and_with_the_overrun() -> None:
    found = assessed(search())
    assert found.decision is MigrationDecision.MOVE
    assert found.fleet is not None
    assert found.bill is not None
    assert found.saved is not None
    assert found.value is not None
    assert found.fleet.monthly.high is not None
    assert found.saved.low == pytest.approx(found.bill - found.fleet.monthly.high)
    assert found.migration.nominal == pytest.approx(2 * 5000)
    assert found.value.low == pytest.approx((found.bill - found.fleet.monthly.high) * 24 - 2 * 5000 * 1.5)
    price = load_prices().price("us-east-1", "g5.xlarge")
    assert price is not None
    assert found.bill == pytest.approx(24 * 730 * price.hourly)
    assert found.billed == price.date


def test_what_is_not_proved_waits_with_the_reason() -> None:
    kernels = assessed(search(custom_kernels=True))
    assert kernels.decision is MigrationDecision.WAIT
    assert "NKI" in dict(kernels.reasons)["operators"]
    unknown = assessed(search(model="acme/own"))
    assert unknown.decision is MigrationDecision.WAIT
    assert "nxpipe check" in dict(unknown.reasons)["operators"]


def test_an_unknown_bill_is_said_and_not_counted_as_zero() -> None:
    found = assessed(search(gpu=GpuFleet(instance="x9.huge", count=2)))
    assert (found.bill, found.saved, found.decision) == (None, None, MigrationDecision.WAIT)
    assert "the price of x9.huge is unknown" in dict(found.reasons)["cost"]


def test_an_objective_that_nothing_meets_stays_and_says_which_types_were_tried() -> None:
    found = assessed(search(latency_ms=0.01))
    assert found.decision is MigrationDecision.STAY
    assert "inf2.xlarge: no batch has a latency of 0.01 ms" in dict(found.reasons)["latency"]


def test_phases_begin_with_what_pays_back_first(tmp_path: Path) -> None:
    file = tmp_path / "portfolio.toml"
    file.write_text('[[workloads]]\nname = "a"\nmodel = "bert-base-uncased"\nrequests_per_second = 10\n'
                    'prompt_tokens = 64\ngpu = { instance = "g5.xlarge", count = 9 }\n'
                    '[[workloads]]\nname = "b"\nmodel = "bert-base-uncased"\nrequests_per_second = 10\n'
                    'prompt_tokens = 64\ngpu = { instance = "g5.xlarge", count = 90 }\n')  # fmt: skip
    found = assess(portfolio_of(file), load_prices(), lambda *_, **__: None, lambda _: None)  # type: ignore[arg-type]
    assert [(phase.title, phase.workloads) for phase in phases(found)] == [("Pilot", ("b",)), ("Roll-out", ("a",))]


WORKLOAD = '[[workloads]]\nname = "a"\nmodel = "m"\nrequests_per_second = 1\nprompt_tokens = 1\n'
GPU = 'gpu = { instance = "g5.xlarge", count = 1 }\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "not a portfolio"),
        ("[portfolio]\n", "no [[workloads]]"),
        (WORKLOAD, "workload 1: gpu: Field required"),
        (f"{WORKLOAD}{GPU}rate = 3\n", "workload 1: rate"),
        (f"{WORKLOAD}{GPU}{WORKLOAD}{GPU}", "two workloads are named 'a'"),
        (f"[portfolio]\nhorizon_months = 0\n{WORKLOAD}{GPU}", "[portfolio]: horizon_months"),
        (f'[portfolio]\ninstances = ["inf2.huge"]\n{WORKLOAD}{GPU}', "inf2.huge"),
        (WORKLOAD + 'gpu = { instance = "g5.xlarge", count = 0 }\n', "workload 1: gpu.count"),
    ],
)
def test_a_malformed_portfolio_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "portfolio.toml"
    file.write_text(text)
    with pytest.raises(InputInvalid, match=re.escape(said)):
        portfolio_of(file)


def test_json_has_every_figure_with_its_interval(nxpipe: InProcess, tmp_path: Path) -> None:
    file = tmp_path / "portfolio.toml"
    file.write_text(PORTFOLIO.partition("[[workloads]]")[0] + "[[workloads]]" + PORTFOLIO.split("[[workloads]]")[2])
    found = json.loads(nxpipe("assess", str(file), "--json").out)
    (one,) = found["workloads"]
    assert one["decision"] == "move"
    assert set(one["saved_a_month"]) == {"nominal", "low", "high"}
    assert one["fleet"]["price_date"] == "2026-07-20"
