"""Evidence of a program: its outputs, their deviation from the reference, and the environment of the run."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.builds import step_result
from nxpipe.artifact_store.documents import parse_document
from nxpipe.artifact_store.errors import Corrupt, Incomplete, InvalidDocument
from nxpipe.artifact_store.evidence import XLA, Compared
from nxpipe.pipeline.compile.artifact_files import device_program
from nxpipe.pipeline.compile.backend import BackendOutput
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.thresholds import Deviation, Thresholds, is_scores
from nxpipe.pipeline.models.versions import digest_of, library_version
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import NotEnoughMemory, VerificationFailed
from nxpipe.pipeline.util.process import available_memory, processors
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.builds import StepResult
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.pipeline.models.weights import Tensors


_ROWS: Final = 64  # rows of logits at a time: a row may have 256,000 entries, and is compared in float64


def compare(ours: Arrays, reference: Arrays) -> list[Deviation]:
    """One deviation for each output, in the reference's order."""
    return [_deviation(name, ours[name], value) for name, value in reference.items()]


def _deviation(name: str, ours: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> Deviation:
    import numpy as np

    if ours.shape != reference.shape:
        raise ValueError(f"output {name}: shape {ours.shape}, and the reference has {reference.shape}")
    a, b = (np.asarray(value, np.float64).ravel() for value in (ours, reference))
    difference = np.abs(a - b)
    largest = float(np.abs(b).max(initial=0.0))
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    worst = float(difference.max(initial=0.0))
    scores = is_scores(name) and reference.ndim and reference.size
    kl, top1 = _as_distributions(ours, reference) if scores else (None, None)
    return Deviation(
        output=name,
        max_absolute=worst,
        mean_absolute=float(difference.mean()) if difference.size else 0.0,
        max_relative=worst / largest if largest else worst,
        cosine=float(a @ b) / lengths if lengths else float(not (a.any() or b.any())),
        kl=kl,
        top1=top1,
    )


def _as_distributions(ours: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """The mean Kullback-Leibler divergence of the softmax over the last axis, and the fraction of positions with the
    same maximum."""
    import numpy as np

    a, b = (value.reshape(-1, value.shape[-1]) for value in (ours, reference))
    divergence, agreeing = 0.0, 0
    for start in range(0, len(a), _ROWS):
        log_q, log_p = (_log_softmax(value[start : start + _ROWS]) for value in (a, b))
        p = np.exp(log_p)
        # An entry of probability 0 in the reference adds nothing.
        divergence += float(np.where(p > 0, p * (log_p - log_q), 0).sum())
        agreeing += int((log_q.argmax(axis=-1) == log_p.argmax(axis=-1)).sum())
    return divergence / len(a), agreeing / len(a)


def _log_softmax(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    import numpy as np

    with np.errstate(invalid="ignore"):  # an infinite score makes the divergence NaN, which is beyond every threshold
        shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


# Files of the step result: the inputs of the program, and its outputs.
_INPUTS: Final = "inputs"
_OUTPUTS: Final = "answers"
_CPU: Final = Path("/proc/cpuinfo")
_LONGEST: Final = 4000  # characters of one value of the environment


@dataclass
class LoadedWeights:
    """A model's weights. `tensors` loads each when it is read; `loaded` keeps all of them in memory."""

    tensors: "Tensors"
    _loaded: "Arrays | None" = field(default=None, init=False)

    @property
    def are_loaded(self) -> bool:
        return self._loaded is not None

    def loaded(self, step: Step) -> "Arrays":
        if self._loaded is None:
            with step("load weights"):
                self._loaded = dict(self.tensors)
        return self._loaded


class WeightCache:
    """Cache of the weights of one model, the last that this process used: two would take twice the memory."""

    def __init__(self) -> None:
        self._key = ""
        self._weights: LoadedWeights | None = None

    def of(self, spec: BuildSpec, step: Step) -> LoadedWeights:
        key = digest_of({"model": spec.source.identity(), "weights": spec.weights.identity()})
        if self._weights is None or self._key != key:
            self._weights = None  # freed before the next is loaded
            with step(f"read the configuration of {spec.source.id}"):
                self._key, self._weights = key, LoadedWeights(spec.tensors())
        return self._weights


class EvidenceCollector:
    """Collector of the evidence of one program. All kinds run on the same inputs, and one run of the reference."""

    def __init__(
        self,
        spec: BuildSpec,
        shape: Shape,
        program: "CompiledGraph",
        weights: LoadedWeights,
        store: "Store",
        step: Step,
    ) -> None:
        _require_memory(spec.source.id, weights)
        self._spec, self._shape, self._program = spec, shape, program
        self._weights, self._store, self._step = weights.loaded(step), store, step

    def collect(self, kind: str, thresholds: Thresholds) -> BackendOutput:
        """Run the program and the reference, and compare their outputs; VerificationFailed for one beyond the
        thresholds."""
        spec, store = self._spec, self._store
        ours = self._on_xla() if kind == XLA else self._emulated()
        deviations = compare(ours, self._reference)
        for deviation in deviations:
            if faults := deviation.faults(thresholds):
                ran = " on XLA" if kind == XLA else ""
                raise VerificationFailed(
                    f"verification failed: {spec.source.id} {self._shape.name}{ran} {deviation.output} "
                    f"{'; '.join(faults)}; the reference is {spec.reference}; try --autocast none, or change [verify]"
                )
        files = {_INPUTS: store.put_blob(tensors_file(self._inputs)), _OUTPUTS: store.put_blob(tensors_file(ours))}
        libraries = ("jaxlib",) if kind == XLA else ()
        return BackendOutput(files, _metadata(deviations, spec.reference, execution_environment(libraries)))

    @cached_property
    def _inputs(self) -> Arrays:
        from nxpipe.emulator.capture import example_inputs

        return example_inputs(self._program.whole, self._spec.source.config, seed=0)

    @cached_property
    def _reference(self) -> Arrays:
        with self._step(f"run {self._shape.name} in {self._spec.reference}"):
            return self._spec.outputs(self._shape, self._weights, self._inputs)

    def _emulated(self) -> Arrays:
        """The outputs of the graph, in the arithmetic of the engines."""
        from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks

        with self._step(f"emulate {self._named}"):
            return LoadedProgram(self._program, LoadedRanks(self._program.graph, self._weights)).run(self._inputs)

    def _on_xla(self) -> Arrays:
        """The outputs of the stored HLO module, which was the input of neuronx-cc, by XLA on the CPU."""
        from nxpipe.emulator.executable.interface import interface_from
        from nxpipe.emulator.hlo.xla import LoadedModule
        from nxpipe.emulator.run.fast import LoadedProgram

        result = step_result(self._store, self._spec.program_key(self._shape))
        if result is None:
            raise Incomplete(
                f"{self._spec.source.id}: the program {self._shape.name} is gone; run the same command again"
            )
        paths = device_program(self._shape.name)
        interface = interface_from(self._store.read_blob(result.blob(paths["interface"])))
        module = self._store.read_blob(result.blob(paths["module"]))
        with self._step(f"run {self._named} on XLA's CPU"):
            return LoadedProgram(self._program, LoadedModule(module, interface, self._weights)).run(self._inputs)

    @property
    def _named(self) -> str:
        degree = self._program.degree
        return f"{self._shape.name} on {degree} ranks" if degree > 1 else self._shape.name


def compared(shape: Shape, result: "StepResult") -> Compared:
    """The comparison of one program with its reference, from its step result."""
    blobs = {"inputs": result.blob(_INPUTS).model_dump(), "answers": result.blob(_OUTPUTS).model_dump()}
    try:
        return parse_document(Compared, {"program": shape.name, "timing": None, **result.facts, **blobs})
    except InvalidDocument as fault:
        raise Corrupt(f"part {result.key}", str(fault), "read it with the version of nxpipe that wrote it") from fault


def _metadata(deviations: Sequence[Deviation], reference: str, environment: Mapping[str, str]) -> dict[str, object]:
    outputs = [deviation.figures().model_dump() for deviation in deviations]
    return {"yardstick": reference, "outputs": outputs, "surroundings": dict(environment)}


def execution_environment(libraries: Sequence[str] = ()) -> dict[str, str]:
    """The processor, its threads and the builds of numpy, torch and further libraries: figures may depend on them,
    artifacts must not.

    It has no host, user or path; torch is included if it is loaded.
    """
    import numpy as np

    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    environment = {
        "processor": _processor(),
        "machine": platform.machine(),
        "processors": str(processors()),
        "features": " ".join(built.get("SIMD Extensions", {}).get("found", ())),
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "numpy": np.__version__,
        **{name: library_version(name) for name in libraries},
    }
    environment |= {
        name: os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name in os.environ
    }
    if (torch := sys.modules.get("torch")) is not None:
        environment |= {
            "torch": str(torch.__version__),
            "torch threads": str(torch.get_num_threads()),
            "torch capability": torch.backends.cpu.get_cpu_capability(),
        }
    return {name: "".join(filter(str.isprintable, text))[:_LONGEST] for name, text in environment.items()}


def _processor() -> str:
    with suppress(OSError):
        for line in _CPU.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _require_memory(model: str, weights: LoadedWeights) -> None:
    """Raise NotEnoughMemory unless the reference's fp32 weights and the emulator's rounded copy fit beside the
    weights."""
    copies = 2 if weights.are_loaded else 3
    need = copies * 4 * sum(kind.elements for kind in weights.tensors.kinds.values())
    free = available_memory()
    if need > free:
        raise NotEnoughMemory(
            f"{model}: verification needs about {human_bytes(need)} of memory, and {human_bytes(free)} are "
            "free; pass --no-verify to publish without evidence"
        )


def tensors_file(values: Arrays) -> bytes:
    """Inputs or outputs of a program as evidence stores them; `stored_arrays` reads them."""
    import numpy as np
    from safetensors.numpy import save

    data: bytes = save({name: np.ascontiguousarray(value) for name, value in values.items()})
    return data
