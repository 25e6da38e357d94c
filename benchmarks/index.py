"""Duration of a listing and of a near-miss search in a store of thousands of artifacts, with and without an index.

Usage: python benchmarks/index.py [--artifacts N] [--runs N] [--store s3://bucket/prefix]

Fills a store (by default a temporary folder) with artifacts whose key inputs are those of real transformer
configurations, then runs whole processes: wall and CPU seconds, the median of the runs.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Executable, Manifest, ModelRef
from nxpipe.artifact_store.records import ActionRecord

ROOT = Path(__file__).parent.parent
GOAL = 1.0  # seconds, from the start of the process to its end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--store", help="an empty store; it is filled and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.store or f"file://{folder}/store"
        model = _model(Path(folder))
        store = open_store(url)
        keys = list(store.backend.each(lambda number: _publish(store, number), range(options.artifacts)))
        commands = {
            "store ls": ["store", "ls", "--json"],
            "store ls --limit 20": ["store", "ls", "--limit", "20"],
            "store explain NAME": ["store", "explain", keys[len(keys) // 2], "--json"],
            "store explain --model-id": ["store", "explain", "--model-id", str(model), "--weights", "random:0"],
        }
        print(f"{options.artifacts} artifacts in {url.partition(':')[0]}, {options.runs} runs")
        print(f"{'command':28} {'':14} {'wall s':>7} {'cpu s':>7} {'goal':>5}")
        within = [_measured(name, words, url, options.runs) for name, words in commands.items()]
    return 0 if all(within) else 1


def _measured(name: str, words: list[str], url: str, runs: int) -> bool:
    """The median of the runs. The first run finds no index and writes it; the goal applies to all others."""
    times = [_timed([*words, "--store", url]) for _ in range(runs + 1)]
    print(f"{name:28} {'first run':14} {times[0][0]:7.2f} {times[0][1]:7.2f}")
    wall, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
    print(f"{name:28} {'with the index':14} {wall:7.2f} {cpu:7.2f} {GOAL:5.1f}")
    return bool(wall < GOAL)


def _timed(words: list[str]) -> tuple[float, float]:
    before, started = _children_seconds(), time.perf_counter()
    subprocess.run([str(Path(sys.executable).parent / "nxpipe"), *words], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - started, _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _publish(store: Store, number: int) -> str:
    """An artifact with tiny blobs: this benchmark reads none."""
    inputs = store.put_blob(canonical_json(_inputs(number)))
    program = store.put_blob(b"program")
    manifest = Manifest(
        model=ModelRef(id=f"example/model-{number % 200:03}", revision=None, task="fill-mask"),
        target="inf2",
        backend="emulator",
        key_inputs=inputs,
        executables=(
            Executable(
                name="forward-b1-s128",
                phase="forward",
                batch=1,
                sequence=128,
                tensor_parallel=1,
                graph_key=program.sha256,
                outputs=("logits",),
                blob=program,
            ),
        ),
        weights=(),
        files=(),
    )
    # The same files as `publish`, without flushes to the disk, which would take minutes for ten thousand artifacts.
    data = manifest.to_bytes()
    assert blob_path(store.put_blob(data)) == blob_path(Blob.of(data))
    store.records.create(ActionRecord.of(manifest, Blob.of(data)))
    return manifest.request_key


def _inputs(number: int) -> dict[str, object]:
    """Two hundred models, each built for some of a hundred combinations of shape, target and options."""
    model, variant = number % 200, number // 200
    dice = random.Random(model)
    sizes = {f"setting_{place}": dice.choice([0.1, 768, "gelu", True, None, 12]) for place in range(45)}
    return {
        "format": "nxpipe.request/1",
        "config": {"model_type": f"type-{model % 20}", "hidden_size": 64 * (1 + model), **sizes},
        "task": "fill-mask",
        "shapes": [["forward", 1 + variant % 5, 128 * (1 + variant // 5)]],
        "compiler": {"backend": "emulator", "source": sha256_hex(str(variant % 7).encode())},
        "libraries": {"torch": "2.13.0", "transformers": "5.23.0", "numpy": f"2.{variant % 3}.0"},
        "weights": {"kind": "random", "seed": number, "generator": "philox"},
        "target": ("inf2", "trn1", "trn2")[variant % 3],
        "options": {"autocast": "matmult", "autocast_type": "bf16", "tensor_parallel": 1},
    }


def _model(folder: Path) -> Path:
    model = folder / "tiny-bert"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 64, "hidden_size": 32}))
    return model


if __name__ == "__main__":
    sys.exit(main())
