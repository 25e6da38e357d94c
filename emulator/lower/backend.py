"""Back end on one page: the steps from a graph to a program, with a checker after each one.

Each step is a function from one frozen record to the next (`lower/records.py`), and `nxpipe explain --after STEP`
prints the record. The order is that of what each step needs: a kernel needs the locations of its operands; residency
needs to know which copies exist and how much of SBUF each kernel leaves free; a buffer's life, and with it its address,
is known only when no copy moves any more; waits compare addresses.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.isa.program import Program
from nxpipe.emulator.lower.backend_check import check
from nxpipe.emulator.lower.emission import emit_kernels
from nxpipe.emulator.lower.hbm_buffers import allocate_hbm, place_interface
from nxpipe.emulator.lower.records import Record, TargetGraph, text
from nxpipe.emulator.lower.sbuf_residency import promote_to_sbuf, reserve_sbuf
from nxpipe.emulator.schedule.redundant_waits import eliminate_redundant_waits
from nxpipe.emulator.schedule.waits import insert_waits

BackendStep = Callable[[Any], Record]

BACKEND: tuple[BackendStep, ...] = (
    place_interface,  # buffers in HBM for inputs, parameters, constants and outputs
    emit_kernels,  # nodes grouped into kernels, tilings chosen by cost, instructions in program order
    promote_to_sbuf,  # buffers between kernels moved from HBM to SBUF where kernels leave space
    reserve_sbuf,  # the same with kernels emitted again in less SBUF, where that is faster
    allocate_hbm,  # addresses; scratch with disjoint lives shares them
    insert_waits,  # semaphore waits that keep the program order of dependent accesses
    eliminate_redundant_waits,  # without the waits that others imply
)


def lower(graph: Graph, core: str, ranks: int = 1) -> Program:
    """The program of a graph for one NeuronCore of this generation; all ranks of a division run the same one."""
    *_, (_, program) = run_backend(TargetGraph(graph, core, ranks))
    assert isinstance(program, Program)  # the last step's record
    return program


def run_backend(target: TargetGraph) -> Iterator[tuple[str, Record]]:
    """Each step's name with the record that it returns, checked."""
    record: Record = target
    for step in BACKEND:
        before, record = record, step(record)
        check(before, record, after=step.__name__)
        yield step.__name__, record


def record_text(graph: Graph, core: str, ranks: int, after: str) -> str:
    """The record after a step, as text."""
    found = (record for name, record in run_backend(TargetGraph(graph, core, ranks)) if name == after)
    return text(next(found))
