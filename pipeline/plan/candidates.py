"""Candidates of a serving plan: layouts of a decoder on an instance type that fit its memory, by runtime and batch.

Bytes are those of BF16 weights and KV cache. Scratch and code are estimates in closed form; `nxpipe check` measures the
graphs themselves.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.emulator.hardware.core import CORES
from nxpipe.pipeline.models import catalogue
from nxpipe.pipeline.plan.schedulers import Replica, Scheduling
from nxpipe.pipeline.plan.sizes import ModelSize
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.work import Architecture, NotPredicted, kv_heads_of_rank
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file
from nxpipe.pipeline.util.text import did_you_mean

_GIB: Final = 1 << 30
_BYTES: Final = 2  # of a weight, an activation or an entry of the KV cache
_SCRATCH_UNIT: Final = 64 << 20  # the runtime rounds its shared scratchpad up to it
_RUNTIME_BYTES: Final = 133 << 20  # that the runtime keeps on a core of trn1 (kiln, docs/neuron-notes.md, SDK 2.32)
_LARGEST: Final = 1 << 20  # bytes of a config.json
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_LEAST_BUCKET: Final = 128
_ROUNDED: Final = 256  # tokens; a row's capacity is a multiple of it
_CHUNK: Final = 512  # tokens of a chunk of `nxpipe serve`
_SEGMENT: Final = 8192  # tokens that vllm-neuron reads at once, at most
_BLOCK: Final = 32  # tokens of a block of vllm-neuron's cache


@dataclass(frozen=True)
class PlannedModel:
    """A decoder: what predictions and memory need to know of it."""

    name: str  # as predictions know it: an id or a folder
    architecture: Architecture
    kind: str = ""  # model_type of its config.json; empty if only its sizes are known
    parameters: int = 0
    positions: int | None = None  # the longest sequence that it was trained for
    listed: str | None = None  # its name in nxpipe.toml


def planned_model(name: str, listed: str | None = None) -> PlannedModel:
    """A model of the catalogue or of a folder with a config.json; InputInvalid for one without a closed form."""
    try:
        found = architecture(name)
    except NotPredicted as reason:
        raise InputInvalid(f"--model-id: {reason}") from reason
    if found is None:
        close = "".join(f"; did you mean {each!r}?" for each in catalogue.nearest(name)[:1])
        raise InputInvalid(
            f"--model-id {name!r} is no model of the catalogue, no folder with a config.json and no model of "
            f"nxpipe.toml{close or '; pass the folder that save_pretrained writes'}"
        )
    if found["kind"] != "decoder":
        raise InputInvalid(f"--model-id {name}: a plan is for decoders that generate text, not for {found['kind']}")
    config = _configuration(name)
    known = catalogue.find(name)
    parameters = known.parameters if known else ModelSize.of(found).parameters
    positions = config.get("max_position_embeddings")
    return PlannedModel(
        name,
        found,
        str(config.get("model_type", "")),
        parameters,
        positions if isinstance(positions, int) else None,
        listed,
    )


def _configuration(name: str) -> Mapping[str, Any]:
    known = catalogue.find(name)
    if known is not None:
        return known.config
    try:
        found = json_of(read_file(Path(name, "config.json"), limit=_LARGEST))
    except (OSError, DocumentInvalid):
        return {}  # a published architecture, of which only the sizes are known
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Runtime:
    """A serving runtime: the chips for which it exists, and the name by which predictions know its programs.

    `kinds` are the model types that it knows, if it knows few."""

    name: str
    scheduling: Scheduling
    targets: tuple[str, ...]
    framework: str
    state: str
    kinds: frozenset[str] = frozenset()
    pads: bool = True  # heads with zeros, where a degree does not divide them

    def refusal(self, model: PlannedModel) -> str | None:
        if self.kinds and model.kind and model.kind not in self.kinds:
            return f"{self.name} has no models of type {model.kind}, only {', '.join(sorted(self.kinds))}"
        return None


RUNTIMES: Final = (
    Runtime(
        "vLLM with NxD Inference",
        Scheduling.NXDI,
        ("inf2", "trn1", "trn1n"),
        "NxD Inference",
        "SDK 2.28, the last release for these chips",
    ),
    Runtime("vLLM with NxD Inference", Scheduling.NXDI, ("trn2",), "NxD Inference", "SDK 2.29 to 2.31, in maintenance"),
    Runtime(
        "vllm-neuron",
        Scheduling.VLLM,
        ("trn2", "trn3"),
        "vllm-neuron",
        "SDK 2.32, beta",
        frozenset({"llama", "gpt_oss", "qwen3"}),
        pads=False,
    ),
    Runtime(
        "nxpipe serve",
        Scheduling.NXPIPE,
        ("inf2", "trn1", "trn1n", "trn2", "trn3"),
        "NxD Inference",
        "not yet run on devices",
    ),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM on one logical core."""

    weights: int
    cache: int
    scratch: int
    code: int
    capacity: int

    @property
    def need(self) -> int:
        return self.weights + self.cache + self.scratch + self.code


@dataclass(frozen=True)
class Candidate:
    """Copies of a model on one instance: the degree of each, and how its server is started."""

    model: PlannedModel = field(repr=False)
    instance: Instance = field(repr=False)
    runtime: Runtime = field(repr=False)
    tp: int
    copies: int
    replica: Replica
    memory: Memory

    @property
    def cores(self) -> int:
        """Physical cores of a copy."""
        return self.tp * CORES[self.instance.core].lnc_default

    @property
    def title(self) -> str:
        return f"{self.instance.name} tp {self.tp} x {self.copies}, batch {self.replica.rows}, {self.runtime.name}"


@dataclass(frozen=True)
class Refusal:
    """What is not possible, and why."""

    instance: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.instance}{', ' if self.what else ''}{self.what}: {self.reason}"


@dataclass(frozen=True)
class Lengths:
    """The longest prompt and the longest sequence that a replica must hold."""

    prompt: int
    sequence: int

    @property
    def capacity(self) -> int:
        return math.ceil(self.sequence / _ROUNDED) * _ROUNDED

    @property
    def buckets(self) -> tuple[int, ...]:
        """Powers of two from 128, and the first that holds the longest prompt; none beyond the capacity."""
        found, bucket = [], _LEAST_BUCKET
        while bucket < self.prompt:
            found.append(bucket)
            bucket *= 2
        return tuple(dict.fromkeys((*found, min(bucket, self.capacity))))


def candidates(
    model: PlannedModel, instances: Sequence[Instance], lengths: Lengths, runtimes: Sequence[Runtime] = RUNTIMES
) -> tuple[list[Candidate], list[Refusal]]:
    """All that fit, and why the others do not."""
    found: list[Candidate] = []
    refused: list[Refusal] = []
    for instance in instances:
        if model.positions is not None and lengths.sequence > model.positions:
            reason = f"the model has {model.positions:,} positions, and requests take {lengths.sequence:,} tokens"
            refused.append(Refusal(instance.name, "", reason))
            continue
        for item in _on(model, instance, lengths, runtimes):
            (found if isinstance(item, Candidate) else refused).append(item)  # type: ignore[arg-type]
    return found, refused


def _on(
    model: PlannedModel, instance: Instance, lengths: Lengths, runtimes: Sequence[Runtime]
) -> Iterator[Candidate | Refusal]:
    """Candidates on one instance type. Of batches that do not fit, the reason of the smallest is given."""
    existing = [each for each in runtimes if instance.compiler_target in each.targets]
    if not existing:
        yield Refusal(instance.name, "", "none of the chosen runtimes exists for its chip")
    for runtime in existing:
        if reason := runtime.refusal(model):
            yield Refusal(instance.name, runtime.name, reason)
    existing = [each for each in existing if not each.refusal(model)]
    for tp in instance.degrees:
        divided = [each for each in existing if each.pads or not _indivisible(model.architecture, tp)]
        if existing and not divided:
            yield Refusal(instance.name, f"tp {tp}", str(_indivisible(model.architecture, tp)))
            continue
        for batch in BATCHES:
            memory = memory_of(model, instance, tp, batch, lengths)
            if memory.need > memory.capacity:
                if batch == BATCHES[0]:
                    yield Refusal(instance.name, f"tp {tp}", _too_large(memory))
                break
            for runtime in divided:
                replica = _replica(runtime.scheduling, batch, lengths)
                yield Candidate(model, instance, runtime, tp, instance.logical_cores // tp, replica, memory)


def _indivisible(a: Architecture, tp: int) -> str | None:
    heads, kv_heads = a["heads"], a.get("kv_heads", a["heads"])
    if heads % tp:
        return f"{tp} does not divide the {heads} heads"
    if kv_heads % tp and tp % kv_heads:
        return f"{tp} neither divides the {kv_heads} heads of keys and values nor is a multiple of them"
    return None


def _too_large(memory: Memory) -> str:
    return (
        f"a core needs {memory.need / _GIB:.1f} GiB at batch 1 ({memory.weights / _GIB:.1f} of weights, "
        f"{memory.cache / _GIB:.1f} of KV cache) and has {memory.capacity / _GIB:.1f} GiB"
    )


def _replica(scheduling: Scheduling, batch: int, lengths: Lengths) -> Replica:
    buckets, capacity = lengths.buckets, lengths.capacity
    if scheduling is Scheduling.NXDI:
        return Replica(batch, capacity, buckets, scheduling)
    chunk = min(_CHUNK if scheduling is Scheduling.NXPIPE else _SEGMENT, buckets[-1])
    buckets = tuple(each for each in buckets if each <= chunk)
    if scheduling is Scheduling.NXPIPE:
        return Replica(batch, capacity, buckets, scheduling, chunk=chunk)
    return Replica(batch, batch * capacity, buckets, scheduling, chunk=chunk, block=_BLOCK, longest=capacity)


def memory_of(model: PlannedModel, instance: Instance, tp: int, batch: int, lengths: Lengths) -> Memory:
    """What one logical core holds for a copy of the model."""
    a = model.architecture
    head_dim = a.get("head_dim", a["hidden"] // a["heads"])
    cache = 2 * a["layers"] * batch * lengths.capacity * kv_heads_of_rank(a, tp) * head_dim * _BYTES
    return Memory(
        weights=math.ceil(_rank_parameters(a, tp) * _BYTES),
        cache=cache,
        scratch=_scratch(a, tp, batch, lengths),
        code=instance.core_code + _RUNTIME_BYTES * CORES[instance.core].lnc_default,
        capacity=instance.core_memory,
    )


def _rank_parameters(a: Architecture, tp: int) -> float:
    """Parameters of one rank: heads in whole, embedding and head divided, norms in each. Tied tables are stored
    twice."""
    hidden, heads = a["hidden"], math.ceil(a["heads"] / tp)
    head_dim = a.get("head_dim", hidden // a["heads"])
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads_of_rank(a, tp))
    projections = 3 if a.get("gated", True) else 2
    experts = a.get("experts", 0)
    dense = a.get("shared_intermediate", 0) if experts else a["intermediate"]
    forward = projections * hidden * dense / tp
    if experts:
        forward += experts * (projections * hidden * a["expert_intermediate"] / tp + hidden)
    layers = a["layers"] * (attention + forward + 2 * hidden)
    return float(layers + 2 * a["vocab"] * hidden / tp + hidden)


def _scratch(a: Architecture, tp: int, batch: int, lengths: Lengths) -> int:
    """Activations of the largest program: a prompt, or a token of all rows, with its logits."""
    head_dim = a.get("head_dim", a["hidden"] // a["heads"])
    wide = max(a["intermediate"], a.get("expert_intermediate", 0)) / tp
    row = 4 * a["hidden"] + (a["heads"] / tp + 2 * kv_heads_of_rank(a, tp)) * head_dim + 3 * wide
    rows = max(lengths.buckets[-1], batch)
    logits = batch * a["vocab"] * 4
    units = math.ceil((rows * row * _BYTES + logits) / _SCRATCH_UNIT)
    return int(units * _SCRATCH_UNIT)


def instances_of(names: Sequence[str]) -> list[Instance]:
    """Instance types by name or by family, without repeats; InputInvalid for an unknown one."""
    found: dict[str, Instance] = {}
    for name in names:
        of_family = {key: each for key, each in INSTANCES.items() if each.family == name}
        chosen = of_family or {key: each for key, each in INSTANCES.items() if key == name}
        if not chosen:
            families = list(dict.fromkeys(each.family for each in INSTANCES.values()))
            hint = did_you_mean(name, [*INSTANCES, *families])
            remedy = hint or f"; pass a type such as inf2.48xlarge, or a family: {', '.join(families)}"
            raise InputInvalid(f"--instance {name}: no Neuron instance type with published figures{remedy}")
        found |= chosen
    return list(found.values())
