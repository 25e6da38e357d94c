"""A training plan as text for a terminal, as a JSON document and as a page."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.plan.serve_report import money
from nxpipe.pipeline.plan.training import MEASURED, PARTS, TrainingCandidate, TrainingStep
from nxpipe.pipeline.plan.training_cost import Offer, Spot, TrainingChoice, TrainingPlan, duration
from nxpipe.pipeline.plan.training_memory import rank_bytes
from nxpipe.pipeline.predict.constants import COVERAGE, PREDICTED
from nxpipe.pipeline.util.page import page as pages
from nxpipe.pipeline.util.page.charts import Bar, bars
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import Section, bullets, heading, sheet, two
from nxpipe.pipeline.util.text import Column, table

_GIB: Final = 2**30
_HELD: Final = ("weights", "gradients", "optimizer", "activations", "working", "reserved")
_NAMES: Final = {
    "compute": "compute",
    "recompute": "recomputation",
    "bubble": "pipeline bubble",
    "tensor": "tensor parallel collectives",
    "pipeline": "sends between stages",
    "executions": "executions with collectives",
    "gradients": "gradients over replicas",
    "optimizer": "optimizer",
}


def summary(plan: TrainingPlan, width: int) -> str:
    """The whole report for a terminal, but for `explanation`."""
    parts = [_demanded(plan)]
    if plan.given is not None:
        parts.append("The imported layout:\n" + _table(plan, [plan.given], width))
    if plan.choices:
        parts.append(_table(plan, plan.choices, width))
        parts.append("\n".join(_remarks(plan)))
    if plan.refused:
        parts.append("Not possible:\n" + "\n".join(f"  {each}" for each in plan.refused))
    return "\n\n".join(parts)


def _demanded(plan: TrainingPlan) -> str:
    job = plan.job
    zero = ", ZeRO-1" if job.zero1 else ""
    return (
        f"{job.model}: {plan.demand.tokens:,.0f} tokens in sequences of {job.tokens:,}, {job.sequences:,} in a step, "
        f"{job.precision}{zero}"
    )


def _table(plan: TrainingPlan, choices: Sequence[TrainingChoice], width: int) -> str:
    header = (
        Column("instances", whole=True),
        *(Column(title) for title in ("layout", "tokens/s", "time", "cost")),
        *(Column(title, drop) for title, drop in (("GiB/rank", 2), ("MFU", 1), ("bought", 3))),
    )
    return table(header, [_row(plan, each) for each in choices], width)


def _row(plan: TrainingPlan, choice: TrainingChoice) -> tuple[str, ...]:
    c, offer = choice.candidate, choice.cheapest(plan.demand)
    low, high = map(_short, _rate(c))
    return (
        f"{c.count} x {c.instance.name}",
        str(c.layout),
        f"{_short(c.tokens_per_second)} ({low} to {high})",
        _span(_hours(choice, offer, plan.demand.tokens)),
        cost(offer) + (", too close to call" if plan.is_close(choice) else ""),
        f"{c.memory.total / _GIB:.1f} of {rank_bytes(c.instance) / _GIB:.0f}",
        f"{c.utilization:.0%}",
        offer.purchase.value if offer else "price unknown",
    )


def _hours(choice: TrainingChoice, offer: Offer | None, tokens: float) -> tuple[float, float, float]:
    return offer.hours if offer else choice.candidate.hours_between(tokens)


def _short(rate: float) -> str:
    """Three digits: 23.6k."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= 0.9995 * size:
            return f"{rate / size:.{max(0, 3 - len(f'{rate / size:.0f}'))}f}{unit}"
    return f"{rate:.0f}"


def _rate(c: TrainingCandidate) -> tuple[float, float]:
    fast, _, slow = c.step.bounds
    tokens = c.job.sequences * c.job.tokens
    return tokens / slow, tokens / fast


def _span(hours: tuple[float, float, float]) -> str:
    low, middle, high = (duration(3600 * each) for each in hours)
    return f"{middle} ({low} to {high})"


def cost(offer: Offer | None) -> str:
    """Dollars with their interval; a price that is not known is "unknown"."""
    if offer is None or offer.dollars is None:
        return "unknown"
    low, middle, high = map(money, offer.dollars)
    return f"{middle} ({low} to {high})"


def _remarks(plan: TrainingPlan) -> Iterator[str]:
    """What a reader must know to trust the figures."""
    assert plan.best is not None
    offer = plan.best.cheapest(plan.demand)
    if offer is not None and offer.note:
        yield f"{plan.best.candidate.count} x {plan.best.candidate.instance.name}, {offer.purchase}: {offer.note}."
    if any((bought := each.cheapest(plan.demand)) and bought.purchase is Purchase.SPOT for each in plan.choices):
        yield (
            "A spot price is no capacity: EC2 may refuse instances. AWS Batch runs no multi-node jobs on them, so that "
            "several are nodes of a cluster of your own; --purchase has other ways."
        )
    dates = sorted({each.dated for choice in plan.choices for each in choice.offers if each.dated})
    if dates:
        yield f"Prices of {plan.demand.region}, dated {dates[0]}" + (f" to {dates[-1]}." if dates[1:] else ".")
    yield f"Times are predicted for {PREDICTED}, with {COVERAGE:.0%} intervals; storage and transfer are not counted."
    families = sorted({each.candidate.instance.family for each in plan.choices} - MEASURED)
    if families:
        yield f"No training on {', '.join(families)} is published: its interval is twice as wide, in logarithms."


def explanation(plan: TrainingPlan) -> str:
    """The parts of memory, time and money of the imported layout, or of the best choice."""
    choice = plan.given or plan.best
    if choice is None:
        return ""
    c = choice.candidate
    memory = [(name, f"{getattr(c.memory, name) / _GIB:.2f}") for name in _HELD]
    memory += [("all", f"{c.memory.total / _GIB:.2f}"), ("of", f"{rank_bytes(c.instance) / _GIB:.2f}")]
    parts = [
        f"{c.count} x {c.instance.name}, {c.layout}: {c.layout.micro_batches} micro-batches of a replica",
        table(("fullest rank", "GiB"), memory),
        table(("step", "seconds", "share"), list(_seconds(c.step))),
        f"Most of the step is {_NAMES[c.step.bound]}. Nothing is assumed to overlap.",
    ]
    if c.others:
        rows = [
            (str(each.layout), f"{each.memory.total / _GIB:.1f}", f"{each.step.seconds:.2f}", _NAMES[each.step.bound])
            for each in c.others
        ]
        parts.append(table(("next layouts", "GiB/rank", "seconds", "most of it"), rows))
    spot = Spot.of(c, plan.demand.checkpoints)
    parts.append(
        f"Spot: any of {c.count} instances is interrupted every {duration(spot.between)} on average; a checkpoint "
        f"takes {duration(spot.write)} and is best written every {duration(spot.interval)} (Daly); "
        f"{spot.waste:.1%} of the time is lost."
    )
    bought = [
        (each.purchase.value, f"{each.hours[1]:,.1f}", cost(each), str(each.dated or "-"), each.note)
        for each in choice.offers
    ]
    parts.append(table(("bought", "hours", "cost", "price of", "note"), bought))
    return "\n\n".join(parts)


def _seconds(step: TrainingStep) -> Iterator[tuple[str, str, str]]:
    for part in PARTS:
        seconds = getattr(step, part)
        yield _NAMES[part], f"{seconds:.3f}", f"{seconds / step.seconds:.1%}"
    low, expected, high = step.bounds
    yield "all", f"{expected:.3f}", f"{low:.3f} to {high:.3f}"


def document(plan: TrainingPlan) -> dict[str, Any]:
    """The plan as JSON."""
    job, demand = plan.job, plan.demand
    return {
        "model": job.model,
        "tokens": demand.tokens,
        "sequence_length": job.tokens,
        "sequences": job.sequences,
        "precision": job.precision.value,
        "region": demand.region,
        "coverage": COVERAGE,
        "choices": [_choice(plan, each) for each in plan.choices],
        "given": _choice(plan, plan.given) if plan.given else None,
        "refused": list(plan.refused),
    }


def _choice(plan: TrainingPlan, choice: TrainingChoice) -> dict[str, Any]:
    c, best = choice.candidate, choice.cheapest(plan.demand)
    low, high = _rate(c)
    return {
        "instance": c.instance.name,
        "instances": c.count,
        "layout": asdict(c.layout) | {"micro_batches": c.layout.micro_batches},
        "fits": c.fits,
        "memory_bytes": {name: round(getattr(c.memory, name)) for name in _HELD} | {"total": round(c.memory.total)},
        "rank_bytes": round(rank_bytes(c.instance)),
        "step_seconds": {part: getattr(c.step, part) for part in PARTS} | {"total": c.step.seconds},
        "tokens_per_second": {"low": low, "expected": c.tokens_per_second, "high": high},
        "mfu": c.utilization,
        "bound_by": c.step.bound,
        "spot": asdict(Spot.of(c, plan.demand.checkpoints)),
        "offers": [_offer(each) for each in choice.offers],
        "bought": best.purchase.value if best else None,
        "too_close_to_call": plan.is_close(choice),
    }


def _offer(offer: Offer) -> dict[str, Any]:
    names = ("low", "expected", "high")
    return {
        "purchase": offer.purchase.value,
        "hours": dict(zip(names, offer.hours, strict=True)),
        "dollars": dict(zip(names, offer.dollars, strict=True)) if offer.dollars else None,
        "hourly": offer.hourly,
        "date": offer.dated.isoformat() if offer.dated else None,
        "source": offer.source or None,
        "note": offer.note,
    }


def page(plan: TrainingPlan) -> bytes:
    """The plan as one page."""
    title = f"Training plan, {plan.job.model}"
    return sheet(title, "Training plan", heading(title, _demanded(plan) + "."), _sections(plan))


def _sections(plan: TrainingPlan) -> Iterator[Section]:
    choices = ([plan.given] if plan.given else []) + list(plan.choices)
    if choices:
        if chart := _bars(choices, plan):
            yield Section("Cost of the run", chart)
        rows = [_cells(plan, each) for each in choices]
        columns = ("instances", "cost", "time", "tokens/s", "MFU", "GiB of a rank")
        yield Section("Plans", pages.table(columns, rows, "Plans"))
        first = choices[0].candidate
        yield Section(f"A step of {first.count} × {first.instance.name}", _step(first))
    else:
        yield Section("Plans", tag("p", "No layout fits."))
    if plan.choices:
        yield Section("Notes", bullets(_remarks(plan)))
    if plan.refused:
        yield Section("Not possible", bullets(plan.refused))


def _bars(choices: Sequence[TrainingChoice], plan: TrainingPlan) -> Markup | None:
    rows = [
        Bar(
            f"{each.candidate.count} × {each.candidate.instance.name}, {offer.purchase}: {cost(offer)}",
            [("r-tensor", offer.dollars[1])],
            (offer.dollars[0], offer.dollars[2]),
        )
        for each in choices
        if (offer := each.cheapest(plan.demand)) is not None and offer.dollars
    ]
    return bars("Dollars of the whole run", "The line is the interval.", rows) if rows else None


def _cells(plan: TrainingPlan, choice: TrainingChoice) -> tuple[Child, ...]:
    c, offer = choice.candidate, choice.cheapest(plan.demand)
    low, high = _rate(c)
    remarks = [str(c.layout), *(["imported"] if choice is plan.given else [])]
    remarks += ["too close to call"] if plan.is_close(choice) else []
    hours = _hours(choice, offer, plan.demand.tokens)
    return (
        tag("div", tag("strong", f"{c.count} × {c.instance.name}"), [tag("small", each) for each in remarks]),
        _dollars(offer),
        two(duration(3600 * hours[1]), f"{duration(3600 * hours[0])} to {duration(3600 * hours[2])}"),
        two(_short(c.tokens_per_second), f"{_short(low)} to {_short(high)}"),
        f"{c.utilization:.0%}",
        two(f"{c.memory.total / _GIB:.1f}", f"of {rank_bytes(c.instance) / _GIB:.0f}"),
    )


def _dollars(offer: Offer | None) -> Markup:
    if offer is None or offer.dollars is None:
        return two("unknown", "no known price")
    low, middle, high = map(money, offer.dollars)
    return two(middle, f"{low} to {high}, {offer.purchase}")


def _step(c: TrainingCandidate) -> Markup:
    rows: list[tuple[Child, ...]] = [tuple(row) for row in _seconds(c.step)]
    return pages.table(("part", "seconds", "share"), rows, "Parts of a step")
