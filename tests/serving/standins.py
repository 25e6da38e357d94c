"""Stand-ins of the serving runtimes, which behave as docs/reference/serving-contract.md says the real ones do, with
their traps; and folders that they would have compiled.

As a module: `compiled(runtime, root)` writes a valid folder of a runtime, `install(runtime, folder, pins)` puts its
programs into a folder for PATH. As a program: the server, an HTTP server with /health, /metrics and the endpoints of
its runtime. Its answers depend on the weights that it loaded. The variable STANDIN_BEHAVIOUR has words: `constant` (one
answer for all prompts), `silent` (no line about what was loaded), `recompiles` (compiles once it serves), `hangs` (no
answer to a prompt).

Standard library only: the servers start without site-packages.
"""

# ruff: noqa: T201

import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RUNTIMES = ("vllm-nxdi", "vllm-neuron", "optimum", "torchscript")
READY = "standin: ready"

PINS: Mapping[str, Mapping[str, str]] = {
    "vllm-nxdi": {
        "torch": "2.9.0",
        "torch-neuronx": "2.9.0.2.11.19912",
        "neuronx-distributed-inference": "0.8.16251",
        "vllm": "0.13.0",
        "neuronx-cc": "2.22.12471.0",
    },
    "vllm-neuron": {
        "torch": "2.11.0",
        "libtorch-neuronx-lite": "2.11.0.1.0.1284",
        "vllm": "0.24.0",
        "vllm-neuron": "0.24.0.1.1.0",
        "neuronx-cc": "2.26.6360.0",
    },
    "optimum": {"optimum-neuron": "0.4.6", "neuronx-cc": "2.21.18209.0", "torch": "2.8.0", "vllm": "0.11.0"},
    "torchscript": {"torch": "2.9.0", "torch-neuronx": "2.9.0.2.11.19912"},
}
TARGETS = {"vllm-nxdi": "inf2", "vllm-neuron": "trn2", "optimum": "inf2", "torchscript": "inf2"}
NEURON_FLAGS = (
    "--tensor-parallel-size 2 --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 128 --block-size 32 "
    "--num-gpu-blocks-override 64 --no-enable-prefix-caching"
)
GRAPHS = 3  # of a command line


@dataclass(frozen=True)
class Compiled:
    """A folder that a runtime compiled, and what an import must be told about it."""

    runtime: str
    folder: Path
    model_files: Path | None = None
    nki_binaries: Path | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""
    command: str = ""

    @property
    def target(self) -> str:
        return TARGETS[self.runtime]

    def stated(self) -> dict[str, Any]:
        """Fields of an ImportRequest."""
        return {
            "runtime": self.runtime,
            "folder": self.folder,
            "model_files": self.model_files,
            "nki_binaries": self.nki_binaries,
            "target": self.target,
            "pins": dict(self.pins),
            "flags": self.flags,
            "command": self.command,
            "model_id": "acme/tiny",
        }

    def arguments(self) -> tuple[str, ...]:
        """Arguments of `nxpipe store import`."""
        more = {"--model-files": self.model_files, "--nki-binaries": self.nki_binaries}
        more |= {"--serve-flags": self.flags, "--command": self.command}  # type: ignore[dict-item]
        return (
            *(str(self.folder), "--runtime", self.runtime, "--model-id", "acme/tiny", "--target", self.target),
            *(word for name, value in more.items() if value for word in (name, str(value))),
            *(word for package, version in self.pins.items() for word in ("--pin", f"{package}={version}")),
        )


def compiled(runtime: str, root: Path, *, nki_root: str = "") -> Compiled:
    """A valid folder below `root`. `nki_root`: the path of NKI kernels that graphs of vllm-neuron name."""
    writers: dict[str, Callable[[], Compiled]] = {
        "vllm-nxdi": lambda: _compiled_nxdi(root),
        "vllm-neuron": lambda: _compiled_neuron(root, nki_root),
        "optimum": lambda: _compiled_optimum(root),
        "torchscript": lambda: _compiled_torchscript(root),
    }
    return writers[runtime]()


def install(runtime: str, folder: Path, versions: Mapping[str, str]) -> Path:
    """Install a runtime's programs, its Python with these packages, and a compiler beside them, for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder.parent / f"{folder.name}-packages"
    for name, version in versions.items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = f"PYTHONPATH={shlex.quote(str(packages))} exec {shlex.quote(sys.executable)} -S -B"
    this = shlex.quote(str(Path(__file__).resolve()))
    program = "serve-traced" if runtime == "torchscript" else "vllm"
    for name, line in {
        "python3": f'{python} "$@"',
        "nccom-test": 'echo "size(B) count(elems) type time(us)"; echo 1024 256 fp32 12',
        program: f'{python} {this} {runtime} "$@"',
        "neuronx-cc": f'{python} {this} neuronx-cc "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def safetensors(tensors: Mapping[str, bytes]) -> bytes:
    """A safetensors file of BF16 vectors."""
    header: dict[str, object] = {}
    end = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def weights(seed: str, size: int = 128 * 1024) -> dict[str, bytes]:
    """Two tensors, one above the limit of packs, one below."""
    block = hashlib.sha256(seed.encode()).digest()
    return {"model.embed.weight": block * (size // len(block)), "model.norm.weight": block * 4}


def write_torchscript(path: Path, content: str = "module") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/constants.pkl", b"\x80\x02).")
        archive.writestr(f"{path.stem}/code/__torch__.py", content * 40)


def write_model(folder: Path, seed: str = "imported") -> Path:
    """A Hugging Face model's folder with weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128}
    for name, document in {"config.json": config, "tokenizer.json": {"model": {}}, "tokenizer_config.json": {}}.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "model.safetensors").write_bytes(safetensors(weights(seed)))
    return folder


def _compiled_nxdi(root: Path, *, tp: int = 2) -> Compiled:
    folder = root / "compiled"
    folder.mkdir(parents=True)
    neuron = {
        "tp_degree": tp,
        "seq_len": 256,
        "batch_size": 4,
        "is_continuous_batching": True,
        "save_sharded_checkpoint": True,
        "logical_nc_config": 1,
        "quantized_checkpoints_path": None,
    }
    document = {"_name_or_path": str(root / "builder" / "tiny"), "model_type": "llama", "neuron_config": neuron}
    (folder / "neuron_config.json").write_text(json.dumps(document))
    write_torchscript(folder / "model.pt")
    for rank in range(tp):
        path = folder / f"weights/tp{rank}_sharded_checkpoint.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(safetensors(weights(f"rank {rank}")))
    model = write_model(root / "tiny")
    return Compiled("vllm-nxdi", folder, model_files=model, pins=PINS["vllm-nxdi"])


def shard_on_load(folder: Path) -> None:
    """Make a folder of NxD Inference one without shards, as they are compiled by default."""
    path = folder / "neuron_config.json"
    document = json.loads(path.read_text())
    document["neuron_config"]["save_sharded_checkpoint"] = False
    path.write_text(json.dumps(document))
    shutil.rmtree(folder / "weights")


def cache_keys(flags: str) -> list[str]:
    """The keys of the graphs of a command line."""
    words = [word for word in shlex.split(flags) if word not in ("--host", "--port")]
    return [hashlib.md5(f"{number} {' '.join(words)}".encode()).hexdigest() for number in range(GRAPHS)]


def _compiled_neuron(root: Path, nki_root: str) -> Compiled:
    cache = root / "cache"
    for key in cache_keys(NEURON_FLAGS):
        folder = cache / "neuron/compile_cache" / key
        folder.mkdir(parents=True)
        neff = f"neff of {key}".encode() * 50
        (folder / "graph.hlo").write_bytes(
            b"\x0a\x05graph" + (f"{nki_root}/kernel.bin\x12".encode() if nki_root else b"")
        )
        (folder / f"graph_{hashlib.md5(neff).hexdigest()}.neff").write_bytes(neff)
        (folder / ".artifact_metadata_v0.json").write_text(json.dumps({"cache_key": key, "version": 0}))
        (folder / ".compilation_complete").write_text(f"completed:1760000000\nneff_size:{len(neff)}\n")
        (folder / "command.txt").write_text("neuronx-cc compile --target=trn2 graph.hlo")
        (folder / f".{key}.compilation_metadata.lock").write_text("")
        (folder / ".cache_accessed").write_text("now")
    binaries = None
    if nki_root:
        nki = cache / "neuron/compile_cache/nki"
        nki.mkdir()
        (nki / f"{'a' * 32}.json").write_text(
            json.dumps({"dumped_config": f"{nki_root}/kernel.bin", "schema_version": 1})
        )
        binaries = root / "nki"
        binaries.mkdir()
        (binaries / "kernel.bin").write_bytes(b"kernel")
    model = write_model(root / "tiny")
    return Compiled("vllm-neuron", cache, model, binaries, PINS["vllm-neuron"], flags=NEURON_FLAGS)


def _compiled_optimum(root: Path) -> Compiled:
    folder = write_model(root / "exported")
    (folder / "model.safetensors").unlink()
    pins = PINS["optimum"]
    settings = {
        "optimum_neuron_version": pins["optimum-neuron"],
        "neuronxcc_version": pins["neuronx-cc"],
        "_serialized_key": "NxDNeuronConfig",
        "batch_size": 2,
        "sequence_length": 256,
        "tp_degree": 2,
        "target": "inf2",
        "checkpoint_id": "acme/tiny",
        "logical_nc_config": 1,
    }
    (folder / "neuron_config.json").write_text(json.dumps(settings))
    write_torchscript(folder / "model.pt")
    for rank in range(2):
        path = folder / f"checkpoint/weights/tp{rank}_sharded_checkpoint.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors(weights(f"rank {rank}")))
    return Compiled("optimum", folder, pins={name: pins[name] for name in ("torch", "vllm")})


def _compiled_torchscript(root: Path) -> Compiled:
    folder = root / "traced"
    for bucket in (32, 128):
        write_torchscript(folder / f"model-{bucket}.pt", f"bucket {bucket}")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {}}))
    command = "serve-traced ${artifact} --port ${port}"
    return Compiled("torchscript", folder, pins=PINS["torchscript"], command=command)


# The servers


@dataclass(frozen=True)
class Loaded:
    """What a server loaded: the digest that its answers depend on, and its compiled limits."""

    digest: str
    blocks: int | None = None
    max_model_len: int | None = None


def _digest(files: Mapping[str, Path] | list[Path]) -> str:
    paths = files.values() if isinstance(files, Mapping) else files
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def _torchscript(path: Path) -> Path:
    """torch.jit.load: ValueError for a missing file, RuntimeError for one that is no archive."""
    if not path.exists():
        raise ValueError(f"The provided filename {path} does not exist")
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile as error:
        raise RuntimeError(f"PytorchStreamReader failed reading zip archive: {error}") from error
    return path


def _compile(output: Path) -> None:
    """The compiler of PATH, as neuronx_cc is called by its name."""
    subprocess.run(["neuronx-cc", "compile", "--output", str(output)], check=True)


def _say(text: str) -> None:
    if "silent" not in os.environ.get("STANDIN_BEHAVIOUR", ""):
        print(text, flush=True)


def _nxdi(model: Path, flags: Mapping[str, str]) -> Loaded:
    json.loads((model / "config.json").read_text())  # AutoConfig, before the loader
    (model / "tokenizer.json").read_text()
    named = os.environ.get("NEURON_COMPILED_ARTIFACTS")
    digest = hashlib.md5(json.dumps(sorted(flags.items())).encode()).hexdigest()
    folder = Path(named) if named else model / "neuron-compiled-artifacts" / digest
    if not named and folder.exists():
        shutil.rmtree(folder)  # plugin 0.2.x, before it looks
    try:
        loaded = _nxdi_loaded(folder)
        _say(f"INFO Successfully loaded pre-compiled model artifacts from {folder}")
    except (FileNotFoundError, ValueError) as error:
        print(f"WARNING Exception: {error}", flush=True)
        print(f"WARNING Unable to find precompiled artifacts from {folder}. Recompiling...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        neuron = {"tp_degree": 1, "seq_len": 128, "batch_size": 1, "save_sharded_checkpoint": False}
        with (folder / "neuron_config.json").open("w") as file:  # config.save(), an OSError of which nobody catches
            json.dump({"_name_or_path": str(model), "neuron_config": neuron}, file)
        _compile(folder / "model.pt")
        loaded = Loaded(_digest([folder / "model.pt"]))
    return loaded


def _nxdi_loaded(folder: Path) -> Loaded:
    document = json.loads((folder / "neuron_config.json").read_text())
    neuron = document["neuron_config"]
    module = _torchscript(folder / "model.pt")
    if neuron["save_sharded_checkpoint"]:
        names = [f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(neuron["tp_degree"])]
        files = [folder / name for name in names]
    else:
        origin = Path(document["_name_or_path"]) if document["_name_or_path"] else folder
        files = sorted((origin if origin.exists() else folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no checkpoint in {folder}")
    # Flags of the command line change nothing of what was compiled.
    blocks = neuron["pa_num_blocks"] if neuron.get("is_block_kv_layout") else neuron["batch_size"]
    return Loaded(_digest([module, *files]), blocks, neuron["seq_len"])


def _neuron(model: Path, flags: Mapping[str, str]) -> Loaded:
    strict = [
        name for name in ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "NEURON_LIBTORCH_ASSERT_CACHE_HIT") if _is_on(name)
    ]
    for name in ("VLLM_NEURON_DISABLE_COMPILE_CACHE", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"):
        if _is_on(name) and strict:
            raise ValueError(f"{name} conflicts with {strict[0]}")
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache/vllm") / "neuron/compile_cache"
    words = [word for name, value in flags.items() for word in ((name, value) if value else (name,))]
    shapes = shlex.join(word for word in _without_address(words))
    neffs = []
    for key in cache_keys(shapes):
        folder = root / key
        if not (folder / ".compilation_complete").exists():
            if strict:  # of the local cache only; a remote one is not asked
                raise RuntimeError(f"Cache miss for key: {key} and warmup compilation is disabled")
            print(f"INFO No entry for key: {key}. Compiling...", flush=True)
            folder.mkdir(parents=True)
            _compile(folder / "graph_0.neff")
            (folder / ".compilation_complete").write_text("")
        elif json.loads((folder / ".artifact_metadata_v0.json").read_text())["cache_key"] != key:
            raise RuntimeError(f"cache_key of {folder} does not match {key}")
        with suppress(OSError):
            (folder / ".cache_accessed").touch()
        neffs += sorted(folder.glob("*.neff"))
        _say(f"INFO Local cache hit for key: {key}")
    for result in (root / "nki").glob("*.json"):
        kernel = json.loads(result.read_text())["dumped_config"]
        if not Path(kernel).exists():
            raise RuntimeError(f"[NCC_EVRF059] {kernel} cannot be read")
    shards = sorted(model.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no weights in {model}")
    return Loaded(_digest([*neffs, *shards]), int(flags["--num-gpu-blocks-override"]), int(flags["--max-model-len"]))


def _without_address(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip or word in ("--host", "--port"):
            skip = not skip
            continue
        kept.append(word)
    return kept


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def _optimum(model: Path, flags: Mapping[str, str]) -> Loaded:
    settings = json.loads((model / "neuron_config.json").read_text())
    for name, package in (("optimum_neuron_version", "optimum-neuron"), ("neuronxcc_version", "neuronx-cc")):
        if settings[name] != (found := importlib.metadata.version(package)):
            raise ValueError(f"Pretrained model is compiled with {package} {settings[name]}, and {found} is installed")
    if int(flags["--max-num-seqs"]) != settings["batch_size"]:
        raise ValueError("no cached configuration for this batch size; use --allow-non-cached-model")
    files = sorted((model / "checkpoint").rglob("*.safetensors")) or sorted(model.glob("*.safetensors"))
    if not files:
        if _is_on("HF_HUB_OFFLINE"):
            raise OSError("Cannot find the requested files in the disk cache and outgoing traffic has been disabled")
        print(f"Downloading {settings['checkpoint_id']}", flush=True)
    return Loaded(_digest([_torchscript(model / "model.pt"), *files]), None, settings["sequence_length"])


def _traced(folder: Path, flags: Mapping[str, str]) -> Loaded:
    modules = sorted(folder.glob("*.pt"))
    return Loaded(_digest([_torchscript(path) for path in modules or [folder / "model.pt"]]))


def _flags(words: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word] = "" if following.startswith("--") else following
    return flags


def serve(runtime: str, words: list[str]) -> None:
    load = {"vllm-nxdi": _nxdi, "vllm-neuron": _neuron, "optimum": _optimum, "torchscript": _traced}[runtime]
    folder, *rest = words[1:] if words[0] == "serve" else words
    flags = _flags(rest)
    loaded = load(Path(folder), flags)
    behaviour = os.environ.get("STANDIN_BEHAVIOUR", "")
    tokens = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, f"vllm:generation_tokens_total {tokens[0]}\nvllm:prompt_tokens_total {tokens[0]}\n")
            elif self.path == "/v1/models":
                self._answer(200, json.dumps({"data": [{"id": folder, "max_model_len": loaded.max_model_len}]}))
            else:
                self._answer(200 if self.path in ("/health", "/ping") else 404, "{}")

        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if "hangs" in behaviour and (tokens[0] or "later" not in behaviour):
                threading.Event().wait(60)
            given = flags.get("--num-gpu-blocks-override")
            if loaded.blocks is not None and given is not None and int(given) != loaded.blocks:
                self._answer(500, json.dumps({"error": "out of bounds access of the KV cache"}))
                return
            tokens[0] += 8
            seed = "" if "constant" in behaviour else json.dumps(json.loads(request).get("prompt", request))
            text = hashlib.sha256((loaded.digest + seed).encode()).hexdigest()[:16]
            logprob = float("nan") if "nan" in behaviour else -int(text[:8], 16) / 2**32
            choice = {"text": text, "logprobs": {"token_logprobs": [logprob]}}
            answer = {"choices": [choice]} if self.path == "/v1/completions" else {"outputs": text}
            self._answer(200, json.dumps(answer))

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
            pass

    server = ThreadingHTTPServer((flags.get("--host", "127.0.0.1"), int(flags.get("--port", "0"))), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"{READY} {server.server_port}", flush=True)
    if "recompiles" in behaviour:
        print("WARNING Recompiling...", flush=True)
    server.serve_forever(0.02)
    server.server_close()


def compile_module(words: list[str]) -> None:
    """The compiler: an hour in a moment."""
    write_torchscript(Path(words[-1]), "compiled on this machine")
    print("Compiler status PASS", flush=True)


def writable(folder: Path) -> None:
    """Give a read-only tree back to the tests' cleaning up."""
    for below, _, _ in os.walk(folder):
        os.chmod(below, stat.S_IRWXU)  # noqa: PTH101


if __name__ == "__main__":
    if sys.argv[1] == "neuronx-cc":
        compile_module(sys.argv[2:])
    else:
        serve(sys.argv[1], sys.argv[2:])
