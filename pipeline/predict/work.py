"""Work of a model: what each rank's share of one execution of a graph computes, reads and exchanges.

Closed forms by architecture, from the entries of a configuration. Counts depend on no hardware, but for the array of
the tensor engine, which multiplies tiles of 128 by 128 even where they are padded. `tests/predict` compares the
operations with those that PyTorch counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Architecture = Mapping[
    str, Any
]  # the entry of architectures.json, or what `model.architecture_of` reads from a config.json

TILE: Final = 128  # rows and columns of the tensor engine's array
_ON_CHIP: Final = 12 << 20  # bytes of one head's attention matrices: half of the SBUF
_LEAST_ROWS: Final = 64  # rows that a tile takes at least: the time to load the next one
_ALIGNED: Final = 32  # columns of a block that engines transpose
_POOLED: Final = 9  # places of the window after a stem, over which the largest is taken
_WIDE: Final = 4  # bytes of fp32
_NARROW: Final = 2  # bytes of bf16


class NotPredicted(Exception):
    """A configuration that the model of times does not cover; the message says which part of it."""


@dataclass
class Work:
    """Counts of one rank in one execution. Elements of the vector engine count once for each pass over them."""

    batch: int = 1
    tp: int = 1
    flops: float = 0.0  # of products, without padding
    dense: float = 0.0  # of products with weights, in whole tiles
    experts: float = 0.0  # of those with the weights of experts
    convolved: float = 0.0  # of convolutions
    attention: float = 0.0  # of products between activations, in whole tiles
    calls: float = 0.0  # of attention in decoding: one for each layer, sequence and head of keys
    scores: float = 0.0  # elements of attention matrices
    spilled: float = 0.0  # bytes of those that do not fit on the chip, written and read
    ragged: float = 0.0  # activations with a last axis that fills no whole lanes, moved one by one
    lanes: float = 0.0  # elements of one lane in passes over the scores of decoding
    narrow: float = 0.0  # elements of one lane in passes over fewer rows than lanes
    elements: float = 0.0  # of element-wise operations and normalizations
    weights: float = 0.0  # bytes read
    gathered: float = 0.0  # bytes of single experts' weights, read by each row that selects them
    visits: float = 0.0  # of experts, one after the other
    cache: float = 0.0  # bytes of the KV cache read
    collectives: int = 0
    exchanged: float = 0.0  # bytes that a rank contributes to collectives
    layers: float = 0.0
    convolutions: float = 0.0
    inputs: float = 0.0  # bytes copied from the host
    outputs: float = 0.0  # bytes copied to the host

    def product(
        self, rows: float, inner: float, columns: float, *, times: float = 1, bytes_each: int = _NARROW
    ) -> None:
        """A product with weights, of `rows` activations."""
        self.flops += 2 * times * rows * inner * columns
        self.dense += 2 * times * max(rows, _LEAST_ROWS) * _tiled(inner) * _tiled(columns)
        self.weights += times * inner * columns * bytes_each
        if inner % _ALIGNED and rows > TILE:
            self.ragged += times * rows * inner

    def convolution(self, positions: float, kernel: int, inner: int, columns: int, *, times: int = 1) -> None:
        """A convolution of one image; one pass adds the bias and activates. Channels that fill half a tile are
        multiplied for one place of the window after the other, fewer ones for all places together."""
        before, ragged = self.dense, self.ragged
        rows, window = self.batch * positions, kernel * kernel
        self.product(rows, window * inner, columns, times=times)
        tiles = window * _tiled(inner) if 2 * inner >= TILE else _tiled(window * inner)
        self.convolved += 2 * times * max(rows, _LEAST_ROWS) * tiles * _tiled(columns)
        self.dense, self.ragged = before, ragged
        self.elements += times * rows * columns
        self.convolutions += times

    def attend(self, heads: float, queries: float, context: float, head_dim: float, *, times: float = 1) -> None:
        """The two products of attention and the softmax between them, for each sequence of the batch."""
        self.flops += 4 * times * self.batch * heads * queries * context * head_dim
        padded = max(queries, _LEAST_ROWS) * _tiled(context) * max(head_dim, TILE)
        self.attention += 4 * times * self.batch * heads * padded
        self.scores += times * self.batch * heads * queries * context
        if self.batch * queries * context * _WIDE > _ON_CHIP:
            self.spilled += 2 * times * self.batch * heads * queries * context * _WIDE

    def exchange(self, elements: float, *, times: int = 1) -> None:
        """A collective over all ranks, of that many 16-bit elements; nothing on one rank."""
        if self.tp > 1:
            self.collectives += times
            self.exchanged += times * elements * _NARROW


def _tiled(size: float) -> float:
    return math.ceil(size / TILE) * TILE


@dataclass(frozen=True)
class Execution:
    """A graph's work and how often a request executes it."""

    work: Work
    times: float = 1
    code: str = ""  # its generator, if it is not that of the row


def transformer(work: Work, a: Architecture, *, tokens: float, context: float, cross: float = 0) -> None:
    """All layers of a transformer: `tokens` queries of each sequence attend to `context` keys, and `cross` others."""
    rows, hidden, layers = work.batch * tokens, a["hidden"], a["layers"]
    head_dim = a.get("head_dim", hidden // a["heads"])
    heads = math.ceil(a["heads"] / work.tp)
    kv_heads = kv_heads_of_rank(a, work.tp)
    for keys in (context, cross):
        if keys:
            work.product(rows, hidden, (heads + 2 * kv_heads) * head_dim, times=layers)
            work.product(rows, heads * head_dim, hidden, times=layers)
            work.attend(heads, tokens, keys, head_dim, times=layers)
            work.elements += layers * rows * (5 * hidden + 2 * (heads + kv_heads) * head_dim)
            work.exchange(rows * hidden, times=layers)
    _feed_forward(work, a, rows)
    work.narrow += layers * 10 * hidden * max(0.0, 1 - rows / TILE)
    work.layers += layers


def kv_heads_of_rank(a: Architecture, tp: int) -> int:
    """The heads of keys and values on a rank: one for each head of queries where the degree divides neither way."""
    heads: int = a.get("kv_heads", a["heads"])
    return math.ceil((heads if heads % tp == 0 or tp % heads == 0 else int(a["heads"])) / tp)


def _feed_forward(work: Work, a: Architecture, rows: float) -> None:
    """Dense and expert layers; all are expert layers but `dense_layers`, if there are experts."""
    hidden, layers = a["hidden"], a["layers"]
    projections = 3 if a.get("gated", a.get("kind") == "decoder") else 2
    expert_layers = layers - a.get("dense_layers", 0) if a.get("experts") else 0
    shared = a.get("shared_intermediate", 0)
    for size, times in ((a["intermediate"], layers - expert_layers), (shared, expert_layers)):
        columns = math.ceil(size / work.tp)
        if columns and times:
            work.product(rows, hidden, columns, times=times * projections)
            work.elements += times * rows * projections * columns
    if expert_layers:
        _experts(work, {**a, "layers": expert_layers}, rows, projections)
    work.elements += layers * rows * 5 * hidden
    work.exchange(rows * hidden, times=layers)


def _experts(work: Work, a: Architecture, rows: float, projections: int) -> None:
    """Each row's own experts are read, or all for all rows, as soon as the rows select as many as there are.

    The floor counts what the rows select: AWS's library computes more, but need not.
    """
    hidden, experts, active = a["hidden"], a["experts"], a["active_experts"]
    columns, times = math.ceil(a["expert_intermediate"] / work.tp), a["layers"] * projections
    work.flops += 2 * times * rows * active * hidden * columns
    work.visits += a["layers"] * min(rows * active, experts)
    if rows * active < experts:
        work.experts += 2 * times * rows * active * _LEAST_ROWS * hidden * columns
        work.gathered += times * rows * active * hidden * columns * _NARROW
    else:
        work.experts += 2 * times * experts * max(rows, _LEAST_ROWS) * hidden * _tiled(columns)
        work.weights += times * experts * hidden * columns * _NARROW
    work.elements += a["layers"] * rows * active * (projections * columns + hidden)
    work.product(rows, hidden, experts, times=a["layers"])


def decode(a: Architecture, *, batch: int, context: int, tp: int) -> Work:
    """One token for each sequence of the batch, with a KV cache of `context` places read whole."""
    work = Work(batch, tp)
    transformer(work, a, tokens=1, context=context)
    kv_heads = kv_heads_of_rank(a, tp)
    head_dim = a.get("head_dim", a["hidden"] // a["heads"])
    heads = math.ceil(a["heads"] / tp)
    work.calls += a["layers"] * batch * kv_heads  # queries that share keys are one product
    work.lanes += a["layers"] * context * math.ceil(batch * heads / TILE)
    work.cache += 2.0 * a["layers"] * batch * context * kv_heads * head_dim * _NARROW
    _language_head(work, a, batch)
    return work


def prefill(a: Architecture, *, batch: int, tokens: int, tp: int, behind: float = 0) -> Work:
    """The prompts of the batch, padded to `tokens`, `behind` others of the same prompts; the logits of the last."""
    work = Work(batch, tp)
    transformer(work, a, tokens=tokens, context=tokens + behind)
    _language_head(work, a, batch)
    return work


def _language_head(work: Work, a: Architecture, rows: int) -> None:
    columns = math.ceil(a["vocab"] / work.tp)
    work.product(rows, a["hidden"], columns)
    work.exchange(rows * a["hidden"])  # of the embedding
    work.exchange(rows * columns)
    work.inputs += rows * 3 * 8
    work.outputs += rows * columns * _WIDE / TILE


def training_head(work: Work, a: Architecture, tokens: int) -> None:
    """The logits of all tokens but the last, which `prefill` counts."""
    columns = math.ceil(a["vocab"] / work.tp)
    work.product(work.batch * (tokens - 1), a["hidden"], columns, bytes_each=0)
    work.elements += work.batch * tokens * columns * 3


def encoder(a: Architecture, *, batch: int, tokens: int) -> Work:
    """A text encoder on one core; its outputs are hidden states, or logits if it has classes."""
    work = Work(batch)
    transformer(work, a, tokens=tokens, context=tokens)
    rows = batch * tokens if a.get("per_token") else batch
    if classes := a.get("classes"):
        work.product(rows, a["hidden"], classes)
        work.outputs += rows * classes * _WIDE
    else:
        work.outputs += batch * (tokens + 1) * a["hidden"] * _WIDE
    work.inputs += 2 * batch * tokens * 4
    return work


def vision_transformer(a: Architecture, *, batch: int, width: int, height: int) -> Work:
    """An image encoder of patches; of two encoders (`text`), both with all texts."""
    work = Work(batch)
    patches = (width // a["patch"]) * (height // a["patch"])
    work.product(batch * patches, 3 * a["patch"] ** 2, a["hidden"])
    transformer(work, a, tokens=patches + 1, context=patches + 1)
    classes = a["classes"]
    work.outputs += batch * (classes or (patches + 1) * a["hidden"]) * _WIDE
    work.inputs += _image_bytes(batch, width, height)
    if text := a.get("text"):
        work.batch = text["texts"]
        transformer(work, text, tokens=text["tokens"], context=text["tokens"])
        work.batch = batch
        work.outputs += text["texts"] * batch * _WIDE
    else:
        work.product(batch, a["hidden"], classes)
    return work


def _image_bytes(batch: int, width: int, height: int) -> float:
    return 3.0 * batch * width * height * _WIDE


def resnet(a: Architecture, *, batch: int, width: int, height: int) -> Work:
    """A residual network: four stages of basic or bottleneck blocks."""
    work = Work(batch)
    expansion, channels = (1 if a["block"] == "basic" else 4), 64
    area = width * height / 16
    work.convolution(4 * area, 7, 3, channels)
    work.elements += _POOLED * batch * area * channels
    for stage, depth in enumerate(a["depths"]):
        inner = 64 << stage
        area /= 4 if stage else 1
        for block in range(depth):
            if a["block"] == "basic":
                work.convolution(area, 3, channels, inner)
                work.convolution(area, 3, inner, inner)
            else:
                work.convolution(area * (4 if stage and not block else 1), 1, channels, inner)
                work.convolution(area, 3, inner, inner)
                work.convolution(area, 1, inner, 4 * inner)
            if channels != inner * expansion:
                work.convolution(area, 1, channels, inner * expansion)
            channels = inner * expansion
            work.elements += batch * area * channels
    work.product(batch, channels, 1000)
    return _classified(work, width, height)


def vgg(a: Architecture, *, batch: int, width: int, height: int) -> Work:
    """Stages of convolutions, each followed by pooling, and three dense layers."""
    work, channels, area = Work(batch), 3, float(width * height)
    for stage, depth in enumerate(a["depths"]):
        columns = min(64 << stage, 512)
        for _ in range(depth):
            work.convolution(area, 3, channels, columns)
            channels = columns
        work.elements += batch * area * columns
        area /= 4
    for inner, columns in ((channels * 49, 4096), (4096, 4096), (4096, 1000)):
        work.product(batch, inner, columns)
    return _classified(work, width, height)


def _classified(work: Work, width: int, height: int) -> Work:
    work.inputs += _image_bytes(work.batch, width, height)
    work.outputs += work.batch * 1000 * _WIDE
    return work


def segmentation_unet(a: Architecture, *, batch: int, width: int, height: int) -> Work:
    """Pairs of convolutions at each width, down by pooling and up by transposed ones; a class for each pixel."""
    work, area, channels = Work(batch), float(width * height), 3
    widths: Sequence[int] = a["widths"]
    for stage, columns in enumerate(widths):
        area /= 4 if stage else 1
        work.convolution(area, 3, channels, columns)
        work.convolution(area, 3, columns, columns)
        channels = columns
    for columns in reversed(widths[:-1]):
        work.convolution(area, 2, channels, columns)
        area *= 4
        work.convolution(area, 3, 2 * columns, columns)
        work.convolution(area, 3, columns, columns)
        channels = columns
    work.convolution(area, 1, channels, a["classes"])
    work.inputs += _image_bytes(batch, width, height)
    work.outputs += batch * area * a["classes"] * _WIDE
    return work


def perceiver(a: Architecture, *, batch: int) -> Work:
    """Latents that attend once to all inputs, and then to themselves in blocks that share their weights."""
    work = Work(batch)
    latents, hidden, inputs, channels = a["latents"], a["hidden"], a["inputs"], a["channels"]
    if "projected_from" in a:
        work.product(batch * inputs, a["projected_from"], channels // 2)
        work.product(inputs, channels // 2, channels // 2)  # of the trained positions
    if "stem" in a:
        work.convolution(112 * 112, 7, 3, a["stem"])
        work.elements += _POOLED * batch * 56 * 56 * a["stem"]
    width = channels
    work.product(batch * inputs, channels, 2 * width)
    work.product(batch * latents, hidden, width)
    work.product(batch * latents, width, hidden, times=1)
    work.attend(1, latents, inputs, width)
    work.elements += 6 * batch * inputs * channels
    own = {"hidden": hidden, "heads": a["heads"], "layers": a["blocks"] * a["layers"], "intermediate": hidden}
    transformer(work, own, tokens=latents, context=latents)
    work.weights /= a["blocks"] if a["blocks"] else 1
    work.product(batch * latents, hidden, a["classes"])
    work.inputs += _image_bytes(batch, 224, 224)
    work.outputs += batch * a["classes"] * _WIDE
    return work


def encoder_decoder(a: Architecture, *, batch: int, inputs: int, outputs: int, tp: int) -> tuple[Execution, ...]:
    """The encoder once and the decoder for each of `outputs` tokens, of which it attends to all, and to the inputs."""
    reading, step = Work(batch, tp), Work(batch, tp)
    transformer(reading, a, tokens=inputs, context=inputs)
    transformer(step, a, tokens=1, context=outputs, cross=inputs)
    kv_bytes = 2.0 * a["layers"] * batch * math.ceil(a["heads"] / tp) * a["head_dim"] * _NARROW
    step.cache += kv_bytes * (inputs + outputs)
    _language_head(step, a, batch)
    return Execution(reading), Execution(step, outputs)


def diffusion(a: Architecture, *, width: int, height: int) -> tuple[Execution, ...]:
    """A whole pipeline: text encoders, all denoising steps, image decoder. Guidance's halves are on two cores."""
    latent_width, latent_height = width // 8, height // 8
    executions = []
    for text in a["text"]:
        words = Work()
        transformer(words, text, tokens=a["context"], context=a["context"])
        words.outputs += a["context"] * text["hidden"] * _NARROW
        executions.append(Execution(words, 2, "traced"))
    for part in (a, a["refiner"]) if "refiner" in a else (a,):
        step = Work()
        if "unet" in part:
            _unet(step, part["unet"], latent_width, latent_height, a["context"])
        else:
            _diffusion_transformer(step, part["dit"], latent_width, latent_height, a["context"])
        step.inputs += 4.0 * latent_width * latent_height * _WIDE
        step.outputs += 4.0 * latent_width * latent_height * _WIDE
        executions.append(Execution(step, part["steps"]))
    executions.append(Execution(_image_decoder(latent_width, latent_height)))
    return tuple(executions)


def _unet(work: Work, a: Architecture, width: int, height: int, context: int) -> None:
    widths, depths = a["widths"], a["transformers"]
    text = {"heads": a.get("heads", 0), "cross": a["cross"], "context": context}
    area, channels = float(width * height), widths[0]
    work.convolution(area, 3, a["inputs"], channels)
    skips = [channels]
    for stage, columns in enumerate(widths):
        for _ in range(2):
            _residual(work, area, channels, columns)
            channels = columns
            _cross_transformer(work, area, columns, depths[stage], **text)
            skips.append(channels)
        if stage < len(widths) - 1:
            area /= 4
            work.convolution(area, 3, channels, channels)
            skips.append(channels)
    _residual(work, area, channels, channels)
    _cross_transformer(work, area, channels, a.get("middle", max(depths[-1], 1)), **text)
    _residual(work, area, channels, channels)
    for stage in reversed(range(len(widths))):
        for _ in range(3):
            _residual(work, area, channels + skips.pop(), widths[stage])
            channels = widths[stage]
            _cross_transformer(work, area, channels, depths[stage], **text)
        if stage:
            area *= 4
            work.convolution(area, 3, channels, channels)
    work.convolution(area, 3, channels, 4)


def _residual(work: Work, area: float, inner: int, columns: int) -> None:
    work.convolution(area, 3, inner, columns)
    work.convolution(area, 3, columns, columns)
    if inner != columns:
        work.convolution(area, 1, inner, columns)
    work.elements += work.batch * area * 4 * (inner + columns)  # two group normalizations with their activations


def _cross_transformer(
    work: Work, area: float, hidden: int, layers: int, *, heads: int, cross: int, context: int
) -> None:
    """A block of transformers between convolutions; its heads have 64 channels where their number is not given."""
    if not layers:
        return
    rows = work.batch * area
    own = {
        "hidden": hidden,
        "heads": heads or hidden // 64,
        "layers": layers,
        "intermediate": 4 * hidden,
        "gated": True,
    }
    transformer(work, own, tokens=area, context=area)
    work.product(rows, hidden, hidden, times=2 * layers)
    work.product(work.batch * context, cross, 2 * hidden, times=layers)
    work.attend(own["heads"], area, context, hidden / own["heads"], times=layers)
    work.product(rows, hidden, hidden, times=2)
    work.elements += rows * hidden * (8 + 5 * layers)


def _diffusion_transformer(work: Work, a: Architecture, width: int, height: int, context: int) -> None:
    tokens = (width // a["patch"]) * (height // a["patch"])
    work.product(tokens, 4 * a["patch"] ** 2, a["hidden"])
    transformer(work, a, tokens=tokens, context=tokens, cross=context)
    work.elements += 6 * a["layers"] * tokens * a["hidden"]  # modulated by the time step, and gated
    work.product(tokens, a["hidden"], 8 * a["patch"] ** 2)


def _image_decoder(width: int, height: int) -> Work:
    """The decoder of the autoencoder that all these pipelines share in shape: eight times the latents' size."""
    work, area, channels = Work(), float(width * height), 512
    work.convolution(area, 3, 4, channels)
    work.product(area, channels, channels, times=4)
    work.attend(1, area, area, channels)
    for _ in range(2):
        _residual(work, area, channels, channels)
    for stage, columns in enumerate((512, 512, 256, 128)):
        for _ in range(3):
            _residual(work, area, channels, columns)
            channels = columns
        if stage < 3:
            area *= 4
            work.convolution(area, 3, channels, channels)
    work.convolution(area, 3, channels, 3)
    work.outputs += area * 3 * _WIDE
    return work
