"""Assessment of a migration: a portfolio of models on GPUs, and for each whether to move, to wait or to stay.

A workload moves if a Neuron fleet meets its objectives and is cheaper than its GPU bill at the slow end of the
predictions too. It waits where that is too close to call, where only an unproven runtime exists, or where the model's
code needs something that no check has proved. It stays where nothing meets the objectives or nothing is saved.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeVar

from pydantic import Field, ValidationError

from nxpipe.artifact_store.documents import Document, Text
from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Prices, Purchase
from nxpipe.pipeline.plan.candidates import instances_of
from nxpipe.pipeline.plan.gpus import Migration
from nxpipe.pipeline.plan.serve import UNAVAILABLE, Interval, Objective, ServingDemand, ServingPlan, fleet_of, with_ends
from nxpipe.pipeline.plan.traffic import LengthDistribution, Traffic
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.constants import predict
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import Architecture, NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, read_file

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

_LARGEST: Final = 1 << 20
_BATCHES: Final = (1, 2, 4, 8, 16, 32)
_LOADED: Final = 0.7  # of an encoder's capacity, at which a queue of random arrivals is short
_VARIED: Final = 0.5  # the coefficient of variation of lengths
_GUARDED: Final = 2  # a latency objective holds twice the predicted time: half of it is for the queue
DEFAULT_TYPES: Final = (
    *("inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge"),
)


class GpuFleet(Document):
    """What a workload runs on today. Without `monthly` the bill is that on demand."""

    instance: Text
    count: Annotated[int, Field(ge=1, le=100_000)]
    monthly: Positive | None = None


class Workload(Document):
    name: Text
    model: Text
    requests_per_second: Positive
    prompt_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    output_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0  # 0: an encoder
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    latency_ms: Positive | None = None  # of an encoder, at the slow end of its prediction
    gpu: GpuFleet
    weeks: Positive | None = None  # of an engineer; by default those of its kind
    custom_kernels: bool = False  # CUDA or Triton kernels, or operators of its own


class Portfolio(Document):
    name: Text = "portfolio"
    region: Text = "us-east-1"
    purchase: Literal["on-demand", "spot", "capacity-block", "reserved-1y", "reserved-3y"] = "on-demand"
    engineer_week: Positive = 5000.0  # dollars
    horizon_months: Annotated[int, Field(ge=1, le=120)] = 24
    availability: Share = 0.999
    instances: tuple[Text, ...] = Field(default=DEFAULT_TYPES, strict=False)


@dataclass(frozen=True)
class PortfolioFile:
    portfolio: Portfolio
    workloads: tuple[Workload, ...]


def portfolio_of(path: Path) -> PortfolioFile:
    """A portfolio file; InputInvalid names the entry and the field that is not understood."""
    try:
        document = tomllib.loads(read_file(path, limit=_LARGEST).decode())
    except (DocumentInvalid, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise InputInvalid(f"{path}: not a portfolio ({str(fault)[:160]}); docs/guides/planning.md has one") from fault
    entries = document.get("workloads")
    if not isinstance(entries, list) or not entries:
        raise InputInvalid(f"{path}: no [[workloads]]; docs/guides/planning.md has a portfolio")
    found = PortfolioFile(
        _parsed(path, "[portfolio]", Portfolio, document.get("portfolio", {})),
        tuple(_parsed(path, f"workload {number}", Workload, entry) for number, entry in enumerate(entries, 1)),
    )
    names = [each.name for each in found.workloads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputInvalid(f"{path}: two workloads are named {twice!r}; give each its own name")
    instances_of(found.portfolio.instances)
    return found


T = TypeVar("T", bound=Document)


def _parsed(path: Path, where: str, kind: type[T], entry: object) -> T:
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in fault["loc"])
        raise InputInvalid(
            f"{path}: {where}: {field}: {fault['msg']}; docs/guides/planning.md has every field"
        ) from None


class MigrationDecision(StrEnum):
    MOVE = "move"
    WAIT = "wait"
    STAY = "stay"


@dataclass(frozen=True)
class NeuronFleet:
    """The cheapest fleet that meets a workload's objectives: `title` says how its servers are started."""

    instance: str
    size: int
    title: str
    runtime: str
    is_proved: bool  # its runtime is released for these chips
    monthly: Interval
    priced: date


@dataclass(frozen=True)
class AssessedWorkload:
    """A decision with its reasons by aspect, and what it saves."""

    workload: Workload
    decision: MigrationDecision
    reasons: tuple[tuple[str, str], ...]  # operators, memory, latency, cost, runtime: and what holds
    bill: float | None  # dollars a month of the GPUs
    billed: date | None  # of the price, if the bill is not the user's own
    fleet: NeuronFleet | None
    migration: Interval
    saved: Interval | None  # dollars a month
    value: Interval | None  # dollars over the horizon, the migration paid

    @property
    def months(self) -> float | None:
        """Until the migration has paid for itself."""
        if self.saved is None or not self.saved.nominal or self.saved.nominal <= 0:
            return None
        return (self.migration.nominal or 0.0) / self.saved.nominal


@dataclass(frozen=True)
class Assessment:
    source: PortfolioFile
    workloads: tuple[AssessedWorkload, ...]

    def of(self, decision: MigrationDecision) -> tuple[AssessedWorkload, ...]:
        """The workloads with this decision; the first one to move is the one that pays back first."""
        found = [each for each in self.workloads if each.decision is decision]
        return tuple(sorted(found, key=lambda each: math.inf if each.months is None else each.months))

    @property
    def saved(self) -> Interval:
        """Dollars a month, if what can move moves."""
        return _sum([each.saved for each in self.of(MigrationDecision.MOVE) if each.saved])

    @property
    def value(self) -> Interval:
        return _sum([each.value for each in self.of(MigrationDecision.MOVE) if each.value])


def _sum(intervals: Sequence[Interval]) -> Interval:
    return Interval(*(math.fsum(getattr(each, end) or 0.0 for each in intervals) for end in ("nominal", "low", "high")))


class PlanServing(Protocol):
    """The planner of decoders, with the runtimes that are released for their chips, or with all."""

    def __call__(
        self, model: str, demand: ServingDemand, types: Sequence[Instance], *, is_proved: bool
    ) -> ServingPlan: ...


def assess(source: PortfolioFile, prices: Prices, plan: PlanServing, progress: Callable[[str], None]) -> Assessment:
    """Assess every workload; `plan` is the planner of decoders."""
    found = []
    for workload in source.workloads:
        progress(f"assess {workload.name}")
        found.append(_Case(source.portfolio, workload, prices, plan).assessed())
    return Assessment(source, tuple(found))


# The weeks of an engineer: compile, prove, shadow and roll out what the release job does for a model of the catalogue;
# another runtime, or kernels to replace, come on top. Estimates of ours; `weeks` of a workload overrides them.
_WEEKS: Final = {"encoder": 2.0, "decoder": 3.0}
_KERNEL_WEEKS: Final = 6.0
_RISK: Final = 0.5  # by which a migration may overrun


@dataclass(frozen=True)
class _Case:
    portfolio: Portfolio
    workload: Workload
    prices: Prices
    plan: PlanServing

    def assessed(self) -> AssessedWorkload:
        known, operators = self._known()
        bill, billed = self._bill()
        fleet, refusals = self._fleet(known) if known is not None else (None, [])
        migration = Migration(self._weeks(known), self.portfolio.engineer_week, _RISK).cost
        saved = value = None
        if fleet is not None and bill is not None and fleet.monthly.nominal is not None:
            saved = _saving(bill, fleet.monthly)
            months = self.portfolio.horizon_months
            value = Interval(
                *(
                    None if gain is None else gain * months - cost
                    for gain, cost in (
                        (saved.nominal, migration.nominal or 0.0),
                        (saved.low, migration.high or 0.0),
                        (saved.high, migration.low or 0.0),
                    )
                )
            )
        reasons = (("operators", operators), *_reasons(self.workload, fleet, refusals, bill, saved, known))
        decision = self._decision(known, fleet, saved, value)
        return AssessedWorkload(self.workload, decision, reasons, bill, billed, fleet, migration, saved, value)

    def _known(self) -> tuple[Architecture | None, str]:
        try:
            found = architecture(self.workload.model)
        except NotPredicted as fault:
            return None, str(fault)
        if found is None:
            return None, f"{self.workload.model} is not known; `nxpipe check` says whether it lowers"
        if self.workload.custom_kernels:
            return found, "its own kernels must be replaced by NKI or PyTorch operators; `nxpipe check` names them"
        return found, f"{found['kind']}: all operators are covered"

    def _bill(self) -> tuple[float | None, date | None]:
        gpu = self.workload.gpu
        if gpu.monthly is not None:
            return gpu.monthly, None
        price = self.prices.price(self.portfolio.region, gpu.instance)
        return (price.hourly * HOURS_A_MONTH * gpu.count, price.date) if price else (None, None)

    def _weeks(self, known: Architecture | None) -> float:
        usual = _WEEKS.get(str(known["kind"]) if known else "decoder", _WEEKS["decoder"])
        return self.workload.weeks or usual + (_KERNEL_WEEKS if self.workload.custom_kernels else 0.0)

    def _fleet(self, known: Architecture) -> tuple[NeuronFleet | None, list[str]]:
        types = instances_of(self.portfolio.instances)
        if self.workload.output_tokens and known["kind"] == "decoder":
            return self._of_decoder(types)
        return self._of_encoder(known, types)

    def _of_decoder(self, types: Sequence[Instance]) -> tuple[NeuronFleet | None, list[str]]:
        workload, portfolio = self.workload, self.portfolio
        demand = ServingDemand(
            traffic=_traffic(workload),
            rate=workload.requests_per_second,
            ttft=Objective(workload.ttft_ms / 1e3) if workload.ttft_ms else None,
            tpot=Objective(workload.tpot_ms / 1e3) if workload.tpot_ms else None,
            availability=portfolio.availability,
            region=portfolio.region,
            purchases=(Purchase(portfolio.purchase),),
        )
        refusals: list[str] = []
        for is_proved in (True, False):
            planned = self.plan(workload.model, demand, types, is_proved=is_proved)
            refusals = [str(each) for each in planned.refused]
            refusals += [note for each in planned.plans if each.price is None for note in each.notes[:1]]
            if priced := [each for each in planned.plans if each.price is not None]:
                break
        else:
            return None, refusals
        # The plan that is cheapest at the slow end: a budget must hold there too.
        best = min(priced, key=lambda each: math.inf if each.monthly.high is None else each.monthly.high)
        runtime = best.candidate.runtime
        assert best.price is not None
        return (
            NeuronFleet(
                instance=best.instance.name,
                size=best.fleet.size,
                title=best.candidate.title,
                runtime=f"{runtime.name} ({runtime.state})",
                is_proved=is_proved,
                monthly=best.monthly,
                priced=best.price.date,
            ),
            refusals,
        )

    def _of_encoder(self, known: Architecture, types: Sequence[Instance]) -> tuple[NeuronFleet | None, list[str]]:
        fleets: list[NeuronFleet] = []
        refusals: list[str] = []
        for each in types:
            found = self._encoders_on(known, each)
            if isinstance(found, str):
                refusals.append(found)
            else:
                fleets.append(found)
        return min(fleets, key=lambda fleet: fleet.monthly.nominal or 0.0, default=None), refusals

    def _encoders_on(self, known: Architecture, type_: Instance) -> NeuronFleet | str:
        """The fleet of one instance type at its best batch, or why there is none. A copy of the model is on every
        core."""
        workload, portfolio = self.workload, self.portfolio
        price = self.prices.price(portfolio.region, type_.name, Purchase(portfolio.purchase))
        if price is None:
            return f"the price of {type_.name} in {portfolio.region}, {portfolio.purchase}, is unknown"
        best: tuple[float, int, tuple[float, float, float]] | None = None
        for batch in _BATCHES:
            configuration = Configuration(
                family="encoder", model=workload.model, instance=type_.name, metric="latency_ms", batch=batch,
                sequence=workload.prompt_tokens,
            )  # fmt: skip
            try:
                predicted = predict(configuration, architecture=known)
            except NotPredicted as fault:
                return f"{type_.name}: {fault}"
            if workload.latency_ms is not None and predicted.high * _GUARDED > workload.latency_ms:
                continue
            capacity = type_.logical_cores * batch / predicted.value
            if best is None or capacity > best[0]:
                best = capacity, batch, (predicted.value, predicted.low, predicted.high)
        if best is None:
            return f"{type_.name}: no batch has a latency of {workload.latency_ms:g} ms and time left for a queue"
        _, batch, times = best
        sizes = [
            fleet_of(workload.requests_per_second, type_.logical_cores * batch / ms * 1e3 * _LOADED,
                     portfolio.availability, UNAVAILABLE)
            for ms in times
        ]  # fmt: skip
        if sizes[0] is None:
            return f"{type_.name}: no fleet is large enough"
        nominal, low, high = (None if each is None else each.size * price.hourly * HOURS_A_MONTH for each in sizes)
        return NeuronFleet(
            instance=type_.name,
            size=sizes[0].size,
            title=f"{type_.name}, a copy on each core, batch {batch}",
            runtime="torch-neuronx TorchScript, or nxpipe serve",
            is_proved=True,
            monthly=Interval(nominal, low, high),
            priced=price.date,
        )

    def _decision(
        self, known: Architecture | None, fleet: NeuronFleet | None, saved: Interval | None, value: Interval | None
    ) -> MigrationDecision:
        if known is None:
            return MigrationDecision.WAIT
        if fleet is None:
            return MigrationDecision.STAY
        if saved is None or value is None:
            return MigrationDecision.WAIT  # no bill, or no price, to compare with
        if (value.high or 0.0) <= 0:
            return MigrationDecision.STAY
        certain = value.low is not None and value.low > 0
        if certain and fleet.is_proved and not self.workload.custom_kernels:
            return MigrationDecision.MOVE
        return MigrationDecision.WAIT


def _saving(bill: float, monthly: Interval) -> Interval:
    nominal, low, high = monthly.nominal, monthly.low, monthly.high
    return Interval(
        None if nominal is None else bill - nominal,
        None if high is None else bill - high,
        None if low is None else bill - low,
    )


def _reasons(
    workload: Workload,
    fleet: NeuronFleet | None,
    refusals: Sequence[str],
    bill: float | None,
    saved: Interval | None,
    known: Architecture | None,
) -> Iterator[tuple[str, str]]:
    """What holds of memory and latency, the cost and the runtime."""
    if known is None:
        return
    if fleet is None:
        yield "latency", f"nothing meets the objectives: {'; '.join(refusals[:3]) or 'no instance type is left'}"
        return
    yield "latency", f"{fleet.size} x {fleet.title} meet the objectives"
    yield "runtime", fleet.runtime if fleet.is_proved else f"only {fleet.runtime}"
    monthly = f"{dollars_of(fleet.monthly)} a month by prices of {fleet.priced}"
    if bill is None:
        yield "cost", f"{monthly}; the price of {workload.gpu.instance} is unknown: give `monthly` of its bill"
    elif saved is not None:
        yield "cost", f"{monthly} against ${bill:,.0f}: {_saved(saved)}"


def _saved(saved: Interval) -> str:
    if saved.low is not None and saved.low > 0:
        return "cheaper at the slow end of the predictions too"
    if saved.high is not None and saved.high > 0:
        return "too close to call" if (saved.nominal or 0.0) > 0 else "cheaper at the fast end of the predictions only"
    return "a GPU is the better choice here"


def dollars_of(interval: Interval) -> str:
    """An interval of dollars in words."""
    if interval.nominal is None:
        return "unknown"
    nominal, low, high = (
        "no limit" if end is None else f"{'-' if end < 0 else ''}${abs(end):,.0f}"
        for end in (interval.nominal, interval.low, interval.high)
    )
    return with_ends(nominal, low, high)


def _traffic(workload: Workload) -> Traffic:
    """Prompts and answers vary around the lengths of the portfolio as chats do."""
    prompts, outputs = (
        LengthDistribution("lognormal", (mean, _VARIED)) for mean in (workload.prompt_tokens, workload.output_tokens)
    )
    return Traffic(prompts, outputs)


@dataclass(frozen=True)
class MigrationPhase:
    """A phase of the migration: what it does, its workloads, and what must be done, by whom."""

    title: str
    workloads: tuple[str, ...]
    tasks: tuple[str, ...]


def phases(found: Assessment) -> tuple[MigrationPhase, ...]:
    """A pilot with the workload that pays back first, then the rest, then what waits."""
    moving, waiting = found.of(MigrationDecision.MOVE), found.of(MigrationDecision.WAIT)
    result = []
    types = sorted({each.fleet.instance for each in moving if each.fleet})
    if moving:
        result.append(MigrationPhase("Pilot", (moving[0].workload.name,), (*_prepare(types), *_TASKS)))
    if moving[1:]:
        result.append(MigrationPhase("Roll-out", tuple(each.workload.name for each in moving[1:]), (*_TASKS, *_AFTER)))
    if waiting:
        result.append(MigrationPhase("Look again", tuple(each.workload.name for each in waiting), _WAITING))
    return tuple(result)


def _prepare(types: Sequence[str]) -> tuple[str, ...]:
    families = sorted({"Inf" if INSTANCES[type_].family.startswith("inf") else "Trn" for type_ in types})
    quotas = ", ".join(f"Running On-Demand {family} instances" for family in families)
    return (
        f"Request the service quota: {quotas}",
        "Write nxpipe.toml with the plan: `nxpipe plan serve --out`",
        "Deploy network, store and fleet: `npx cdk deploy --all`",
    )


_TASKS: Final = (
    "Compile and verify in the release job: `nxpipe release`",
    "Prove on a device: `nxpipe prove`",
    "Measure against the GPU with the same load test, and import the result: `nxpipe plan serve --measured`",
    "Roll out with a shadow phase: `nxpipe rollout start`",
    "Rehearse the rollback: `nxpipe rollback`",
    "Point alarms and the dashboard at the on-call team",
)
_AFTER: Final = ("Return the GPU instances, and stop their savings plans or reservations at their end",)
_WAITING: Final = (
    "Replace what `nxpipe check` names",
    "Measure with the own traffic where the plan is too close to call",
    "Assess again after the next release of the Neuron SDK",
)
