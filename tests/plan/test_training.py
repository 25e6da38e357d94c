"""Training plans: layouts that can run, closed forms of a step, interruptions and blocks, and what must never be."""

import math
import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nxpipe.emulator.hardware.instance import INSTANCES, Instance
from nxpipe.pipeline.config.capacity import DRAINED_BEFORE_THE_END
from nxpipe.pipeline.config.prices import Price, Prices, Purchase
from nxpipe.pipeline.plan.training import (
    MEASURED,
    TrainingClock,
    TrainingJob,
    candidate,
    fastest,
    instance_of,
    layouts,
    reason_against,
)
from nxpipe.pipeline.plan.training_cost import (
    BLOCK_DAYS,
    OFFERED,
    Checkpoints,
    TrainingDemand,
    TrainingPlan,
    block_days,
    block_end,
    block_sizes,
    daly,
    offers,
    plan_training,
    slowdown,
    young,
)
from nxpipe.pipeline.plan.training_memory import Precision, Recompute, TrainingLayout
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.util.errors import InputInvalid

TRN1, TRN2 = INSTANCES["trn1.32xlarge"], INSTANCES["trn2.48xlarge"]
REGION = "us-east-2"
DAY = date(2026, 11, 1)


@cache
def job(name: str = "meta-llama/Llama-2-7b-hf", tokens: int = 4096, sequences: int = 1024) -> TrainingJob:
    found = architecture(name)
    assert found is not None
    return TrainingJob(name, found, tokens, sequences)


@cache
def clock(instance: Instance = TRN1, name: str = "meta-llama/Llama-2-7b-hf") -> TrainingClock:
    return TrainingClock.of(job(name), instance)


def layout(**given: Any) -> TrainingLayout:
    return TrainingLayout(**{"tp": 8, "pp": 1, "dp": 4, "micro": 1, "sequences": 1024, **given})


def priced(prices: Mapping[tuple[str, Purchase], float]) -> Prices:
    return Prices({(REGION, what, how): Price(dollars, DAY, "a test") for (what, how), dollars in prices.items()})


# Layouts.


def test_every_layout_uses_all_ranks_and_divides_heads_and_sequences() -> None:
    found = list(layouts(job(), TRN1, 4))
    assert len(found) > 20
    for each in found:
        assert each.ranks == 4 * TRN1.logical_cores
        assert each.tp in TRN1.degrees
        assert job().sizes.heads % each.tp == 0
        assert each.micro_batches * each.dp * each.micro == each.sequences
        assert reason_against(job(), TRN1, 4, each) is None
    assert {each.pp for each in found} >= {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 4, "dp": 8}, "tensor parallel 4 is no degree of trn1.32xlarge (1, 2, 8, 16, 32)"),
        ({"dp": 8}, "tp x pp x dp is 64, but 1 x trn1.32xlarge have 32 ranks"),
        ({"sequences": 1023}, "1023 sequences are no multiple of dp 4 x micro-batch 1"),
        ({"tp": 1, "pp": 32, "dp": 1, "interleave": 2}, "64 stages are more than 32 layers"),
        ({"interleave": 2}, "interleaving needs several stages"),
        ({"pp": 4, "dp": 1, "interleave": 3}, "interleaving needs several stages"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_rule_it_breaks(changes: dict[str, Any], reason: str) -> None:
    found = reason_against(job(), TRN1, 1, layout(**changes))
    assert found is not None
    assert reason in found


def test_heads_that_a_degree_does_not_divide_are_refused() -> None:
    odd = replace(job(), architecture={**job().architecture, "heads": 36, "kv_heads": 12})
    assert "does not divide 36 heads" in str(reason_against(odd, TRN1, 1, layout()))
    keys = replace(job(), architecture={**job().architecture, "heads": 48, "kv_heads": 12})
    assert "multiple of 12 heads of keys" in str(reason_against(keys, TRN1, 1, layout()))


def test_instances_without_a_network_for_it_train_alone() -> None:
    small = INSTANCES["trn1.2xlarge"]
    assert "no Elastic Fabric Adapter" in str(reason_against(job(), small, 2, layout(tp=2, dp=2)))
    with pytest.raises(InputInvalid, match=r"inf2\.48xlarge is no instance type that trains"):
        instance_of("inf2.48xlarge")


# The step.


@pytest.mark.parametrize(("stages", "virtual", "sequences"), [(2, 1, 64), (4, 1, 1024), (8, 1, 128), (4, 2, 64)])
def test_the_bubble_is_that_of_1f1b(stages: int, virtual: int, sequences: int) -> None:
    one = layout(pp=stages, dp=4, interleave=virtual, sequences=sequences)
    step = clock().step(stages, one)
    busy = step.seconds - step.bubble - step.gradients - step.optimizer
    assert step.bubble / busy == pytest.approx((stages - 1) / (virtual * one.micro_batches))


def test_one_stage_has_no_bubble_one_replica_no_reduction_and_one_core_no_collectives() -> None:
    alone = clock().step(1, layout(tp=32, dp=1))
    assert (alone.bubble, alone.pipeline, alone.gradients) == (0, 0, 0)
    single = clock().step(1, layout(tp=1, dp=32))
    assert (single.tensor, single.executions) == (0, 0)
    assert single.gradients > 0


def test_the_gradients_of_a_ring_move_twice_all_but_one_share() -> None:
    without = layout(tp=32, dp=4, zero1=False)  # one ring of each rank crosses the network
    parameters = candidate(clock(), 4, without).memory.weights / 2
    rate = 100e9 / 32
    assert clock().step(4, without).gradients == pytest.approx(2 * 4 * parameters * 3 / 4 / rate)
    sharded = replace(without, zero1=True)  # fp32 gradients are scattered, bf16 weights gathered
    assert clock().step(4, sharded).gradients == pytest.approx((4 + 2) * parameters * 3 / 4 / rate)


def test_recomputation_of_whole_layers_takes_a_forward_pass_of_products() -> None:
    selective, full = (clock().step(1, layout(recompute=each)) for each in (Recompute.SELECTIVE, Recompute.FULL))
    assert selective.recompute == 0
    assert 0.2 < full.recompute / full.compute < 1 / 3  # attention is recomputed in both
    assert full.tensor == pytest.approx(1.5 * selective.tensor)
    kept = clock().step(1, layout(recompute=Recompute.NONE, flash=False))
    assert kept.recompute < 0


def test_utilization_counts_the_operations_of_the_model() -> None:
    found = candidate(clock(), 1, layout())
    s = job().sizes
    parameters = s.layers * (4 * s.hidden**2 + 3 * s.hidden * s.wide) + s.vocabulary * s.hidden
    of_token = 6 * parameters + 12 * s.layers * s.hidden * job().tokens
    assert job().flops == pytest.approx(of_token * job().tokens, rel=1e-6)
    assert found.utilization == pytest.approx(found.tokens_per_second * of_token / 3040e12, rel=1e-6)
    assert found.utilization < 1


def test_no_step_is_faster_than_the_peak_rate() -> None:
    for instance in (TRN1, TRN2):
        found = fastest(clock(instance), 1)
        assert found is not None
        low, expected, high = found.step.bounds
        assert low < expected < high
        assert low / expected >= found.utilization - 1e-9, "no end of the interval is beyond the peak rate"
        assert min(getattr(found.step, part) for part in ("compute", "tensor", "bubble")) >= 0


def test_the_interval_of_instances_without_published_training_is_wider() -> None:
    assert "trn2" not in MEASURED
    assert clock(TRN2).factor == pytest.approx(clock(TRN1).factor ** 2)


# AWS's tables of benchmarks: sequences a second of 1,024 in a step on trn1.32xlarge, by model and layout.
PUBLISHED = [
    ("meta-llama/Llama-3.1-70B", 32, 32, 8, 8192, "mixed", 7.94),
    ("GPT3-175B", 32, 32, 8, 2048, "bf16-sr", 14.6),
    ("GPT3-23B", 32, 8, 4, 2048, "bf16-sr", 107.18),
    ("GPT3-46B", 32, 8, 8, 2048, "bf16-sr", 48.24),
    ("meta-llama/Llama-2-70b-hf", 32, 32, 4, 4096, "mixed", 17.86),
    ("meta-llama/Llama-2-70b-hf", 32, 32, 8, 4096, "mixed", 14.44),
    ("meta-llama/Llama-2-7b-hf", 32, 8, 4, 4096, "bf16-sr", 89),
    ("meta-llama/Llama-2-7b-hf", 16, 8, 1, 4096, "mixed", 95.14),
]


def test_published_training_is_within_15_percent_in_the_middle_and_not_biased() -> None:
    """If new constants of training were fitted, `python benchmarks/training_rows.py` prints the new OWN_WORK."""
    errors, inside = [], 0
    for name, count, tp, pp, tokens, precision, rate in PUBLISHED:
        own = replace(job(name), tokens=tokens, precision=Precision(precision), flash=False)
        timed = TrainingClock.of(own, TRN1)
        dp = count * 32 // (tp * pp)
        one = layout(tp=tp, pp=pp, dp=dp, precision=own.precision, flash=False)
        found = candidate(timed, count, one)
        assert found.fits
        error = found.tokens_per_second / tokens / rate - 1
        errors.append(error)
        inside += 1 / found.step.factor <= 1 + error <= found.step.factor
    assert statistics.median(map(abs, errors)) <= 0.15
    assert abs(statistics.median(errors)) <= 0.08
    assert inside >= 0.85 * len(PUBLISHED)


# Interruptions.


@given(st.floats(1, 600), st.floats(3600, 1e7))
def test_young_and_daly_agree_for_short_checkpoints(write: float, between: float) -> None:
    assert young(write, between) == pytest.approx(math.sqrt(2 * write * between))
    assume(write < between / 200)
    assert daly(write, between) == pytest.approx(young(write, between), rel=0.06)


@given(st.floats(1, 3600), st.floats(7200, 1e7), st.floats(0, 3600))
def test_no_other_interval_wastes_noticeably_less_than_dalys(write: float, between: float, restart: float) -> None:
    best = daly(write, between)
    least = slowdown(best, write, between, restart)
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        assert least <= slowdown(factor * best, write, between, restart) * 1.01
    assert least >= 1


def test_the_waste_is_youngs_first_order_for_rare_interruptions() -> None:
    write, between = 10.0, 1e6
    interval = young(write, between)
    assert slowdown(interval, write, between, 0) - 1 == pytest.approx(
        write / interval + interval / (2 * between), rel=0.01
    )


def test_the_expected_time_is_that_of_simulated_interruptions() -> None:
    source, write, between, restart, interval = random.Random(23), 60.0, 7200.0, 300.0, 900.0
    segments = 20_000
    seconds = 0.0
    for _ in range(segments):
        need = interval + write
        while (lost := source.expovariate(1 / between)) < need:  # the segment starts again from its checkpoint
            seconds += lost
            need = restart + interval + write
        seconds += need
    # Daly's form has an interruption during the restart start it again, as here.
    assert seconds / (segments * interval) == pytest.approx(slowdown(interval, write, between, restart), rel=0.02)


def test_without_interruptions_or_with_long_checkpoints_the_forms_hold() -> None:
    assert Checkpoints(monthly=0).between_interruptions(8) == math.inf
    assert daly(60, math.inf) == math.inf
    assert slowdown(math.inf, 60, math.inf, 900) == 1
    assert daly(200, 100) == 100
    assert slowdown(1e9, 60, 1, 0) == math.inf
    assert Checkpoints(monthly=0.2).between_interruptions(1) == pytest.approx(730 * 3600 / -math.log(0.8))
    assert Checkpoints().between_interruptions(4) == pytest.approx(Checkpoints().between_interruptions(1) / 4)


# Capacity blocks.


def test_blocks_are_sold_by_days_to_two_weeks_and_by_weeks_to_half_a_year() -> None:
    assert BLOCK_DAYS[:15] == (*range(1, 15), 21)
    assert BLOCK_DAYS[-1] == 182
    assert all(days % 7 == 0 for days in BLOCK_DAYS[14:])


@pytest.mark.parametrize(
    ("hours", "days"),
    [(1, [1]), (23.25, [1]), (23.3, [2]), (14 * 24 - 0.75, [14]), (14 * 24, [21]), (182 * 24 - 0.75, [182])],
)
def test_a_block_ends_after_the_run_and_its_drained_end(hours: float, days: list[int]) -> None:
    assert block_days(hours) == days


@given(st.floats(0.1, 20_000))
def test_blocks_hold_the_run_and_none_is_spare(hours: float) -> None:
    drained = DRAINED_BEFORE_THE_END.total_seconds() / 3600
    found = block_days(hours)
    usable = [24 * each - drained for each in found]
    assert sum(usable) >= hours - 1e-6
    assert sum(usable[:-1]) < hours
    assert set(found) <= set(BLOCK_DAYS)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (3, [4]), (64, [64]), (65, [64, 1]), (96, [64, 32]), (256, [64] * 4)]
)
def test_more_instances_than_a_block_are_several_blocks(count: int, sizes: list[int]) -> None:
    assert block_sizes(count) == sizes
    assert block_sizes(257) is None


def test_a_block_of_whole_days_begins_and_ends_at_half_past_eleven() -> None:
    assert block_end(date(2027, 1, 4), 2) == (
        datetime(2027, 1, 4, 11, 30, tzinfo=UTC),
        datetime(2027, 1, 6, 11, 30, tzinfo=UTC),
    )


# Money.


def test_each_way_of_buying_bills_its_own_hours() -> None:
    found = fastest(clock(TRN2), 4)
    assert found is not None
    prices = priced({(TRN2.name, each): 10.0 for each in Purchase})
    by_way = {each.purchase: each for each in offers(found, 1e10, prices, REGION)}
    work = found.hours(1e10)
    assert by_way[Purchase.ON_DEMAND].dollars == pytest.approx(tuple(40 * each for each in found.hours_between(1e10)))
    spot, block = by_way[Purchase.SPOT], by_way[Purchase.CAPACITY_BLOCK]
    assert spot.dollars is not None
    assert block.dollars is not None
    assert spot.dollars[1] > 40 * work
    assert block.dollars[1] == 40 * 24 * sum(block_days(work))
    assert "$350,400 are committed over 1 year, used or not" in by_way[Purchase.SAVINGS_PLAN_1Y].note
    assert "3 years" in by_way[Purchase.RESERVED_3Y].note


def test_a_block_of_more_instances_than_needed_is_billed_whole() -> None:
    three, four = (
        next(
            each
            for each in offers(found, 1e10, priced({(TRN2.name, Purchase.CAPACITY_BLOCK): 10.0}), REGION)
            if each.purchase is Purchase.CAPACITY_BLOCK
        )
        for found in (replace(candidate(clock(TRN2), 4, layout(dp=32)), count=count) for count in (3, 4))
    )
    assert three.dollars == four.dollars


def test_an_unknown_price_is_said_and_ranked_last() -> None:
    prices = priced({(TRN1.name, Purchase.ON_DEMAND): 21.5})
    found = planned(prices, [TRN1, TRN2], [1, 2])
    assert [each.candidate.instance.name for each in found.choices] == [TRN1.name, TRN1.name, TRN2.name, TRN2.name]
    unknown = found.choices[-1]
    assert unknown.cheapest(found.demand) is None
    assert {each.dollars for each in unknown.offers} == {None}
    assert all(each.hours[1] > 0 for each in unknown.offers)
    limited = planned(prices, [TRN2], [1], budget=1e9)
    assert limited.choices == []
    assert "its price is not known, so that no budget can hold" in limited.refused[0]


def planned(prices: Prices, instances: Iterable[Instance], counts: Iterable[int], **demand: Any) -> TrainingPlan:
    asked = TrainingDemand(tokens=1e10, region=REGION, **demand)
    return plan_training(job(), asked, list(instances), list(counts), prices)


def test_commitments_of_years_are_bought_only_if_asked_for() -> None:
    prices = priced({(TRN1.name, Purchase.RESERVED_3Y): 1.0, (TRN1.name, Purchase.ON_DEMAND): 21.5})
    assert Purchase.RESERVED_3Y not in OFFERED
    default, asked = (
        planned(prices, [TRN1], [1], purchases=each).choices[0] for each in (OFFERED, (Purchase.RESERVED_3Y,))
    )
    bought = default.cheapest(TrainingDemand(1e10, REGION))
    committed = asked.cheapest(TrainingDemand(1e10, REGION, (Purchase.RESERVED_3Y,)))
    assert bought is not None
    assert committed is not None
    assert (bought.purchase, committed.purchase) == (Purchase.ON_DEMAND, Purchase.RESERVED_3Y)


def test_deadlines_and_budgets_say_what_exceeds_them() -> None:
    prices = priced({(TRN1.name, Purchase.ON_DEMAND): 21.5})
    late = planned(prices, [TRN1], [1, 64], deadline=24.0)
    assert [each.candidate.count for each in late.choices] == [64]
    assert "1 x trn1.32xlarge: " in late.refused[0]
    assert "beyond the deadline of 24.0 h" in late.refused[0]
    dear = planned(prices, [TRN1], [1], budget=10.0)
    assert "beyond the budget of $10" in dear.refused[0]


def test_what_does_not_fit_is_said_with_the_memory_it_needs() -> None:
    large = job("meta-llama/Meta-Llama-3.1-405B")
    found = plan_training(large, TrainingDemand(1e9, REGION), [TRN1], [1], priced({}))
    assert found.choices == []
    assert "the least full layout, tp 8 pp 4 dp 1 micro 1 full" in found.refused[0]
    assert "GiB of a rank's 16.0 GiB" in found.refused[0]


# What must never be.


@given(st.sampled_from([(1, 4), (8, 1), (8, 2), (32, 1)]), st.sampled_from([1, 2, 4]), st.integers(0, 4))
def test_more_instances_of_one_layout_never_take_longer_for_their_own_work(
    split: tuple[int, int], micro: int, doubled: int
) -> None:
    tp, pp = split
    count = 2**doubled
    few = layout(tp=tp, pp=pp, dp=count * 32 // (tp * pp), micro=micro)
    more = replace(few, dp=2 * few.dp)
    assume(few.sequences % (more.dp * micro) == 0)
    a, b = clock().step(count, few), clock().step(2 * count, more)
    own = [step.seconds - step.gradients for step in (a, b)]
    assert own[1] <= own[0] * (1 + 1e-12)
    if few.tp * few.dp > 32:  # the replicas of both are on several instances
        assert a.gradients <= b.gradients <= a.gradients * (1 - 1 / more.dp) / (1 - 1 / few.dp) * (1 + 1e-12)


@given(st.sampled_from(["meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", "GPT3-23B"]))
def test_the_fastest_layout_on_more_instances_is_faster(name: str) -> None:
    found = [fastest(clock(TRN1, name), count) for count in (8, 16, 32, 64)]
    hours = [each.hours(1e10) for each in found if each is not None]
    assert len(hours) == 4
    assert hours == sorted(hours, reverse=True)


@given(st.integers(1, 4))
def test_more_memory_never_makes_a_layout_invalid_nor_a_plan_slower(doubled: int) -> None:
    larger = replace(TRN1, device_memory_gib=TRN1.device_memory_gib * 2**doubled)
    for count in (1, 4):
        small = {each.layout for each in _candidates(TRN1, count) if each.fits}
        large = {each.layout for each in _candidates(larger, count) if each.fits}
        assert small <= large
    before, after = fastest(clock(), 1), fastest(replace(clock(), instance=larger), 1)
    assert before is not None
    assert after is not None
    assert after.step.seconds <= before.step.seconds


def _candidates(instance: Instance, count: int) -> list[Any]:
    own = replace(clock(), instance=instance)
    return [candidate(own, count, each) for each in layouts(own.job, instance, count)]


DOLLARS = st.floats(0.1, 100)


@given(st.dictionaries(st.sampled_from(list(OFFERED)), DOLLARS, min_size=1), st.floats(0.1, 1), st.data())
def test_a_cheaper_price_never_raises_the_cost(
    known: dict[Purchase, float], factor: float, data: st.DataObject
) -> None:
    changed = data.draw(st.sampled_from(sorted(known)))
    before = _cost(planned(priced({(TRN2.name, how): dollars for how, dollars in known.items()}), [TRN2], [4]))
    lower = {**known, changed: known[changed] * factor}
    assert _cost(planned(priced({(TRN2.name, how): dollars for how, dollars in lower.items()}), [TRN2], [4])) <= before


@given(DOLLARS, DOLLARS)
def test_another_instance_type_or_number_never_worsens_the_best_plan(first: float, second: float) -> None:
    prices = priced({(TRN1.name, Purchase.ON_DEMAND): first, (TRN2.name, Purchase.ON_DEMAND): second})
    alone, both = planned(prices, [TRN1], [4]), planned(prices, [TRN1, TRN2], [2, 4])
    assert _cost(both) <= _cost(alone)


def _cost(plan: TrainingPlan) -> float:
    assert plan.best is not None
    offer = plan.best.cheapest(plan.demand)
    assert offer is not None
    assert offer.dollars is not None
    return offer.dollars[1]
