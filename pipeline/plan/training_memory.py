"""TrainingMemory of one rank in training: weights, gradients, optimizer, activations, by the stage of its pipeline.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), with
their counts of a GPT layer taken apart, so that gated layers, grouped heads and models without dropout have theirs.
A rank is a logical core; bytes are of the fullest stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nxpipe.emulator.hardware.instance import Instance
from nxpipe.pipeline.predict.work import Architecture, NotPredicted

_BF16: Final = 2
_FP32: Final = 4
_MASK: Final = 1  # a byte for each element that dropout may zero

# What AWS's libraries hold beside the tensors of training: two buckets of collectives of 512 MB (the default of
# NeuronX Distributed), and 0.25 GiB for code, DMA rings and tables of the runtime (0.13 GiB measured for one graph).
RESERVED: Final = 2 * 512 * 10**6 + (1 << 28)


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # those of the attention core
    FULL = "full"  # all of a layer but its input


class Precision(StrEnum):
    """Types of weights, gradients and AdamW's state."""

    MIXED = "mixed"  # bf16 weights; fp32 gradients, master weights and moments
    BF16_SR = "bf16-sr"  # bf16 weights and gradients with stochastic rounding; fp32 moments, no master weights
    FP32 = "fp32"

    @property
    def weight_bytes(self) -> int:
        return _FP32 if self is Precision.FP32 else _BF16

    @property
    def gradient_bytes(self) -> int:
        return _BF16 if self is Precision.BF16_SR else _FP32

    @property
    def optimizer_bytes(self) -> int:
        """Two moments, and in mixed precision a master copy of the weights."""
        return (3 if self is Precision.MIXED else 2) * _FP32


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """How a batch and a model are divided over ranks: tensor, pipeline and data parallel, and micro-batches."""

    tp: int
    pp: int
    dp: int
    micro: int  # sequences of a micro-batch
    sequences: int  # of a step, over all replicas
    interleave: int = 1  # virtual stages of a rank
    recompute: Recompute = Recompute.SELECTIVE
    precision: Precision = Precision.MIXED
    zero1: bool = True
    sequence_parallel: bool = True
    flash: bool = True  # attention whose kernel keeps no matrix of scores

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """Of one replica in one step."""
        return self.sequences // (self.dp * self.micro)

    def __str__(self) -> str:
        interleaved = f" x{self.interleave}" if self.interleave > 1 else ""
        return f"tp {self.tp} pp {self.pp}{interleaved} dp {self.dp} micro {self.micro} {self.recompute}"


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank, by what they hold."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # of the layer that is computed, and of the logits
    reserved: float = RESERVED

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.reserved


def rank_bytes(instance: Instance) -> float:
    """The device memory of one logical core."""
    return instance.device_memory_gib * 2**30 / instance.logical_cores


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder that memory depends on. `wide` are the columns of a token's feed-forward layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    stored: int  # columns of all feed-forward layers of a layer, experts among them
    gated: bool
    experts: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, a: Architecture) -> "DecoderSizes":
        if a["kind"] != "decoder":
            raise NotPredicted(f"training of a model of kind {a['kind']} is not planned, only of decoders")
        heads, experts = a["heads"], a.get("experts") or 0
        dense = (a.get("shared_intermediate") or 0) if experts else a["intermediate"]
        expert = a.get("expert_intermediate") or 0
        return cls(
            layers=a["layers"],
            hidden=a["hidden"],
            heads=heads,
            kv_heads=a.get("kv_heads") or heads,
            head_dim=a.get("head_dim") or a["hidden"] // heads,
            wide=dense + (a.get("active_experts") or 0) * expert,
            stored=dense + experts * expert,
            gated=bool(a.get("gated", True)),
            experts=experts,
            vocabulary=a["vocab"],
            tied=bool(a.get("tied")),
        )

    @property
    def dropout(self) -> bool:
        """GPT's layers are trained with it, gated ones without."""
        return not self.gated

    def kv_of_rank(self, tp: int) -> int:
        """Heads of keys and values of a rank; beyond their number they are replicated."""
        return math.ceil(self.kv_heads / tp)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Layers of each stage of the pipeline; what does not divide goes to the middle, whose stages have no table."""
    counts = [layers // stages] * stages
    for stage in [*range(1, stages - 1), 0, stages - 1][: layers % stages]:
        counts[stage] += 1
    return counts


def layer_parameters(s: DecoderSizes, tp: int) -> float:
    """Of one rank."""
    attention = s.hidden * s.head_dim * (2 * s.heads / tp + 2 * s.kv_of_rank(tp))
    feed_forward = (3 if s.gated else 2) * s.hidden * s.stored / tp
    return attention + feed_forward + s.hidden * (s.experts + 2)  # a router and two norms on each rank


def stage_parameters(s: DecoderSizes, layout: TrainingLayout, stage: int) -> float:
    """Of one rank: its layers, and the tables of the first and last stage."""
    count = layers_of_stages(s.layers, layout.pp)[stage] * layer_parameters(s, layout.tp)
    table = s.vocabulary * s.hidden / layout.tp
    first, last = stage == 0, stage == layout.pp - 1
    if first and last:
        count += table if s.tied else 2 * table
    elif first or last:
        count += table  # tied ones are on both stages, with gradients that are summed
    return count + (s.hidden if last else 0)


def layer_activations(
    s: DecoderSizes, layout: TrainingLayout, tokens: int, recompute: Recompute | None = None
) -> float:
    """Bytes that one layer keeps of one micro-batch on one rank, until its backward pass."""
    recompute = layout.recompute if recompute is None else recompute
    rows = layout.micro * tokens
    replicated = layout.tp if layout.sequence_parallel else 1
    if recompute is Recompute.FULL:
        return _BF16 * rows * s.hidden / replicated  # the input of the layer
    # Inputs of the two norms and of the products behind them, and masks of dropout on the sums.
    shared = rows * s.hidden * (4 * _BF16 + (2 * _MASK if s.dropout else 0))
    heads = s.heads / layout.tp
    attention = rows * s.head_dim * _BF16 * (2 * heads + 2 * s.kv_of_rank(layout.tp))  # Q, its result, K and V
    feed_forward = rows * s.wide / layout.tp * _BF16 * (4 if s.gated else 2)
    scores = layout.micro * heads * tokens**2 * (2 * _BF16 + _MASK if s.dropout else _BF16)
    kept = scores if recompute is Recompute.NONE and not layout.flash else 0.0
    return shared / replicated + attention + feed_forward + kept


def layers_in_flight(layout: TrainingLayout, layers: int, stage: int) -> float:
    """Layers times micro-batches whose activations a rank of a stage of `layers` keeps at most, in 1F1B."""
    if layout.interleave == 1:
        return layers * min(layout.micro_batches, layout.pp - stage)
    chunks = 2 * (layout.pp - stage - 1) + (layout.interleave - 1) * layout.pp + 1
    return layers / layout.interleave * min(chunks, layout.micro_batches * layout.interleave)


def stage_memory(s: DecoderSizes, layout: TrainingLayout, tokens: int, stage: int) -> TrainingMemory:
    """One rank of a stage."""
    parameters = stage_parameters(s, layout, stage)
    sharded = math.ceil(parameters / layout.dp) if layout.zero1 else parameters
    layers = layers_of_stages(s.layers, layout.pp)[stage]
    rows = layout.micro * tokens
    # The backward pass of a layer has all of its activations, those that were not kept too, and their gradients.
    working = 2 * layer_activations(s, layout, tokens, Recompute.NONE)
    if stage == layout.pp - 1:  # logits in fp32 and their gradient
        working = max(working, 2 * _FP32 * rows * s.vocabulary / layout.tp)
    return TrainingMemory(
        weights=parameters * layout.precision.weight_bytes,
        gradients=parameters * layout.precision.gradient_bytes,
        optimizer=sharded * layout.precision.optimizer_bytes,
        activations=layers_in_flight(layout, layers, stage) * layer_activations(s, layout, tokens),
        working=working,
    )


def memory(s: DecoderSizes, layout: TrainingLayout, tokens: int) -> TrainingMemory:
    """The fullest stage: the first has most micro-batches in flight, the second a layer more, the last the logits."""
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max((stage_memory(s, layout, tokens, stage) for stage in stages), key=lambda each: each.total)


def checkpoint_bytes(s: DecoderSizes, layout: TrainingLayout, stages: Sequence[int] | None = None) -> float:
    """Weights and AdamW's state of the model, without copies of other replicas."""
    each = layout.precision.weight_bytes + layout.precision.optimizer_bytes
    indices = range(layout.pp) if stages is None else stages
    return sum(stage_parameters(s, layout, stage) for stage in indices) * layout.tp * each
