"""Training plans: valid layouts on instances, the time of a step, and what a number of tokens takes.

    step = (micro-batches + (pp - 1) / interleave) * slot + gradients + optimizer

A slot is one micro-batch forward and backward in the slowest stage: products and element-wise work as `AWS's
compiler` takes them (pipeline/predict, family `training`), collectives of tensor parallelism, the stage's sends and
what each execution with collectives takes. None of these is assumed to overlap with another one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from nxpipe.emulator.hardware.instance import INSTANCES, Instance
from nxpipe.emulator.hardware.links import collectives_ns, link_gb_s, near_gb_s
from nxpipe.pipeline.plan.training_memory import (
    DecoderSizes,
    Precision,
    Recompute,
    TrainingLayout,
    TrainingMemory,
    layers_of_stages,
    memory,
    rank_bytes,
    stage_parameters,
)
from nxpipe.pipeline.predict import work as works
from nxpipe.pipeline.predict.constants import FittedConstants, predict, shipped
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import Architecture
from nxpipe.pipeline.util.errors import InputInvalid

# The constants of the family `training` were fitted to whole steps, bubbles and collectives among them. This share of
# the predicted time is left for one rank's own work: the median over published rows of what their other terms leave.
# `benchmarks/training_rows.py` prints it, with the errors of rows whose model it has not seen.
OWN_WORK: Final = 0.96

MEASURED: Final = frozenset({"trn1"})  # families with published training, on which the interval rests
_BF16: Final = 2
_MICRO: Final = (1, 2, 4, 8)
_EXECUTIONS: Final = 2  # of a micro-batch on a stage: forward, backward


@dataclass(frozen=True)
class TrainingJob:
    """What is trained: a model, the tokens of a sequence, the sequences of a step, and numbers' types."""

    model: str
    architecture: Architecture
    tokens: int
    sequences: int
    precision: Precision = Precision.MIXED
    zero1: bool = True
    sequence_parallel: bool = True
    flash: bool = True

    @cached_property
    def sizes(self) -> DecoderSizes:
        return DecoderSizes.of(self.architecture)

    @cached_property
    def forward(self) -> works.Work:
        """One sequence, without the logits."""
        work = works.Work()
        works.transformer(work, self.architecture, tokens=self.tokens, context=self.tokens)
        return work

    @property
    def head_flops(self) -> float:
        """The logits of one sequence, forward."""
        return 2.0 * self.tokens * self.sizes.hidden * self.sizes.vocabulary

    @property
    def flops(self) -> float:
        """Of one sequence forward and backward: what model FLOPS utilization counts, no recomputation."""
        return 3 * (self.forward.flops + self.head_flops)


def instance_of(name: str) -> Instance:
    """An instance type that can train; InputInvalid for another one."""
    trainable = [each for each, entry in INSTANCES.items() if entry.compiler_target != "inf2" and entry.servers == 1]
    if name not in trainable:
        raise InputInvalid(f"{name} is no instance type that trains; the types are {', '.join(trainable)}")
    return INSTANCES[name]


def reason_against(job: TrainingJob, instance: Instance, count: int, layout: TrainingLayout) -> str | None:
    """Why a layout cannot run on so many instances; None if it can, its memory aside."""
    s, ranks = job.sizes, count * instance.logical_cores
    if layout.tp not in instance.degrees:
        return f"tensor parallel {layout.tp} is no degree of {instance.name} ({_listed(instance.degrees)})"
    if count > 1 and not instance.efa_interfaces:
        return f"{instance.name} has no Elastic Fabric Adapter for training on {count} instances"
    if layout.ranks != ranks:
        return f"tp x pp x dp is {layout.ranks}, but {count} x {instance.name} have {ranks} ranks"
    if s.heads % layout.tp:
        return f"tensor parallel {layout.tp} does not divide {s.heads} heads"
    if s.kv_heads % layout.tp and layout.tp % s.kv_heads:
        return f"tensor parallel {layout.tp} neither divides nor is a multiple of {s.kv_heads} heads of keys and values"
    if layout.pp * layout.interleave > s.layers:
        return f"{layout.pp * layout.interleave} stages are more than {s.layers} layers"
    if layout.sequences % (layout.dp * layout.micro):
        return f"{layout.sequences} sequences are no multiple of dp {layout.dp} x micro-batch {layout.micro}"
    if layout.interleave > 1 and (
        layout.pp == 1 or layout.micro_batches % layout.pp or s.layers % (layout.pp * layout.interleave)
    ):
        return "interleaving needs several stages, and layers and micro-batches that they divide"
    return None


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def layouts(job: TrainingJob, instance: Instance, count: int) -> Iterator[TrainingLayout]:
    """All layouts without interleaving that can run on so many instances, their memory aside."""
    ranks = count * instance.logical_cores
    choices = (Recompute.SELECTIVE, Recompute.FULL) if job.flash else tuple(Recompute)
    for tp in instance.degrees:
        stages = [pp for pp in range(1, job.sizes.layers + 1) if ranks % (tp * pp) == 0]
        for pp in stages:
            for micro in _MICRO:
                for recompute in choices:
                    layout = TrainingLayout(
                        tp=tp,
                        pp=pp,
                        dp=ranks // (tp * pp),
                        micro=micro,
                        sequences=job.sequences,
                        recompute=recompute,
                        precision=job.precision,
                        zero1=job.zero1,
                        sequence_parallel=job.sequence_parallel and tp > 1,
                        flash=job.flash,
                    )
                    if reason_against(job, instance, count, layout) is None:
                        yield layout


PARTS: Final = ("compute", "recompute", "bubble", "tensor", "pipeline", "executions", "gradients", "optimizer")


@dataclass(frozen=True)
class TrainingStep:
    """Seconds of one step by what takes them. `factor` is that of the 90 % interval, `floor` the least seconds that
    the operations of the model can take."""

    compute: float
    recompute: float
    bubble: float  # slots in which a stage waits for the first or last micro-batch
    tensor: float  # collectives of tensor parallelism
    pipeline: float  # sends between stages
    executions: float  # what each execution with collectives takes
    gradients: float  # reduction over replicas, and the gather of ZeRO-1's weights
    optimizer: float
    factor: float
    floor: float

    @property
    def bounds(self) -> tuple[float, float, float]:
        """The interval's lower end, the expected seconds, and its upper end."""
        return max(self.seconds / self.factor, self.floor), self.seconds, self.seconds * self.factor

    @property
    def seconds(self) -> float:
        return math.fsum(getattr(self, part) for part in PARTS)

    @property
    def bound(self) -> str:
        """The part that takes most of the time."""
        return max(PARTS, key=lambda part: float(getattr(self, part)))


@dataclass(frozen=True)
class TrainingClock:
    """The times of a job on one instance type. `sequence` is the seconds that a sequence without its logits takes one
    physical core, and `floor` the least."""

    job: TrainingJob
    instance: Instance
    sequence: float
    floor: float
    factor: float

    @classmethod
    def of(
        cls, job: TrainingJob, instance: Instance, fitted: FittedConstants | None = None, share: float = OWN_WORK
    ) -> "TrainingClock":
        """NotPredicted for a model or an instance type without constants."""
        fitted = fitted or shipped()
        whole = predict(configuration(job, instance), fitted, job.architecture)
        factor = fitted.interval("training")
        if instance.family not in MEASURED:
            factor **= 2  # no training on it was published, so its constants are those of other chips
        return cls(job, instance, max(share * whole.seconds, whole.floor_seconds), whole.floor_seconds, factor)

    def step(self, count: int, layout: TrainingLayout) -> TrainingStep:
        """One step of a layout that is valid on `count` instances."""
        job, s, cores = self.job, self.job.sizes, layout.tp * self._cores_of_rank
        each = self.sequence / cores * layout.micro
        head = each * job.head_flops / job.forward.flops
        again = each * _recomputed(job, layout)
        counts = layers_of_stages(s.layers, layout.pp)
        last = len(counts) - 1
        work = [each * n / s.layers + (head if stage == last else 0.0) for stage, n in enumerate(counts)]
        slowest = max(range(len(counts)), key=lambda stage: work[stage] + again * counts[stage] / s.layers)
        layers = counts[slowest]
        slot = {
            "compute": work[slowest],
            "recompute": again * layers / s.layers,
            "tensor": layers * self._exchanges(layout),
            "pipeline": self._sends(count, layout),
            "executions": _EXECUTIONS * layout.interleave * collectives_ns(self.instance.core, cores) / 1e9,
        }
        slots, waits = layout.micro_batches, (layout.pp - 1) / layout.interleave
        return TrainingStep(
            **{part: slots * seconds for part, seconds in slot.items()},
            bubble=waits * math.fsum(slot.values()),
            gradients=self._gradients(count, layout),
            optimizer=self._optimizer(layout),
            factor=self.factor,
            floor=self.floor * (1 + job.head_flops / job.forward.flops) * job.sequences / (count * self.instance.cores),
        )

    @property
    def _cores_of_rank(self) -> int:
        return self.instance.cores // self.instance.logical_cores

    def _exchanges(self, layout: TrainingLayout) -> float:
        """Four all-reduces of a layer's activations, or as many pairs of all-gather and reduce-scatter."""
        if layout.tp == 1:
            return 0.0
        rate = self._rate(layout.tp * self._cores_of_rank)
        passes = 6 if layout.recompute is Recompute.FULL else 4
        bytes_each = 2 * (layout.tp - 1) / layout.tp * layout.micro * self.job.tokens * self.job.sizes.hidden * _BF16
        return passes * bytes_each / rate

    def _rate(self, cores: int) -> float:
        """Bytes a second of a ring of so many cores on one instance."""
        near = cores <= self.instance.cores_per_chip
        return (near_gb_s(self.instance) if near else link_gb_s(self.instance)) * 1e9

    def _sends(self, count: int, layout: TrainingLayout) -> float:
        """Activations to the next stage and gradients to the one before, both ways at once, for each virtual stage."""
        if layout.pp == 1:
            return 0.0
        divided = layout.tp if layout.sequence_parallel else 1
        sent = layout.micro * self.job.tokens * self.job.sizes.hidden * _BF16 / divided
        across = layout.tp * layout.dp >= self.instance.logical_cores and count > 1
        rate = self._network / self.instance.logical_cores if across else self._rate(self.instance.cores)
        return 2 * layout.interleave * sent / rate

    @property
    def _network(self) -> float:
        """Bytes a second of one instance."""
        return (self.instance.efa_gbps or 0.0) / 8 * 1e9

    def _gradients(self, count: int, layout: TrainingLayout) -> float:
        """Rings over the replicas: those on one instance share its links, and one ring crosses its network once.

        Ranks are numbered by tensor, then data, then pipeline parallel index.
        """
        if layout.dp == 1:
            return 0.0
        near = min(layout.dp, self.instance.logical_cores // layout.tp)
        across = layout.dp > near and count > 1
        rate = self._network / (self.instance.logical_cores / near) if across else self._rate(self.instance.cores)
        precision = layout.precision
        gathered = precision.weight_bytes if layout.zero1 else precision.gradient_bytes
        parameters = max(stage_parameters(self.job.sizes, layout, stage) for stage in {0, layout.pp - 1})
        return parameters * (precision.gradient_bytes + gathered) * (layout.dp - 1) / layout.dp / rate

    def _optimizer(self, layout: TrainingLayout) -> float:
        """Its state is read and written, gradients are read, weights written; on the shard of ZeRO-1."""
        precision = layout.precision
        parameters = max(stage_parameters(self.job.sizes, layout, stage) for stage in {0, layout.pp - 1})
        moved = 2 * precision.optimizer_bytes + precision.gradient_bytes + precision.weight_bytes
        rate = self.instance.device_memory_gb_s * 1e9 / self.instance.logical_cores
        return parameters * moved / (layout.dp if layout.zero1 else 1) / rate


def configuration(job: TrainingJob, instance: Instance) -> Configuration:
    """The job on one physical core, as a row of published training has it."""
    exact = job.precision is Precision.FP32
    return Configuration(
        family="training",
        model=job.model,
        instance=instance.name,
        metric="train_seq_per_s",
        sequence=job.tokens,
        framework="neuronx-distributed",
        model_dtype="fp32" if exact else "bf16",
        autocast="none" if exact else "bf16",
    )


def _recomputed(job: TrainingJob, layout: TrainingLayout) -> float:
    """Work of recomputation beyond that of published training, which recomputes attention, as a share of it.

    Forward and backward are three times the products of forward; a fourth is what is recomputed.
    """
    attention = job.forward.attention
    other = job.forward.dense + job.forward.experts
    published = 3 * other + 4 * attention
    if layout.recompute is Recompute.FULL:
        return other / published
    return -attention / published if layout.recompute is Recompute.NONE and not layout.flash else 0.0


@dataclass(frozen=True)
class TrainingCandidate:
    """A layout on instances of a type: its memory and its step."""

    job: TrainingJob
    instance: Instance
    count: int
    layout: TrainingLayout
    memory: TrainingMemory
    step: TrainingStep
    others: Sequence["TrainingCandidate"] = ()  # the next best layouts on the same instances

    @property
    def fits(self) -> bool:
        return self.memory.total <= rank_bytes(self.instance)

    @property
    def tokens_per_second(self) -> float:
        return self.job.sequences * self.job.tokens / self.step.seconds

    @property
    def utilization(self) -> float:
        """Model FLOPS utilization: operations of the model over those at the peak rate in bf16."""
        peak = self.instance.tflops_bf16 * 1e12 * self.count
        return self.job.flops * self.job.sequences / self.step.seconds / peak

    def hours(self, tokens: float) -> float:
        """Of the expected time of whole steps."""
        return self.hours_between(tokens)[1]

    def hours_between(self, tokens: float) -> tuple[float, float, float]:
        """The interval's ends, with the expected hours between."""
        low, expected, high = (self.steps(tokens) * each / 3600 for each in self.step.bounds)
        return low, expected, high

    def steps(self, tokens: float) -> int:
        return math.ceil(tokens / (self.job.sequences * self.job.tokens))


_LISTED: Final = 5  # layouts of the same instances that a plan keeps beside the best


def candidate(clock: TrainingClock, count: int, layout: TrainingLayout) -> TrainingCandidate:
    held = memory(clock.job.sizes, layout, clock.job.tokens)
    return TrainingCandidate(clock.job, clock.instance, count, layout, held, clock.step(count, layout))


def fastest(clock: TrainingClock, count: int) -> TrainingCandidate | None:
    """The fastest layout that fits; None if none does. Equal ones: the one with more memory left."""
    found = (candidate(clock, count, layout) for layout in layouts(clock.job, clock.instance, count))
    ordered = sorted(
        (each for each in found if each.fits), key=lambda each: (each.step.seconds, each.memory.total, str(each.layout))
    )
    return replace(ordered[0], others=tuple(ordered[1 : _LISTED + 1])) if ordered else None


def least_memory(clock: TrainingClock, count: int) -> TrainingCandidate | None:
    """The layout with the fullest rank least full, for the sentence that nothing fits; None if there is no layout."""
    found = [candidate(clock, count, layout) for layout in layouts(clock.job, clock.instance, count)]
    return min(found, key=lambda each: each.memory.total, default=None)
