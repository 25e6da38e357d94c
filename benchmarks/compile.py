"""CPU time and memory of compiling an artifact, by default six programs of Llama-3.1-8B for eight cores.

    python benchmarks/compile.py [--model-id ID] [--target TYPE] [--tp N] [--batch N] [PHASE:TOKENS ...]

Each program is compiled as `nxpipe build --no-verify` does it: capture, passes, sharding, back end, legality,
utilisation, and its files in a store, which is a temporary folder. Weights are not needed. All programs are compiled in
this process, one after the other; the first one's time includes the imports of torch and transformers, and *peak* is
that of the process so far. `nxpipe build` captures in a confined process, whose imports are not counted twice here.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.compile.frontend import EmulatorBackend
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec

PROGRAMS: Final = tuple(
    f"{phase}:{tokens}"
    for phase, sizes in (("prefill", (128, 512, 2048)), ("decode", (2048, 4096, 8192)))
    for tokens in sizes
)
GOAL: Final = (55.0, 0.6)  # seconds of CPU time of the default programs, and GB
_SPEC: Final = ModelSpec("", None, None, "", None, None, (1,), None, "matmult", "bf16", verified=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=PROGRAMS, metavar="PHASE:TOKENS")
    parser.add_argument("--model-id", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--target", default="inf2.48xlarge")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    shapes = [
        Shape(phase, options.batch, int(tokens))
        for phase, _, tokens in (name.partition(":") for name in options.programs)
    ]
    spec = replace(_SPEC, model_id=options.model_id, target=options.target, tp=options.tp)
    request = replace(BuildSpec.without_weights(spec), shapes=tuple(shapes))
    print(f"{options.model_id}, tp {options.tp} on {options.target}")
    print(f"{'':24} {'front s':>8} {'back s':>8} {'CPU s':>8} {'GB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            _compile(request, shape, Path(folder))
    seconds, peak = time.process_time(), _peak()
    print(f"{'all':24} {'':8} {'':8} {seconds:8.1f} {peak:6.2f}")
    return 0 if options.programs != PROGRAMS or (seconds <= GOAL[0] and peak <= GOAL[1]) else 1


def _compile(request: BuildSpec, shape: Shape, folder: Path) -> None:
    """Compile one program and print its CPU seconds, of front and back end, and the peak memory so far."""
    backend, began = EmulatorBackend(), time.process_time()
    graph = backend.frontend(request, shape, _step)
    captured = time.process_time()
    backend.program(request, shape, graph, open_store(str(folder)), _step, force=True)
    ended = time.process_time()
    print(
        f"{shape.name:24} {captured - began:8.1f} {ended - captured:8.1f} {ended - began:8.1f} {_peak():6.2f}",
        flush=True,
    )


@contextmanager
def _step(_: str) -> Iterator[None]:
    yield


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
