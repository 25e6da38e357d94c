"""Products of matrices whatever their elements, and sums over named axes."""

import math
from collections.abc import Sequence

from nxpipe.emulator.capture.site import NotExpressible, Site
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Index, Iota, MatMul, Reduce, Transpose

_MOST_TERMS = 64  # of Einstein's notation: what remains of the names is looked through for each of them


def matrix_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """The tensor engine multiplies floats; integers are multiplied and added up by the general engine, exactly."""
    if a.type.dtype.is_float:
        return site.emit(MatMul(out), a, b)
    rows = site.reshape(a, (*a.type.shape, 1))
    columns = site.reshape(b, (*b.type.shape[:-2], 1, *b.type.shape[-2:]))
    terms = site.binary("multiply", rows, columns)
    return site.cast(site.emit(Reduce("sum", (terms.type.rank - 2,), False), terms), out)


def vector_product(site: Site, a: Value, b: Value, out: DType) -> Value:
    """A vector on the left is a row, on the right a column; the result forgets them."""
    row = a if a.type.rank > 1 else site.reshape(a, (1, *a.type.shape))
    column = b if b.type.rank > 1 else site.reshape(b, (*b.type.shape, 1))
    product = matrix_product(site, row, column, out)
    *batch, rows, columns = product.type.shape
    return site.reshape(product, (*batch, *(() if a.type.rank == 1 else (rows,)), *([columns] * (b.type.rank > 1))))


def einsum(site: Site, equation: str, operands: Sequence[Value], out: DType) -> Value:
    """Einstein's notation, from left to right, each two operands by one product of matrices."""
    if len(operands) > _MOST_TERMS:
        raise NotExpressible(f"it multiplies {len(operands):,} tensors, and the limit is {_MOST_TERMS}; use MatMul")
    terms, result = _labelled(equation, operands)
    waiting = [_diagonal(site, operand, term) for operand, term in zip(operands, terms, strict=True)]
    value, labels = waiting.pop(0)
    while waiting:
        other, names = waiting.pop(0)
        kept = {*result, *(name for _, later in waiting for name in later)}
        value, labels = _contracted(site, (value, labels), (other, names), kept, out)
    value, labels = _summed(site, value, labels, set(result))
    return site.cast(site.emit(Transpose(tuple(labels.index(name) for name in result)), value), out)


Labelled = tuple[Value, list[str]]


def _labelled(equation: str, operands: Sequence[Value]) -> tuple[list[list[str]], list[str]]:
    """A name for each axis. What an ellipsis stands for is named by numbers, counted from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_names(term, operand.type.rank) for term, operand in zip(left.split(","), operands, strict=True)]
    every = [name for term in terms for name in term]
    numbered = sorted({name for name in every if name.isdigit()}, key=int, reverse=True)
    if arrow:
        before, dots, after = right.partition("...")
        return terms, [*before, *(numbered if dots else ()), *after]
    return terms, [*numbered, *sorted(name for name in set(every) if every.count(name) == 1 and not name.isdigit())]


def _names(term: str, rank: int) -> list[str]:
    before, dots, after = term.partition("...")
    missing = rank - len(before) - len(after)
    if missing < 0 or (missing and not dots):
        raise NotExpressible(f"its term {term!r} does not name the {rank} axes of its operand")
    return [*before, *(str(number) for number in reversed(range(missing))), *after]


def _diagonal(site: Site, x: Value, names: list[str]) -> Labelled:
    """A name that an operand has twice asks for its diagonal."""
    for name in names:
        if names.count(name) > 1:
            first, second = [axis for axis, other in enumerate(names) if other == name][:2]
            rest = [axis for axis in range(x.type.rank) if axis not in (first, second)]
            count = site.emit(Iota(x.type.shape[first], 0, 1, DType.INT64))
            last = site.emit(Transpose((*rest, first, second)), x)
            picked = site.emit(Index((len(rest), len(rest) + 1)), last, count, count)
            return _diagonal(site, picked, [*(names[axis] for axis in rest), name])
    return x, names


def _summed(site: Site, x: Value, names: list[str], kept: set[str]) -> Labelled:
    gone = tuple(axis for axis, name in enumerate(names) if name not in kept)
    return (site.emit(Reduce("sum", gone, False), x) if gone else x), [name for name in names if name in kept]


def _contracted(site: Site, left: Labelled, right: Labelled, kept: set[str], out: DType) -> Labelled:
    """Names that both have stay in front if they are kept, and are multiplied away if not."""
    a, of_a = _summed(site, *left, kept | set(right[1]))
    b, of_b = _summed(site, *right, kept | set(left[1]))
    shared = [name for name in of_a if name in of_b]
    batch, inner = [n for n in shared if n in kept], [n for n in shared if n not in kept]
    rows, columns = [n for n in of_a if n not in shared], [n for n in of_b if n not in shared]
    sizes = {n: max(x.type.shape[of.index(n)] for x, of in ((a, of_a), (b, of_b)) if n in of) for n in (*of_a, *of_b)}

    def laid_out(x: Value, of: list[str], first: list[str], second: list[str]) -> Value:
        turned = site.emit(Transpose(tuple(of.index(name) for name in (*batch, *first, *second))), x)
        whole = site.broadcast(turned, [sizes[name] for name in (*batch, *first, *second)])
        matrix = (math.prod(sizes[n] for n in first), math.prod(sizes[n] for n in second))
        return site.reshape(whole, (*(sizes[n] for n in batch), *matrix))

    product = matrix_product(site, laid_out(a, of_a, rows, inner), laid_out(b, of_b, inner, columns), out)
    names = [*batch, *rows, *columns]
    return site.reshape(product, [sizes[name] for name in names]), names
