"""Products of the same rows, written together: the rows are brought and turned once for all of them.

`plan` says in which pieces. Products whose results meet in what follows have the same block of columns at hand, so that
only what becomes of them is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveReduceScatter
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from nxpipe.emulator.lower.factors import Fill, Part, Rows, Sharing
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.plan import BANK, STRIP, Cut, Piece, best, strip_of, turns_of
from nxpipe.emulator.lower.turned import chunks_of, each_chunk, each_slab, load
from nxpipe.emulator.lower.view import View


@dataclass(frozen=True)
class Products:
    k: Kernel
    rows: Rows
    parts: tuple[Part, ...]
    first: Affine | int = 0  # row of what the endings see

    def write(self) -> None:
        if not self.rows.shape[0]:
            return
        note = self.k.note
        if self.rows.shape[1]:
            for parts, cut in self._plan:
                self.k.note = note
                replace(self, parts=parts)._write(cut)
        else:
            for part in self.parts:
                _At(self, part, (0, part.columns)).write_empty_sums()
        self.k.note = note

    @property
    def ns(self) -> float:
        """What it is expected to take."""
        return sum(cut.ns for _, cut in self._plan)

    @cached_property
    def _plan(self) -> list[tuple[tuple[Part, ...], Cut]]:
        """Which parts are written together: all of them, or none where that is cheaper."""
        parts = tuple(part for part in self.parts if part.columns)
        if not parts:
            return []
        core, room = self.k.core, self.k.left(Memory.SBUF)
        together = best(core, room, self.rows, [part.sizes for part in parts])
        alone = [best(core, room, self.rows, [part.sizes]) for part in parts] if len(parts) > 1 else [together]
        if sum(cut.ns for cut in alone) < together.ns:
            return [((part,), cut) for part, cut in zip(parts, alone, strict=True)]
        return [(parts, together)]

    def _write(self, cut: Cut) -> None:
        with self.k.room():
            fill = self._noted(self.rows.begin())
            if cut.weights_stay:
                self._pass_rows(cut, fill)
            else:
                self._pass_weights(cut, fill)

    def _noted(self, fill: Fill) -> Fill:
        note = self.k.note

        def noted(turned: Block, rows: Span) -> None:
            self.k.note = note
            fill(turned, rows)

        return noted

    def _pass_weights(self, cut: Cut, fill: Fill) -> None:
        k = self.k
        for rows in k.spans(self.rows.shape[0], cut.height):
            with k.room():
                turned = self.rows.block(rows[1], 1)
                with k.room():
                    fill(turned, rows)
                for part, piece in zip(self.parts, cut.pieces, strict=True):
                    for columns in k.spans(part.columns, piece.width):
                        with k.room():
                            _At(self, part, columns).write(turned, rows, piece)

    def _pass_rows(self, cut: Cut, fill: Fill) -> None:
        """Only one part may go in blocks of columns."""
        k, (first, *others) = self.k, self.parts
        for columns in k.spans(first.columns, cut.pieces[0].width):
            with k.room():
                places = [_At(self, first, columns), *(_At(self, part, (0, part.columns)) for part in others)]
                ready = [place.begin(1 + cut.ahead) for place in places]
                for rows in k.spans(self.rows.shape[0], cut.height):
                    with k.room():
                        turned = self.rows.block(rows[1], cut.turns)
                        with k.room():
                            fill(turned, rows)
                        for each in ready:
                            each.write(turned, rows)


@dataclass(frozen=True)
class _At:
    """Some columns of a part."""

    products: Products
    part: Part
    columns: Span

    @property
    def k(self) -> Kernel:
        return self.products.k

    def begin(self, turns: int) -> "_Ready":
        """With their weights at hand, whole."""
        self.k.note = self.part.note
        return _Ready(self, self.common(turns), self.weights(Affine(), self.products.rows.shape[1], turns))

    def write(self, turned: Block, rows: Span, piece: Piece) -> None:
        self.k.note = self.part.note
        if piece.slab < chunks_of(self.products.rows.shape[1]):
            self._write_in_slabs(turned, rows, piece.slab)
        else:
            self.begin(2).write(turned, rows)

    def _write_in_slabs(self, turned: Block, rows: Span, slab: int) -> None:
        """All sums wait in PSUM until the last slab of the weights has passed; there are few, so they are written
        out."""
        k, height, width = self.k, rows[1], self.columns[1]
        tiles, banks, common = chunks_of(height), -(-width // BANK), self.common(2)
        turns = turns_of(len(self.part.factors) * tiles * banks)
        waiting = [k.psum(min(height, PARTITIONS), tiles, banks, BANK, turns=turns) for _ in self.part.factors]
        rows_of = [(tile, min(height - tile * PARTITIONS, PARTITIONS)) for tile in range(tiles)]
        wide_of = [min(width - bank * BANK, BANK) for bank in range(banks)]
        for chunk, depth in each_slab(k, self.products.rows.shape[1], slab):
            with k.room():
                weights = self.weights(chunk, depth, 2)
                for (tile, count), (bank, wide) in product(rows_of, enumerate(wide_of)):
                    for block, weight in zip(waiting, weights, strict=True):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, wide))
                        row, column = (tile * PARTITIONS, count), (bank * BANK, wide)
                        multiply(k, sums, turned, weight, chunk, row, column, depth)
        for (tile, count), left in product(rows_of, range(0, width, STRIP)):
            with k.room():
                strip = (left, min(width - left, STRIP))
                made = common.made(count, strip[1])
                for number, block in enumerate(waiting):
                    for bank in range(left // BANK, -(-(left + strip[1]) // BANK)):
                        sums = block.cut(count, (tile, 1), (bank, 1), (0, wide_of[bank]))
                        place = (bank * BANK - left, wide_of[bank])
                        common.bring(number, made[number].cut(count, place), sums, (bank * BANK, wide_of[bank]))
                common.finish(made, (rows[0] + tile * PARTITIONS, count), strip)

    def weights(self, chunk: Affine, depth: int, turns: int) -> list[Block]:
        found = []
        for factor in self.part.factors:
            block = self.k.tile(factor.dtype, PARTITIONS, chunks_of(depth), self.columns[1], turns=turns)
            load(self.k, block, factor.weight.cut((chunk * PARTITIONS, depth), self.columns))
            found.append(block)
        return found

    def common(self, turns: int) -> "_Common":
        return _Common(self, [self._bias(factor.bias, turns) for factor in self.part.factors])

    def _bias(self, bias: View | None, turns: int) -> Block | None:
        """The same row on every partition."""
        if bias is None:
            return None
        lanes = min(self.products.rows.shape[0], PARTITIONS)
        block = self.k.tile(bias.dtype, lanes, self.columns[1], turns=turns)
        self.k.copy(block.whole, bias.cut(self.columns).broadcast((lanes, self.columns[1])).far())
        return block

    def write_empty_sums(self) -> None:
        k = self.k
        for left, width in k.spans(self.part.columns, BANK):
            with k.room():
                common = replace(self, columns=(left, width)).common(2)
                for row, count in k.spans(self.products.rows.shape[0], PARTITIONS):
                    with k.room():
                        made = common.made(count, width)
                        for block, bias in zip(made, common.biases, strict=True):
                            k.emit(Memset(engine=Engine.VECTOR, dst=block.whole, value=0.0))
                            if bias is not None:
                                k.emit(TensorCopy(engine=Engine.VECTOR, dst=block.whole, src=bias.cut(count)))
                        common.finish(made, (row, count), (0, width))


@dataclass(frozen=True)
class _Common:
    """What all rows of some columns have in common."""

    at: _At
    biases: Sequence[Block | None]

    def made(self, rows: int, width: int) -> list[Block]:
        """Room for a piece of each result, of all ranks' rows."""
        k, part = self.at.k, self.at.part
        shape = (part.ranks, width) if part.ranks > 1 else (width,)
        return [k.tile(factor.out, rows, *shape, turns=2) for factor in part.factors]

    def bring(self, number: int, dst: Tile, sums: Tile, column: Span) -> None:
        bias = self.biases[number]
        if bias is None:
            self.at.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=sums))
        else:
            right = bias.cut(dst.partitions, column)
            self.at.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=sums, right=right, op=Alu.ADD))

    def finish(self, made: Sequence[Block], row: Span, column: Span) -> None:
        """The rows are those of all ranks, of which each goes on with its own."""
        part, (start, count) = self.at.part, row
        whole = [block.whole for block in made]
        if part.ranks > 1:
            start, count = divided(start, part.ranks), count // part.ranks
            whole = [self._own(tile, column[1]) for tile in whole]
        tiles = {factor.result: tile for factor, tile in zip(part.factors, whole, strict=True)}
        columns = (self.at.columns[0] + column[0], column[1])
        part.ending.finish(tiles, (start + self.at.products.first, count), columns)

    def _own(self, of_all: Tile, width: int) -> Tile:
        k = self.at.k
        own = k.tile(of_all.dtype, of_all.partitions, width, turns=2).whole
        k.emit(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=own, src=of_all))
        return own


@dataclass(frozen=True)
class _Ready:
    """Some columns of a part with their weights."""

    at: _At
    common: _Common
    weights: Sequence[Block]

    def write(self, turned: Block, rows: Span) -> None:
        k, ranks, sharing = self.at.k, self.at.part.ranks, self.at.part.sharing
        k.note = self.at.part.note
        for row, count in k.spans(rows[1], PARTITIONS * ranks):
            for strip in k.spans(self.at.columns[1], strip_of(ranks)):
                with k.room():
                    made = self.common.made(count // ranks, strip[1])
                    for number, block in enumerate(made):
                        with k.loop(ranks) as rank:
                            place = (row + rank * (sharing.rows if sharing else 0), count // ranks)
                            self._multiply(number, block, rank, turned, place, strip)
                    self.common.finish(made, (row + rows[0], count), strip)

    def _multiply(self, number: int, made: Block, rank: Affine, turned: Block, row: Span, strip: Span) -> None:
        k, depth = self.at.k, self.at.products.rows.shape[1]
        for bank, some in k.spans(strip[1], BANK):
            with k.room():
                column = (strip[0] + bank, some)
                sums, sharing = k.psum(row[1], some).whole, self.at.part.sharing
                multiply(k, sums, turned, self.weights[number], Affine(), row, column, depth, sharing)
                dst = made.cut(row[1], *([(rank, 1)] if sharing else []), (bank, some))
                self.common.bring(number, dst, sums, column)


def multiply(
    k: Kernel,
    sums: Tile,
    turned: Block,
    weight: Block,
    first: Affine,
    row: Span,
    column: Span,
    depth: int,
    sharing: Sharing | None = None,
) -> None:
    """Some rows by some columns: a slab of the summed axis, which begins at this chunk. Of rows that ranks share, those
    of one rank in several runs."""
    rows = (row[0], sharing.rows) if sharing else row
    for chunk, deep in each_chunk(k, depth):
        stationary = turned.cut(deep, (first + chunk, 1), rows)
        if sharing:
            runs = Axis(row[1] // sharing.rows, turned.apart(sharing.ranks * sharing.rows))
            stationary = replace(stationary, axes=(runs, stationary.axes[-1]))
        moving = weight.cut(deep, (chunk, 1), column)
        k.emit(Matmul(engine=Engine.TENSOR, dst=sums, stationary=stationary, moving=moving, accumulate=first + chunk))
