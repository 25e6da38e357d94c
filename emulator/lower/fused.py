"""Rows that are folded, and where they go from there: to HBM, or turned to the products that read them.

What only products of the same rows read need not be stored. They are made anew for each block of columns where the
weights stay, so that it depends on what it costs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.graph import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.transfer import moved
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.factors import HbmRows, LoadRows, OutputGroup, RowSharding, allocate_rows
from nxpipe.emulator.lower.factors import LoadableRows as Sources
from nxpipe.emulator.lower.folding import RowBlock, RowKernel
from nxpipe.emulator.lower.following import EpilogueFusion
from nxpipe.emulator.lower.gathered import GatheredRows, gathered_matmuls, write_gathered_matmuls
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Span
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.products import as_matrix, matmuls_of, output_groups, row_sharding
from nxpipe.emulator.lower.together import MatmulKernel
from nxpipe.emulator.lower.turned import chunks_of, transpose_tile
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.lower.work import KernelCost, load_cost, transpose_cost

_PASSES: Final = 2  # of the vector engine over a row, beside what follows it


def write_row_kernel(low: Lowering, node: Node, axes: int, fold: Callable[[RowBlock], None], between: int = 0) -> None:
    """Rows along the last `axes` axes of the first operand, with the other operands as rows for all of them."""
    x = low.lying(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = as_matrix(low, x, x.elements // width if width else 0, width)
    shared = [low.packed(low.view(operand)).packed_as((width,)) for operand in node.operands[1:]]
    found = low.following(node.result, width)
    found.follow(node.result)
    behind = _consumers(low, found, node.result, width)
    gathers = [behind.gather] if behind.gather else []
    ending = low.ended(found, node.result, [*gathers, *behind.products])
    rows = RowKernel.of(low.k, flat, shared, ending, on_device(node.result.type.dtype), fold, between)
    if behind.products:
        _write_with_matmuls(low, rows, found.known[behind.value], behind)
    else:
        rows.write()


@dataclass(frozen=True)
class _Consumers:
    """The products that read a value, or what of it ranks gather."""

    value: Value
    products: Sequence[Node] = ()
    gather: Node | None = None
    sharing: RowSharding | None = None


def _consumers(low: Lowering, found: EpilogueFusion, result: Value, width: int) -> _Consumers:
    """Of the values that are made of a result, that which most products read."""
    values = [value for value in found.known if value.type.shape[-1:] == (width,)]
    return max(
        (each for value in values for each in _consumer_options(low, value, result)),
        key=lambda each: len(each.products),
        default=_Consumers(result),
    )


def _consumer_options(low: Lowering, value: Value, result: Value) -> Iterator[_Consumers]:
    yield _Consumers(value, matmuls_of(low, value, result))
    gather = low.only(value)
    products = gathered_matmuls(low, gather, result) if gather else []
    if gather and products:
        yield _Consumers(value, products, gather, row_sharding(low, gather))


def _write_with_matmuls(low: Lowering, rows: RowKernel, tile: Value, behind: _Consumers) -> None:
    """Where it is cheaper, or there is no room for both, the products' rows are stored first."""
    k, dtype = low.k, on_device(behind.value.type.dtype)
    lying, parts = low.places.views.get(tile), _consumer_groups(low, rows, behind.products)
    flat = whole(0, on_device(tile.type.dtype), rows.x.shape)
    storing = ComputedRows(rows, tile, dtype).made(k.core, rows.x.shape[0]) + KernelCost(
        bytes=0 if lying else moved(flat.far())
    )
    stored = [MatmulKernel(k, each, parts).ns for each in _row_sources(low, HbmRows(k, flat, dtype), behind)]
    later = min(stored, default=inf) + storing.ns(k.core)
    made = [each for narrow in rows.narrower() for each in _row_sources(low, ComputedRows(narrow, tile, dtype), behind)]
    at_once = min((MatmulKernel(k, each, parts) for each in made), key=lambda each: each.ns, default=None)
    if at_once is not None and at_once.ns <= later and tile.type.dtype.itemsize > 1:  # bytes cannot be turned
        at_once.write()
        return
    flat = as_matrix(low, lying or low.scratch(tile.type.dtype, rows.x.shape), *rows.x.shape)
    rows.write(None if lying else _store_rows(low, tile, flat))
    if behind.sharing:
        write_gathered_matmuls(low, flat, dtype, parts, behind.sharing)
    else:
        MatmulKernel(k, HbmRows(k, flat, dtype), parts).write()


def _row_sources(low: Lowering, own: Sources, behind: _Consumers) -> list[Sources]:
    """The rows as products read them: a rank's own, or those of all ranks, if there is room to exchange them."""
    if not behind.sharing:
        return [own]
    gathered = GatheredRows(low.k, own, behind.sharing)
    return [gathered] if gathered.fits else []


def _consumer_groups(low: Lowering, rows: RowKernel, readers: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """What follows the products cannot look into HBM for what is stored of the rows: not all of them may be there."""
    views = low.places.views
    stored = {value: views.pop(value) for value, _ in rows.ending.chain.homes}
    parts = output_groups(low, readers)
    views |= stored
    return parts


def _store_rows(low: Lowering, tile: Value, view: View) -> Callable[[Mapping[Value, Tile], Span, Span], None]:
    return lambda tiles, row, left: low.k.copy(view.cut(row, left).far(), tiles[tile])


@dataclass(frozen=True)
class ComputedRows:
    """Rows for products, which are made in SBUF."""

    source: RowKernel
    tile: Value  # which of the values that are made of them
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        rows, summed = self.source.x.shape
        return rows, summed

    @property
    def run(self) -> int:
        return 1

    @property
    def kept(self) -> int:
        return self.source.kept

    @property
    def room(self) -> int:
        return self.source.room

    def begun(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, turns: int) -> Block:
        return allocate_rows(self.source.k, self, height, turns)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        return self.made(core, height) + transpose_cost(core, self.tile.type.dtype, chunks_of(self.shape[1]), height)

    def made(self, core: CoreSpec, height: int) -> KernelCost:
        """Up to where they lie in SBUF, row by row."""
        x, chain = self.source.x, self.source.ending.chain
        load = load_cost(core, x.transposed((1, 0)), chunks_of(x.shape[1]), height)
        elements = x.shape[1] * ceil(height / PARTITIONS) * (_PASSES + len(chain.links))
        beside = sum(view.dtype.itemsize for view in chain.views) * height * x.shape[1]
        return load + KernelCost(vector=elements / core.vector_ghz, bytes=beside)

    def begin(self) -> LoadRows:
        common = self.source.begin()

        def fill(turned: Block, rows: Span) -> None:
            def take(tiles: Mapping[Value, Tile], row: Span, left: Span) -> None:
                transpose_tile(self.source.k, turned, tiles[self.tile], left[0], row)

            self.source.make(rows, common, take)

        return fill
