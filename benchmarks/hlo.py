"""The second oracle: graphs as HLO on XLA's CPU, compared with `fast`; and the time and size of large models' modules.

    python benchmarks/hlo.py operators [--cases 50] [--only PART]
    python benchmarks/hlo.py models [--only PART]
    python benchmarks/hlo.py sizes
    python benchmarks/hlo.py page docs/results/hlo.md

`operators` runs random cases of every operator (types, shapes, strides). `models` runs a small model of every class,
each phase, on 1, 2 and 4 ranks, and eight steps of decoding with the caches in place. `sizes` writes and converts the
modules of full-size Llama models. Each prints its rows and keeps them in FOLDER (--folder), so that the work can be
done in slices; `page` writes the rows as a page. The exit code is 1 if a row failed.
"""

import argparse
import json
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

_LLAMA: Final[Mapping[str, Any]] = {"model_type": "llama", "num_key_value_heads": 8, "rms_norm_eps": 1e-05}
_ROPE: Final = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
_SHAPES_8B: Final[Mapping[str, Any]] = {
    **_LLAMA,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {**_ROPE, "original_max_position_embeddings": 8192},
}
_SHAPES_70B: Final[Mapping[str, Any]] = {
    **_LLAMA,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
# name -> configuration, degree, goals in seconds and bytes
SIZES: Final[Mapping[str, tuple[Mapping[str, Any], int, float, int]]] = {
    "Llama-3.1-8B, tp 8": (_SHAPES_8B, 8, 30, 10**9),
    "Llama-2-70B, tp 24": (_SHAPES_70B, 24, 90, 2 * 10**9),
    "Llama-2-70B, tp 32": (_SHAPES_70B, 32, 90, 2 * 10**9),
}
CAPACITY: Final = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("operators", "models", "sizes", "page"))
    parser.add_argument("path", type=Path, nargs="?", help="of the page")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nxpipe-hlo")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.part == "page":
        options.path.write_text(page(options.folder), encoding="utf-8")
        return 0
    measure = {"operators": operators, "models": models, "sizes": sizes}[options.part]
    failed = 0
    for row in measure(options):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        failed += row["failed"]
        file = options.folder / f"{options.part}-{row['name'].replace(' ', '_').replace('/', '_')}.json"
        file.write_text(json.dumps(row))
    return 1 if failed else 0


def operators(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from tests.hlo.harness import Distance, bounds, distance_on_xla, drawn_case
    from tests.lower.test_every_operator import ROWS

    for row in ROWS:
        if options.only not in row.name:
            continue
        worst, failed = Distance(), 0
        for number in range(options.cases):
            found = distance_on_xla(drawn_case(row, Random(f"{row.name} {number}")), *bounds(row))
            worst, failed = worst.worst(found), failed + (found.part > 1)
        yield {
            "name": row.name,
            "operator": row.kind.name,
            "cases": options.cases,
            "units": f"{worst.units:.3g}",
            "absolute": f"{worst.absolute:.2g}",
            "part": f"{worst.part:.2f}",
            "failed": failed,
        }


def models(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from tests.emulator.test_decode import DECODERS
    from tests.hlo.models import TASKS, TOLERANCE, compiled, degrees, generation_distance, model_distance, requests

    for family in TASKS:
        for wanted in requests(family) if options.only in family else ():
            for degree in degrees(compiled((family, wanted.phase))):
                error = model_distance(family, wanted, degree)
                yield _model_row(f"{family} {wanted.phase} tp {degree}", error, error < TOLERANCE)
    for name in DECODERS:
        if options.only in name:
            error, in_place = generation_distance(name, 2 if name in ("llama", "gemma2", "falcon") else 1)
            yield _model_row(f"{name} prefill and 8 steps", error, in_place and error < 2 * TOLERANCE)


def _model_row(name: str, error: float, agrees: bool) -> dict[str, Any]:
    return {"name": name, "error": f"{error:.1e}", "failed": int(not agrees)}


def sizes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In processes of their own, for the peak of each."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    for name in SIZES:
        if options.only in name:
            with spawn.Pool(1) as pool:
                yield pool.apply(_size, (name,))


def _size(name: str) -> dict[str, Any]:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.compile import compile_program
    from nxpipe.emulator.hlo.module import module_of
    from nxpipe.emulator.hlo.xla import proto_of
    from nxpipe.emulator.passes import PassOptions

    config, degree, most_seconds, most_bytes = SIZES[name]
    captured = seconds = 0.0
    text = proto = 0
    for phase, sequence, capacity in (("prefill", CAPACITY // 2, CAPACITY), ("decode", CAPACITY, None)):
        started = time.perf_counter()
        request = CaptureRequest(config, "text-generation", phase, 1, sequence, "bfloat16", capacity=capacity)
        program = compile_program(request, PassOptions(tensor_parallel=degree))
        compiled, processor = time.perf_counter(), time.process_time()
        module = module_of(program.graph, degree)
        proto += len(proto_of(module.text))
        text += len(module.text)
        captured += compiled - started
        seconds += time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return {
        "name": name,
        "capture": f"{captured:.1f} s",
        "module, processor": f"{seconds:.1f} s",
        "text": f"{text / 1e6:.1f} MB",
        "proto": f"{proto / 1e6:.1f} MB",
        "peak": f"{peak / 1e6:.0f} MB",
        "failed": int(seconds > most_seconds or peak > most_bytes),
    }


_HEADING: Final = """# HLO on XLA's CPU

Graphs as StableHLO modules ([hlo](../reference/hlo.md)), executed by XLA's CPU client and compared with `fast`, by
`benchmarks/hlo.py` on {date}; Python {python}, jaxlib {jaxlib}, torch {torch}. {summary}
"""
_EXPLANATIONS: Final = {
    "operators": "## Operators\n\nThe worst element of all cases: in units of its last place (large where a result is "
    "nearly zero), absolutely, and as a part of the bound of its row.",
    "models": "## Models\n\nSmall models with random weights. The error is relative to the largest number of an "
    "output. The limit is 1e-5, that of `fast` and PyTorch; 2e-5 over several steps.",
    "sizes": "## Large models\n\nPrefill of 2,048 tokens and decode, a cache of 4,096, bfloat16. `capture` is the "
    "front end with sharding, which depends on other load; `module` the processor time of the StableHLO text and its "
    "conversion, both phases together.",
}


def page(folder: Path) -> str:
    tables = {
        part: [json.loads(file.read_text()) for file in sorted(folder.glob(f"{part}-*.json"))] for part in _EXPLANATIONS
    }
    failed = sum(row["failed"] for rows in tables.values() for row in rows)
    counts = (
        f"{len(tables['operators'])} members of operators, {sum(row['cases'] for row in tables['operators']):,} cases"
    )
    summary = f"{counts}; {len(tables['models'])} runs of models; {failed} failed."
    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "summary": summary}
    libraries = {name: version(name).partition("+")[0] for name in ("jaxlib", "torch")}
    parts = [_HEADING.format(**facts, **libraries).strip()]
    for part, rows in tables.items():
        if rows:
            parts += [_EXPLANATIONS[part], _table(rows)]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
