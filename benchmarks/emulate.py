"""Speed of the emulator on whole models, compared with PyTorch and others on the same machine.

    python benchmarks/emulate.py [bert] [llama-prefill] [llama-decode] [--page docs/results/emulation.md]

Every variant runs in a process of its own, so that its peak memory is measured alone and no other library's threads
interfere. A second process runs PyTorch's eager fp32, and the two alternate, one forward pass each: other load then
affects both alike, and their ratio is stable. Weights are random, times are medians. The goal: at most 1.15 times eager
fp32, at most 1.5 times the bytes of the weights in fp32.
"""

import argparse
import base64
import datetime
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

# The shapes of Llama 3.2 1B.
_LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
# name -> configuration (or model id), task, phase, sequence length
CASES: Mapping[str, tuple[Any, str, str, int]] = {
    "bert": ("bert-base-uncased", "feature-extraction", "forward", 128),
    "llama-prefill": (_LLAMA_1B, "text-generation", "prefill", 128),
    "llama-decode": (_LLAMA_1B, "text-generation", "decode", 128),
}
BASELINE = "eager fp32"
EMULATED = "emulated bf16 matmult"
WAYS = (EMULATED, "eager bf16", "compile fp32", "compile bf16", "onnxruntime", "onnx reference")
_ROUNDS = {"bert": 21, "llama-prefill": 7, "llama-decode": 15}
_LIBRARIES = {"onnxruntime": "onnxruntime", "onnx reference": "onnx"}
# Explicit position ids: BERT's own gather is too long for ONNX's reference evaluator.
_GIVEN_TO_ONNX = {"bert": ("token_type_ids",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--way", action="append", choices=WAYS, help="only this variant and eager fp32")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nxpipe-emulation")
    parser.add_argument("--page", type=Path, help="write the results in the folder as a page to this path")
    parser.add_argument("--capture", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.capture:
        print(base64.b64encode(_captured(_request(options.cases[0])).to_bytes()).decode())
        return
    if options.serve:
        serve(options.cases[0], options.serve)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        print(f"\n{case}\n" + _line(HEADER), flush=True)
        for way in options.way or WAYS:
            row = {**side_by_side(case, way), "way": way, "date": str(datetime.date.today())}
            (options.folder / f"{case}.{way.replace(' ', '-')}.json").write_text(json.dumps(row))
            print(_line(_cells(row)), flush=True)
    if options.page:
        options.page.write_text(page(options.folder))


class _Runner:
    """A variant of a case, in a process that runs it once per request."""

    def __init__(self, case: str, way: str) -> None:
        command = [sys.executable, __file__, case, "--serve", way]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=both, text=True)
        self.ready = self._receive()

    def run(self) -> Any:
        """Run once: milliseconds of wall time and of CPU time."""
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        return self._receive()

    def stop(self) -> Any:
        """Stop the process: its peak memory, and the bytes of the weights in fp32."""
        assert self._process.stdin
        self._process.stdin.close()
        answer = self._receive()
        self._process.wait()
        return answer

    def _receive(self) -> Any:
        assert self._process.stdout
        line = "no word"
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print lines in between
                return json.loads(line)
        return {"why_not": f"failed: {line.strip()[:100]}"}


def side_by_side(case: str, way: str) -> dict[str, Any]:
    """The medians of a variant and of eager fp32, alternating."""
    runner = _Runner(case, way)
    if "why_not" in runner.ready:
        return dict(runner.ready)
    baseline = _Runner(case, BASELINE)
    ours: list[Any] = []
    theirs: list[Any] = []
    for order in range(_ROUNDS[case]):  # the first of the two alternates, too
        for entry in (runner, baseline) if order % 2 else (baseline, runner):
            (ours if entry is runner else theirs).append(entry.run())
    return {
        **{key: statistics.median(run[key] for run in ours) for key in ("ms", "processor_ms")},
        "baseline": {key: statistics.median(run[key] for run in theirs) for key in ("ms", "processor_ms")},
        **runner.stop(),
        "baseline_memory": baseline.stop(),
    }


def serve(case: str, way: str) -> None:
    """Prepare, then run once for each line on stdin."""
    library = _LIBRARIES.get(way)
    if library and find_spec(library) is None:
        print(json.dumps({"why_not": f"{library} is not installed"}))
        return
    if way.startswith("compile") and not (shutil.which("g++") or shutil.which("clang++")):
        print(json.dumps({"why_not": "no C++ compiler here"}))
        return
    run, weights = _emulated(case) if way == EMULATED else _in_pytorch(case, way)
    for _ in range(2):
        run()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started, worked = time.perf_counter(), time.process_time()
        run()
        took = {"ms": time.perf_counter() - started, "processor_ms": time.process_time() - worked}
        print(json.dumps({key: seconds * 1e3 for key, seconds in took.items()}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"rss": peak, "weights": weights}), flush=True)


HEADER = ("", "median ms", "eager fp32 ms", "x eager fp32", "processor ms", "x eager fp32", "peak RSS GB", "x weights")


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    if "why_not" in row:
        return (row["way"], row["why_not"])
    beside, memory = row["baseline"], row["rss"] / row["weights"]
    return (
        row["way"],
        f"{row['ms']:.1f}",
        f"{beside['ms']:.1f}",
        f"{row['ms'] / beside['ms']:.2f}",
        f"{row['processor_ms']:.0f}",
        f"{row['processor_ms'] / beside['processor_ms']:.2f}",
        f"{row['rss'] / 1e9:.2f}",
        f"{memory:.2f}",
    )


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:22}" + "".join(f"{cell:>14}" for cell in cells[1:])


def page(folder: Path) -> str:
    rows = {case: _rows(folder, case) for case in CASES}
    dates = sorted({row["date"] for found in rows.values() for row in found})
    libraries = ("numpy", "torch", "transformers", "onnxruntime", "onnx")
    versions = ", ".join(f"{name} {version(name) if find_spec(name) else 'not installed'}" for name in libraries)
    return (
        "# Emulation\n\nHow fast `emulator/run/fast.py` runs whole models with bf16 `matmult`, "
        "beside PyTorch and others. "
        "The goal is at most 1.15 times the time of PyTorch's eager fp32, at most 1.5 times the bytes of the weights "
        "in fp32.\n\n"
        f"Measured by `python benchmarks/emulate.py --page docs/results/emulation.md` on {' and '.join(dates)}, "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, {versions}. "
        "Each variant ran in its own process, alternating pass by pass with a process that ran eager fp32: "
        "the second column is that process beside the variant, and ratios are those of the two medians. *processor* "
        "is the CPU time of all threads of the process, busy waiting included.\n\n"
        + "\n".join(_section(case, found) for case, found in rows.items() if found)
    )


def _rows(folder: Path, case: str) -> list[dict[str, Any]]:
    paths = [folder / f"{case}.{way.replace(' ', '-')}.json" for way in WAYS]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def _section(case: str, rows: Sequence[Mapping[str, Any]]) -> str:
    _, task, phase, sequence = CASES[case]
    table = [HEADER, ("---",) + ("---:",) * (len(HEADER) - 1)]
    table += [(*_cells(row), *[""] * (len(HEADER) - len(_cells(row)))) for row in rows]
    beside = next((row["baseline_memory"] for row in rows if "baseline_memory" in row), None)
    memory = f" Eager fp32 takes {beside['rss'] / beside['weights']:.2f} times the weights." if beside else ""
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    what = f"{task}, {phase}, batch 1, {sequence} {'positions in the KV cache' if phase == 'decode' else 'tokens'}"
    return f"## {case}\n\n{what}; medians of {_ROUNDS[case]} rounds.{memory}\n\n{lines}\n"


def _request(case: str) -> Any:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.pipeline.models.catalogue import find

    config, task, phase, sequence = CASES[case]
    known = find(config) if isinstance(config, str) else None
    return CaptureRequest(known.config if known else config, task, phase, 1, sequence, "float32")


def _tensors(request: Any) -> Any:
    from nxpipe.emulator.capture import parameter_specs
    from nxpipe.pipeline.models.weights import RandomWeights, Tensors

    return Tensors(RandomWeights(0), parameter_specs(request))


def _bytes(tensors: Any) -> int:
    return sum(kind.nbytes for kind in tensors.kinds.values())


def _captured(request: Any) -> Any:
    from nxpipe.emulator.capture import capture
    from nxpipe.emulator.passes import PassOptions, run_passes

    return run_passes(capture(request), PassOptions("matmult", "bf16"))


def _emulated(case: str) -> tuple[Callable[[], object], int]:
    """The compiled graph, captured in a process of its own, because running it needs no PyTorch."""
    from nxpipe.emulator.capture import example_inputs
    from nxpipe.emulator.ir.decoding import decode
    from nxpipe.emulator.run.fast import LoadedGraph
    from nxpipe.pipeline.models.weights import RandomWeights, Tensors

    request = _request(case)
    capturing = subprocess.run([sys.executable, __file__, case, "--capture"], capture_output=True, check=True)
    graph = decode(base64.b64decode(capturing.stdout.splitlines()[-1]))
    tensors = Tensors(RandomWeights(0), {name: value.type for name, value in graph.parameters.items()})
    loaded = LoadedGraph(graph, tensors)
    inputs = example_inputs(graph, request.config, seed=0)
    return lambda: loaded.run(inputs), _bytes(tensors)


def _in_pytorch(case: str, way: str) -> tuple[Callable[[], object], int]:
    """PyTorch's model without hooks: eager, compiled, or exported to ONNX."""
    import torch

    from nxpipe.emulator.capture import capture, example_inputs
    from nxpipe.emulator.capture.reference import Reference

    request = _request(case)
    tensors = _tensors(request)
    reference = Reference(request, tensors, "bfloat16" if way.endswith("bf16") else "float32")
    inputs = reference.tensors(example_inputs(capture(request), request.config, seed=0))
    model = torch.compile(reference.model) if way.startswith("compile") else reference.model

    def run() -> object:
        with torch.no_grad():
            return model(**inputs)

    if way.startswith("onnx"):
        inputs |= {name: torch.zeros_like(inputs["input_ids"]) for name in _GIVEN_TO_ONNX.get(case, ())}
        return _in_onnx(way, reference.model, inputs), _bytes(tensors)
    return run, _bytes(tensors)


def _in_onnx(way: str, model: Any, inputs: Mapping[str, Any]) -> Callable[[], object]:
    import torch

    class Undotted(torch.nn.Module):
        """A model without dots in input names: the exporter writes them into Python text, where `cache.0.key` is not a
        name."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **tensors: Any) -> Any:
            return self.model(**{name.replace("__", "."): tensor for name, tensor in tensors.items()})

    named = {name.replace(".", "__"): tensor for name, tensor in inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            Undotted().eval(), (), path, kwargs=named, input_names=list(named), dynamo=True, verbose=False
        )
        if way == "onnxruntime":
            session = import_module("onnxruntime").InferenceSession(path)
        else:
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(str(path))
    arrays = {name: tensor.numpy() for name, tensor in named.items()}
    return lambda: session.run(None, arrays)


if __name__ == "__main__":
    main()
