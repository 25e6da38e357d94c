"""`this program`: a published row compiled by our compiler, and the time of its execution on the row's instance.

A row's model is captured from the catalogue's configuration, or from one of the same architecture: layers, widths,
heads, experts. Rows of equal configuration are compiled once. A folder keeps the programs, under a digest of the
configuration and of the compiler's source files.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nxpipe.emulator.hardware.core import CORES
from nxpipe.emulator.hardware.instance import Instance
from nxpipe.pipeline.models import catalogue
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.model import compiled_prefill, context_of, family_of, length_of
from nxpipe.pipeline.predict.work import NotPredicted

EMULATOR = Path(__file__).parent.parent / "emulator"
CLOCK = ("analysis", "run", "schedule/execution.py", "schedule/timeline.py")  # do not change a program


@dataclass(frozen=True)
class Compilation:
    """One program: a configuration as JSON or a module by name, its shape, type, division and core."""

    config: str
    task: str
    phase: str
    batch: int
    tokens: int
    dtype: str
    autocast: str
    ranks: int
    core: str

    @property
    def name(self) -> str:
        kind = json.loads(self.config).get("model_type", self.task)
        return f"{kind} {self.phase} b{self.batch} {self.tokens} tokens, {self.ranks} ranks on {self.core}"


def compilation_of(c: Configuration) -> Compilation:
    """What our compiler compiles for a row; NotPredicted says why it cannot."""
    if c.family not in ("encoder", "llm-decode", "llm-prefill", "vision-cnn", "vision-transformer"):
        reason = "has no cached decoder" if c.family == "encoder-decoder" else "is not one program"
        raise NotPredicted(f"{c.model}: {c.family} {reason} in our front end")
    found = architecture(c.published_name, c.model)
    if found is None:
        raise NotPredicted(f"{c.model}: its architecture is not in the catalogue")
    machine = family_of(c.instance)
    config, task = _configuration(c, found)
    phase, batch, tokens = _shape(c)
    dtype = "bfloat16" if c.family.startswith("llm") else "float32"
    autocast = {"": "none", "none": "none"}.get(c.autocast, "all" if c.autocast.startswith("all") else "matmult")
    ranks = _ranks(c, found, machine)
    return Compilation(
        json.dumps(config, sort_keys=True), task, phase, batch, tokens, dtype, autocast, ranks, machine.core
    )


def _shape(c: Configuration) -> tuple[str, int, int]:
    if c.family == "llm-decode":
        return "decode", c.batch, context_of(c)
    if c.family == "llm-prefill":
        batch, tokens = compiled_prefill(c)
        return "prefill", batch, tokens
    return "forward", c.batch, length_of(c) if c.family == "encoder" else 1


def _ranks(c: Configuration, a: Mapping[str, Any], machine: Instance) -> int:
    """A rank is a physical core. A published rank of several takes as many of ours where the heads divide."""
    each = max(1, round(c.cores / (c.tp * c.dp * c.pp))) if CORES[machine.core].lnc_default > 1 else 1
    return c.tp * each if a.get("heads", 1) % (c.tp * each) == 0 else c.tp


def _configuration(c: Configuration, a: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config.json and the task of a row: the catalogue's, with the row's head, or one of equal architecture."""
    known = next((found for name in (c.published_name, c.model) if (found := catalogue.find(name))), None)
    width = c.image[0] if c.image else 224
    match a["kind"]:
        case "encoder":
            config: dict[str, Any] = dict(known.config) if known else _encoder(c.model, a)
            return config | {"num_labels": a.get("classes", 2)}, _encoder_task(a)
        case "decoder":
            config = dict(known.config) if known else _decoder(a)
            # Positions are computed or read from a table, whose length no time depends on.
            places = max(1 << 17, int(config.get("max_position_embeddings", 0)))
            return config | {"max_position_embeddings": places}, "text-generation"
        case "vision-transformer":
            if "text" in a:
                return dict(known.config) if known else {}, "zero-shot-image-classification"
            return {
                "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": a["hidden"],
                "num_hidden_layers": a["layers"], "num_attention_heads": a["heads"],
                "intermediate_size": a["intermediate"], "patch_size": a["patch"], "image_size": width,
                "num_labels": a["classes"],
            }, "image-classification"  # fmt: skip
        case "resnet":
            basic = a["block"] == "basic"
            widths = [64, 128, 256, 512]
            return {
                "model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": a["depths"],
                "layer_type": a["block"], "hidden_sizes": widths if basic else [4 * each for each in widths],
                "num_labels": 1000, "image_size": width,
            }, "image-classification"  # fmt: skip
        case "vgg" | "segmentation-unet" | "perceiver":
            return dict(a) | {"image": c.image or (224, 224)}, "module"
    raise NotPredicted(f"{c.model}: a model of kind {a['kind']} has no configuration")


def _encoder_task(a: Mapping[str, Any]) -> str:
    if a.get("per_token"):
        return "fill-mask"
    return "text-classification" if "classes" in a else "feature-extraction"


def _encoder(model: str, a: Mapping[str, Any]) -> dict[str, Any]:
    if a["layers"] * 2 <= 12 and "distil" in model:  # without token types and pooler
        return {
            "model_type": "distilbert", "dim": a["hidden"], "n_layers": a["layers"], "n_heads": a["heads"],
            "hidden_dim": a["intermediate"], "vocab_size": a["vocab"], "architectures": ["DistilBertModel"],
        }  # fmt: skip
    return {
        "model_type": "bert", "hidden_size": a["hidden"], "num_hidden_layers": a["layers"],
        "num_attention_heads": a["heads"], "intermediate_size": a["intermediate"], "vocab_size": a["vocab"],
        "architectures": ["BertModel"], "max_position_embeddings": 1024,
    }  # fmt: skip


def _decoder(a: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        "hidden_size": a["hidden"], "num_hidden_layers": a["layers"], "num_attention_heads": a["heads"],
        "num_key_value_heads": a["kv_heads"], "head_dim": a["head_dim"], "vocab_size": a["vocab"],
        "intermediate_size": a["intermediate"] or a.get("expert_intermediate", 0),
    }  # fmt: skip
    if not a.get("experts"):
        kind = "llama" if a.get("gated", True) else "gpt_neox"
        return sizes | {
            "model_type": kind,
            "architectures": ["LlamaForCausalLM" if kind == "llama" else "GPTNeoXForCausalLM"],
        }
    experts = {
        "num_experts": a["experts"], "num_experts_per_tok": a["active_experts"],
        "moe_intermediate_size": a["expert_intermediate"],
    }  # fmt: skip
    if a.get("shared_intermediate"):
        shared = {"shared_expert_intermediate_size": a["shared_intermediate"]}
        return sizes | experts | shared | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    return sizes | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


@cache
def compiler_digest() -> str:
    """A digest of the files that can change a program."""
    sources = hashlib.sha256()
    for path in sorted([*EMULATOR.rglob("*.py"), Path(__file__).with_name("published_modules.py")]):
        name = path.relative_to(EMULATOR.parent).as_posix()
        if not name.startswith(tuple(f"emulator/{each}" for each in CLOCK)):
            sources.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sources.hexdigest()


def compiled(task: Compilation, folder: Path | None) -> Any:
    """The program, read from the folder if it is there."""
    from nxpipe.emulator.executable.executable import Executable, read, to_bytes

    name = hashlib.sha256((compiler_digest() + json.dumps(asdict(task), sort_keys=True)).encode()).hexdigest()
    path = folder / f"{name}.nxe" if folder else None
    if path and path.is_file():
        return read(path).program
    program = _compile(task)
    if path:
        whole = path.with_suffix(f".{task.ranks}.part")
        whole.write_bytes(to_bytes(Executable(program)))
        whole.replace(path)
    return program


def _compile(task: Compilation) -> Any:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.compile import compile_program, shard_graph
    from nxpipe.emulator.lower.backend import lower
    from nxpipe.emulator.passes import PassOptions, run_passes

    options = PassOptions(autocast=task.autocast, tensor_parallel=task.ranks)
    config = json.loads(task.config)
    if task.task == "module":
        from published_modules import capture_of

        made = shard_graph(run_passes(capture_of(config, task.batch), options), options)
    else:
        capacity = task.tokens if task.phase == "prefill" else None
        request = CaptureRequest(config, task.task, task.phase, task.batch, task.tokens, task.dtype, capacity)
        made = compile_program(request, options)
    return lower(made.graph, task.core, made.degree)


def _times(task: Compilation, instance: str, in_flight: float, folder: Path | None) -> dict[str, float] | str:
    """The execution's times in seconds, or why there are none. Runs in a worker process."""
    from nxpipe.emulator.schedule.execution import execute

    try:
        found = execute(compiled(task, folder), family_of(instance), in_flight=in_flight)
    except Exception as fault:  # a row that our compiler refuses is a result
        return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
    if found is None:
        return "the timeline has too many steps"
    return {name: value / 1e9 for name, value in asdict(found).items()}


def executions(
    rows: Iterable[Configuration], *, jobs: int, folder: Path | None
) -> dict[Configuration, dict[str, float] | str]:
    """The times of each row's program, or the reason why it has none; progress on stderr."""
    found: dict[Configuration, dict[str, float] | str] = {}
    wanted: dict[tuple[Compilation, str, float], list[Configuration]] = {}
    for c in rows:
        try:
            wanted.setdefault((compilation_of(c), c.instance, c.queued), []).append(c)
        except NotPredicted as reason:
            found[c] = str(reason)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(_times, *key, folder): key for key in wanted}
        for number, task in enumerate(as_completed(tasks), 1):
            key, times = tasks[task], task.result()
            text = times if isinstance(times, str) else f"{times['cycle'] * 1e3:.2f} ms"
            print(f"{number}/{len(tasks)} {key[0].name}, {key[1]}: {text}", file=sys.stderr, flush=True)
            found |= dict.fromkeys(wanted[key], times)
    return found
