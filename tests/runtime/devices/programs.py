"""The same small programs for each kind of runtime: `.nxe` for the emulator, NEFFs of the stand-in for devices."""

from pathlib import Path

from nxpipe.emulator.compile import CompiledGraph, emit
from nxpipe.emulator.executable.executable import to_bytes
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import AllReduce, Binary, Gather
from tests.runtime.devices import neff

KINDS = ("emulated", "libnrt", "nrtpy")
FOUR, STATE = TensorType((4,), DType.FLOAT32), "total"


def addition(kind: str, folder: Path, world: int = 1) -> Path:
    """y = x + w, summed over ranks; x, w and y have four numbers."""
    if kind != "emulated":
        return neff.addition(world).write(folder / "addition.neff")
    return _emitted(_sum(1), _sum(world), world, folder / "addition.nxe")


def accumulator(kind: str, folder: Path) -> Path:
    """total = total + x, in place, and y = total."""
    if kind != "emulated":
        name = f"{STATE}.must_alias_input"
        program = neff.Neff(
            {"x": (4,), name: (4,)}, {STATE: (4,), "y": (4,)}, [f"add {STATE} x {name}", f"copy y @{STATE}"]
        )
        return program.write(folder / "accumulator.neff")
    builder = GraphBuilder()
    after = builder.add(Binary("add"), builder.input("x", FOUR), builder.input(STATE, FOUR))
    builder.output("y", after)
    builder.output(STATE, after)
    graph = builder.build()
    return _emitted(graph, graph, 1, folder / "accumulator.nxe")


def lookup(kind: str, folder: Path) -> Path:
    """y = the rows of table (6 rows of 4) with these two ids."""
    if kind != "emulated":
        program = neff.Neff(
            {"table": (6, 4), "ids": (2,)}, {"y": (2, 4)}, ["gather y table ids"], dtypes={"ids": "int32"}
        )
        return program.write(folder / "lookup.neff")
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((2,), DType.INT64))
    table = builder.parameter("table", TensorType((6, 4), DType.FLOAT32))
    builder.output("y", builder.add(Gather(0), table, ids))
    graph = builder.build()
    return _emitted(graph, graph, 1, folder / "lookup.nxe")


def _sum(world: int) -> Graph:
    builder = GraphBuilder()
    total = builder.add(Binary("add"), builder.input("x", FOUR), builder.parameter("w", FOUR))
    builder.output("y", builder.add(AllReduce(world), total) if world > 1 else total)
    return builder.build()


def _emitted(whole: Graph, sharded: Graph, world: int, path: Path) -> Path:
    path.write_bytes(to_bytes(emit(CompiledGraph(whole, sharded, world, {}, {}), "v2")))
    return path
