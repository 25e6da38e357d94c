"""Recipes of serving runtimes: what a folder that a runtime compiled must hold, and the draft of its contract.

Each recipe reads the folder and raises ModelSourceError with one sentence (file, reason, remedy) for one that the
runtime would not load, or would load wrongly. docs/reference/serving-contract.md lists the rules and their reasons.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.contract import default_lnc
from nxpipe.pipeline.artifacts.runtime_folder import (
    TOKENIZERS,
    Content,
    checked_files,
    files_below,
    json_file,
    model_files,
    require_file,
    require_torchscript,
    require_weights,
)
from nxpipe.pipeline.models.configuration import task_of
from nxpipe.pipeline.util.errors import ModelSourceError

NKI_BINARIES: Final = "/var/tmp/nki-intermediate-cache"  # noqa: S108 - the path is compiled into the graphs
_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,63}")


@dataclass(frozen=True)
class ImportRequest:
    """What the user stated about a folder that a runtime compiled."""

    runtime: str
    folder: Path
    model_files: Path | None = None
    nki_binaries: Path | None = None
    name: str | None = None
    model_id: str | None = None
    target: str | None = None
    lnc: int | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""  # of `vllm serve`
    command: str = ""  # of a server of the user's own


@dataclass(frozen=True)
class DraftTree:
    """A tree before its files are stored: by path in it, a file of this machine, or bytes in place of one."""

    name: str
    destination: str
    files: Mapping[str, Content]
    runtime_writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A contract whose files are not stored yet, and the model that it serves."""

    request: ImportRequest
    model_id: str
    task: str
    target: str
    lnc: int
    tp: int
    pins: Mapping[str, str]
    trees: tuple[DraftTree, ...]
    environment: Mapping[str, str]
    argv: tuple[str, ...]
    forbidden: tuple[str, ...]
    proves: tuple[str, ...]
    disproves: tuple[str, ...]
    progress: tuple[str, ...]


def draft(request: ImportRequest) -> Draft:
    """The checked draft of a folder."""
    for package, version in request.pins.items():
        if not _VERSION.fullmatch(version):
            raise ModelSourceError(f"--pin {package}={version}: it is no exact version; give one, as in 2.9.0")
    return _RECIPES[request.runtime](request)


# Values of a draft


def _integer(settings: Mapping[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelSourceError(f"{path}: {name} is {value!r}, no positive number; compile and export the model again")
    return value


def _target(request: ImportRequest, recorded: object = None) -> str:
    known = sorted({instance.compiler_target for instance in INSTANCES.values()})
    if request.target and recorded and request.target != recorded:
        raise ModelSourceError(
            f"{request.folder}: was compiled for {recorded}; pass --target {recorded}, or compile it"
        )
    target = request.target or recorded
    if target not in known:
        raise ModelSourceError(f"{request.folder}: does not state its target; pass --target {'|'.join(known)}")
    return str(target)


def _recorded_lnc(settings: Mapping[str, Any], path: Path) -> int | None:
    name = "logical_nc_config"
    return None if settings.get(name) is None else _integer(settings, name, path)


def _lnc(request: ImportRequest, target: str, recorded: int | None = None) -> int:
    if request.lnc and recorded and request.lnc != recorded:
        raise ModelSourceError(
            f"{request.folder}: was compiled with logical cores of {recorded}; pass --lnc {recorded}"
        )
    return request.lnc or recorded or default_lnc(target)


def _pins(
    request: ImportRequest, required: tuple[str, ...], recorded: Mapping[str, str] | None = None
) -> dict[str, str]:
    pins = dict(request.pins)
    for package, version in (recorded or {}).items():
        if pins.setdefault(package, version) != version:
            raise ModelSourceError(
                f"{request.folder}: was compiled with {package} {version}, and --pin says {pins[package]}; leave it out"
            )
    for package in required:
        if package not in pins:
            raise ModelSourceError(
                f"{request.folder}: does not record its {package}, which must be the same where it is loaded; pass "
                f"--pin {package}=VERSION, from `pip list` of the environment that compiled it"
            )
    return pins


def _forbid_flags(request: ImportRequest) -> None:
    if request.flags:
        raise ModelSourceError(
            f"{request.folder}: {request.runtime} ignores flags that differ from the compiled shapes, so they are "
            "derived; leave out --serve-flags"
        )


def _vllm(model: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    return ("vllm", "serve", model, *flags, "--host", "0.0.0.0", "--port", "${port}")  # noqa: S104 - the load balancer's


def _command(request: ImportRequest) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(request.command))
    except ValueError as fault:
        raise ModelSourceError(f"--command {request.command!r}: {fault}; quote it as for a shell") from fault


def _id(request: ImportRequest, root: Path) -> str:
    return request.model_id or root.resolve().name


_COMPILES: Final = (r"\b[Rr]ecompiling\b", r"neuronx-cc compile\b", r"Compiler status PASS")
_VLLM_PROGRESS: Final = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_FOREIGN: Final = ("NEURON_RT_ALLOW_LEGACY_NEFF",)  # programs of another target would run, wrongly or slowly

# Recipe A: vLLM with NxD Inference


def _nxdi(request: ImportRequest) -> Draft:
    root = request.folder
    _forbid_flags(request)
    files: dict[str, Content] = dict(
        checked_files(files_below(root, leave_out=lambda path: path.startswith("neuronxcc-")))
    )
    remedy = "without it the server compiles for an hour into this folder: export the compiled model again"
    config_path = _path(require_file(files, "neuron_config.json", root, remedy))
    require_torchscript(_path(require_file(files, "model.pt", root, remedy)))
    config = json_file(config_path)
    compiled = config.get("neuron_config")
    if not isinstance(compiled, dict):
        raise ModelSourceError(f"{config_path}: has no neuron_config; export the compiled model again")
    tp = _integer(compiled, "tp_degree", config_path)
    model_root = request.model_files or root
    model = model_files(model_root) if request.model_files else {name: _path(one) for name, one in files.items()}
    if not request.model_files:
        model_files(root)
    if compiled.get("save_sharded_checkpoint"):
        for rank in range(tp):
            require_file(files, f"weights/tp{rank}_sharded_checkpoint.safetensors", root, remedy)
    else:
        weights = {name: path for name, path in model.items() if ".safetensors" in name and "/" not in name}
        files = {**weights, **files}  # the loader looks here once the path of the build machine is gone
        require_weights(files, root)
    files["neuron_config.json"] = _relocated(config, compiled, config_path)
    trees = [DraftTree("artifact", "artifact", files)]
    if request.model_files:
        settings = {name: path for name, path in model.items() if ".safetensors" not in name}
        trees.append(DraftTree("model", "model", settings))
    target = _target(request)
    lnc = _lnc(request, target, _recorded_lnc(compiled, config_path))
    return Draft(
        request=request,
        model_id=_id(request, model_root),
        task=task_of(json_file(model_root / "config.json")),
        target=target,
        lnc=lnc,
        tp=tp,
        pins=_pins(request, ("torch", "torch-neuronx", "neuronx-distributed-inference", "vllm")),
        trees=tuple(trees),
        environment={
            "NEURON_COMPILED_ARTIFACTS": "${artifact}",
            "NEURON_RT_NUM_CORES": str(tp),
            "HF_HUB_OFFLINE": "1",
            **({"NEURON_LOGICAL_NC_CONFIG": str(lnc)} if lnc > 1 else {}),
            **({"VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference"} if _is_fork(request.pins["vllm"]) else {}),
        },
        argv=_vllm("${model}" if request.model_files else "${artifact}", _nxdi_flags(compiled, tp, config_path)),
        forbidden=("NEURON_RT_VISIBLE_CORES", *_FOREIGN),
        proves=("Successfully loaded pre-compiled model artifacts from",),
        disproves=("Unable to find precompiled artifacts", *_COMPILES),
        progress=_VLLM_PROGRESS,
    )


def _path(content: Content) -> Path:
    assert isinstance(content, Path)
    return content


def _is_fork(version: str) -> bool:
    """vLLM up to 0.9 with Neuron inside, before there was a plugin."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) <= (0, 9)


def _relocated(config: dict[str, Any], compiled: dict[str, Any], path: Path) -> bytes:
    """neuron_config.json without paths of the machine that compiled: a checkpoint that happens to lie at one of them
    would be loaded in place of the imported one."""
    quantized = str(compiled.get("quantized_checkpoints_path") or "")
    if config.get("fused_spec_config") and not compiled.get("save_sharded_checkpoint"):
        raise ModelSourceError(
            f"{path}: has a draft model, whose checkpoint is at a path of the machine that compiled, and weights are "
            "sharded when they are loaded; compile with save_sharded_checkpoint"
        )
    if Path(quantized).is_absolute():
        if not compiled.get("save_sharded_checkpoint"):
            raise ModelSourceError(
                f"{path}: quantized_checkpoints_path is {quantized} of the machine that compiled, and weights are "
                "sharded when they are loaded; compile with save_sharded_checkpoint"
            )
        compiled = {**compiled, "quantized_checkpoints_path": None}
    name = {"_name_or_path": ""} if Path(str(config.get("_name_or_path") or "")).is_absolute() else {}
    return json.dumps({**config, **name, "neuron_config": compiled}, indent=2, ensure_ascii=False).encode() + b"\n"


def _nxdi_flags(compiled: Mapping[str, Any], tp: int, path: Path) -> tuple[str, ...]:
    """The flags of the compiled shapes: the server ignores others, and another number of blocks reads out of bounds."""
    chunked = compiled.get("chunked_prefill_config")
    batch = 1 if chunked else _integer(compiled, "batch_size", path)
    if isinstance(chunked, dict):
        batch = _integer(chunked, "max_num_seqs", path, default=1)
    flags = {
        "--tensor-parallel-size": tp,
        "--max-model-len": _integer(compiled, "seq_len", path),
        "--max-num-seqs": batch,
    }
    if compiled.get("is_block_kv_layout"):
        flags["--block-size"] = _integer(compiled, "pa_block_size", path)
        flags["--num-gpu-blocks-override"] = _integer(compiled, "pa_num_blocks", path)
    else:
        flags["--num-gpu-blocks-override"] = batch
    prefix = "--enable-prefix-caching" if compiled.get("is_prefix_caching") else "--no-enable-prefix-caching"
    return (*(word for name, value in flags.items() for word in (name, str(value))), prefix)


# Recipe B: vLLM Neuron, without NxD Inference

_KEY: Final = re.compile(r"[0-9a-f]{32}")
_GRAPHS: Final = "neuron/compile_cache"  # in VLLM_CACHE_ROOT
_NEURON_FLAGS: Final = (
    *("--tensor-parallel-size", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size"),
    "--num-gpu-blocks-override",
)


def _vllm_neuron(request: ImportRequest) -> Draft:
    root = request.folder / _GRAPHS if (request.folder / _GRAPHS).is_dir() else request.folder
    files = files_below(root, leave_out=_is_of_the_process)
    keys = sorted({path.split("/")[0] for path in files} - {"nki"})
    if not keys:
        raise ModelSourceError(f"{root}: holds no compiled graph; pass VLLM_CACHE_ROOT of the server that compiled")
    for key in keys:
        _require_graph(files, key, root)
    binaries = files_below(request.nki_binaries) if request.nki_binaries else {}
    _require_binaries(files, binaries, root)
    if request.model_files is None:
        raise ModelSourceError(f"{root}: has no weights and tokenizer; pass the model's folder with --model-files")
    model = model_files(request.model_files)
    require_weights(model, request.model_files)
    flags = _neuron_flags(request)
    target = _target(request, _compiled_for(files))
    if target not in ("trn2", "trn3"):
        raise ModelSourceError(
            f"{root}: vLLM Neuron serves on trn2 and trn3, not on {target}; use vllm-nxdi or optimum"
        )
    later = "libtorch-neuronx-lite" in request.pins
    lnc, tp = _lnc(request, target), int(flags["--tensor-parallel-size"])
    trees = [
        DraftTree("cache", "cache", {f"{_GRAPHS}/{path}": file for path, file in files.items()}, _OF_THE_PROCESS),
        DraftTree("model", "model", dict(model)),
    ]
    if binaries:
        trees.append(DraftTree("nki", NKI_BINARIES, dict(binaries)))
    return Draft(
        request=request,
        model_id=_id(request, request.model_files),
        task=task_of(json_file(request.model_files / "config.json")),
        target=target,
        lnc=lnc,
        tp=tp,
        pins=_pins(
            request,
            ("neuronx-cc", "torch", "libtorch-neuronx-lite" if later else "torch-neuronx", "vllm", "vllm-neuron"),
        ),
        trees=tuple(trees),
        environment={
            "VLLM_CACHE_ROOT": "${cache}",
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
            "NEURON_LOGICAL_NC_CONFIG": str(lnc),
            "NEURON_RT_NUM_CORES": str(tp),
            "HF_HUB_OFFLINE": "1",
            **(_LATER_ENVIRONMENT if later else {"VLLM_NEURON_ASSERT_CACHE_HIT": "1"}),
        },
        argv=_vllm("${model}", tuple(shlex.split(request.flags))),
        forbidden=(*_NEURON_FORBIDDEN, *_FOREIGN),
        proves=tuple(f"Local cache hit for key:.*{key}" for key in keys),
        disproves=(r"[Cc]ache miss for key", r"Compiling\.\.\.", *_COMPILES),
        progress=_VLLM_PROGRESS,
    )


_LATER_ENVIRONMENT: Final = {
    "NEURON_LIBTORCH_CACHE_ROOT": "${cache}",
    "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1",
    "NEURON_LIBTORCH_ASSERT_CACHE_HIT": "1",
}
# They turn the cache off, look elsewhere first, or (NEURON_COMPILED_ARTIFACTS) are documented and do nothing.
_NEURON_FORBIDDEN: Final = (
    *("VLLM_NEURON_DISABLE_COMPILE_CACHE", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"),
    *("VLLM_NEURON_REMOTE_CACHE", "NEURON_LIBTORCH_REMOTE_CACHE", "NEURON_COMPILED_ARTIFACTS"),
    "VLLM_NEURON_CPU_COMPILE",
)


_OF_THE_PROCESS: Final = ("*.lock", "*.compilation_metadata", ".cache_accessed")


def _is_of_the_process(path: str) -> bool:
    """Locks and records of the process that compiled, which mean nothing elsewhere."""
    return any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in _OF_THE_PROCESS)


def _require_graph(files: Mapping[str, Path], key: str, root: Path) -> None:
    remedy = "the server would stop with a cache miss: copy the folder with its hidden files, or compile again"
    if not _KEY.fullmatch(key):
        raise ModelSourceError(f"{root / key}: is no cache key of 32 hex digits; pass the cache as the server wrote it")
    require_file(files, f"{key}/graph.hlo", root, remedy)
    marker = _path(require_file(files, f"{key}/.compilation_complete", root, remedy))
    metadata = _path(require_file(files, f"{key}/.artifact_metadata_v0.json", root, remedy))
    if (found := json_file(metadata).get("cache_key")) != key:
        raise ModelSourceError(f"{metadata}: its cache_key is {found!r}, not the folder's name; do not rename folders")
    neffs = [path for path in files if re.fullmatch(rf"{key}/graph_[0-9a-f]{{32}}\.neff", path)]
    if len(neffs) != 1:
        raise ModelSourceError(f"{root / key}: has {len(neffs)} graph_*.neff instead of one; {remedy}")
    size = re.search(r"^neff_size:(\d+)$", marker.read_text(errors="replace"), re.MULTILINE)
    actual = files[neffs[0]].stat().st_size
    if size is None or int(size[1]) != actual:
        recorded = size[1] if size else "no size"
        raise ModelSourceError(f"{root / neffs[0]}: has {actual} bytes, and its marker says {recorded}; copy it again")


def _require_binaries(files: Mapping[str, Path], binaries: Mapping[str, Path], root: Path) -> None:
    """Every kernel that a graph or an NKI result names by its absolute path is imported too."""
    named = re.compile(re.escape(NKI_BINARIES).encode() + rb"/([A-Za-z0-9_./+-]+)")
    for path, file in files.items():
        if not path.endswith(("graph.hlo", ".json")):
            continue
        for match in named.finditer(file.read_bytes()):
            name = match[1].decode()  # in a proto, bytes of the next field may look like its end
            if not any(name.startswith(binary) for binary in binaries):
                raise ModelSourceError(
                    f"{root / path}: names {NKI_BINARIES}/{name}, which is not imported; pass the folder with "
                    f"--nki-binaries {NKI_BINARIES}"
                )


def _compiled_for(files: Mapping[str, Path]) -> str | None:
    """The target in the commands that the server kept."""
    for path, file in files.items():
        if path.endswith("/command.txt") and (
            match := re.search(r"--target[= ](\w+)", file.read_text(errors="replace"))
        ):
            return match[1]
    return None


def _neuron_flags(request: ImportRequest) -> dict[str, str]:
    try:
        words = shlex.split(request.flags)
    except ValueError as fault:
        raise ModelSourceError(f"--serve-flags: {fault}; quote them as for a shell") from fault
    given = dict(_option(word, following) for word, following in zip(words, [*words[1:], ""], strict=True))
    for flag in _NEURON_FLAGS:
        if not given.get(flag, "").isdecimal():
            raise ModelSourceError(
                f"{request.folder}: its graphs are of one command line, and {flag} is not known; pass the flags of "
                "`vllm serve` that compiled them, with numbers, as --serve-flags"
            )
    for flag in ("--port", "--host"):
        if flag in given:
            raise ModelSourceError(f"--serve-flags: {flag} is set by the fleet; leave it out")
    return given


def _option(word: str, following: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    return name, value if equals else following


# Recipe C: optimum-neuron


def _optimum(request: ImportRequest) -> Draft:
    root = request.folder
    files = checked_files(files_below(root))
    config = json_file(_path(require_file(files, "config.json", root, "export the model again")))
    section = config.get("neuron")
    if isinstance(section, dict):
        return _optimum_encoder(request, files, config, section)
    _forbid_flags(request)
    path = _path(require_file(files, "neuron_config.json", root, "export the model with optimum-cli export neuron"))
    settings = json_file(path)
    for name in ("optimum_neuron_version", "_serialized_key", "neuronxcc_version"):
        if not isinstance(settings.get(name), str) or not settings[name]:
            raise ModelSourceError(
                f"{path}: has no {name}, without which optimum-neuron does not load it; export again"
            )
    bundles = [name for name in files if re.fullmatch(r"model(_\w+)?\.pt", name)]
    if not bundles:
        raise ModelSourceError(f"{root / 'model.pt'}: is missing; export the model with optimum-cli export neuron")
    for bundle in bundles:
        require_torchscript(files[bundle])
    tp = _integer(settings, "tp_degree", path, default=1)
    _require_checkpoint(files, tp, root)
    if not any(name in files for name in TOKENIZERS):
        raise ModelSourceError(f"{root}: holds no tokenizer, such as tokenizer.json; copy the model's tokenizer files")
    target = _target(request, settings.get("target"))
    lnc = _lnc(request, target, _recorded_lnc(settings, path))
    batch = _integer(settings, "max_batch_size" if settings.get("max_batch_size") else "batch_size", path)
    recorded = {"optimum-neuron": settings["optimum_neuron_version"], "neuronx-cc": settings["neuronxcc_version"]}
    return replace(
        _one_tree(request, root, files, target, lnc, tp, task_of(config), _pins(request, ("torch", "vllm"), recorded)),
        argv=_vllm(
            "${artifact}",
            (
                *("--max-num-seqs", str(batch), "--max-model-len", str(_integer(settings, "sequence_length", path))),
                *("--tensor-parallel-size", str(tp)),
            ),
        ),
        progress=_VLLM_PROGRESS,
    )


def _optimum_encoder(
    request: ImportRequest, files: dict[str, Path], config: Mapping[str, Any], section: Mapping[str, Any]
) -> Draft:
    root = request.folder
    models = [name for name in files if name.rpartition("/")[2] == "model.neuron"]
    if not models:
        raise ModelSourceError(f"{root / 'model.neuron'}: is missing; export the model with optimum-cli export neuron")
    for name in models:
        require_torchscript(files[name])
    version = section.get("compiler_version")
    recorded = {"neuronx-cc": version} if isinstance(version, str) else {}
    target = _target(request)
    pins = _pins(request, ("optimum-neuron", "torch", "torch-neuronx"), recorded)
    drafted = _one_tree(request, root, files, target, _lnc(request, target), 1, task_of(config), pins)
    return replace(drafted, argv=_command(request))


def _require_checkpoint(files: Mapping[str, Path], tp: int, root: Path) -> None:
    """The weights are in the folder: else optimum-neuron downloads them from the hub."""
    sharded = {name for name in files if name.startswith("checkpoint/") and name.endswith(".safetensors")}
    for folder in sorted({name.rpartition("/")[0] for name in sharded}):
        for rank in range(tp):
            name = f"{folder}/tp{rank}_sharded_checkpoint.safetensors"
            require_file(files, name, root, f"the model has {tp} shards: export it again")
    if not sharded:
        require_weights(files, root)


# Recipe D: TorchScript of torch_neuronx.trace


def _torchscript(request: ImportRequest) -> Draft:
    root = request.folder
    files = checked_files(files_below(root))
    modules = [name for name in files if name.endswith(".pt")]
    if not modules:
        raise ModelSourceError(f"{root}: holds no *.pt; save the traced module with torch.jit.save")
    for name in modules:
        require_torchscript(files[name])
    target = _target(request)
    pins = _pins(request, ("torch", "torch-neuronx"))
    task = task_of(json_file(files["config.json"])) if "config.json" in files else "feature-extraction"
    drafted = _one_tree(request, root, files, target, _lnc(request, target), 1, task, pins)
    return replace(drafted, argv=_command(request))


def _one_tree(
    request: ImportRequest,
    root: Path,
    files: Mapping[str, Path],
    target: str,
    lnc: int,
    tp: int,
    task: str,
    pins: Mapping[str, str],
) -> Draft:
    """The draft of a runtime that loads one folder and holds no compiler on that path: no line of its log proves it."""
    return Draft(
        request=request,
        model_id=_id(request, root),
        task=task,
        target=target,
        lnc=lnc,
        tp=tp,
        pins=pins,
        trees=(DraftTree("artifact", "artifact", dict(files)),),
        environment={
            "NEURON_RT_NUM_CORES": str(tp),
            "HF_HUB_OFFLINE": "1",
            **({"NEURON_LOGICAL_NC_CONFIG": str(lnc)} if lnc > 1 else {}),
            "NXPIPE_SERVING_FOLDER": "${artifact}",
        },
        argv=(),
        forbidden=("NEURON_RT_VISIBLE_CORES", *_FOREIGN),
        proves=(),
        disproves=_COMPILES,
        progress=(),
    )


_RECIPES: Final[Mapping[str, Callable[[ImportRequest], Draft]]] = {
    "vllm-nxdi": _nxdi,
    "vllm-neuron": _vllm_neuron,
    "optimum": _optimum,
    "torchscript": _torchscript,
}
