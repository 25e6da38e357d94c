"""The nxpipe.toml that carries a serving plan out: a model, a fleet, and the flags of its server."""

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.config.capacity import IN_CAPACITY_BLOCKS
from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.plan.candidates import Candidate
from nxpipe.pipeline.plan.schedulers import Scheduling
from nxpipe.pipeline.plan.serve import Plan, ServingPlan
from nxpipe.pipeline.util.errors import InputInvalid

_READY_FACTOR: Final = 3  # of the slow end of a cold start
_READY: Final = (30, 110)  # minutes: the default, and the most that a fleet may have
_BLOCK_DAYS: Final = 14
_BLOCK_HOUR: Final = (11, 30)  # UTC, at which EC2 ends capacity blocks
_RESERVATION: Final = "cr-00000000000000000"
_LONGEST: Final = 24  # characters of a name
_ACKNOWLEDGED: Final = timedelta(days=90)
_PHASES: Final = {Scheduling.NXPIPE: ("extend", "decode")}


def serving_flags(candidate: Candidate) -> str:
    """The command line that serves what was compiled with the plan's shapes."""
    replica, tp = candidate.replica, candidate.tp
    rows = replica.rows
    if replica.scheduler is Scheduling.NXPIPE:
        return f"nxpipe serve --rows {rows} --copies {candidate.copies}"
    if replica.scheduler is Scheduling.VLLM:
        # vLLM counts blocks of all rows together; one more is its null block.
        blocks = replica.capacity // replica.block
        length = replica.longest
        config = canonical_json({"neuron_config": {"num_batched_tokens_buckets": list(replica.buckets)}}).decode()
        return (
            f"vllm serve MODEL --tensor-parallel-size {tp} --max-model-len {length} --max-num-seqs {rows} "
            f"--max-num-batched-tokens {replica.chunk} --block-size {replica.block} "
            f"--num-gpu-blocks-override {blocks + 1} --additional-config '{config}'"
        )
    return (
        f"vllm serve MODEL --tensor-parallel-size {tp} --max-model-len {replica.capacity} --max-num-seqs {rows} "
        f"--block-size {replica.capacity} --num-gpu-blocks-override {rows} --no-enable-prefix-caching"
    )


def name_of(model: str) -> str:
    """A model's id as a name in nxpipe.toml."""
    words = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return words[:_LONGEST].rstrip("-") or "model"


def configuration(plan: ServingPlan, chosen: Plan, *, project: str = "", today: datetime | None = None) -> bytes:
    """A whole nxpipe.toml for one of the plans."""
    if chosen.instance.servers > 1:
        raise InputInvalid(
            f"--out: EC2 launches a {chosen.instance.name} as several instances, which no fleet of nxpipe.toml "
            "describes; choose another --instance"
        )
    now = today or datetime.now(UTC)
    name = plan.model.listed or name_of(plan.model.name)
    lines = [
        *_header(plan, chosen),
        *_project(project or name, plan.demand.region),
        *_model(plan, chosen.candidate, name),
        *_fleet(plan, chosen, name, now),
        *_acknowledgement(project or name, name, now),
    ]
    return ("\n".join(lines) + "\n").encode()


def _header(plan: ServingPlan, chosen: Plan) -> Iterator[str]:
    demand, candidate = plan.demand, chosen.candidate
    cost = "of an unknown price"
    if chosen.price is not None and chosen.monthly.nominal is not None:
        cost = f"${chosen.monthly.nominal:,.0f} a month at prices of {chosen.price.date}"
    yield f"# nxpipe plan serve: {demand.rate:g} requests/s, prompts of {demand.prompt:,.0f} and answers of"
    yield f"# {demand.output:,.0f} tokens; {cost}."
    yield f"# An instance serves {candidate.copies} copies, each on {candidate.tp} cores, by {candidate.runtime.name}:"
    yield f"#   {serving_flags(candidate)}"
    if candidate.replica.scheduler is not Scheduling.NXPIPE:
        yield "# What it compiles becomes the fleet's artifact by `nxpipe store import --runtime`, and the artifact's"
        yield "# contract starts the server with the flags of the compiled shapes."
    yield ""


def _project(project: str, region: str) -> Iterator[str]:
    yield "[project]"
    yield f'name = "{project}"'
    yield f'region = "{region}"'
    yield ""
    yield "[build]"
    yield 'backend = "neuronx"'
    yield ""


def _model(plan: ServingPlan, candidate: Candidate, name: str) -> Iterator[str]:
    replica = candidate.replica
    longest = replica.longest or replica.capacity
    buckets = sorted({*replica.buckets, longest})
    phases = _PHASES.get(replica.scheduler, ("prefill", "decode"))
    is_folder = plan.model.name.startswith((".", "/", "~"))
    yield "[[models]]"
    yield f'name = "{name}"'
    yield f"{'path' if is_folder else 'id'} = {_text(plan.model.name)}"
    yield 'task = "text-generation"'
    yield f'target = "{candidate.instance.name}"'
    yield f"tp = {candidate.tp}"
    yield f"batches = [{replica.rows}]"
    yield f"buckets = [{', '.join(map(str, buckets))}]"
    yield f"phases = [{', '.join(_text(each) for each in phases)}]"
    yield ""


def _text(value: str) -> str:
    """A string of TOML, whose escapes are those of JSON."""
    return canonical_json(value).decode()


def _fleet(plan: ServingPlan, chosen: Plan, name: str, now: datetime) -> Iterator[str]:
    size = chosen.fleet.size
    minutes = math.ceil(_READY_FACTOR * (chosen.cold_start.high or 0.0) / 60)
    yield "[[fleets]]"
    yield 'kind = "serving"'
    yield f'name = "{name}"'
    yield f'model = "{name}"'
    yield 'channel = "production"'
    yield f'instance_types = ["{chosen.instance.name}"]'
    yield from _capacity(chosen, plan.demand.region, now)
    yield f"size = {{ min = {size}, desired = {size}, max = {size} }}"
    yield f'ready_within = "{min(max(minutes, _READY[0]), _READY[1])}m"'
    if chosen.purchase is Purchase.CAPACITY_BLOCK:
        yield 'updates = { policy = "swap" }'
    yield ""


def _capacity(chosen: Plan, region: str, now: datetime) -> Iterator[str]:
    purchase = chosen.purchase
    if purchase is Purchase.CAPACITY_BLOCK:
        if chosen.instance.name not in IN_CAPACITY_BLOCKS:
            raise InputInvalid(
                f"--out: EC2 sells no capacity blocks of {chosen.instance.name}; pass another --purchase"
            )
        start = (now + timedelta(days=1)).replace(hour=_BLOCK_HOUR[0], minute=_BLOCK_HOUR[1], second=0, microsecond=0)
        end = start + timedelta(days=_BLOCK_DAYS)
        yield "# Replace id, start, end and zone by those of the capacity block that you buy."
        yield f'zone = "{region}a"'
        times = f"start = {start:%Y-%m-%dT%H:%M:%SZ}, end = {end:%Y-%m-%dT%H:%M:%SZ}"
        yield f'capacity = {{ kind = "capacity-block", id = "{_RESERVATION}", {times} }}'
        return
    if purchase is Purchase.SPOT:
        yield 'capacity = { kind = "spot", on_demand_base = 0 }'
        return
    if purchase is not Purchase.ON_DEMAND:
        yield f"# Billed as {purchase}: a commitment of the account, which changes no resource."
    yield 'capacity = { kind = "on-demand" }'


def _acknowledgement(project: str, fleet: str, now: datetime) -> Iterator[str]:
    yield "# The fleet serves plain HTTP inside of its network; set `certificate` for HTTPS and remove this."
    yield "[[acknowledge]]"
    yield 'rule = "NXP-NET-3"'
    yield f'resource = "{project}-serve-{fleet}*"'
    yield 'reason = "callers are inside of the network"'
    yield f"expires = {(now + _ACKNOWLEDGED):%Y-%m-%d}"
