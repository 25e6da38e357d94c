"""Predictions of `AWS's compiler`: the time of a configuration as terms of documented rates and fitted constants.

Each term is a duration at a documented rate and the names of the constants that multiply it. Of one execution,
computing and reading overlap, the rest is serial:

    time = (compute ** p + memory ** p) ** (1 / p) + serial

No prediction is below the floor: bytes over the HBM rate, or operations over the peak rate.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from nxpipe.emulator.hardware.core import CORES
from nxpipe.emulator.hardware.instance import INSTANCES, Instance
from nxpipe.emulator.hardware.links import collectives_ns, link_gb_s, near_gb_s
from nxpipe.pipeline.predict import work as works
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import TILE, Architecture, Execution, NotPredicted, Work

Group = Literal["compute", "memory", "serial"]


@dataclass(frozen=True)
class Cores:
    """The documented rates of one core and the links of its chips."""

    name: str
    family: str
    per_chip: int
    ring: bool
    flops: float
    flops_fp32: float
    hbm: float
    dma: float
    vector: float
    link: float
    near: float


def family_of(instance: str) -> Instance:
    """An instance type; for a size without published figures another one of its family, which has the same chips."""
    family = instance.partition(".")[0]
    found = INSTANCES.get(instance) or next((each for each in INSTANCES.values() if each.family == family), None)
    if found is None:
        raise NotPredicted(f"{instance}: no rates of its cores are documented")
    return found


def cores_of(instance: str) -> Cores:
    """The rates of an instance type's cores."""
    found = family_of(instance)
    core = CORES[found.core]
    return Cores(
        name=found.core,
        family=instance.partition(".")[0],
        per_chip=found.cores_per_chip,
        ring=found.topology == "ring",
        flops=found.tflops_bf16 / found.cores * 1e12,
        flops_fp32=found.tflops_fp32 / found.cores * 1e12,
        hbm=found.device_memory_gb_s / found.cores * 1e9,
        dma=core.dma_engines * core.dma_engine_peak_gb_s * 1e9,
        vector=core.partitions * core.vector_ghz * 1e9,
        link=link_gb_s(found) * 1e9,
        near=near_gb_s(found) * 1e9,
    )


@dataclass(frozen=True)
class Term:
    """A duration at documented rates, and the names of the constants that multiply it."""

    group: Group
    constants: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Graph:
    """The terms of one execution, how often a cycle executes it, and the least seconds that it can take.

    `analytic` is what a planner for GPUs would say: fixed efficiencies and a cost for each operator."""

    terms: tuple[Term, ...]
    times: float
    floor: float
    analytic: float


def graphs(configuration: Configuration, found: Architecture | None = None) -> tuple[Graph, ...]:
    """The graphs of one cycle: a request, a token, a batch or a training sequence. NotPredicted if not covered.
    `found` is the model's architecture, if it is not that of its name."""
    found = found or architecture(configuration.published_name, configuration.model)
    if found is None:
        raise NotPredicted(f"{configuration.model}: its architecture is not in the catalogue")
    cores = cores_of(configuration.instance)
    executions = list(_executions(configuration, _replicated(configuration, found)))
    copies = sum(each.times for each in executions)
    return tuple(_graph(configuration, cores, each, copies) for each in executions)


def _replicated(c: Configuration, a: Architecture) -> Architecture:
    """The architecture with the heads of keys and values that the row's library keeps. Transformers NeuronX before
    SDK 2.19 repeats those that a degree does not divide once for each head of queries."""
    heads = a.get("kv_heads", 0)
    old = c.transformers_neuronx and c.sdk and c.release < (2, 19)
    return {**a, "kv_heads": a["heads"]} if old and heads % c.tp else a


def _executions(c: Configuration, a: Architecture) -> Iterator[Execution]:
    kind = a["kind"]
    match c.family:
        case "llm-decode" if kind == "decoder":
            yield Execution(works.decode(a, batch=c.batch, context=context_of(c), tp=c.tp))
        case "llm-prefill" if kind == "decoder":
            yield from _prefills(c, a)
        case "training":
            yield Execution(_training(c, a))
        case "encoder-decoder" if kind == "encoder-decoder":
            yield from _generation(c, a)
        case "diffusion" if kind == "diffusion":
            width, height = c.image or _IMAGE
            yield from works.diffusion(a, width=width, height=height)
        case "encoder" | "vision-cnn" | "vision-transformer":
            yield Execution(_single(c, a, batch=c.batch))
        case _:
            raise NotPredicted(f"{c.model}: {c.family} of a model of kind {kind} is not covered")


_IMAGE: Final = (224, 224)
_IMAGE_FORMS: Final = {
    "resnet": works.resnet,
    "segmentation-unet": works.segmentation_unet,
    "vgg": works.vgg,
    "vision-transformer": works.vision_transformer,
}


def _single(c: Configuration, a: Architecture, *, batch: int) -> Work:
    """The one graph of a model that is executed once for each request."""
    kind = a["kind"]
    if kind in _IMAGE_FORMS:
        width, height = c.image or _IMAGE
        return _IMAGE_FORMS[kind](a, batch=batch, width=width, height=height)
    if kind == "perceiver":
        return works.perceiver(a, batch=batch)
    if kind == "decoder" and c.family == "training":
        return works.prefill(a, batch=batch, tokens=length_of(c), tp=1)
    if kind in ("encoder", "decoder"):
        return works.encoder(a, batch=batch, tokens=length_of(c))
    raise NotPredicted(f"{c.model}: {c.family} of a model of kind {kind} is not covered")


def _generation(c: Configuration, a: Architecture) -> Iterator[Execution]:
    """The share of one token: the encoder runs once for all of them."""
    outputs = c.outputs or length_of(c)
    for each in works.encoder_decoder(a, batch=c.batch, inputs=length_of(c), outputs=outputs, tp=c.tp):
        yield Execution(each.work, each.times / outputs)


def length_of(c: Configuration) -> int:
    if length := c.sequence or c.inputs:
        return length
    raise NotPredicted(f"{c.model}: the row has no sequence length")


def _bucket(tokens: float, longest: int | None) -> int:
    """The compiled length that holds the tokens: a power of two from 128, and the longest."""
    bucket = max(128, 1 << max(0, math.ceil(tokens) - 1).bit_length())
    return min(bucket, longest) if longest else bucket


def context_of(c: Configuration) -> int:
    """Places of the cache that the middle of the generation reads; all without a prompt."""
    if c.inputs is None or (c.code == "served" and c.sequence):
        return length_of(c)  # a server of optimum-neuron compiles one length
    return _bucket(c.inputs + (c.outputs or 0) / 2 + 1, c.sequence)


_CHUNK: Final = 8192  # tokens of a prompt that vllm-neuron reads at once


def compiled_prefill(c: Configuration) -> tuple[int, int]:
    """The prompts that are read at a time, and their compiled length. Servers read one prompt, Transformers NeuronX
    those of the batch together."""
    return c.batch if c.code == "tnx-prefill" else 1, _bucket(c.inputs or length_of(c), c.sequence)


def _prefills(c: Configuration, a: Architecture) -> Iterator[Execution]:
    batch, tokens = compiled_prefill(c)
    if "vllm-neuron" in c.framework and tokens > _CHUNK:
        for start in range(0, c.inputs or tokens, _CHUNK):
            yield Execution(works.prefill(a, batch=batch, tokens=_CHUNK, tp=c.tp, behind=start))
    else:
        yield Execution(works.prefill(a, batch=batch, tokens=tokens, tp=c.tp))


def _training(c: Configuration, a: Architecture) -> Work:
    """The share of one sequence in a step: products forward and, twice as many, backward, on the cores of all nodes.

    NeMo Megatron computes the forward pass of all layers again, neuronx-distributed that of attention. The stages of a
    pipeline wait for the first and after the last of a step's micro-batches.
    """
    work = _single(c, a, batch=1)
    if a["kind"] == "decoder":
        works.training_head(work, a, length_of(c))
    library = c.framework.lower()
    passes = 4 if "nemo" in library else 3
    again = 4 if "nemo" in library or "distributed" in library else 3
    micro_batches = (c.global_batch or 0) / (c.dp * c.batch)
    share = (1 + (c.pp - 1) / micro_batches if micro_batches >= 1 else 1) / max(c.cores, 1)
    return Work(
        flops=work.flops * 3 / max(c.cores, 1),
        dense=work.dense * passes * share,
        convolved=work.convolved * passes * share,
        attention=work.attention * again * share,
        scores=work.scores * again * share,
        elements=work.elements * passes * share,
    )


_FLASH_V2: Final = 4096  # tokens of a prompt
_FLASH_V3: Final = 1024
_FLASH: Final = ("diffusion", "nxd-prefill", "training")  # their attention kernels keep scores on the chip


_ELEMENT: Final = 64  # bytes of a DMA's smallest access
_OPERATORS: Final = 8  # of a layer, for the analytic baseline


def _graph(c: Configuration, cores: Cores, execution: Execution, copies: float) -> Graph:
    """Terms of one execution; a rank of a Trn2 or Trn3 is several physical cores."""
    work = execution.work
    each = max(1, round(c.cores / (c.tp * c.dp * c.pp))) if c.family != "training" else 1
    fp32 = c.autocast == "none" and c.model_dtype == "fp32"
    flops = (cores.flops_fp32 if fp32 else cores.flops) * each
    read = work.weights * (2 if fp32 else 1)
    code = execution.code or c.code
    at = (f"@{code}", f"@{cores.family}")
    terms = [
        _term("compute", "tensor.dense", at, work.dense / flops),
        _term("compute", "tensor.experts", at, work.experts / flops),
        _term("compute", "tensor.convolution", at, work.convolved / flops),
        _term("compute", "tensor.attention", at, work.attention / flops),
        _term("compute", "vector.elements", at, work.elements / (cores.vector * each)),
        _term("compute", _softmax(c, cores), at, work.scores / (cores.vector * each)),
        _term("compute", "dma.spilled", at, 0.0 if code in _FLASH else work.spilled / (cores.dma * each)),
        _term("compute", "dma.ragged", at, work.ragged * _ELEMENT / (cores.dma * each)),
        _term("serial", "vector.narrow", at, work.narrow * TILE / cores.vector),
        _term("serial", "vector.context", at, work.lanes * TILE / cores.vector),
        _term("memory", "dma.weights", at, read / (cores.dma * each)),
        _term("memory", "dma.cache", at, work.cache / (cores.dma * each)),
        _term("serial", "attention.call", at, work.calls * 1e-6),
        _term("serial", "experts.visit", (), work.visits * 1e-6),
        _term("memory", "dma.gathered", at, work.gathered / (cores.dma * each)),
        _term("serial", "convolution.fixed", at, work.convolutions * 1e-6),
        _term("serial", "layer.fixed", at, work.layers * 1e-6),
        *_collective_terms(c, cores, work, each, at),
        *_host_terms(c, work, copies * execution.times / max(copies, 1)),
    ]
    reading, computing = (read + work.gathered + work.cache) / (cores.hbm * each), work.flops / flops
    operators = _OPERATORS * work.layers + work.convolutions + work.collectives
    analytic = max(reading / 0.8, computing / 0.7) + operators * 3e-6
    floor = max(reading, computing)
    return Graph(tuple(term for term in terms if term.seconds > 0), execution.times, floor, analytic)


def _softmax(c: Configuration, cores: Cores) -> str:
    """NxD Inference attends to prompts of this length by a kernel that reads and writes no matrix of scores."""
    longest = max(c.inputs or 0, c.sequence or 0 if c.inputs is None else 0)
    flash = c.code == "nxd-prefill" and longest >= (_FLASH_V2 if cores.name == "v2" else _FLASH_V3)
    return "vector.flash" if flash else "vector.softmax"


def _term(group: Group, name: str, at: tuple[str, ...], seconds: float) -> Term:
    return Term(group, (name, *(name + each for each in at)), seconds)


def _collective_terms(c: Configuration, cores: Cores, work: Work, each: int, at: tuple[str, ...]) -> list[Term]:
    if not work.collectives:
        return []
    chips = math.ceil(c.tp * each / cores.per_chip)
    fixed = collectives_ns(cores.name, c.tp * each) / 1e9 if chips > 1 else 0.0
    return [
        _term("serial", "collective.execution", (at[0].removesuffix("-prefill"), *at[1:]), fixed),
        _term("serial", "collective.latency" if chips > 1 else "collective.local", at, work.collectives * 10e-6),
        _term("serial", "collective.hop", at, work.collectives * math.log2(chips) * 1e-6),
        _term("serial", "collective.bytes", at, 2 * work.exchanged / cores.link)
        if chips > 1
        else _term("serial", "collective.near", at, 2 * work.exchanged / cores.near),
    ]


_PAGED: Final = 32 << 20  # the largest allocation that glibc serves from pages which are already mapped


def _host_terms(c: Configuration, work: Work, executions: float) -> list[Term]:
    if c.family == "training":
        return []
    hidden = ("host.concealed",) if c.queued > 1.5 else ()
    fresh = work.outputs if work.outputs > _PAGED else 0.0
    server = 1e-3 if c.tier == "serving" else 0.0
    return [
        Term("serial", ("host.execution", f"host.execution@{c.family}", *hidden), 100e-6),
        Term("serial", ("host.copy",), (work.inputs + work.outputs) / 10e9),
        Term("serial", ("host.loop",), 1e-3 if c.family == "encoder-decoder" else 0.0),
        Term("serial", ("host.page",), fresh / 4096 * 1e-6),
        Term("serial", (f"host.server.{c.family}",), server),
    ]


@dataclass(frozen=True)
class Duration:
    """The time of a cycle and the term that takes most of it; the floor if nothing is above it."""

    seconds: float
    bound: str


def duration(cycle: tuple[Graph, ...], constants: Mapping[str, float]) -> Duration:
    """The time of a cycle with these constants; one without a value is 1."""
    shares: dict[str, float] = {}
    total = 0.0
    for graph in cycle:
        sums = {"compute": 0.0, "memory": 0.0, "serial": 0.0}
        for term in graph.terms:
            seconds = term.seconds * math.prod(constants.get(name, 1.0) for name in term.constants)
            sums[term.group] += seconds
            shares[term.constants[0]] = shares.get(term.constants[0], 0.0) + graph.times * seconds
        seconds = overlapped(sums["compute"], sums["memory"], constants.get("overlap", 2.0)) + sums["serial"]
        shares["floor"] = shares.get("floor", 0.0) + (graph.times * graph.floor if graph.floor > seconds else 0.0)
        total += graph.times * max(graph.floor, seconds)
    return Duration(total, max(sorted(shares), key=lambda name: shares[name]))


def overlapped(compute: float, memory: float, power: float) -> float:
    """The time of two activities that overlap: between the longer one and their sum."""
    longer = max(compute, memory)
    return longer and longer * ((compute / longer) ** power + (memory / longer) ** power) ** (1 / power)
