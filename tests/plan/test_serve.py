"""Serving plans: what must hold for any traffic, objective and price; memory; fleets; ways of buying."""

import math
import subprocess
import sys
from dataclasses import replace
from datetime import date
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Price, Prices, Purchase, load_prices
from nxpipe.pipeline.plan.candidates import RUNTIMES, Lengths, candidates, instances_of, memory_of, planned_model
from nxpipe.pipeline.plan.schedulers import Scheduling
from nxpipe.pipeline.plan.serve import (
    Interval,
    Objective,
    ServingDemand,
    ServingPlan,
    capacity_of,
    cold_start,
    fleet_of,
    plan_serving,
)
from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Request, Traffic
from nxpipe.pipeline.util.errors import InputInvalid
from tests.plan.serving_demands import LLAMA, NXDI, demand, linear_steps, traffic
from tests.tiers import examples

MODEL = planned_model(LLAMA)
TYPES = instances_of(["inf2.xlarge", "inf2.24xlarge"])
DAY = date(2026, 11, 1)


def prices(**hourly: float) -> Prices:
    """Prices on demand by size: `xlarge=0.7` is inf2.xlarge's."""
    known = {
        (("us-east-2"), f"inf2.{size.lstrip('_')}", Purchase.ON_DEMAND): Price(cost, DAY, "a test")
        for size, cost in hourly.items()
    }
    return Prices(known)


PRICES = prices(xlarge=0.76, _24xlarge=6.49)


def planned(asked: ServingDemand, known: Prices = PRICES, types: object = None) -> ServingPlan:
    return plan_serving(MODEL, asked, types or TYPES, known, linear_steps, runtimes=NXDI, workers=1)  # type: ignore[arg-type]


def least(plan: ServingPlan) -> float:
    """Dollars a month of the cheapest plan; infinite if none is possible."""
    monthly = [each.monthly.nominal for each in plan.plans if each.monthly.nominal is not None]
    return min(monthly, default=math.inf)


RATES = st.floats(0.05, 500)
TIMES = st.floats(0.005, 3)
FEW = settings(max_examples=examples(40))


class TestWhatHoldsForAnyDemand:
    @FEW
    @given(rate=RATES, more=st.floats(1, 20), ttft=TIMES, tpot=TIMES)
    def test_more_traffic_never_needs_less_money(self, rate: float, more: float, ttft: float, tpot: float) -> None:
        asked = demand(rate, ttft=Objective(ttft), tpot=Objective(tpot / 10))
        assert least(planned(asked)) <= least(planned(replace(asked, rate=rate * more)))

    @FEW
    @given(
        ttft=TIMES,
        tpot=TIMES,
        tighter=st.floats(0.2, 1),
        quantiles=st.lists(st.floats(0.5, 0.995), min_size=2, max_size=2),
    )
    def test_a_tighter_objective_never_costs_less(
        self, ttft: float, tpot: float, tighter: float, quantiles: list[float]
    ) -> None:
        loose, strict = sorted(quantiles)
        asked = demand(ttft=Objective(ttft, loose), tpot=Objective(tpot / 10, loose))
        stricter = demand(ttft=Objective(ttft * tighter, strict), tpot=Objective(tpot / 10 * tighter, strict))
        assert least(planned(asked)) <= least(planned(stricter))

    @FEW
    @given(availability=st.lists(st.floats(0.5, 0.99999), min_size=2, max_size=2), rate=RATES)
    def test_a_higher_availability_never_costs_less(self, availability: list[float], rate: float) -> None:
        low, high = sorted(availability)
        assert least(planned(demand(rate, availability=low))) <= least(planned(demand(rate, availability=high)))

    @FEW
    @given(first=st.floats(0.1, 9), second=st.floats(0.1, 60), cheaper=st.floats(0.1, 1), rate=RATES)
    def test_a_cheaper_price_never_raises_the_cost_of_a_plan(
        self, first: float, second: float, cheaper: float, rate: float
    ) -> None:
        before = planned(demand(rate), prices(xlarge=first, _24xlarge=second))
        after = planned(demand(rate), prices(xlarge=first * cheaper, _24xlarge=second))
        assert least(after) <= least(before)
        for one, other in product(before.plans, after.plans):
            if one.instance is other.instance and one.monthly.nominal and other.monthly.nominal:
                assert other.monthly.nominal <= one.monthly.nominal

    @FEW
    @given(rate=RATES, ttft=TIMES, first=st.floats(0.1, 9), second=st.floats(0.1, 60))
    def test_one_more_instance_type_never_worsens_the_best_plan(
        self, rate: float, ttft: float, first: float, second: float
    ) -> None:
        asked, known = demand(rate, ttft=Objective(ttft)), prices(xlarge=first, _24xlarge=second)
        assert least(planned(asked, known)) <= min(least(planned(asked, known, [each])) for each in TYPES)

    @FEW
    @given(rate=RATES, ttft=TIMES, tpot=TIMES)
    def test_figures_lie_in_their_intervals(self, rate: float, ttft: float, tpot: float) -> None:
        for plan in planned(demand(rate, ttft=Objective(ttft), tpot=Objective(tpot / 10))).plans:
            for found in (plan.sizes, plan.monthly, plan.per_million, plan.cold_start):
                assert found.low is not None
                assert found.nominal is not None
                assert found.low <= found.nominal <= (math.inf if found.high is None else found.high)

    @FEW
    @given(ttft=TIMES, tpot=TIMES)
    def test_what_is_not_simulated_carries_no_more(self, ttft: float, tpot: float) -> None:
        asked = demand(ttft=Objective(ttft), tpot=Objective(tpot / 10))
        plan = planned(asked, types=TYPES[1:])
        found, _ = candidates(MODEL, TYPES[1:], asked.lengths, NXDI)
        highest = max(capacity_of(each, next(linear_steps(each)), asked).rate * each.copies for each in found)
        carried = [each.load.rate * each.candidate.copies for each in plan.plans]
        assert max(carried, default=0.0) == highest


class TestMemory:
    @pytest.mark.parametrize("name", [LLAMA, "meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1"])
    def test_weights_of_one_rank_are_the_published_parameters(self, name: str) -> None:
        model = planned_model(name)
        memory = memory_of(model, INSTANCES["inf2.48xlarge"], 1, 1, Lengths(128, 256))
        assert memory.weights == 2 * model.parameters

    def test_the_cache_grows_with_rows_and_shrinks_with_the_degree_down_to_one_head(self) -> None:
        lengths, instance = Lengths(1000, 2000), INSTANCES["trn2.48xlarge"]
        one = memory_of(MODEL, instance, 1, 1, lengths).cache
        assert one == 2 * 32 * 2048 * 8 * 128 * 2  # K and V, layers, tokens, heads, width, bytes
        assert memory_of(MODEL, instance, 1, 16, lengths).cache == 16 * one
        assert memory_of(MODEL, instance, 8, 1, lengths).cache == one // 8
        assert memory_of(MODEL, instance, 32, 1, lengths).cache == one // 8  # eight heads: four ranks have each

    def test_what_does_not_fit_is_refused_with_the_numbers(self) -> None:
        found, refused = candidates(
            planned_model("meta-llama/Llama-3.1-70B"), instances_of(["inf2.xlarge"]), Lengths(128, 256)
        )
        assert not found
        assert any("131.4 of weights" in each.reason and "16.0 GiB" in each.reason for each in refused)

    def test_no_candidate_needs_more_memory_or_cores_than_there_are(self) -> None:
        found, _ = candidates(MODEL, instances_of(["inf2", "trn1", "trn1n", "trn2", "trn3"]), Lengths(900, 4000))
        for each in found:
            assert each.memory.need <= each.memory.capacity
            assert each.tp * each.copies <= each.instance.logical_cores
            assert each.replica.buckets[-1] >= min(900, each.replica.chunk or 900)

    def test_degrees_that_do_not_divide_the_heads_are_for_runtimes_that_pad(self) -> None:
        found, _ = candidates(MODEL, instances_of(["inf2.48xlarge"]), Lengths(128, 256))
        assert 24 in {each.tp for each in found}
        found, _ = candidates(MODEL, instances_of(["trn2.48xlarge"]), Lengths(128, 256))
        assert 64 not in {each.tp for each in found if each.runtime.scheduling is Scheduling.VLLM}

    def test_runtimes_are_those_that_exist_for_the_chip_and_know_the_model(self) -> None:
        everything = instances_of(["inf2.xlarge", "trn2.48xlarge", "trn3_gen1"])
        found, _ = candidates(MODEL, everything, Lengths(128, 256))
        by_type = {each.instance.name: set[Scheduling]() for each in found}
        for each in found:
            by_type[each.instance.name].add(each.runtime.scheduling)
        assert by_type == {
            "inf2.xlarge": {Scheduling.NXDI, Scheduling.NXPIPE},
            "trn2.48xlarge": set(Scheduling),
            "trn3_gen1": {Scheduling.VLLM, Scheduling.NXPIPE},
        }
        _, refused = candidates(planned_model("mistralai/Mistral-7B-v0.1"), everything, Lengths(128, 256))
        assert any("no models of type mistral" in each.reason for each in refused)

    def test_a_sequence_beyond_the_models_positions_is_refused(self) -> None:
        found, refused = candidates(MODEL, TYPES, Lengths(140_000, 150_000))
        assert not found
        assert all("131,072 positions" in each.reason for each in refused)

    def test_a_log_is_held_whole_even_if_it_is_simulated_in_part(self) -> None:
        log = tuple(Request(float(n), 100 if n < 300 else 3000, 5) for n in range(400))
        assert ServingDemand(Traffic(log=log), 1.0, simulated=50).lengths == Lengths(3000, 3005)


class TestFleets:
    @given(rate=st.floats(0.01, 1e4), capacity=st.floats(0.01, 100), availability=st.floats(0.01, 0.9999))
    def test_a_fleet_carries_the_traffic_with_one_host_lost(
        self, rate: float, capacity: float, availability: float
    ) -> None:
        fleet = fleet_of(rate, capacity, availability, 0.005)
        if fleet is not None:
            assert (fleet.size - 1) * capacity >= rate * (1 - 1e-6)
            assert fleet.size > fleet.needed

    @pytest.mark.parametrize(("needed", "down"), [(1, 0.005), (10, 0.005), (60, 0.02), (300, 0.005)])
    def test_enough_hosts_run_for_the_asked_share_of_the_time(self, needed: int, down: float) -> None:
        fleet = fleet_of(needed, 1.0, 0.999, down)
        assert fleet is not None

        def share(size: int) -> float:
            return math.fsum(
                math.comb(size, lost) * down**lost * (1 - down) ** (size - lost) for lost in range(size - needed + 1)
            )

        assert share(fleet.size) >= 0.999
        assert fleet.size == needed + 1 or share(fleet.size - 1) < 0.999

    def test_no_capacity_has_no_fleet(self) -> None:
        assert fleet_of(5, 0.0, 0.9, 0.005) is None
        assert fleet_of(1e9, 1.0, 0.9, 0.005) is None

    def test_a_larger_model_starts_later(self) -> None:
        (small, *_), _ = candidates(
            planned_model("Qwen/Qwen2.5-0.5B"), instances_of(["trn1.32xlarge"]), Lengths(128, 256)
        )
        (large, *_), _ = candidates(MODEL, instances_of(["trn1.32xlarge"]), Lengths(128, 256))
        assert (cold_start(small).nominal or 0) < (cold_start(large).nominal or 0)


class TestBuying:
    def test_an_unknown_price_is_said_and_not_zero(self) -> None:
        plan = planned(demand(), prices(xlarge=0.76))
        unknown = next(each for each in plan.plans if each.instance.name == "inf2.24xlarge")
        assert unknown is plan.plans[-1]
        assert unknown.monthly == unknown.per_million == Interval(None, None, None)
        assert any("unknown" in note for note in unknown.notes)
        assert plan.best is plan.plans[0]

    def test_a_plan_without_a_price_is_not_within_a_budget(self) -> None:
        plan = planned(demand(budget=1e9), prices(), TYPES[:1])
        assert plan.plans
        assert plan.best is None

    def test_a_budget_that_no_plan_keeps_leaves_no_best_plan(self) -> None:
        assert planned(demand(budget=1.0)).best is None
        assert planned(demand(budget=1e9)).best is not None

    def test_money_is_instances_times_price_and_rollouts(self) -> None:
        plan = planned(demand(rollouts=0)).plans[0]
        assert plan.price is not None
        assert plan.monthly.nominal == pytest.approx(plan.fleet.size * plan.price.hourly * HOURS_A_MONTH)
        with_rollouts = planned(demand(rollouts=10, rollout_hours=2)).plans[0]
        assert with_rollouts.monthly.nominal is not None
        hours = with_rollouts.monthly.nominal / with_rollouts.fleet.size / plan.price.hourly - HOURS_A_MONTH
        # That of the slowest layout, so that a layout with more capacity never costs more.
        own = with_rollouts.cold_start.nominal or 0.0
        assert 20 + 10 * own / 3600 <= hours + 1e-9 < 20 + 10 * 10 * own / 3600

    def test_a_million_tokens_cost_the_month_by_the_tokens_of_the_month(self) -> None:
        asked = demand()
        plan = planned(asked).plans[0]
        tokens = asked.rate * asked.output * 3600 * HOURS_A_MONTH
        assert plan.monthly.nominal is not None
        assert plan.per_million.nominal == pytest.approx(plan.monthly.nominal / tokens * 1e6)

    def test_each_way_of_buying_with_a_price_is_a_plan_and_the_others_are_named(self) -> None:
        asked = demand(purchases=(Purchase.ON_DEMAND, Purchase.SPOT, Purchase.RESERVED_3Y))
        types = instances_of(["inf2.xlarge"])
        known = Prices(dict(PRICES.known) | {("us-east-2", "inf2.xlarge", Purchase.SPOT): Price(0.2, DAY, "a test")})
        plan = planned(asked, known, types)
        assert [each.purchase for each in plan.plans] == [Purchase.SPOT, Purchase.ON_DEMAND]
        assert any(each.what == Purchase.RESERVED_3Y and "unknown" in each.reason for each in plan.refused)
        assert any("reclaim" in note for note in plan.plans[0].notes)

    def test_more_interruptions_of_spot_instances_need_no_fewer_of_them(self) -> None:
        known = Prices({("us-east-2", "inf2.xlarge", Purchase.SPOT): Price(0.2, DAY, "a test")})
        sizes = [
            planned(demand(200, purchases=(Purchase.SPOT,), spot_interruptions=each), known, TYPES[:1])
            .plans[0]
            .fleet.size
            for each in (0, 1, 100, 1000)
        ]
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0]

    def test_trn2_is_planned_as_ec2_sells_it(self) -> None:
        plan = plan_serving(
            MODEL, demand(), instances_of(["trn2.48xlarge"]), load_prices(), linear_steps, runtimes=NXDI, workers=1
        )
        assert plan.plans[0].purchase is Purchase.CAPACITY_BLOCK
        assert plan.plans[0].surge == 0
        assert any("in place" in note for note in plan.plans[0].notes)

    def test_overlapping_costs_are_too_close_to_call(self) -> None:
        plan = planned(demand(50), prices(xlarge=0.76, _24xlarge=0.76 * 3))
        alike = planned(demand(50), prices(xlarge=0.76, _24xlarge=76.0))
        assert not any(alike.is_close(each) for each in alike.plans)
        first, second = plan.plans
        assert plan.is_close(second) == second.per_million.overlaps(first.per_million)


class TestWhatIsNotPossible:
    def test_an_objective_beyond_every_layout_is_refused_with_the_least_times(self) -> None:
        plan = planned(demand(ttft=Objective(0.0001)))
        assert not plan.plans
        assert plan.best is None
        assert all("no layout meets TTFT" in each.reason for each in plan.refused if not each.what)

    @FEW
    @given(rate=RATES, ttft=TIMES, tpot=TIMES)
    def test_a_certain_plan_meets_the_objectives_at_the_slow_end_for_no_less_money(
        self, rate: float, ttft: float, tpot: float
    ) -> None:
        asked = demand(rate, ttft=Objective(ttft), tpot=Objective(tpot / 10))
        certain = planned(replace(asked, certain=True))
        assert all(each.sizes.high is not None for each in certain.plans)
        assert least(planned(asked)) <= least(certain) * (1 + 1e-9)

    def test_without_objectives_a_fleet_carries_what_its_programs_execute(self) -> None:
        plan = planned(demand(ttft=None, tpot=None))
        assert plan.plans[0].load.rate == pytest.approx(0.95 * plan.plans[0].load.limit)

    @pytest.mark.parametrize("name", ["no/such-model", "bert-base-uncased"])
    def test_what_is_no_decoder_of_a_known_form_is_refused(self, name: str) -> None:
        with pytest.raises(InputInvalid, match=name):
            planned_model(name)

    def test_an_unknown_instance_is_refused_with_the_nearest_one(self) -> None:
        with pytest.raises(InputInvalid, match=r"did you mean 'inf2\.xlarge'\?"):
            instances_of(["inf3.xlarge"])


def test_two_processes_find_what_one_finds() -> None:
    asked = demand(20)
    results = [
        plan_serving(MODEL, asked, TYPES, PRICES, linear_steps, runtimes=NXDI, workers=workers) for workers in (1, 2)
    ]
    assert results[0].plans == results[1].plans


def test_every_scheduler_has_a_plan_where_its_runtime_exists() -> None:
    for scheduling in Scheduling:
        runtimes = [each for each in RUNTIMES if each.scheduling is scheduling]
        plan = plan_serving(
            MODEL, demand(), instances_of(["trn2.48xlarge"]), load_prices(), runtimes=runtimes, workers=1
        )
        assert plan.plans[0].candidate.replica.scheduler is scheduling


def test_constant_traffic_is_served_at_a_higher_load_than_bursts() -> None:
    lengths = LengthDistribution.parse("200"), LengthDistribution.parse("30")
    rates = []
    for arrivals in (Arrivals.CONSTANT, Arrivals.POISSON, Arrivals.BURSTY):
        asked = replace(
            demand(ttft=Objective(0.3, 0.99)),
            traffic=replace(traffic(), prompts=lengths[0], outputs=lengths[1], arrivals=arrivals),
        )
        best = planned(asked, types=TYPES[1:]).plans[0]
        rates.append(best.load.rate * best.candidate.copies)
    assert rates == sorted(rates, reverse=True)


def test_planning_imports_neither_numpy_nor_torch_nor_a_client_of_aws() -> None:
    code = (
        "import sys, nxpipe.pipeline.plan.serve_page, nxpipe.pipeline.plan.serve_files\n"
        "print([name for name in ('numpy', 'torch', 'transformers', 'boto3', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
