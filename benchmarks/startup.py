"""Startup time of the light commands over bare Python, and their imports.

Usage: python benchmarks/startup.py [--runs N]

The commands alternate, N runs each; the median is printed, with the difference to `python -c pass`. The imports of a
command come from a separate run under `-X importtime`, which is not timed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAVY = ("torch", "transformers", "boto3", "numpy")
GOALS_MS = {"nxpipe --help": 150, "nxpipe build (cached)": 400}
ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        _fill(store, 100)
        build = ["build", "--model-id", str(_tiny_model(Path(folder))), "--weights", "random:0", "--buckets", "16"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "nxpipe --help": _nxpipe("--help"),
            "nxpipe store ls (100 artifacts)": _nxpipe("store", "ls", "--store", store),
            "nxpipe build (cached)": _nxpipe(*build, "--store", store),
        }
        _run(commands["nxpipe build (cached)"])  # the build that compiles
        medians = _medians(commands, runs)
        imports = {name: _heavy_imports(command) for name, command in commands.items()}
    return _print(medians, imports, runs)


def _nxpipe(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "nxpipe"), *arguments]


def _fill(store: str, count: int) -> None:
    """Artifacts that differ in one field: small, but complete and verified."""
    from nxpipe.artifact_store import open_store
    from nxpipe.artifact_store.canonical import canonical_json
    from nxpipe.artifact_store.manifest import Executable, Manifest, ModelRef

    opened = open_store(store)
    for index in range(count):
        blob = opened.put_blob(f"program {index}".encode())
        inputs: dict[str, object] = {"index": index}
        program = Executable(
            name="forward-b1-s128",
            phase="forward",
            batch=1,
            sequence=128,
            tensor_parallel=1,
            graph_key=blob.sha256,
            outputs=("logits",),
            blob=blob,
        )
        opened.publish(
            Manifest(
                model=ModelRef(id=f"example/model-{index:03}", revision=None, task="feature-extraction"),
                target="inf2",
                backend="emulator",
                key_inputs=opened.put_blob(canonical_json(inputs)),
                executables=(program,),
                weights=(),
                files=(),
            )
        )


def _tiny_model(folder: Path) -> Path:
    model = folder / "tiny-bert"
    model.mkdir()
    sizes = '"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64'
    (model / "config.json").write_text(f'{{"model_type": "bert", "vocab_size": 64, {sizes}}}')
    return model


def _run(command: list[str], **environment: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    ).stderr


def _medians(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
    """Milliseconds; the commands alternate, so that a slow minute of the machine affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            started = time.perf_counter()
            _run(command)
            times[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def _heavy_imports(command: list[str]) -> list[str]:
    lines = _run(command, PYTHONPROFILEIMPORTTIME="1").splitlines()
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    return [name for name in HEAVY if name in modules]


def _print(medians: dict[str, float], imports: dict[str, list[str]], runs: int) -> int:
    bare = medians["python -c pass"]
    missed = False
    print(f"{'command':34} {'median ms':>9} {'over bare':>9} {'goal':>6}  heavy imports   ({runs} runs)")
    for name, median in medians.items():
        goal = GOALS_MS.get(name)
        missed |= goal is not None and median - bare > goal
        heavy = ", ".join(imports[name]) or "none"
        print(f"{name:34} {median:9.0f} {median - bare:9.0f} {goal or '':>6}  {heavy}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
