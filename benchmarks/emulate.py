"""How fast the emulator runs whole models, beside PyTorch and others on the same machine, in the same run.

    python benchmarks/emulate.py [bert] [llama-prefill] [llama-decode]

Every way is timed in a process of its own, so that peak memory is its own and no library's threads disturb another's.
Weights are random, times are medians. The goal: at most 1.15 times PyTorch's eager fp32, at most 1.5 times the weights.
"""

import argparse
import base64
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

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
# name -> configuration (or the id of a known one), task, phase, sequence
CASES: Mapping[str, tuple[Any, str, str, int]] = {
    "bert": ("bert-base-uncased", "feature-extraction", "forward", 128),
    "llama-prefill": (_LLAMA_1B, "text-generation", "prefill", 128),
    "llama-decode": (_LLAMA_1B, "text-generation", "decode", 128),
}
WAYS = (
    *("eager fp32", "emulated bf16 matmult", "eager bf16", "compile fp32", "compile bf16"),
    *("onnxruntime", "onnx reference"),
)
_REPEATS = {"bert": 15, "llama-prefill": 3, "llama-decode": 7}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.cases[0], options.one)))
        return
    for case in options.cases:
        print(f"\n{case}\n{'':24}{'median ms':>10}{'x eager fp32':>14}{'peak RSS GB':>13}{'x weights':>11}")
        yardstick = 0.0
        for way in WAYS:
            found = _in_a_process(case, way)
            if "why_not" in found:
                print(f"{way:24}{found['why_not']}")
                continue
            yardstick = yardstick or found["ms"]
            ratio, memory = found["ms"] / yardstick, found["rss"] / found["weights"]
            print(f"{way:24}{found['ms']:10.1f}{ratio:14.2f}{found['rss'] / 1e9:13.2f}{memory:11.2f}", flush=True)


def _in_a_process(case: str, way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, case, "--one", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"why_not": "failed: " + (done.stderr.strip().splitlines() or ["no word"])[-1][:90]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(case: str, way: str) -> dict[str, Any]:
    """The median time of one forward pass, the peak memory, and the bytes of the weights in fp32."""
    if way == "capture":
        return {"graph": base64.b64encode(_captured(_request(case)).to_bytes()).decode()}
    library = {"onnxruntime": "onnxruntime", "onnx reference": "onnx"}.get(way)
    if library and find_spec(library) is None:
        return {"why_not": f"{library} is not installed"}
    if way.startswith("compile") and not (shutil.which("g++") or shutil.which("clang++")):
        return {"why_not": "no C++ compiler here"}
    run, weights = _emulated(case) if way.startswith("emulated") else _in_pytorch(case, way)
    run()
    times = []
    for _ in range(_REPEATS[case]):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ms": statistics.median(times) * 1e3, "rss": peak, "weights": weights}


def _request(case: str) -> Any:
    from emulator.capture import CaptureRequest
    from pipeline.models.known import find

    config, task, phase, sequence = CASES[case]
    known = find(config) if isinstance(config, str) else None
    return CaptureRequest(known.config if known else config, task, phase, 1, sequence, "float32")


def _tensors(request: Any) -> Any:
    from emulator.capture import parameter_specs
    from pipeline.models.weights import RandomWeights, Tensors

    return Tensors(RandomWeights(0), parameter_specs(request))


def _bytes(tensors: Any) -> int:
    return sum(kind.nbytes for kind in tensors.kinds.values())


def _captured(request: Any) -> Any:
    from emulator.capture import capture
    from emulator.passes import PassOptions, run_passes

    return run_passes(capture(request), PassOptions("matmult", "bf16"))


def _emulated(case: str) -> tuple[Callable[[], object], int]:
    """A compiled graph needs no PyTorch to run, so it is captured in a process of its own."""
    from emulator.capture import example_inputs
    from emulator.fast import LoadedGraph
    from emulator.graph import Graph
    from pipeline.models.weights import RandomWeights, Tensors

    request = _request(case)
    graph = Graph.from_bytes(base64.b64decode(_in_a_process(case, "capture")["graph"]))
    tensors = Tensors(RandomWeights(0), {name: value.type for name, value in graph.parameters.items()})
    loaded = LoadedGraph(graph, tensors)
    inputs = example_inputs(graph, request.config, seed=0)
    return lambda: loaded.run(inputs), _bytes(tensors)


def _in_pytorch(case: str, way: str) -> tuple[Callable[[], object], int]:
    """PyTorch's model itself, without hooks: eager, compiled, or exported to ONNX."""
    import torch

    from emulator.capture import capture, example_inputs
    from emulator.capture.reference import Reference

    request = _request(case)
    tensors = _tensors(request)
    reference = Reference(request, tensors, "bfloat16" if way.endswith("bf16") else "float32")
    inputs = reference.tensors(example_inputs(capture(request), request.config, seed=0))
    model = torch.compile(reference.model) if way.startswith("compile") else reference.model

    def run() -> object:
        with torch.no_grad():
            return model(**inputs)

    if way.startswith("onnx"):
        return _in_onnx(way, reference.model, inputs), _bytes(tensors)
    return run, _bytes(tensors)


def _in_onnx(way: str, model: Any, inputs: Mapping[str, Any]) -> Callable[[], object]:
    import tempfile

    import torch

    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, (), path, kwargs=dict(inputs), input_names=list(inputs), dynamo=True, verbose=False)
        if way == "onnxruntime":
            session = import_module("onnxruntime").InferenceSession(path)
        else:
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(str(path))
    return lambda: session.run(None, arrays)


if __name__ == "__main__":
    main()
