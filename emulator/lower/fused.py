"""Rows that are folded, and where they go from there: to HBM, or turned to the products that read them.

What only products of the same rows read need not be stored. They are made anew for each block of columns where the
weights stay, so that it depends on what it costs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.factors import Fill, Loaded, Part, Sharing, room_for
from nxpipe.emulator.lower.factors import Rows as Sources
from nxpipe.emulator.lower.folding import Folding, Rows
from nxpipe.emulator.lower.following import Following
from nxpipe.emulator.lower.gathered import Gathered, products_gathered, write_gathered
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Span
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.products import as_rows, parts_of, products_of, sharing_of
from nxpipe.emulator.lower.together import Products
from nxpipe.emulator.lower.turned import chunks_of, turn_tile
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.lower.work import Work, load_work, turning_work

_PASSES: Final = 2  # of the vector engine over a row, beside what follows it


def write_rows(low: Lowering, node: Node, axes: int, fold: Callable[[Folding], None], between: int = 0) -> None:
    """Rows along the last `axes` axes of the first operand, with the other operands as rows for all of them."""
    x = low.lying(node.operands[0])
    width = prod(x.shape[x.rank - axes :])
    flat = as_rows(low, x, x.elements // width if width else 0, width)
    shared = [low.packed(low.view(operand)).packed_as((width,)) for operand in node.operands[1:]]
    found = low.following(node.result, width)
    found.follow(node.result)
    behind = _products_behind(low, found, node.result, width)
    gathers = [behind.gather] if behind.gather else []
    ending = low.ended(found, node.result, [*gathers, *behind.products])
    rows = Rows.of(low.k, flat, shared, ending, on_device(node.result.type.dtype), fold, between)
    if behind.products:
        _multiply(low, rows, found.known[behind.value], behind)
    else:
        rows.write()


@dataclass(frozen=True)
class _Behind:
    """The products that read a value, or what of it ranks gather."""

    value: Value
    products: Sequence[Node] = ()
    gather: Node | None = None
    sharing: Sharing | None = None


def _products_behind(low: Lowering, found: Following, result: Value, width: int) -> _Behind:
    """Of the values that are made of a result, that which most products read."""
    values = [value for value in found.known if value.type.shape[-1:] == (width,)]
    return max(
        (each for value in values for each in _readings(low, value, result)),
        key=lambda each: len(each.products),
        default=_Behind(result),
    )


def _readings(low: Lowering, value: Value, result: Value) -> Iterator[_Behind]:
    yield _Behind(value, products_of(low, value, result))
    gather = low.only(value)
    products = products_gathered(low, gather, result) if gather else []
    if gather and products:
        yield _Behind(value, products, gather, sharing_of(low, gather))


def _multiply(low: Lowering, rows: Rows, tile: Value, behind: _Behind) -> None:
    """Where it is cheaper, or there is no room for both, the products' rows are stored first."""
    k, dtype = low.k, on_device(behind.value.type.dtype)
    lying, parts = low.places.views.get(tile), _parts_beside(low, rows, behind.products)
    flat = whole(0, on_device(tile.type.dtype), rows.x.shape)
    storing = Made(rows, tile, dtype).made(k.core, rows.x.shape[0]) + Work(bytes=0 if lying else moved(flat.far()))
    stored = [Products(k, each, parts).ns for each in _met(low, Loaded(k, flat, dtype), behind)]
    later = min(stored, default=inf) + storing.ns(k.core)
    made = [each for narrow in rows.narrower() for each in _met(low, Made(narrow, tile, dtype), behind)]
    at_once = min((Products(k, each, parts) for each in made), key=lambda each: each.ns, default=None)
    if at_once is not None and at_once.ns <= later and tile.type.dtype.itemsize > 1:  # bytes cannot be turned
        at_once.write()
        return
    flat = as_rows(low, lying or low.scratch(tile.type.dtype, rows.x.shape), *rows.x.shape)
    rows.write(None if lying else _storing(low, tile, flat))
    if behind.sharing:
        write_gathered(low, flat, dtype, parts, behind.sharing)
    else:
        Products(k, Loaded(k, flat, dtype), parts).write()


def _met(low: Lowering, own: Sources, behind: _Behind) -> list[Sources]:
    """The rows as products read them: a rank's own, or those of all ranks, if there is room to exchange them."""
    if not behind.sharing:
        return [own]
    gathered = Gathered(low.k, own, behind.sharing)
    return [gathered] if gathered.fits else []


def _parts_beside(low: Lowering, rows: Rows, readers: Sequence[Node]) -> tuple[Part, ...]:
    """What follows the products cannot look into HBM for what is stored of the rows: not all of them may be there."""
    views = low.places.views
    stored = {value: views.pop(value) for value, _ in rows.ending.chain.homes}
    parts = parts_of(low, readers)
    views |= stored
    return parts


def _storing(low: Lowering, tile: Value, view: View) -> Callable[[Mapping[Value, Tile], Span, Span], None]:
    return lambda tiles, row, left: low.k.copy(view.cut(row, left).far(), tiles[tile])


@dataclass(frozen=True)
class Made:
    """Rows for products, which are made in SBUF."""

    source: Rows
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

    def begun(self, core: CoreSpec) -> Work:
        return Work()

    def block(self, height: int, turns: int) -> Block:
        return room_for(self.source.k, self, height, turns)

    def work(self, core: CoreSpec, height: int) -> Work:
        return self.made(core, height) + turning_work(core, self.tile.type.dtype, chunks_of(self.shape[1]), height)

    def made(self, core: CoreSpec, height: int) -> Work:
        """Up to where they lie in SBUF, row by row."""
        x, chain = self.source.x, self.source.ending.chain
        load = load_work(core, x.transposed((1, 0)), chunks_of(x.shape[1]), height)
        elements = x.shape[1] * ceil(height / PARTITIONS) * (_PASSES + len(chain.links))
        beside = sum(view.dtype.itemsize for view in chain.views) * height * x.shape[1]
        return load + Work(vector=elements / core.vector_ghz, bytes=beside)

    def begin(self) -> Fill:
        common = self.source.begin()

        def fill(turned: Block, rows: Span) -> None:
            def take(tiles: Mapping[Value, Tile], row: Span, left: Span) -> None:
                turn_tile(self.source.k, turned, tiles[self.tile], left[0], row)

            self.source.make(rows, common, take)

        return fill
