"""Published claims about speed and cost: possible, implausible or impossible, with the arithmetic.

What documents say of memory, rates and prices decides what is impossible; the predictions of `AWS's compiler` and
published measurements, what is implausible. Where a claim leaves something open, what helps it most is assumed.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from nxpipe.artifact_store.documents import Document, Text
from nxpipe.emulator.hardware.instance import INSTANCES, Instance, UnknownInstance, instance
from nxpipe.pipeline.config.prices import Price, Prices, Purchase, load_prices
from nxpipe.pipeline.plan.sizes import ModelSize
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.constants import predict
from nxpipe.pipeline.predict.measurements import Configuration, Measured, read
from nxpipe.pipeline.predict.work import Architecture, NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, read_file
from nxpipe.pipeline.util.text import did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=1, le=1 << 30)]

MEASURED: Final = Path(__file__).parents[1] / "predict" / "published.csv"
_LARGEST: Final = 1 << 20
_CONTEXT: Final = 2048  # tokens, where a claim names no sequence length
_EQUAL: Final = 0.03  # within which two figures agree: claims are rounded
_BITS: Final = (16, 8)  # of weights that runtimes of these chips serve
_MIXED: Final = 16  # bytes of a parameter in training: bf16 weights and gradients, AdamW in fp32
_LEAST: Final = 2  # with frozen weights, as LoRA trains
_MARGIN: Final = 1.15  # over the best measured utilisation, before a claim is implausible
_MOST_ROWS: Final = 256


class Credibility(StrEnum):
    POSSIBLE = "possible"
    IMPLAUSIBLE = "implausible"
    IMPOSSIBLE = "impossible"


class Baseline(Document):
    """What the claim compares with: tokens a second of another instance, or dollars of the whole."""

    instance: Text | None = None
    tokens_per_second: Positive | None = None
    dollars: Positive | None = None
    cheaper: Annotated[float, Field(gt=0, lt=1)] | None = None  # the share that is saved


class Claim(Document):
    """A claim as published, and what it leaves open as None. `tokens_per_second` is of all instances together."""

    text: Text = "a claim"
    what: Literal["serving", "training", "core"] = "serving"
    instance: Text
    instances: Number = 1
    model: Text | None = None
    parameters: Positive | None = None
    tokens_per_second: Positive | None = None
    tp: Number | None = None
    batch: Number | None = None
    sequence: Number | None = None
    dollars_per_million: Positive | None = None
    dollars: Positive | None = None  # of a whole training
    tflops: Positive | None = None  # of one core, in bf16
    region: Text = "us-east-1"
    baseline: Baseline | None = None


def claims_of(path: Path) -> tuple[Claim, ...]:
    """The `[[claims]]` of a file; InputInvalid names what is not understood."""
    try:
        entries = tomllib.loads(read_file(path, limit=_LARGEST).decode())["claims"]
        return tuple(_claim(path, number, entry) for number, entry in enumerate(entries, 1))
    except (DocumentInvalid, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise InputInvalid(f"{path}: no [[claims]] ({str(fault)[:160]}); docs/claims.md has examples") from fault


def _claim(path: Path, number: int, entry: object) -> Claim:
    try:
        return Claim.model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in fault["loc"])
        raise InputInvalid(f"{path}: claim {number}: {where}: {fault['msg']}; docs/claims.md has examples") from None


@dataclass(frozen=True)
class Step:
    """One line of arithmetic and what it says of the claim."""

    verdict: Credibility
    text: str


@dataclass(frozen=True)
class ExaminedClaim:
    """A claim and all steps; the worst of them is the verdict."""

    claim: Claim
    steps: tuple[Step, ...]

    @property
    def verdict(self) -> Credibility:
        return max((step.verdict for step in self.steps), key=list(Credibility).index, default=Credibility.POSSIBLE)


def examine(claim: Claim, prices: Prices | None = None) -> ExaminedClaim:
    """The steps of a claim. InputInvalid for an instance or a model that nothing is known of."""
    try:
        found = instance(claim.instance)
    except UnknownInstance as fault:
        raise InputInvalid(str(fault)) from fault
    money = _Money(claim, prices or load_prices())
    steps: Iterable[Step]
    match claim.what:
        case "core":
            steps = _core(claim, found)
        case "training":
            steps = (*_training(claim, found), *money.of_training())
        case _:
            steps = (*_serving(claim, found), *money.of_serving())
    return ExaminedClaim(claim, tuple(steps))


def _needed(value: float | None, name: str, claim: Claim) -> float:
    if value is None:
        raise InputInvalid(f"{claim.text}: a claim about {claim.what} needs {name}; add it")
    return value


# A core


def _core(claim: Claim, found: Instance) -> Iterator[Step]:
    claimed, documented = _needed(claim.tflops, "tflops", claim), found.tflops_bf16 / found.cores
    chip = found.tflops_bf16 / found.chips
    arithmetic = (
        f"{found.chip} has {chip:,.1f} TFLOPS in bf16 and {found.cores_per_chip} cores: {documented:,.1f} a core"
    )
    if claimed <= documented * (1 + _EQUAL):
        yield Step(Credibility.POSSIBLE, f"{arithmetic}; {claimed:,.1f} are claimed")
    else:
        whose = "; the claimed figure is that of the chip" if abs(claimed / chip - 1) < _EQUAL else ""
        yield Step(
            Credibility.IMPOSSIBLE, f"{arithmetic}; {claimed:,.1f} are {claimed / documented:.1f} times as many{whose}"
        )


# Models


def _size(claim: Claim) -> tuple[ModelSize, Architecture | None]:
    if claim.model is not None:
        try:
            if (found := architecture(claim.model)) is not None:
                return ModelSize.of(found), found
        except NotPredicted as fault:
            raise InputInvalid(str(fault)) from fault
    if claim.parameters is None:
        known = (row.configuration.model for row in _published())
        named = f"{claim.model} is not known{did_you_mean(claim.model, known)}" if claim.model else "it names no model"
        raise InputInvalid(f"{claim.text}: {named}; give its parameters, or a folder with its config.json as the model")
    count = round(claim.parameters)
    return ModelSize(count, count, 0), None


@dataclass(frozen=True)
class _Layout:
    """Copies of a model on the cores of the claimed instances, and documented rates of the cores of one copy."""

    size: ModelSize
    cores: int  # of a copy
    copies: int
    memory: float  # bytes
    hbm: float  # bytes a second
    flops: Mapping[int, float]  # operations a second, by the bits of weights

    @classmethod
    def of(cls, claim: Claim, found: Instance, size: ModelSize) -> "_Layout":
        all_ = found.cores * claim.instances
        grouped = found.cores // found.logical_cores  # physical cores of a rank
        cores = min(claim.tp * grouped, all_) if claim.tp else all_
        share = cores / found.cores
        return cls(
            size=size,
            cores=cores,
            copies=all_ // cores,
            memory=found.device_memory_gib * 2**30 * share,
            hbm=found.device_memory_gb_s * 1e9 * share,
            flops={16: found.tflops_bf16 * 1e12 * share, 8: (found.tflops_fp8 or found.tflops_bf16) * 1e12 * share},
        )

    def fits(self, bits: int) -> bool:
        return self.size.parameters * bits / 8 <= self.memory

    def most(self, bits: int, batch: int | None, sequence: int | None) -> float:
        """Tokens a second that no program can exceed: bytes over the HBM rate, operations over the peak rate."""
        computing = self.copies * self.flops[bits] / (2 * self.size.active)
        if batch is None:
            return computing
        read = self.size.active * bits / 8 + batch * (sequence or 0) * self.size.cache * 2
        return min(computing, self.copies * batch * self.hbm / read)


# Serving


def _serving(claim: Claim, found: Instance) -> Iterator[Step]:
    claimed = _needed(claim.tokens_per_second, "tokens_per_second", claim)
    size, known = _size(claim)
    layout = _Layout.of(claim, found, size)
    yield from _memory(claim, layout)
    yield from _floor(claim, layout, claimed)
    if known is not None:
        yield from _predicted(claim, found, layout, known, claimed)
    if (row := nearest_measurement(claim, found, size)) is not None:
        yield Step(Credibility.POSSIBLE, f"nearest measurement: {described(row)}")


def _memory(claim: Claim, layout: _Layout) -> Iterator[Step]:
    whole, cores = layout.size.parameters * 2 / 1e9, f"the {layout.memory / 1e9:,.0f} GB of {layout.cores} cores"
    if layout.fits(16):
        yield Step(Credibility.POSSIBLE, f"memory: {whole:,.1f} GB of weights in bf16 fit {cores}")
    elif layout.fits(8):
        text = f"memory: {whole:,.1f} GB of weights in bf16 do not fit {cores}; {whole / 2:,.1f} GB in 8 bits do"
        yield Step(Credibility.IMPLAUSIBLE, text)
    else:
        yield Step(Credibility.IMPOSSIBLE, f"memory: not even {whole / 2:,.1f} GB of weights in 8 bits fit {cores}")


def _floor(claim: Claim, layout: _Layout, claimed: float) -> Iterator[Step]:
    most = {bits: layout.most(bits, claim.batch, claim.sequence) for bits in _BITS}
    shape = f"{layout.copies} {'copy' if layout.copies == 1 else 'copies'} of {layout.cores} cores"
    if claim.batch is None:
        arithmetic = (
            f"floor: at any batch, {shape} compute at most {most[16]:,.0f} tokens/s "
            f"({layout.copies * layout.flops[16] / 1e12:,.0f} TFLOPS, {2e-9 * layout.size.active:,.1f} GFLOP a token)"
        )
    else:
        weights = layout.size.active * 2 / 1e9
        arithmetic = (
            f"floor: {shape}, batch {claim.batch}, read {weights:,.1f} GB of weights a step at {layout.hbm / 1e9:,.0f} "
            f"GB/s: at most {most[16]:,.0f} tokens/s in bf16, {most[8]:,.0f} in 8 bits"
        )
    if claimed <= most[16]:
        yield Step(Credibility.POSSIBLE, f"{arithmetic}; {claimed:,.0f} are claimed")
    elif claimed <= most[8]:
        share = f"{claimed / most[8]:.0%} of that in 8 bits"
        yield Step(Credibility.IMPLAUSIBLE, f"{arithmetic}; {claimed:,.0f} are claimed, which is {share}")
    else:
        yield Step(
            Credibility.IMPOSSIBLE, f"{arithmetic}; {claimed:,.0f} are claimed, {claimed / most[8]:.1f} times the most"
        )


@dataclass(frozen=True)
class _Rate:
    """Tokens a second by `AWS's compiler` with their interval, and the configuration."""

    value: float
    low: float
    high: float
    text: str


def _predicted(claim: Claim, found: Instance, layout: _Layout, known: Architecture, claimed: float) -> Iterator[Step]:
    try:
        rate = max(_rates(claim, found, layout.size, known), key=lambda each: each.high, default=None)
    except NotPredicted as fault:
        yield Step(Credibility.POSSIBLE, f"no prediction of AWS's compiler: {fault}")
        return
    if rate is None:
        return
    text = f"AWS's compiler, {rate.text}: {rate.value:,.0f} tokens/s predicted, {rate.low:,.0f} to {rate.high:,.0f}"
    if claimed > rate.high * (1 + _EQUAL):
        yield Step(Credibility.IMPLAUSIBLE, f"{text}; {claimed:,.0f} are {claimed / rate.value:.1f} times as many")
    else:
        yield Step(Credibility.POSSIBLE, f"{text}; {claimed:,.0f} are claimed")


def _rates(claim: Claim, found: Instance, size: ModelSize, known: Architecture) -> Iterator[_Rate]:
    """What the claimed configuration reaches, or each one that the claim leaves open and that fits in bf16."""
    context = claim.sequence or _CONTEXT
    grouped = found.cores // found.logical_cores
    for tp in (claim.tp,) if claim.tp else found.degrees:
        memory = found.device_memory_gib * 2**30 * tp / found.logical_cores
        batch = claim.batch or 1
        while claim.batch or (size.parameters + batch * context * size.cache) * 2 <= memory:
            copies = found.logical_cores * claim.instances // tp
            if not copies:
                break
            configuration = Configuration(
                family="llm-decode", model=claim.model or "", instance=claim.instance, metric="tpot_ms",
                cores=tp * grouped, tp=tp, batch=batch, sequence=context,
            )  # fmt: skip
            found_ = predict(configuration, architecture=known)
            value, low, high = (copies * batch / ms * 1e3 for ms in (found_.value, found_.high, found_.low))
            yield _Rate(value, low, high, f"{copies} x tp {tp}, batch {batch}, {context:,} tokens")
            if claim.batch or batch >= _MOST_ROWS:
                break
            batch *= 2


# Training


def _training(claim: Claim, found: Instance) -> Iterator[Step]:
    claimed = _needed(claim.tokens_per_second, "tokens_per_second", claim)
    size, known = _size(claim)
    memory = found.device_memory_gib * 2**30 * claim.instances
    need, have = size.parameters * _MIXED / 1e12, f"the {memory / 1e12:,.2f} TB of {claim.instances} x {claim.instance}"
    if size.parameters * _MIXED <= memory:
        yield Step(Credibility.POSSIBLE, f"memory: {need:,.2f} TB of weights, gradients and optimizer fit {have}")
    elif size.parameters * _LEAST <= memory:
        text = f"memory: {need:,.2f} TB of weights, gradients and optimizer do not fit {have}; frozen weights do (LoRA)"
        yield Step(Credibility.POSSIBLE, text)
    else:
        yield Step(Credibility.IMPOSSIBLE, f"memory: not even {need / _MIXED * _LEAST:,.2f} TB of weights fit {have}")
    flops = 6 * size.active * claimed
    peak = found.tflops_bf16 * 1e12 * claim.instances
    utilisation = flops / peak
    arithmetic = (
        f"work: 6 x {size.active / 1e9:,.1f}e9 x {claimed:,.0f} = {flops / 1e12:,.0f} TFLOPS of {peak / 1e12:,.0f}: "
        f"{utilisation:.1%} utilisation (MFU)"
    )
    if utilisation > 1:
        yield Step(Credibility.IMPOSSIBLE, f"{arithmetic}, more than the peak")
        return
    measured = sorted(_measured_utilisation())
    span = f"{measured[0][0]:.0%} to {measured[-1][0]:.0%} were measured on Trn1 ({measured[-1][1]})"
    too_high = utilisation > measured[-1][0] * _MARGIN
    yield Step(Credibility.IMPLAUSIBLE if too_high else Credibility.POSSIBLE, f"{arithmetic}; {span}")
    if known is not None and claim.sequence:
        yield from _predicted_training(claim, found, known, claimed, claim.sequence)


def _predicted_training(
    claim: Claim, found: Instance, known: Architecture, claimed: float, sequence: int
) -> Iterator[Step]:
    configuration = Configuration(
        family="training", model=claim.model or "", instance=claim.instance, metric="train_seq_per_s",
        cores=found.cores * claim.instances, nodes=claim.instances, sequence=sequence, tp=claim.tp or 1,
    )  # fmt: skip
    try:
        found_ = predict(configuration, architecture=known)
    except NotPredicted as fault:
        yield Step(Credibility.POSSIBLE, f"no prediction of AWS's compiler: {fault}")
        return
    value, low, high = (each * sequence for each in (found_.value, found_.low, found_.high))
    text = f"AWS's compiler: {value:,.0f} tokens/s predicted, {low:,.0f} to {high:,.0f}; {claimed:,.0f} are claimed"
    yield Step(Credibility.IMPLAUSIBLE if claimed > high * (1 + _EQUAL) else Credibility.POSSIBLE, text)


@cache
def _published() -> tuple[Measured, ...]:
    return read(MEASURED)


def _measured_utilisation() -> Iterator[tuple[float, str]]:
    """The utilisation of each published training of a decoder, and its model."""
    for row in _published():
        c, known = row.configuration, architecture(row.configuration.published_name, row.configuration.model)
        if c.family == "training" and known is not None and known["kind"] == "decoder" and c.sequence:
            peak = INSTANCES[c.instance].tflops_bf16 / INSTANCES[c.instance].cores * c.cores * 1e12
            yield 6 * ModelSize.of(known).active * row.value * c.sequence / peak, c.model


# Measurements


def nearest_measurement(claim: Claim, found: Instance, size: ModelSize) -> Measured | None:
    """The published decode whose model, chip, degree and batch are nearest, by the logarithms of their sizes."""

    def distance(row: Measured) -> float:
        c = row.configuration
        known = architecture(c.published_name, c.model)
        if known is None or known["kind"] != "decoder":
            return math.inf
        chip = INSTANCES.get(c.instance)
        far = 4 * abs(math.log(ModelSize.of(known).active / size.active))
        far += 0 if chip is not None and chip.chip == found.chip else 2
        far += abs(math.log((claim.tp or found.logical_cores) / c.tp))
        return far + (abs(math.log(claim.batch / c.batch)) if claim.batch else 0.0)

    decodes = [row for row in _published() if row.configuration.family == "llm-decode"]
    best = min(decodes, key=distance, default=None)
    return best if best is not None and distance(best) < math.inf else None


def described(row: Measured) -> str:
    """A measurement in words, with its tokens a second."""
    c = row.configuration
    rate = row.value if c.metric == "throughput_per_s" else c.dp * c.batch / row.value * 1e3
    time = "" if c.metric == "throughput_per_s" else f" ({row.value:.3g} ms a token)"
    copies = f"{c.dp} x " if c.dp > 1 else ""
    context = f", {c.sequence:,} tokens" if c.sequence else ""
    return (
        f"{rate:,.0f} tokens/s{time} of {c.model} on {c.instance}, {copies}tp {c.tp}, batch {c.batch}{context}, "
        f"by {c.framework or 'NxD Inference'}"
    )


# Money


@dataclass(frozen=True)
class _Money:
    claim: Claim
    prices: Prices

    def of_serving(self) -> Iterator[Step]:
        claim = self.claim
        if claim.dollars_per_million is None and claim.baseline is None:
            return
        rate = _needed(claim.tokens_per_second, "tokens_per_second", claim)
        costs = [
            (price.hourly * claim.instances / (rate * 3600) * 1e6, purchase, price)
            for purchase, price in self._known(claim.instance)
        ]
        if not costs:
            yield Step(Credibility.POSSIBLE, f"cost: no price of {claim.instance} is known in {claim.region}")
            return
        if claim.dollars_per_million is not None:
            yield from self._cost(claim.dollars_per_million, costs)
        yield from self._cheaper(claim.dollars_per_million or costs[0][0])

    def _known(self, type_: str) -> Sequence[tuple[Purchase, Price]]:
        """All known prices in the region, on demand first; of another region, where it has none."""
        for region in dict.fromkeys((self.claim.region, *sorted({key[0] for key in self.prices.known}))):
            found = [(each, price) for each in Purchase if (price := self.prices.price(region, type_, each))]
            if found:
                return found
        return ()

    def _cost(self, claimed: float, costs: list[tuple[float, Purchase, Price]]) -> Iterator[Step]:
        listed = "; ".join(
            f"${cost:,.2f} {purchase} at ${price.hourly:,.2f} an hour of {price.date}"
            for cost, purchase, price in costs
        )
        text = f"cost: a million tokens at the claimed speed cost {listed}; ${claimed:,.2f} are claimed"
        lowest = min(cost for cost, _, _ in costs)
        if claimed < lowest * (1 - _EQUAL):
            yield Step(
                Credibility.IMPOSSIBLE, f"{text}, less than at any price that is known: the claim contradicts itself"
            )
        else:
            yield Step(Credibility.POSSIBLE, text)

    def _cheaper(self, cost: float) -> Iterator[Step]:
        baseline = self.claim.baseline
        if baseline is None or baseline.instance is None or baseline.tokens_per_second is None:
            return
        found = self._known(baseline.instance)
        if not found:
            yield Step(Credibility.POSSIBLE, f"baseline: no price of {baseline.instance} is known")
            return
        purchase, price = found[0]
        other = price.hourly / (baseline.tokens_per_second * 3600) * 1e6
        saved = 1 - cost / other
        text = (
            f"baseline: {baseline.instance} at {baseline.tokens_per_second:,.0f} tokens/s costs ${other:,.2f} "
            f"{purchase} at ${price.hourly:,.2f} an hour of {price.date}: ${cost:,.2f} is {_saving(saved)}"
        )
        if baseline.cheaper is None or abs(saved - baseline.cheaper) < _EQUAL:
            yield Step(Credibility.POSSIBLE, text)
            return
        needed = cost / (1 - baseline.cheaper) * baseline.tokens_per_second * 3600 / 1e6
        yield Step(
            Credibility.IMPLAUSIBLE, f"{text}, not {baseline.cheaper:.0%} cheaper, which needs ${needed:,.2f} an hour"
        )

    def of_training(self) -> Iterator[Step]:
        claim = self.claim
        if claim.dollars is None:
            return
        rate = _needed(claim.tokens_per_second, "tokens_per_second", claim)
        for purchase, price in self._known(claim.instance)[:1]:
            hourly = price.hourly * claim.instances
            hours = claim.dollars / hourly
            text = (
                f"cost: ${claim.dollars:,.0f} buy {hours:,.0f} hours of {claim.instances} x {claim.instance} "
                f"{purchase} (${hourly:,.2f} an hour, prices of {price.date}): {rate * hours * 3.6e-6:,.1f}e9 tokens"
            )
            if claim.baseline is not None and claim.baseline.dollars is not None:
                text += (
                    f"; against ${claim.baseline.dollars:,.0f} {_saving(1 - claim.dollars / claim.baseline.dollars)}"
                )
            yield Step(Credibility.POSSIBLE, text)


def _saving(share: float) -> str:
    return f"{share:.0%} cheaper" if share >= 0 else f"{-share:.0%} dearer"
