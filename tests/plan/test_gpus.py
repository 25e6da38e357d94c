"""GPUs beside a plan: the shipped measurements, imported load tests, verdicts and break-even."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.config.prices import Price, Prices, Purchase, load_prices
from nxpipe.pipeline.plan.candidates import instances_of, planned_model
from nxpipe.pipeline.plan.gpus import (
    BreakEven,
    GpuMeasurement,
    GpuPlan,
    Migration,
    break_even,
    gpu_plans,
    gpu_table,
    own_measurement,
    verdict,
)
from nxpipe.pipeline.plan.load_tests import LoadTest, read_load_tests
from nxpipe.pipeline.plan.serve import Interval, Objective, Plan, plan_serving
from nxpipe.pipeline.plan.traffic import LengthDistribution, Traffic
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.util.errors import InputInvalid
from tests.plan.serving_demands import LLAMA, NXDI, demand, linear_steps

MODEL = planned_model(LLAMA)
VLLM = {
    "date": "20260901-120000",
    "model_id": LLAMA,
    "num_prompts": 200,
    "max_concurrency": 16,
    "completed": 200,
    "total_input_tokens": 200_000,
    "total_output_tokens": 51_200,
    "request_throughput": 4.0,
    "output_throughput": 1024.0,
    "mean_ttft_ms": 210.0,
    "median_ttft_ms": 190.0,
    "p99_ttft_ms": 480.0,
    "mean_tpot_ms": 14.0,
    "median_tpot_ms": 13.5,
    "p99_tpot_ms": 21.0,
}
AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 4.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1024.0},
    "time_to_first_token": {"unit": "ms", "avg": 210.0, "p50": 190.0, "p95": 400.0, "p99": 480.0, "min": 90.0},
    "inter_token_latency": {"unit": "ms", "avg": 14.0, "p50": 13.5, "p99": 21.0},
    "input_sequence_length": {"unit": "tokens", "avg": 1000.0},
    "output_sequence_length": {"unit": "tokens", "avg": 256.0},
    "start_time": "2026-09-01T12:00:00",
    "input_config": {"loadgen": {"concurrency": 16}},
}
AIPERF_CSV = """\
Metric,avg,min,max,p1,p50,p95,p99,std
Time to First Token (ms),210.00,90.00,500.00,95.00,190.00,400.00,480.00,60.00
Inter Token Latency (ms),14.00,9.00,30.00,9.50,13.50,18.00,21.00,2.00
Input Sequence Length (tokens),1000.00,1000.00,1000.00,1000.00,1000.00,1000.00,1000.00,0.00
Output Sequence Length (tokens),256.00,256.00,256.00,256.00,256.00,256.00,256.00,0.00

Metric,Value
Benchmark Duration (sec),50.00
Request Throughput (requests/sec),4.00
Output Token Throughput (tokens/sec),1024.00
"""


def distribution(mean: float, median: float, p99: float) -> dict[str, Any]:
    found = {"mean": mean, "median": median, "percentiles": {"p001": median / 2, "p50": median, "p99": p99}}
    return {"successful": found, "errored": {"mean": 0.0}}


GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [
        {
            "metrics": {
                "requests_per_second": distribution(factor * 4.0, 4.0, 4.0),
                "output_tokens_per_second": distribution(factor * 1024.0, 1000.0, 1100.0),
                "time_to_first_token_ms": distribution(210.0, 190.0, 480.0 * factor),
                "inter_token_latency_ms": distribution(14.0, 13.5, 21.0),
                "prompt_token_count": distribution(1000.0, 1000.0, 1000.0),
                "output_token_count": distribution(256.0, 256.0, 256.0),
                "request_concurrency": distribution(16.0, 16.0, 16.0),
            }
        }
        for factor in (1, 3)
    ],
}


def guidellm_csv() -> str:
    figures = {
        ("Time to First Token", "Successful ms"): (210.0, 190.0, 480.0),
        ("Inter Token Latency", "Successful ms"): (14.0, 13.5, 21.0),
        ("Server Throughput", "Successful Requests/Sec"): (4.0, 4.0, 4.0),
        ("Server Throughput", "Successful Concurrency"): (16.0, 16.0, 16.0),
        ("Token Metrics", "Successful Input Tokens"): (1000.0, 1000.0, 1000.0),
        ("Token Metrics", "Successful Output Tokens"): (256.0, 256.0, 256.0),
        ("Token Throughput", "Successful Output Tokens/Sec"): (1024.0, 1000.0, 1100.0),
    }
    columns: list[tuple[str, str, str, str]] = [("Run Info", "Run ID", "", "abc")]
    for (group, name), (mean, median, p99) in figures.items():
        listed = [median / 2] * 9 + [p99, p99]
        columns += [(group, name, "Mean", str(mean)), (group, name, "Median", str(median))]
        columns.append((group, name, "Percentiles", str(listed)))
    text = io.StringIO()
    csv.writer(text).writerows(zip(*columns, strict=True))
    return text.getvalue()


FILES = {
    "vllm.json": json.dumps(VLLM),
    "vllm.jsonl": "\n".join(json.dumps(VLLM | {"output_throughput": each}) for each in (1024.0, 512.0)),
    "aiperf.json": json.dumps(AIPERF),
    "aiperf.csv": AIPERF_CSV,
    "guidellm.json": json.dumps(GUIDELLM),
    "guidellm.csv": guidellm_csv(),
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


class TestLoadTests:
    @pytest.mark.parametrize("name", FILES)
    def test_results_of_public_load_generators_are_read(self, name: str, tmp_path: Path) -> None:
        first = read_load_tests(written(tmp_path, name, FILES[name]))[0]
        assert (first.tokens, first.requests, first.prompt, first.output) == (1024.0, 4.0, 1000.0, 256.0)
        assert (first.ttft(None), first.ttft(0.5), first.ttft(0.99)) == (210.0, 190.0, 480.0)
        assert (first.tpot(None), first.tpot(0.99)) == (14.0, 21.0)
        assert first.concurrency == (None if name == "aiperf.csv" else 16)

    def test_each_load_of_a_sweep_is_read(self, tmp_path: Path) -> None:
        assert [each.tokens for each in read_load_tests(written(tmp_path, "a", FILES["guidellm.json"]))] == [1024, 3072]
        assert [each.tokens for each in read_load_tests(written(tmp_path, "b", FILES["vllm.jsonl"]))] == [1024, 512]

    def test_a_percentile_that_was_not_measured_is_that_of_the_next_higher_one(self, tmp_path: Path) -> None:
        test = read_load_tests(written(tmp_path, "a", FILES["vllm.json"]))[0]
        assert test.ttft(0.95) == test.ttft(0.99)
        assert test.ttft(0.999) is None

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[1]",
            "{}",
            "hello",
            "a,b\n1,2\n",
            json.dumps(VLLM | {"output_throughput": "fast"}),
            json.dumps(VLLM | {"output_throughput": 0}),
            json.dumps(VLLM | {"output_throughput": float("nan")}),
            json.dumps(VLLM | {"completed": -1}),
            json.dumps(VLLM | {"p99_ttft_ms": None}),
            json.dumps({key: value for key, value in VLLM.items() if key != "completed"}),
            json.dumps(AIPERF | {"output_token_throughput": 4}),
            json.dumps(AIPERF | {"time_to_first_token": {"unit": "fortnights", "p50": 1}}),
            json.dumps(AIPERF | {"time_to_first_token": [1]}),
            AIPERF_CSV.replace("1024.00", "many"),
            json.dumps({"benchmarks": 5}),
            json.dumps({"benchmarks": [{}]}),
            json.dumps({"benchmarks": []}),
            guidellm_csv().replace("1024.0", "x"),
            "\x00\x01",
        ],
    )
    def test_malformed_files_are_refused_in_one_sentence(self, text: str, tmp_path: Path) -> None:
        path = written(tmp_path, "result", text)
        with pytest.raises(InputInvalid) as refused:
            read_load_tests(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert "pass" in str(refused.value)

    def test_a_missing_and_a_binary_file_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        for name in ("absent", "binary"):
            with pytest.raises(InputInvalid, match=name):
                read_load_tests(tmp_path / name)

    @given(text=st.text(max_size=60) | st.dictionaries(st.text(max_size=4), st.integers() | st.none()).map(json.dumps))
    def test_any_other_text_is_refused(self, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = tmp_path_factory.mktemp("fuzz") / "result"
        path.write_text(text, encoding="utf-8", errors="replace")
        with pytest.raises(InputInvalid, match="not a result of"):
            read_load_tests(path)


class TestTable:
    def test_every_row_is_of_a_known_model_and_has_a_source_with_licence_and_date(self) -> None:
        table = gpu_table()
        known = {gpu for gpu, _ in table.instances.values()}
        for source in table.sources:
            assert source.licence
            assert source.read.year >= 2026
            for row in source.rows:
                assert architecture(row.model) is not None, row.model
                assert row.gpu in known
                assert row.tokens > 0
                assert row.prompt > 0

    def test_no_measurement_is_listed_twice(self) -> None:
        for source in gpu_table().sources:
            keys = [(row.model, row.gpu, row.gpus, row.precision, row.prompt, row.output) for row in source.rows]
            assert len(keys) == len(set(keys))

    @pytest.mark.parametrize("lengths", [(1000, 1000), (2048, 128), (128, 2048), (5000, 500)])
    def test_what_is_interpolated_is_near_the_published_row(self, lengths: tuple[int, int]) -> None:
        prompt, output = lengths
        asked = replace(
            demand(20, region="us-east-1"),
            traffic=Traffic(LengthDistribution.parse(str(prompt)), LengthDistribution.parse(str(output))),
        )
        plans, silent = gpu_plans(MODEL.architecture, asked, load_prices(), ["p4de.24xlarge"])
        assert not silent
        row = next(
            row
            for source in gpu_table().sources
            for row in source.rows
            if row.model == LLAMA and row.gpu == "A100 80GB" and (row.prompt, row.output) == lengths
        )
        tokens = plans[0].measurement.tokens
        assert (tokens.high or 0) * 0.999 <= 8 * row.tokens <= (tokens.low or 0) * 1.001
        assert tokens.nominal == pytest.approx(8 * row.tokens, rel=0.1)

    def test_models_of_the_same_shape_have_the_same_measurements(self) -> None:
        found = [
            gpu_plans(planned_model(name).architecture, demand(region="us-east-1"), load_prices())[0]
            for name in (LLAMA, LLAMA + "-Instruct")
        ]
        assert found[0] == found[1]
        assert {plan.instance.partition(".")[0] for plan in found[0]} >= {"p5", "g6e", "p4de"}

    def test_a_named_type_without_a_measurement_is_said(self) -> None:
        plans, silent = gpu_plans(MODEL.architecture, demand(), load_prices(), ["g5.2xlarge"])
        assert not plans
        assert "g5.2xlarge" in silent[0]
        assert "--measured" in silent[0]

    def test_an_unknown_gpu_type_is_refused(self) -> None:
        with pytest.raises(InputInvalid, match=r"did you mean 'p5\.48xlarge'"):
            gpu_plans(MODEL.architecture, demand(), load_prices(), ["p5.48xlage"])


class TestOwnMeasurement:
    def test_the_highest_load_that_meets_the_objectives_counts(self) -> None:
        tests = [
            LoadTest("guidellm", "a", tokens, prompt=200, output=40, ttfts={0.95: ttft}, tpots={0.95: 20.0})
            for tokens, ttft in ((100.0, 100.0), (900.0, 800.0), (2000.0, 5000.0))
        ]
        found = own_measurement(tests, "p4d.24xlarge", demand(ttft=Objective(1.0)))
        assert (found.tokens.nominal, found.meets) == (900.0, True)

    def test_a_measurement_that_misses_the_objectives_says_so_and_wins_no_verdict(self) -> None:
        test = LoadTest("AIPerf", "a", 5000.0, ttfts={0.95: 9000.0}, tpots={0.95: 20.0})
        found = own_measurement([test], "g5.2xlarge", demand())
        assert found.meets is False
        plans, _ = gpu_plans(MODEL.architecture, demand(region="us-east-1"), load_prices(), ["g5.2xlarge"], [found])
        assert verdict(None, plans) == ""

    def test_other_lengths_than_the_demands_are_said(self) -> None:
        test = LoadTest("AIPerf", "a", 5000.0, prompt=4000, output=16)
        found = own_measurement([test], "g5.2xlarge", demand())
        assert "which differ" in found.basis
        assert found.meets is None


def gpu_plan(monthly: float, tokens: float = 1e9) -> GpuPlan:
    cost = Interval(monthly, monthly * 0.9, monthly * 1.1)
    measurement = GpuMeasurement("p5.48xlarge", Interval(1.0, 1.0, 1.0), "a test", meets=True)
    price = Price(55.04, load_prices().date, "a test")
    return GpuPlan(measurement, Purchase.ON_DEMAND, Interval(2, 2, 2), price, cost, cost.times(1e6 / tokens))


@pytest.fixture(scope="module")
def best() -> Plan:
    plan = plan_serving(
        MODEL, demand(20), instances_of(["inf2.xlarge"]), load_prices(), linear_steps, runtimes=NXDI, workers=1
    )
    return plan.plans[0]


def costing(plan: Plan, monthly: float) -> Plan:
    cost = Interval(monthly, monthly * 0.9, monthly * 1.1)
    return replace(plan, monthly=cost, per_million=cost.times(1e6 / 1e9))


class TestVerdicts:
    @pytest.mark.parametrize(
        ("neuron", "gpu", "begins"),
        [
            (1000, 5000, "the better choice is inf2.xlarge"),
            (5000, 1000, "a GPU is the better choice here: p5.48xlarge"),
            (1000, 1100, "too close to call"),
            (1100, 1000, "too close to call"),
        ],
    )
    def test_the_cheaper_one_is_named_unless_the_intervals_overlap(
        self, best: Plan, neuron: float, gpu: float, begins: str
    ) -> None:
        assert verdict(costing(best, neuron), [gpu_plan(gpu)]).startswith(begins)

    def test_without_a_plan_a_gpu_is_the_better_choice(self) -> None:
        assert verdict(None, [gpu_plan(5000)]).startswith("a GPU is the better choice here")

    def test_without_a_priced_gpu_there_is_no_verdict(self, best: Plan) -> None:
        assert verdict(best, []) == ""

    def test_a_source_that_states_no_latency_is_no_proof(self, best: Plan) -> None:
        unproven = gpu_plan(1000)
        unproven = replace(unproven, measurement=replace(unproven.measurement, meets=None))
        assert "says nothing of these objectives" in verdict(costing(best, 5000), [unproven])


class TestBreakEven:
    def test_months_are_the_cost_of_the_migration_by_what_it_saves(self, best: Plan) -> None:
        gpu = Interval(10_000.0, 9_000.0, 11_000.0)
        found = break_even(gpu, costing(best, 4_000), Migration(6, 5_000, 0.5))
        assert found is not None
        assert found.months.nominal == pytest.approx(30_000 / 6_000)
        assert found.months.low == pytest.approx(30_000 / (11_000 - 3_600))
        assert found.months.high == pytest.approx(45_000 / (9_000 - 4_400))

    def test_what_saves_nothing_never_pays_back(self, best: Plan) -> None:
        found = break_even(Interval(1_000.0, 1_000.0, 1_000.0), costing(best, 4_000), Migration(6, 5_000))
        assert found == BreakEven(found.saved, Interval(None, None, None)) if found else False

    def test_without_a_price_there_is_none(self, best: Plan) -> None:
        assert break_even(Interval(None, None, None), costing(best, 1), Migration(6, 5_000)) is None

    @given(weeks=st.floats(0.1, 100), saved=st.floats(1, 1e6), overrun=st.floats(0, 3))
    def test_more_weeks_never_pay_back_sooner(self, best: Plan, weeks: float, saved: float, overrun: float) -> None:
        gpu = Interval(5_000 + saved, 5_000 + saved, 5_000 + saved)
        first, second = (
            break_even(gpu, costing(best, 5_000), Migration(each, 100, overrun)) for each in (weeks, 2 * weeks)
        )
        assert first is not None
        assert second is not None
        assert (first.months.nominal or 0) <= (second.months.nominal or 0)


def test_a_dearer_gpu_never_becomes_the_better_choice() -> None:
    asked = demand(20, region="us-east-1")
    costs = []
    for factor in (1, 2, 5):
        known = {key: replace(price, hourly=price.hourly * factor) for key, price in load_prices().known.items()}
        plans, _ = gpu_plans(MODEL.architecture, asked, Prices(known))
        costs.append(plans[0].monthly.nominal or 0)
    assert costs == sorted(costs)
