"""Digests of what a graph becomes; as a program, those of the graph on standard input. Nothing of PyTorch."""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from nxpipe.emulator.compile import CompiledGraph, emit, shard_graph
from nxpipe.emulator.executable.executable import to_bytes
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import proto_of
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.passes import PassOptions


def digests_of(program: CompiledGraph, core: str) -> tuple[str, ...]:
    """Of the executable, of the HLO module's text, and of its canonical proto where jaxlib is installed."""
    module = module_of(program.graph, program.degree)
    parts = [to_bytes(emit(program, core)), module.text.encode()]
    if find_spec("jaxlib"):
        results = [result.name for result in module.interface.results]
        parts.append(canonical(proto_of(module.text), output_names=results))
    return tuple(hashlib.sha256(part).hexdigest() for part in parts)


if __name__ == "__main__":
    graph = decode(sys.stdin.buffer.read())
    program = shard_graph(graph, PassOptions(tensor_parallel=int(sys.argv[1])))
    sys.stdout.write(" ".join(digests_of(program, sys.argv[2])))
