"""Assumptions about the interface of programs and about their ranks: outputs, aliases, names, sizes, logical cores and
collectives."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from nxpipe.emulator.executable.interface import RANK
from nxpipe.emulator.hlo.probe import (
    FUNCTION,
    LOGICAL_CORE,
    NAMES,
    NO_OTHER,
    ROUNDED,
    Emit,
    Expect,
    N,
    Probe,
    X,
    Y,
    written,
)
from nxpipe.emulator.numerics import Array


def interfaces() -> Iterator[Probe]:
    yield from _outputs()
    yield from _aliases()
    yield from _names()
    yield from _sizes()
    yield from _logical_cores()


def _outputs() -> Iterator[Probe]:
    yield written(
        *(
            "output/several",
            "several outputs arrive under their names, in any order and of any type",
            "one program for each output",
        ),
        *({"x": X, "z": N}, lambda w, t: (w.reshape(w.binary("add", t[0], t[0]), (8, 4)), w.binary("add", t[1], t[1]))),
        *(lambda x, z: ((x + x).reshape(8, 4), z + z),),
        outputs=("second", "first"),
        proves=("outputs",),
    )
    yield written(
        *("output/equal-types", "two outputs of one type are not exchanged", "give each output another shape"),
        *({"x": X}, lambda w, t: (w.binary("add", t[0], t[0]), w.unary("negate", t[0])), lambda x: (x + x, -x)),
        outputs=("b", "a"),
    )
    yield written(
        *("output/copy", "an output that is a copy of an input has memory of its own", "add zero"),
        *({"x": X, "z": Y}, lambda w, t: (w.copy(t[0]), w.binary("add", *t)), lambda x, z: (x, x + z)),
        outputs=("same", "sum"),
        tolerance=ROUNDED,
    )
    yield written(
        *("output/rerun", "a second run writes its outputs anew", "load the program for each run"),
        *({"x": X, "z": Y}, lambda w, t: w.binary("add", *t), np.add),
        tolerance=ROUNDED,
        runs=2,
    )


def _aliases() -> Iterator[Probe]:
    state = partial(written, aliases={"state": 0}, tolerance=ROUNDED)
    copied = "copy each state on the host"
    given = {"x": X, "state": Y}
    yield state(
        *("alias/in-place", "a state with a demanded alias (kind must) is updated in one buffer", copied, given),
        *(lambda w, t: w.binary("add", *t), np.add),
        outputs=("state",),
        proves=("aliases",),
    )
    yield state(
        *("alias/steps", "a state carries over from run to run", copied, given),
        *(lambda w, t: w.binary("add", *t), np.add),
        outputs=("state",),
        runs=3,
    )
    old = "a result reads a state's value from before its update"
    yield state(
        *("alias/old-value", old, "read the state in a program of its own", given),
        *(lambda w, t: (w.binary("add", *t), w.unary("negate", t[1])), lambda x, s: (x + s, -s)),
        outputs=("state", "y"),
    )
    crossed = "states whose outputs are in another order keep their buffers"
    yield written(
        *("alias/crossed", crossed, "order states as their outputs", {"a": X, "b": Y}),
        *(lambda w, t: (w.binary("add", t[1], t[0]), w.unary("negate", t[0])), lambda a, b: (b + a, -a)),
        outputs=("b", "a"),
        aliases={"a": 1, "b": 0},
        tolerance=ROUNDED,
    )
    unchanged = "a state that the program leaves as it is may be an output"
    yield state(
        *("alias/unchanged", unchanged, "copy it before the output", given),
        *(lambda w, t: (t[1], w.binary("add", *t)), lambda x, s: (s, x + s)),
        outputs=("state", "y"),
    )
    yield from _parts_of_states()


def _parts_of_states() -> Iterator[Probe]:
    """Updates of a part, as those of KV caches are."""
    cache = partial(written, outputs=("state",), aliases={"state": 0})
    yield cache(
        *("alias/window", "an update of a window leaves the rest of a state", "write whole states"),
        {"x": X[:1], "state": Y},
        *(lambda w, t: w.update_slice(t[1], t[0], (2, 0)), lambda x, s: replaced(s, slice(2, 3), x)),
    )
    position = "a row of a cache is written at a computed position (`scatter`)"
    yield cache(
        *("alias/cache-position", position, "select by a mask over the whole cache"),
        {"x": X[:1], "position": np.array([[3]], np.int32), "state": Y},
        *(lambda w, t: w.scatter(t[2], t[1], t[0], (0,), 0), lambda x, p, s: replaced(s, p[:, 0], x)),
    )


def _names() -> Iterator[Probe]:
    def sum_of(name: str, assumption: str, fallback: str, first: str, output: str = "y", **others: Any) -> Probe:
        return written(
            *(name, assumption, fallback, {first: X, "z": Y}, lambda w, t: w.binary("add", *t), np.add),
            outputs=(output,),
            tolerance=ROUNDED,
            keeps_names=not others,
            **others,
        )

    default = "use the default names, input0 and output0"
    yield sum_of("name/inputs", "`neff_input_names` names the inputs in the NEFF", default, "hidden", proves=NAMES[:1])
    yield sum_of(
        "name/outputs", "`neff_output_names` names the outputs in the NEFF", default, "x", "logits", proves=NAMES[1:]
    )
    yield sum_of(
        "name/dots",
        "names of checkpoints, with dots and digits, are kept",
        default,
        "model.layers.0.self_attn.q_proj.weight",
    )
    yield sum_of("name/punctuation", "names with blanks, quotes and slashes are kept", default, "a b/c:'d'[0]", "y (1)")
    yield sum_of("name/longest", "names of 255 bytes are kept", "shorten long names", "n" * 255, "m" * 255)
    yield written(
        *(
            "name/unused-input",
            "an input that nothing reads stays or vanishes, and nothing else changes",
            "drop it from the module",
        ),
        *({"x": X, "unread": N, "z": Y}, lambda w, t: w.binary("add", t[0], t[2]), lambda x, _, z: x + z),
        tolerance=ROUNDED,
    )


def _sizes() -> Iterator[Probe]:
    yield written(
        *("size/scalar", "inputs and outputs may have rank 0", "use tensors of one element"),
        *({"x": np.float32(1.5), "z": np.float32(2)}, lambda w, t: w.binary("add", *t), np.add),
    )
    yield written(
        *("size/five-axes", "tensors may have five axes", "merge neighbouring axes"),
        *(
            {"x": X.reshape(1, 2, 2, 2, 4)},
            lambda w, t: w.transpose(t[0], (4, 2, 0, 3, 1)),
            lambda x: x.transpose(4, 2, 0, 3, 1).copy(),
        ),
    )
    odd = (np.arange(131 * 3) % 61 - 30).astype(np.float32).reshape(131, 3)
    yield written(
        *("size/odd", "sizes need not be multiples of 128", "pad to multiples of 128"),
        *({"x": odd}, lambda w, t: w.binary("add", t[0], t[0]), lambda x: x + x),
    )
    table = (np.arange(65_536) * 3 % 257).astype(np.float32).reshape(256, 256)
    yield written(
        *("size/large-constant", "a literal of 256 KiB is kept in the NEFF", "pass tables as inputs"),
        *({"x": np.array([[255], [0], [7]], np.int32)}, lambda w, t: w.gather(w.table(table, "f32"), t[0], (0,), 0)),
        *(lambda x: table[x[:, 0]],),
    )


def _logical_cores() -> Iterator[Probe]:
    """Programs for a logical core of two physical ones, as builds for trn2 and trn3 compile them."""
    two = partial(written, physical_cores=2)
    yield two(
        *(
            "core/two",
            "with `--lnc 2` a NEFF is for two physical cores, and runs where the runtime's logical cores have two",
            "compile with `--lnc 1`, and set NEURON_LOGICAL_NC_CONFIG=1",
        ),
        *({"x": X, "z": Y}, lambda w, t: w.binary("add", *t), np.add),
        tolerance=ROUNDED,
        proves=(LOGICAL_CORE,),
    )
    lhs, rhs = X.reshape(1, 4, 8), Y.reshape(1, 8, 4)
    yield two(
        *("core/dot", "two physical cores compute one product of matrices", "compile with `--lnc 1`"),
        *({"x": lhs, "z": rhs}, lambda w, t: w.dot(*t, ((0,), (0,)), (2, 1)), np.matmul),
        tolerance=FUNCTION,
    )
    yield two(
        *("core/state", "two physical cores update one state in place", "compile with `--lnc 1`"),
        *({"x": X, "state": Y}, lambda w, t: w.binary("add", *t), np.add),
        outputs=("state",),
        aliases={"state": 0},
        tolerance=ROUNDED,
        runs=2,
    )
    yield two(
        *(
            "core/all-reduce",
            "each rank of a collective is a logical core of two physical ones",
            "compile with `--lnc 1`",
        ),
        *({"x": np.stack([X, Y * 4])}, lambda w, t: w.all_reduce(t[0], 2), partial(all_ranks, np.add)),
        world=2,
        tolerance=ROUNDED,
    )


# Ranks ----------------------------------------------------------------------------------------------------------------


def ranks() -> Iterator[Probe]:
    pair = np.stack([X, Y * 4])
    yield written(
        *("rank/all-reduce-alone", "an `all-reduce` over a group of one rank is a copy", "leave it out", {"x": X}),
        *(lambda w, t: w.all_reduce(t[0], 1), lambda x: x),
    )
    yield written(
        *("rank/load", "two ranks load one program, each with inputs of its own", NO_OTHER, {"x": pair}),
        *(lambda w, t: w.binary("add", t[0], t[0]), lambda ranks: [each["x"] * 2 for each in ranks]),
        world=2,
        proves=("ranks",),
    )
    sums = partial(all_ranks, np.add)
    yield _collective("all-reduce", "exchange by all-gather, and add", pair, lambda w, t: w.all_reduce(t[0], 2), sums)
    yield _collective(
        *("all-gather", "add zero-padded shares by all-reduce", pair, lambda w, t: w.all_gather(t[0], 0, 2)),
        *(partial(all_ranks, lambda a, b: np.concatenate([a, b], 0)),),
    )
    yield written(
        *(
            "rank/all-gather-columns",
            "`all-gather` joins an axis that is not the outermost",
            "transpose before and after",
        ),
        *(
            {"x": pair},
            lambda w, t: w.all_gather(t[0], 1, 2),
            partial(all_ranks, lambda a, b: np.concatenate([a, b], 1)),
        ),
        world=2,
    )
    yield _collective(
        *("reduce-scatter", "slice the result of all-reduce", pair, lambda w, t: w.reduce_scatter(t[0], 0, 2)),
        *(lambda ranks: np.split(ranks[0]["x"] + ranks[1]["x"], 2),),
    )
    yield written(
        *("rank/order", "collectives of one program run in one order on all ranks", "one program for each collective"),
        *({"x": pair}, lambda w, t: w.all_gather(w.all_reduce(t[0], 2), 0, 2)),
        *(partial(all_ranks, lambda a, b: np.concatenate([a + b, a + b], 0)),),
        world=2,
        tolerance=ROUNDED,
    )
    numbers = np.array([[0], [1]], np.int32)
    yield written(
        *(
            "rank/own-rank",
            f"a rank's number arrives as the input {RANK}",
            "one program for each rank",
            {"x": pair, RANK: numbers},
        ),
        *(lambda w, t: w.dynamic_slice(t[0], 0, w.reshape(t[1], ()), 1),),
        *(lambda ranks: [each["x"][at : at + 1] for at, each in enumerate(ranks)],),
        world=2,
        proves=("own rank",),
    )


def _collective(opcode: str, fallback: str, pair: Array, emit: Emit, expect: Expect) -> Probe:
    return written(
        *(f"rank/{opcode}", f"`{opcode}` over two ranks, in the order of ranks", fallback, {"x": pair}, emit, expect),
        world=2,
        tolerance=ROUNDED,
        proves=(f"opcode {opcode}",),
    )


def all_ranks(function: Any, ranks: Sequence[dict[str, Array]]) -> list[Array]:
    """One result for all ranks."""
    return [function(*(each["x"] for each in ranks))] * len(ranks)


def replaced(x: Array, place: Any, values: Array) -> Array:
    result = x.copy()
    result[place] = values
    return result
