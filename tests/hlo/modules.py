"""Modules of StableHLO text without a violation, and their protos, as jaxlib writes them and in canonical form."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from nxpipe.emulator.hlo.canonical import canonical


@dataclass(frozen=True)
class Sample:
    """`inputs` are pairs of name and type; `aliases` are outputs by the input that they replace."""

    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    body: str
    aliases: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
    executable: bool = True  # XLA's CPU client lacks the custom calls of Neuron

    def text(self) -> str:
        order = [name for name, _ in self.outputs]
        aliased = {name: f", tf.aliasing_output = {order.index(output)} : i32" for name, output in self.aliases}
        arguments = ", ".join(
            f"%{name}: tensor<{tensor}> "
            f'{{mhlo.frontend_attributes = {{neff_input_names = "{name}"}}{aliased.get(name, "")}}}'
            for name, tensor in self.inputs
        )
        results = ", ".join(f"tensor<{tensor}>" for _, tensor in self.outputs)
        returned = ", ".join(f"%{name}" for name in order)
        return (
            f"module @sample {{\nfunc.func @main({arguments}) -> ({results}) {{\n{self.body}\n"
            f"return {returned} : {results}\n}}\n}}"
        )


def _dot(lhs: str, rhs: str, left: str, right: str, result: str, axes: str = "contracting_dims = [1] x [0]") -> str:
    return f"stablehlo.dot_general {lhs}, {rhs}, {axes} : (tensor<{left}>, tensor<{right}>) -> tensor<{result}>"


def _reduce(value: str, init: str, op: str, axis: int, of: str, to: str) -> str:
    element = of.rsplit("x", 1)[1]
    return (
        f"stablehlo.reduce({value} init: {init}) applies stablehlo.{op} across dimensions = [{axis}] : "
        f"(tensor<{of}>, tensor<{element}>) -> tensor<{to}>"
    )


def _combine(name: str, operand: str, attributes: str, of: str, to: str, op: str = "add") -> str:
    element = of.rsplit("x", 1)[1]
    return f"""\"stablehlo.{name}"({operand}) ({{
    ^bb0(%l: tensor<{element}>, %r: tensor<{element}>):
      %s = stablehlo.{op} %l, %r : tensor<{element}>
      stablehlo.return %s : tensor<{element}>
    }}) {{{attributes}}} : (tensor<{of}>) -> tensor<{to}>"""


_SOFTMAX: Final = f"""
%low = stablehlo.constant dense<0xFF800000> : tensor<f32>
%zero = stablehlo.constant dense<0.0> : tensor<f32>
%peak = {_reduce("%scores", "%low", "maximum", 1, "8x8xf32", "8xf32")}
%peaks = stablehlo.broadcast_in_dim %peak, dims = [0] : (tensor<8xf32>) -> tensor<8x8xf32>
%centred = stablehlo.subtract %scores, %peaks : tensor<8x8xf32>
%powers = stablehlo.exponential %centred : tensor<8x8xf32>
%sum = {_reduce("%powers", "%zero", "add", 1, "8x8xf32", "8xf32")}
%sums = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<8xf32>) -> tensor<8x8xf32>
%probabilities = stablehlo.divide %powers, %sums : tensor<8x8xf32>
"""

_ATTENTION: Final = f"""
%scores = {_dot("%q", "%k", "8x16xf32", "8x16xf32", "8x8xf32", "contracting_dims = [1] x [1]")}
{_SOFTMAX}
%context = {_dot("%probabilities", "%v", "8x8xf32", "8x16xf32", "8x16xf32")}
"""

_PAIRS: Final = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"

SAMPLES: Final[dict[str, Sample]] = {
    "encoder layer": Sample(
        [("x", "8x16xf32"), ("wq", "16x16xf32"), ("wk", "16x16xf32"), ("wv", "16x16xf32"), ("wo", "16x16xf32")],
        [("y", "8x16xf32")],
        f"""
%q = {_dot("%x", "%wq", "8x16xf32", "16x16xf32", "8x16xf32")}
%k = {_dot("%x", "%wk", "8x16xf32", "16x16xf32", "8x16xf32")}
%v = {_dot("%x", "%wv", "8x16xf32", "16x16xf32", "8x16xf32")}
{_ATTENTION}
%projected = {_dot("%context", "%wo", "8x16xf32", "16x16xf32", "8x16xf32")}
%sum1 = stablehlo.add %x, %projected : tensor<8x16xf32>
%total = {_reduce("%sum1", "%zero", "add", 1, "8x16xf32", "8xf32")}
%width = stablehlo.constant dense<16.0> : tensor<8xf32>
%mean = stablehlo.divide %total, %width : tensor<8xf32>
%means = stablehlo.broadcast_in_dim %mean, dims = [0] : (tensor<8xf32>) -> tensor<8x16xf32>
%y = stablehlo.subtract %sum1, %means : tensor<8x16xf32>
""",
    ),
    "attention": Sample(
        [("q", "8x16xf32"), ("k", "8x16xf32"), ("v", "8x16xf32")], [("context", "8x16xf32")], _ATTENTION
    ),
    "causal mask": Sample(
        [("x", "8x8xbf16")],
        [("y", "8x8xbf16")],
        """
%rows = stablehlo.iota dim = 0 : tensor<8x8xi32>
%columns = stablehlo.iota dim = 1 : tensor<8x8xi32>
%seen = stablehlo.compare GE, %rows, %columns : (tensor<8x8xi32>, tensor<8x8xi32>) -> tensor<8x8xi1>
%least = stablehlo.constant dense<-1.0e4> : tensor<8x8xbf16>
%y = stablehlo.select %seen, %x, %least : tensor<8x8xi1>, tensor<8x8xbf16>
""",
    ),
    "decode step": Sample(
        [("x", "1x16xbf16"), ("position", "i32"), ("cache", "8x16xbf16"), ("w", "16x16xbf16")],
        [("y", "1x8xf32"), ("next", "8x16xbf16")],
        f"""
%new = {_dot("%x", "%w", "1x16xbf16", "16x16xbf16", "1x16xbf16")}
%origin = stablehlo.constant dense<0> : tensor<i32>
%next = stablehlo.dynamic_update_slice %cache, %new, %position, %origin :
  (tensor<8x16xbf16>, tensor<1x16xbf16>, tensor<i32>, tensor<i32>) -> tensor<8x16xbf16>
%scores = {_dot("%x", "%next", "1x16xbf16", "8x16xbf16", "1x8xbf16", "contracting_dims = [1] x [1]")}
%y = stablehlo.convert %scores : (tensor<1x8xbf16>) -> tensor<1x8xf32>
""",
        aliases=(("cache", "next"),),
    ),
    "convolution": Sample(
        [("x", "1x3x8x8xf32"), ("w", "4x3x3x3xf32")],
        [("y", "1x4x4x4xf32")],
        """
%y = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1],
  window = {stride = [2, 2], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
  : (tensor<1x3x8x8xf32>, tensor<4x3x3x3xf32>) -> tensor<1x4x4x4xf32>
""",
    ),
    "pooling": Sample(
        [("x", "1x3x8x8xf32")],
        [("y", "1x3x4x4xf32")],
        """
%low = stablehlo.constant dense<0xFF800000> : tensor<f32>
%y = "stablehlo.reduce_window"(%x, %low) ({
^bb0(%l: tensor<f32>, %r: tensor<f32>):
  %m = stablehlo.maximum %l, %r : tensor<f32>
  stablehlo.return %m : tensor<f32>
}) {window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>}
  : (tensor<1x3x8x8xf32>, tensor<f32>) -> tensor<1x3x4x4xf32>
""",
    ),
    "row-parallel layer": Sample(
        [("x", "4x8xbf16"), ("w", "8x16xbf16")],
        [("y", "4x16xbf16")],
        f"""
%partial = {_dot("%x", "%w", "4x8xbf16", "8x16xbf16", "4x16xbf16")}
%y = {_combine("all_reduce", "%partial", _PAIRS, "4x16xbf16", "4x16xbf16")}
""",
        ranks=2,
    ),
    "collectives": Sample(
        [("x", "4x8xf32")],
        [("gathered", "8x8xf32"), ("scattered", "2x8xf32"), ("exchanged", "4x8xf32"), ("moved", "4x8xf32")],
        f"""
%gathered = "stablehlo.all_gather"(%x) {{all_gather_dim = 0 : i64, {_PAIRS}}} : (tensor<4x8xf32>) -> tensor<8x8xf32>
%scattered = {_combine("reduce_scatter", "%x", f"scatter_dimension = 0 : i64, {_PAIRS}", "4x8xf32", "2x8xf32")}
%exchanged = "stablehlo.all_to_all"(%x) {{split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64,
  {_PAIRS}}} : (tensor<4x8xf32>) -> tensor<4x8xf32>
%moved = "stablehlo.collective_permute"(%x) {{source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}}
  : (tensor<4x8xf32>) -> tensor<4x8xf32>
""",
        ranks=2,
    ),
    "transposed": Sample(
        [("x", "4x2x3xf32")],
        [("y", "3x4x2xf32"), ("z", "8x3xf32")],
        """
%y = stablehlo.transpose %x, dims = [2, 0, 1] : (tensor<4x2x3xf32>) -> tensor<3x4x2xf32>
%rows = stablehlo.reshape %y : (tensor<3x4x2xf32>) -> tensor<3x8xf32>
%z = stablehlo.transpose %rows, dims = [1, 0] : (tensor<3x8xf32>) -> tensor<8x3xf32>
""",
    ),
    "two caches": Sample(
        [("a", "4x4xf32"), ("b", "2x4xf32")],
        [("sum", "4x4xf32"), ("double", "2x4xf32")],
        """
%sum = stablehlo.add %a, %a : tensor<4x4xf32>
%double = stablehlo.multiply %b, %b : tensor<2x4xf32>
""",
        aliases=(("a", "sum"), ("b", "double")),
    ),
    "embedding": Sample(
        [("ids", "4x1xi32"), ("table", "32x8xf32")],
        [("y", "4x8xf32")],
        """
%y = "stablehlo.gather"(%table, %ids) {dimension_numbers = #stablehlo.gather<offset_dims = [1],
  collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>}
  : (tensor<32x8xf32>, tensor<4x1xi32>) -> tensor<4x8xf32>
""",
    ),
    "position embedding": Sample(
        [("table", "8x4xf32")],
        [("y", "8x4xf32")],
        """
%ids = stablehlo.iota dim = 0 : tensor<8x1xi32>
%y = "stablehlo.gather"(%table, %ids) {dimension_numbers = #stablehlo.gather<offset_dims = [1],
  collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 4>}
  : (tensor<8x4xf32>, tensor<8x1xi32>) -> tensor<8x4xf32>
""",
    ),
    "scatter": Sample(
        [("x", "8x4xf32"), ("at", "2x1xi32"), ("rows", "2x4xf32")],
        [("y", "8x4xf32")],
        """
%y = "stablehlo.scatter"(%x, %at, %rows) ({
^bb0(%l: tensor<f32>, %r: tensor<f32>):
  stablehlo.return %r : tensor<f32>
}) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0],
  scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
  : (tensor<8x4xf32>, tensor<2x1xi32>, tensor<2x4xf32>) -> tensor<8x4xf32>
""",
    ),
    "greedy sampling": Sample(
        [("logits", "2x32xf32")],
        [("values", "2x8xf32"), ("tokens", "2x8xui32")],
        """
%top:2 = stablehlo.custom_call @AwsNeuronTopK(%logits) {backend_config = "8"}
  : (tensor<2x32xf32>) -> (tensor<2x8xf32>, tensor<2x8xui32>)
%values = stablehlo.reshape %top#0 : (tensor<2x8xf32>) -> tensor<2x8xf32>
%tokens = stablehlo.reshape %top#1 : (tensor<2x8xui32>) -> tensor<2x8xui32>
""",
        executable=False,
    ),
    "sort": Sample(
        [("x", "4x8xf32")],
        [("y", "4x8xf32")],
        """
%y = "stablehlo.sort"(%x) ({
^bb0(%l: tensor<f32>, %r: tensor<f32>):
  %c = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.return %c : tensor<i1>
}) {dimension = 1 : i64, is_stable = false} : (tensor<4x8xf32>) -> tensor<4x8xf32>
""",
    ),
    "constants": Sample(
        [("x", "4xf32"), ("n", "4xi32")],
        [("y", "4xf32"), ("m", "4xi32"), ("mask", "4xi1")],
        """
%f = stablehlo.constant dense<[1.5, -2.0, 0.25, 1.0e6]> : tensor<4xf32>
%h = stablehlo.constant dense<[1.5, -2.0, 0.25, 4.0]> : tensor<4xbf16>
%i = stablehlo.constant dense<[300, -2, 3, 2000000000]> : tensor<4xi32>
%mask = stablehlo.constant dense<[true, false, true, true]> : tensor<4xi1>
%wide = stablehlo.convert %h : (tensor<4xbf16>) -> tensor<4xf32>
%product = stablehlo.multiply %f, %wide : tensor<4xf32>
%y = stablehlo.add %x, %product : tensor<4xf32>
%m = stablehlo.shift_right_arithmetic %i, %n : tensor<4xi32>
""",
    ),
    "noise": Sample(
        [("state", "4xui32")],
        [("following", "4xui32"), ("bits", "16xui32")],
        """
%following, %bits = stablehlo.rng_bit_generator %state, algorithm = DEFAULT
  : (tensor<4xui32>) -> (tensor<4xui32>, tensor<16xui32>)
""",
        executable=False,  # two clients need not draw the same bits
    ),
}


@cache
def written(name: str) -> bytes:
    """The proto of a sample as jaxlib writes it."""
    return convert(SAMPLES[name].text())


def convert(text: str) -> bytes:
    from jaxlib import _jax

    computation = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    return bytes(computation.as_serialized_hlo_module_proto())


@cache
def good(name: str) -> bytes:
    """The canonical proto of a sample, with the names of its outputs."""
    return canonical(written(name), output_names=[output for output, _ in SAMPLES[name].outputs])
