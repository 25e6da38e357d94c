"""What each operator is asked to compute, and from what: functions of PyTorch, and operands."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf

from emulator.numerics import Array

Function = Callable[..., Any]


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Array:
    return np.abs(normal(*shape)) + 0.1


def counted(*shape: int, below: int = 5) -> Array:
    return np.random.default_rng(below).integers(0, below, shape)


def truth(*shape: int) -> Array:
    return normal(*shape) > 0


X = normal(2, 3, 4)
PLACES = np.array([[0, 2, 1], [3, 2, 0]])
SAME = (X, normal(2, 3, 4) + 1)

UNARY: dict[str, Function] = {
    "abs": torch.abs,
    "atan": torch.atan,
    "cosh": torch.cosh,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "diagonal": lambda x: x.diagonal(1, -1, 0),
    "exp2": torch.exp2,
    "eye": lambda x: x @ torch.eye(4),
    "glu": lambda x: nnf.glu(x, 2),
    "histogram": lambda x: torch.histc(x, 5, -1, 2),
    "isfinite": torch.isfinite,
    "linspace": lambda x: x + torch.linspace(-1, 1, 4),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, (0, 2)),
    "norm of no order": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "one hot": lambda x: nnf.one_hot((x > 0).long(), 3),
    "prelu": lambda x: nnf.prelu(x, torch.tensor([0.1, 0.2, 0.3])),
    "sinh": torch.sinh,
    "std": lambda x: x.std(-1),
    "triangle": lambda x: x[:, torch.tril_indices(3, 4, 1)[0], torch.tril_indices(3, 4, 1)[1]],
    "unfold": lambda x: x.unfold(2, 3, 1),
    "var and mean": lambda x: torch.var_mean(x, 1),
    "mask assigned": lambda x: _assigned_by_mask(x.clone()),
    "adaptive average": lambda x: nnf.adaptive_avg_pool1d(x, 3),
    "average of windows": lambda x: nnf.avg_pool1d(x, 3, 2, 1),
    "largest of windows": lambda x: nnf.max_pool1d(x, 2, 1, dilation=2),
    "linear stretch": lambda x: nnf.interpolate(x, 7, mode="linear"),
    "batch norm of the batch": lambda x: nnf.batch_norm(x, None, None, training=True),
    "instance norm": nnf.instance_norm,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "elu": nnf.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "gelu": nnf.gelu,
    "gelu tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "hardsigmoid": nnf.hardsigmoid,
    "hardswish": nnf.hardswish,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "leaky relu": nnf.leaky_relu,
    "log sigmoid": nnf.logsigmoid,
    "mish": nnf.mish,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "relu": nnf.relu,
    "relu6": nnf.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": nnf.silu,
    "sin": torch.sin,
    "softplus": nnf.softplus,
    "softplus beta": lambda x: nnf.softplus(x, beta=3, threshold=2),
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp min": lambda x: x.clamp_min(0.25),
    "clamp max": lambda x: x.clamp_max(0.25),
    "scalar arithmetic": lambda x: (3 - x) * 2 + 1 / (x * x + 1),
    "scalar power": lambda x: x**3,
    "to integer": lambda x: (x * 10).to(torch.int32),
    "to half and back": lambda x: x.to(torch.float16).to(torch.float32),
    "bits of a float": lambda x: x.view(torch.int32),
    "halves of a float": lambda x: x.view(torch.bfloat16),
    "round to hundredths": lambda x: x.round(decimals=2),
    "places of running extremes": lambda x: tuple(x.cummin(1)),
    "places of the largest of windows": lambda x: nnf.max_pool1d(x, 2, 1, return_indices=True),
    "stretches of unequal length": lambda x: nnf.adaptive_max_pool1d(x, 3, return_indices=True),
    "mirrored": lambda x: nnf.pad(x, (2, 1), mode="reflect"),
    "border repeated": lambda x: nnf.pad(x, (2, -1), mode="replicate"),
    "round in circles": lambda x: nnf.pad(x, (2, 1), mode="circular"),
    "sum of a scalar": lambda x: x[0, 0, 0].sum(0),
    "order of a scalar": lambda x: tuple(x[0, 0, 0].sort(0)),
    "histogram of all": lambda x: torch.histc(x, 5),
    "to bfloat16": lambda x: x.bfloat16() * 1.1,
    "dropout": lambda x: nnf.dropout(x, 0.5, training=False),
    "log softmax": lambda x: torch.log_softmax(x, 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of half": lambda x: torch.softmax(x.half(), -1, dtype=torch.float32),
    "layer norm": lambda x: nnf.layer_norm(x, (3, 4)),
    "rms norm": lambda x: nnf.rms_norm(x, (4,)),
    "sum": lambda x: x.sum(),
    "sum axes": lambda x: x.sum((0, 2), keepdim=True),
    "sum booleans": lambda x: (x > 0).sum(-1),
    "mean": lambda x: x.mean(),
    "mean axis": lambda x: x.mean(-1, keepdim=True),
    "mean of integers as float": lambda x: (x * 9).int().mean(1, dtype=torch.float32),
    "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: x.amin(2, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max with place": lambda x: tuple(x.max(1)),
    "min with place": lambda x: tuple(x.min(-1, keepdim=True)),
    "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(-1),
    "var without correction": lambda x: x.var((1, 2), correction=0, keepdim=True),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x < 1).all(),
    "argmax": lambda x: x.argmax(),
    "argmax axis": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum of booleans": lambda x: (x > 0).cumsum(-1),
    "cumprod": lambda x: x.cumprod(2),
    "sort": lambda x: tuple(x.sort(-1)),
    "sort descending": lambda x: x.sort(1, descending=True).values,
    "argsort of equals": lambda x: torch.argsort((x > 0).int(), stable=True),
    "topk": lambda x: x.topk(2, dim=1).values,
    "smallest": lambda x: x.topk(2, dim=-1, largest=False).indices,
    "view": lambda x: x.view(6, -1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(-1).squeeze(3),
    "permute": lambda x: x.permute(2, 0, -2),
    "transpose": lambda x: x.transpose(0, -1),
    "matrix transpose": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1),
    "select": lambda x: x[:, -1],
    "slice": lambda x: x[1:, ::2, -3:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "cat": lambda x: torch.cat([x, x + 1], -1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "split": lambda x: x.split(3, dim=-1),
    "split sizes": lambda x: x.split([1, 3], -1),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "unbind": lambda x: x.unbind(1),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -1), (1, 2)),
    "roll flat": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat interleave": lambda x: x.repeat_interleave(2, dim=1),
    "pad": lambda x: nnf.pad(x, (1, 2, 0, 1), value=0.5),
    "crop by padding": lambda x: nnf.pad(x, (-1, 1)),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "arange": lambda x: torch.arange(4) + x,
    "arange start": lambda x: torch.arange(1, 5) * x,
    "arange step": lambda x: torch.arange(8, 0, -2) * x,
    "arange of floats": lambda x: torch.arange(0, 2, 0.5) * x,
    "zeros": lambda x: torch.zeros(3, 4) + x,
    "ones": lambda x: torch.ones_like(x) - x,
    "full": lambda x: torch.full((4,), 2.5) * x,
    "full like": lambda x: torch.full_like(x, -1) * x,
    "new full": lambda x: x.new_full((3, 1), 0.5) + x,
    "einsum": lambda x: torch.einsum("bij,bkj->ik", x, x),
    "in place": lambda x: _written_in_place(x.clone()),
    "a constant tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "group norm": lambda x: nnf.group_norm(x.reshape(2, 4, 3), 2),
}


def _assigned_by_mask(x: Any) -> Any:
    x[x > 0.5] = -1.0
    return x


def _written_in_place(x: Any) -> Any:
    x[:, 1] = 7.0
    x[0].mul_(2)
    return x.add_(1)


BINARY: dict[str, Function] = {
    "atan2": torch.atan2,
    "batch norm": lambda x, y: nnf.batch_norm(x, y[0, :, 0], y[0, :, 1].abs(), y[0, :, 2], y[0, :, 3], eps=1e-3),
    "bucketize": lambda x, y: torch.bucketize(x, y[0, 0].sort().values),
    "dot": lambda x, y: torch.dot(x[0, 0], y[0, 0]),
    "masked scatter": lambda x, y: x.masked_scatter(y > 0.5, y * 10),
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul": torch.mul,
    "div": torch.div,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": lambda x, y: x.round() == y.round(),
    "ne": lambda x, y: x.round() != y.round(),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical and": torch.logical_and,
    "logical or": lambda x, y: torch.logical_or(x > 0, y > 0),
    "logical xor": lambda x, y: torch.logical_xor(x > 0, y > 0),
    "logical not": lambda x, y: torch.logical_not(x > y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where scalar": lambda x, y: torch.where(x > y, x, 0.0),
    "masked fill": lambda x, y: x.masked_fill(y > 0, -1e9),
    "matmul": lambda x, y: x @ y.mT,
    "matmul broadcast": lambda x, y: x @ y[0].t(),
    "matrix times vector": lambda x, y: x @ y[0, 0],
    "vector times matrix": lambda x, y: x[0, 0] @ y.mT,
    "bmm": lambda x, y: torch.bmm(x, y.mT),
    "mm": lambda x, y: torch.mm(x[0], y[0].t()),
    "addmm": lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t()),
    "addmm scaled": lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t(), beta=0.5, alpha=2),
    "baddbmm": lambda x, y: torch.baddbmm(x[:, :, :3], x, y.mT),
    "linear": lambda x, y: nnf.linear(x, y[0]),
    "linear bias": lambda x, y: nnf.linear(x, y[0], y[0, :, 0]),
    "layer norm affine": lambda x, y: nnf.layer_norm(x, (4,), y[0, 0], y[0, 1]),
    "layer norm bias": lambda x, y: nnf.layer_norm(x, (4,), None, y[0, 1]),
    "group norm affine": lambda x, y: nnf.group_norm(x.mT, 2, y[0, 0], y[0, 1]),
    "rms norm affine": lambda x, y: nnf.rms_norm(x, (4,), y[0, 0], 1e-3),
    "slice scatter": lambda x, y: torch.slice_scatter(x, y[:, :, :2], 2, 0, 4, 2),
    "select scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, -1),
    "type as": lambda x, y: (x * 5).int().type_as(y),
}

# Function, operands.
SPECIAL: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "log": (torch.log, (positive(3, 4),)),
    "log1p": (torch.log1p, (positive(3, 4),)),
    "log2": (torch.log2, (positive(3, 4),)),
    "rsqrt": (torch.rsqrt, (positive(3, 4),)),
    "sqrt": (torch.sqrt, (positive(3, 4),)),
    "pow": (torch.pow, (positive(3, 4), normal(3, 4))),
    "integer sum": (lambda x: x.sum(0), (counted(3, 4).astype(np.int32),)),
    "integer division": (lambda x: x / 2, (counted(3, 4),)),
    "integer floor division": (lambda x: (x - 2) // 2, (counted(3, 4),)),
    "integer truncating division": (lambda x: torch.div(x - 2, 2, rounding_mode="trunc"), (counted(3, 4),)),
    "bits": (lambda x, y: (x & y) | (x ^ ~y), (counted(3, 4), counted(3, 4, below=9))),
    "boolean algebra": (lambda x, y: (x & y) | ~x ^ y, (truth(3, 4), truth(4))),
    "embedding": (nnf.embedding, (counted(2, 3), normal(5, 4))),
    "index select": (lambda x, y: y.index_select(1, x), (counted(3), normal(2, 5))),
    "gather": (lambda x, y: y.gather(1, x), (counted(2, 3), normal(4, 5))),
    "take along": (lambda x, y: torch.take_along_dim(y, x, 1), (counted(4, 3), normal(4, 5))),
    "index": (lambda x, y: y[x], (counted(2, 3), normal(5, 4))),
    "index two axes": (lambda x, y: y[x[:, None], x], (counted(3, below=2), normal(2, 3, 4))),
    "index apart": (lambda x, y: y[x, :, x], (counted(3, below=2), normal(2, 3, 4))),
    "index negative": (lambda x, y: y[:, x - 2], (counted(3, below=3), normal(2, 3, 4))),
    "index put": (lambda x, y: y.index_put((x,), y[:2] * 0), (np.array([2, 0]), normal(4, 3))),
    "index put adds": (lambda x, y: y.index_put((x,), y[:2], accumulate=True), (np.array([2, 2]), normal(4, 3))),
    "index copy": (lambda x, y: y.index_copy(1, x, y[:, :2] + 1), (np.array([2, 0]), normal(4, 3))),
    "index add": (lambda x, y: y.index_add(0, x, y[:2], alpha=2), (np.array([2, 2]), normal(4, 3))),
    "attention": (nnf.scaled_dot_product_attention, (normal(2, 4, 5, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 6))),
    "attention causal": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (normal(2, 5, 8), normal(2, 5, 8) + 1, normal(2, 5, 8) - 1),
    ),
    "attention grouped": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)),
    ),
    "attention grouped, causal": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        (normal(2, 6, 5, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)),
    ),
    "attention with a boolean mask and an empty row": (
        lambda q, k, mask: nnf.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        (normal(2, 2, 3, 8), normal(2, 2, 3, 8), np.tri(3, 3, -1) > 0),
    ),
    "attention with an additive mask": (
        lambda q, k, mask: nnf.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        (normal(2, 2, 3, 8), normal(2, 2, 3, 8), normal(2, 1, 3, 3)),
    ),
    "acos": (torch.acos, (np.linspace(-1, 1, 9, dtype=np.float32),)),
    "asin": (torch.asin, (np.linspace(-1, 1, 9, dtype=np.float32),)),
    "log10": (torch.log10, (positive(3, 4),)),
    "scatter": (lambda i, x: x.scatter(0, i, x[:2] * 2), (PLACES, normal(4, 3))),
    "scatter a number": (lambda i, x: x.scatter(1, i % 3, 9.0), (PLACES, normal(4, 3))),
    "scatter adds": (lambda i, x: x.scatter_add(0, i, x), (PLACES, normal(4, 3))),
    "scatter largest": (lambda i, x: x.scatter_reduce(0, i, x, "amax"), (PLACES, normal(4, 3))),
    "scatter smallest": (lambda i, x: x.scatter_reduce(0, i, x, "amin", include_self=False), (PLACES, normal(4, 3))),
    "scatter product": (lambda i, x: x.scatter_reduce(0, i, x, "prod", include_self=False), (PLACES, normal(4, 3))),
    "index reduce": (
        lambda i, x: x.index_reduce(0, i[0], x[:3], "amax", include_self=False),
        (PLACES, normal(4, 3)),
    ),
    "scatter smallest integer": (
        lambda i, x: x.scatter_reduce(0, i, x, "amin", include_self=False),
        (PLACES, counted(4, 3)),
    ),
    "integer product": (lambda x, y: x @ y, (counted(2, 3, 4), counted(4, 5, below=9))),
    "integer linear": (lambda x, y: nnf.linear(x, y, y[:, 0]), (counted(3, 4), counted(5, 4, below=9))),
    "linspace between tensors": (
        lambda x, y: torch.linspace(x, y, 7),
        (np.asarray(1.5, np.float32), np.asarray(-2, np.float32)),
    ),
    "scatter mean": (lambda i, x: x.scatter_reduce(0, i, x, "mean", include_self=False), (PLACES, normal(4, 3))),
    "conv1d": (lambda x, w: nnf.conv1d(x, w, w[:, 0, 0], 2, 1), (normal(2, 3, 9), normal(4, 3, 3))),
    "conv1d same": (lambda x, w: nnf.conv1d(x, w, padding="same"), (normal(2, 3, 9), normal(4, 3, 4))),
    "conv1d by channel": (lambda x, w: nnf.conv1d(x, w, padding=3, groups=4), (normal(2, 4, 9), normal(4, 1, 4))),
    "conv2d": (lambda x, w: nnf.conv2d(x, w, w[:, 0, 0, 0], (2, 1), (1, 0)), (normal(2, 3, 9, 7), normal(4, 3, 3, 2))),
    "conv2d in groups": (lambda x, w: nnf.conv2d(x, w, dilation=2, groups=2), (normal(2, 6, 9, 7), normal(4, 3, 3, 2))),
    "conv2d by patches": (lambda x, w: nnf.conv2d(x, w, stride=4), (normal(2, 3, 9, 8), normal(5, 3, 4, 4))),
    "conv2d without a batch": (nnf.conv2d, (normal(3, 9, 7), normal(4, 3, 3, 2))),
    "conv3d": (lambda x, w: nnf.conv3d(x, w, stride=(1, 2, 1)), (normal(1, 2, 5, 6, 4), normal(3, 2, 2, 3, 2))),
    "conv bfloat16": (lambda x, w: nnf.conv1d(x.bfloat16(), w.bfloat16()), (normal(2, 3, 9), normal(4, 3, 3))),
    "conv1d transposed": (
        lambda x, w: nnf.conv_transpose1d(x, w, None, 3, 2, 1, dilation=2),
        (normal(2, 3, 9), normal(3, 4, 4)),
    ),
    "conv2d transposed in groups": (
        lambda x, w: nnf.conv_transpose2d(x, w, w[0, :, 0, 0].repeat(2), 2, 3, groups=2),
        (normal(2, 4, 5, 6), normal(4, 3, 2, 3)),
    ),
    "average pool": (lambda x: nnf.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (normal(2, 3, 8, 7),)),
    "average pool rounded up": (lambda x: nnf.avg_pool2d(x, 3, 2, ceil_mode=True), (normal(2, 3, 8, 7),)),
    "average pool 3d": (lambda x: nnf.avg_pool3d(x, 2), (normal(1, 2, 4, 5, 6),)),
    "max pool": (lambda x: nnf.max_pool2d(x, 3, 2, 1), (normal(2, 3, 8, 7),)),
    "max pool rounded up": (lambda x: nnf.max_pool2d(x, (2, 3), 2, ceil_mode=True), (normal(2, 3, 9, 8),)),
    "adaptive average pool": (lambda x: nnf.adaptive_avg_pool2d(x, (3, 2)), (normal(2, 3, 8, 7),)),
    "adaptive max pool": (lambda x: nnf.adaptive_max_pool2d(x, (4, 1)), (normal(2, 3, 8, 7),)),
    "nearest": (lambda x: nnf.interpolate(x, scale_factor=2), (normal(2, 3, 4, 5),)),
    "nearest to a size": (lambda x: nnf.interpolate(x, (5, 3)), (normal(2, 3, 4, 7),)),
    "bilinear": (lambda x: nnf.interpolate(x, (7, 3), mode="bilinear"), (normal(2, 3, 4, 5),)),
    "bilinear by a factor": (
        lambda x: nnf.interpolate(x, scale_factor=1.7, mode="bilinear"),
        (normal(2, 3, 4, 5),),
    ),
    "bilinear, corners aligned": (
        lambda x: nnf.interpolate(x, (7, 1), mode="bilinear", align_corners=True),
        (normal(2, 3, 4, 5),),
    ),
    "bicubic": (lambda x: nnf.interpolate(x, (9, 3), mode="bicubic"), (normal(2, 3, 4, 5),)),
    "bicubic smoothed": (
        lambda x: nnf.interpolate(x, (3, 7), mode="bicubic", antialias=True),
        (normal(2, 3, 8, 5),),
    ),
    "bilinear smoothed": (
        lambda x: nnf.interpolate(x, (3, 4), mode="bilinear", antialias=True),
        (normal(2, 3, 8, 9),),
    ),
    "pixel shuffle": (lambda x: nnf.pixel_shuffle(x, 2), (normal(2, 8, 3, 5),)),
    "grid sample": (lambda x, y: nnf.grid_sample(x, y, align_corners=False), (normal(2, 3, 4, 5), normal(2, 6, 7, 2))),
    "grid sample, mirrored and cubic": (
        lambda x, y: nnf.grid_sample(x, y, "bicubic", "reflection", align_corners=True),
        (normal(2, 3, 4, 5), normal(2, 6, 7, 2)),
    ),
    "grid sample in three dimensions": (
        lambda x, y: nnf.grid_sample(x, y, "nearest", "border", align_corners=False),
        (normal(2, 3, 4, 5, 3), normal(2, 2, 3, 4, 3)),
    ),
    "fold": (lambda x: nnf.fold(x, (4, 5), (2, 3), padding=1, stride=2), (normal(2, 12, 9),)),
    "max unpool": (
        lambda x: nnf.max_unpool2d(*nnf.max_pool2d(x, 2, return_indices=True), 2),
        (normal(2, 3, 6, 4),),
    ),
    "grouped product": (
        lambda x, w, ends: torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends)[:6],
        (normal(7, 8), normal(3, 8, 16), np.array([2, 2, 6], np.int32)),
    ),
    "bfloat16 matmul": (lambda x, y: x.bfloat16() @ y.bfloat16(), (normal(4, 8), normal(8, 3))),
    "a scalar does not widen": (lambda x: x.bfloat16() + 1e-3, (normal(4, 8),)),
}

CASES: dict[str, tuple[Function, tuple[Array, ...]]] = (
    {name: (function, (X,)) for name, function in UNARY.items()}
    | {name: (function, SAME) for name, function in BINARY.items()}
    | SPECIAL
)
