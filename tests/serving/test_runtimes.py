"""Contracts of serving runtimes: from a folder that a runtime compiled to its server, which compiles nothing.

The tests run as root on many machines, where mode 0444 stops nobody: a server that writes into its trees is then found
by `require_unchanged`. The test of what the modes prevent takes CAP_DAC_OVERRIDE from its server.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.pipeline.artifacts import recipes
from nxpipe.pipeline.artifacts.contract import (
    ServingContract,
    contract_of_folder,
    contracts_of,
    installed_versions,
    interpreter_of,
    require_pins,
)
from nxpipe.pipeline.artifacts.payload import publish_draft
from nxpipe.pipeline.artifacts.recipes import ImportRequest, draft
from nxpipe.pipeline.fleet.agent import trees
from nxpipe.pipeline.fleet.agent.trees import LaidOut, ProofOfNoCompile, lay_out
from nxpipe.pipeline.fleet.monitor.source import Compilers
from nxpipe.pipeline.util.errors import NotReady
from tests.artifact_store.samples import folder as store_in
from tests.artifact_store.samples import put
from tests.serving import standins
from tests.serving.standins import NEURON_FLAGS, PINS, RUNTIMES, Compiled, cache_keys, compiled

_DROP, _DAC_OVERRIDE = 24, 1  # PR_CAPBSET_DROP and the capability by which root writes to any file


def obey_modes() -> None:
    """From the next program on, root is stopped by modes like any user."""
    if os.getuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(_DROP, _DAC_OVERRIDE, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


@dataclass
class Serving:
    """A fetched artifact of a runtime, on a machine with that runtime."""

    runtime: str
    source: Compiled
    fetched: Path
    root: Path
    programs: Path
    processes: Path
    base: dict[str, str] = field(default_factory=dict)

    @property
    def contract(self) -> ServingContract:
        contract = contract_of_folder(self.fetched)
        assert contract is not None
        return contract

    def tree(self, name: str) -> Path:
        return self.fetched / "serving" / self.contract.name / name

    def lay_out(self) -> LaidOut:
        return lay_out(self.contract, self.fetched, self.root, free_port())

    def proof(self) -> ProofOfNoCompile:
        return ProofOfNoCompile(self.contract, Compilers(self.processes))

    def start(self, laid_out: LaidOut, environ: Mapping[str, str] | None = None, **options: Any) -> "Started":
        environ = laid_out.environ(self.base) if environ is None else environ
        return Started.of(laid_out.argv, environ, self.proof(), **options)


@dataclass
class Started:
    """A server whose log the proof has read until it was ready or had ended."""

    process: "subprocess.Popen[str]"
    proof: ProofOfNoCompile
    log: list[str]
    port: int | None

    @classmethod
    def of(
        cls, argv: tuple[str, ...], environ: Mapping[str, str], proof: ProofOfNoCompile, **options: Any
    ) -> "Started":
        program = shutil.which(argv[0], path=environ["PATH"])
        assert program is not None
        process = subprocess.Popen(
            (program, *argv[1:]), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )
        assert process.stdout is not None
        started = cls(process, proof, [], None)
        for line in process.stdout:
            proof.line(line)
            started.log.append(line)
            if line.startswith(standins.READY):
                started.port = int(line.split()[-1])
                break
        return started

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.loads(response.read())

    def stop(self) -> str:
        self.process.terminate()
        rest, _ = self.process.communicate(timeout=10)
        return "".join(self.log) + rest


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


Prepare = Callable[..., Serving]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepare]:
    nki = str(tmp_path / "var/tmp/nki-intermediate-cache")
    monkeypatch.setattr(recipes, "NKI_BINARIES", nki)

    def make(runtime: str, change: Callable[[Compiled], object] = lambda _: None) -> Serving:
        source = compiled(runtime, tmp_path / "built", nki_root=nki if runtime == "vllm-neuron" else "")
        change(source)
        store = store_in(tmp_path / "store").store
        imported = publish_draft(store, draft(ImportRequest(**source.stated())))
        assert contracts_of(store, imported.published.manifest) == (imported.contract,)
        fetch(store.blobs, imported.published.manifest, tmp_path / "fetched")
        versions = PINS[runtime]
        programs = standins.install(runtime, tmp_path / "venv/bin", versions)
        processes = tmp_path / "proc"
        processes.mkdir()
        base = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
        return Serving(runtime, source, tmp_path / "fetched", tmp_path / "laid-out", programs, processes, base)

    yield make
    for folder in (tmp_path / "laid-out", Path(nki)):
        standins.writable(folder)


# From the compiled folder to the server


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_a_runtime_compiled_is_served_elsewhere_and_proves_that_nothing_was_compiled(
    runtime: str, prepare: Prepare
) -> None:
    serving = prepare(runtime)
    shutil.rmtree(serving.source.folder.parent)  # the machine that compiled is gone
    laid_out = serving.lay_out()
    require_pins(serving.contract, installed_versions(interpreter_of(laid_out.argv[0], serving.base["PATH"])))
    server = serving.start(laid_out)
    assert server.port is not None, server.log
    path, body = ("/v1/completions", {"prompt": "hi"}) if runtime != "torchscript" else ("/invocations", {"text": "hi"})
    assert server.ask(path, body)
    assert (server.proof.fault(), server.proof.unproven()) == (None, None)
    laid_out.require_unchanged()
    server.stop()


def test_the_flags_of_vllm_are_those_of_the_compiled_shapes(prepare: Prepare) -> None:
    argv = prepare("vllm-nxdi").lay_out().argv
    flags = dict(pairwise(argv))
    numbers = {"--tensor-parallel-size": "2", "--max-model-len": "256", "--max-num-seqs": "4"}
    assert numbers.items() <= flags.items()
    assert flags["--num-gpu-blocks-override"] == "4"


def test_flags_of_a_block_cache_are_its_blocks_and_their_size(prepare: Prepare) -> None:
    def paged(source: Compiled) -> None:
        path = source.folder / "neuron_config.json"
        document = json.loads(path.read_text())
        document["neuron_config"] |= {"is_block_kv_layout": True, "pa_num_blocks": 96, "pa_block_size": 32}
        path.write_text(json.dumps(document))

    serving = prepare("vllm-nxdi", paged)
    laid_out = serving.lay_out()
    text = " ".join(laid_out.argv)
    assert "--block-size 32 --num-gpu-blocks-override 96" in text
    server = serving.start(laid_out)
    assert server.ask("/v1/completions", {"prompt": "hi"})["choices"]
    server.stop()


def test_a_checkpoint_at_the_path_of_the_machine_that_compiled_is_not_served(prepare: Prepare, tmp_path: Path) -> None:
    """Shard on load reads `_name_or_path` of the compiled configuration first, whatever lies there."""

    def foreign(source: Compiled) -> None:
        standins.shard_on_load(source.folder)
        standins.write_model(tmp_path / "built/builder/tiny", seed="something else")

    serving = prepare("vllm-nxdi", foreign)
    laid_out = serving.lay_out()
    server = serving.start(laid_out)
    loaded = [Path(laid_out.places["artifact"], name) for name in ("model.pt", "model.safetensors")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(loaded))).hexdigest()
    expected = hashlib.sha256((digest + json.dumps("hi")).encode()).hexdigest()[:16]
    assert server.ask("/v1/completions", {"prompt": "hi"})["choices"][0]["text"] == expected
    server.stop()


# Before the start: what is missing, changed, or of another version

BROKEN = {
    "vllm-nxdi": ("artifact/model.pt", "artifact/weights/tp1_sharded_checkpoint.safetensors", "model/tokenizer.json"),
    "vllm-neuron": (
        "cache/*/.compilation_complete",
        "cache/*/graph_*.neff",
        "model/model.safetensors",
        "nki/kernel.bin",
    ),
    "optimum": ("artifact/neuron_config.json", "artifact/checkpoint/weights/tp0_sharded_checkpoint.safetensors"),
    "torchscript": ("artifact/model-32.pt",),
}
FILES = [(runtime, pattern) for runtime, patterns in BROKEN.items() for pattern in patterns]


def chosen(serving: Serving, pattern: str) -> Path:
    tree, _, rest = pattern.partition("/")
    rest = rest.replace("*/", "neuron/compile_cache/*/", 1) if tree == "cache" else rest
    return min(path for path in serving.tree(tree).glob(rest) if path.is_file() and path.parent.name != "compile_cache")


@pytest.mark.parametrize(("runtime", "pattern"), FILES)
@pytest.mark.parametrize("fault", ["missing", "truncated", "changed"])
@pytest.mark.sample(3)
def test_a_broken_file_is_named_before_the_server_starts(
    fault: str, runtime: str, pattern: str, prepare: Prepare
) -> None:
    serving = prepare(runtime)
    path = chosen(serving, pattern)
    data = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(data[:-1] if fault == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(NotReady) as refused:
        serving.lay_out()
    assert path.name in str(refused.value)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_pin_is_compared_and_the_message_names_package_wanted_and_found(runtime: str, prepare: Prepare) -> None:
    contract = prepare(runtime).contract
    installed = dict(PINS[runtime])
    require_pins(contract, installed)
    for package, wanted in contract.pins.items():
        for found in ("9.9.9", None):
            other = {name: version for name, version in installed.items() if name != package}
            other |= {package: found} if found else {}
            with pytest.raises(NotReady, match=f"{package} {wanted}.*{found or 'none'}"):
                require_pins(contract, other)


def test_a_driver_may_be_newer_than_its_pin_and_a_local_version_counts_as_the_public_one(prepare: Prepare) -> None:
    contract = prepare("torchscript").contract
    pinned = contract.model_copy(update={"pins": {"driver": "2.26.5.0", "torch": "2.9.0", "sdk": "2.31.0"}})
    require_pins(pinned, {"driver": "2.27.0.0", "torch": "2.9.0+cpu"})
    with pytest.raises(NotReady, match=r"driver at least 2\.26\.5\.0, and 2\.9\.1 is installed"):
        require_pins(pinned, {"driver": "2.9.1", "torch": "2.9.0"})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_forbidden_variable_is_refused_by_name(runtime: str, prepare: Prepare) -> None:
    laid_out = prepare(runtime).lay_out()
    for name in laid_out.contract.forbidden:
        with pytest.raises(NotReady, match=name):
            laid_out.environ({"PATH": "/bin", name: "1"})


# While it starts: the traps of the runtimes


def test_a_recompilation_after_a_swallowed_error_stops_at_the_refused_compiler(prepare: Prepare) -> None:
    """NxD Inference swallows the error of a lost file and compiles into the same folder: as root it can write there,
    and the log, the refusal on PATH and the digests each reveal it."""
    serving = prepare("vllm-nxdi")
    laid_out = serving.lay_out()
    lost = Path(laid_out.places["artifact"], "weights/tp1_sharded_checkpoint.safetensors")
    lost.parent.chmod(0o755)
    lost.unlink()
    server = serving.start(laid_out)
    assert server.port is None
    assert "Recompiling" in str(server.proof.fault()) or "Unable to find" in str(server.proof.fault())
    with pytest.raises(NotReady, match=r"neuron_config\.json|tp1_sharded"):
        laid_out.require_unchanged()
    assert server.process.wait(10) != 0


def test_a_server_that_modes_stop_cannot_write_into_the_trees_so_a_recompilation_ends_at_once(prepare: Prepare) -> None:
    serving = prepare("vllm-nxdi")
    laid_out = serving.lay_out()
    lost = Path(laid_out.places["artifact"], "model.pt")
    lost.parent.chmod(0o755)
    lost.unlink()
    lost.parent.chmod(0o555)
    before = Path(laid_out.places["artifact"], "neuron_config.json").read_bytes()
    server = serving.start(laid_out, preexec_fn=obey_modes)
    log = server.stop()
    assert "Recompiling" in log
    assert "PermissionError" in log
    assert Path(laid_out.places["artifact"], "neuron_config.json").read_bytes() == before


@pytest.mark.parametrize("runtime", ["vllm-nxdi", "vllm-neuron"])
def test_no_compiler_of_the_environment_answers_on_path(runtime: str, prepare: Prepare) -> None:
    serving = prepare(runtime)
    environ = serving.lay_out().environ(serving.base)
    compiler = shutil.which("neuronx-cc", path=environ["PATH"])
    assert compiler is not None
    called = subprocess.run([compiler, "compile"], capture_output=True, text=True, check=False)
    assert called.returncode != 0
    proof = serving.proof()
    proof.line(called.stderr)
    assert "a compiler was called" in str(proof.fault())


def test_a_cache_that_a_server_may_not_write_survives_its_rmtree(prepare: Prepare) -> None:
    """Plugin 0.2.x, which removes the folder that it computed before it looks into it."""
    laid_out = prepare("vllm-nxdi").lay_out()
    artifact = laid_out.places["artifact"]
    code = f"import shutil; shutil.rmtree({artifact!r})"
    removed = subprocess.run([sys.executable, "-S", "-c", code], check=False, preexec_fn=obey_modes)
    assert removed.returncode != 0
    laid_out.require_unchanged()


def test_the_contract_sets_the_variable_without_which_the_plugin_removes_its_cache(prepare: Prepare) -> None:
    serving = prepare("vllm-nxdi")
    laid_out = serving.lay_out()
    environ = laid_out.environ(serving.base)
    assert environ["NEURON_COMPILED_ARTIFACTS"] == laid_out.places["artifact"]
    without = {name: value for name, value in environ.items() if name != "NEURON_COMPILED_ARTIFACTS"}
    server = serving.start(laid_out, without)
    assert server.port is None
    assert server.proof.fault() is not None
    server.stop()
    with pytest.raises(NotReady, match="neuron-compiled-artifacts"):  # where root could write
        laid_out.require_unchanged()


def test_a_cache_that_lacks_a_graph_of_the_flags_stops_the_server_and_the_proof_says_so(prepare: Prepare) -> None:
    serving = prepare("vllm-neuron")
    laid_out = serving.lay_out()
    laid_out.argv = tuple("1024" if word == "512" else word for word in laid_out.argv)  # other flags, other keys
    server = serving.start(laid_out)
    assert server.port is None
    assert "Cache miss" in str(server.proof.fault())
    server.stop()


def test_kernels_lie_at_the_absolute_path_that_the_graphs_name(prepare: Prepare, tmp_path: Path) -> None:
    serving = prepare("vllm-neuron")
    laid_out = serving.lay_out()
    assert laid_out.places["nki"] == str(tmp_path / "var/tmp/nki-intermediate-cache")
    (tmp_path / "var/tmp/nki-intermediate-cache").chmod(0o755)
    (tmp_path / "var/tmp/nki-intermediate-cache/kernel.bin").unlink()
    server = serving.start(laid_out)
    assert server.port is None
    assert "NCC_EVRF059" in server.stop()
    laid_again = serving.lay_out()
    server = serving.start(laid_again)
    assert server.port is not None
    server.stop()


def test_files_of_others_at_an_absolute_path_are_not_replaced(prepare: Prepare, tmp_path: Path) -> None:
    serving = prepare("vllm-neuron")
    nki = tmp_path / "var/tmp/nki-intermediate-cache"
    nki.mkdir(parents=True)
    (nki / "other.bin").write_text("of another server")
    with pytest.raises(NotReady, match=r"other\.bin is not of this contract"):
        serving.lay_out()
    assert (nki / "other.bin").exists()


def test_optimum_refuses_another_version_itself_and_the_pins_refuse_it_earlier(
    prepare: Prepare, tmp_path: Path
) -> None:
    serving = prepare("optimum")
    other = standins.install("optimum", tmp_path / "other/bin", {**PINS["optimum"], "optimum-neuron": "0.4.5"})
    laid_out = serving.lay_out()
    with pytest.raises(NotReady, match=r"optimum-neuron 0\.4\.6, and 0\.4\.5"):
        require_pins(serving.contract, installed_versions(other / "python3"))
    server = serving.start(laid_out, laid_out.environ({"PATH": f"{other}:/usr/bin:/bin"}))
    assert server.port is None
    server.stop()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_the_fetch_verified_is_read_again_only_if_it_has_changed(
    runtime: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = prepare(runtime)
    read: list[Path] = []
    content = trees._sha256

    def digest(path: Path) -> str | None:
        read.append(path)
        return content(path)

    monkeypatch.setattr(trees, "_sha256", digest)
    serving.lay_out()
    serving.lay_out()
    assert read == [], "a layout changes links and modes, and no byte"
    file = next(path for path in sorted(serving.tree(serving.contract.trees[0].name).rglob("*")) if path.is_file())
    whole = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    os.utime(file, ns=(946_684_800 * 10**9,) * 2)
    with pytest.raises(NotReady, match="has other bytes than were imported"):
        serving.lay_out()


# Once it is ready


@pytest.mark.parametrize("runtime", ["vllm-nxdi", "vllm-neuron"])
def test_a_ready_server_without_its_line_of_proof_is_unproven(runtime: str, prepare: Prepare) -> None:
    serving = prepare(runtime)
    laid_out = serving.lay_out()
    environ = {**laid_out.environ(serving.base), "STANDIN_BEHAVIOUR": "silent"}
    server = serving.start(laid_out, environ)
    assert server.port is not None
    assert serving.contract.proves[0] in str(server.proof.unproven())
    server.stop()


def test_one_graph_without_a_cache_hit_is_unproven_and_named(prepare: Prepare) -> None:
    serving = prepare("vllm-neuron")
    *hit, missing = cache_keys(NEURON_FLAGS)
    proof = serving.proof()
    for key in hit:
        proof.line(f"INFO Local cache hit for key: {key}")
    assert missing in str(proof.unproven())
    proof.line(f"INFO Local cache hit for key: {missing[:-1]}")
    assert missing in str(proof.unproven())
    proof.line(f"(Worker_TP1) INFO Local cache hit for key: {missing}")
    assert proof.unproven() is None


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_line_of_a_recompilation_is_a_fault_at_once_and_stays_one(runtime: str, prepare: Prepare) -> None:
    proof = prepare(runtime).proof()
    proof.line("INFO: loading")
    assert proof.fault() is None
    proof.line("WARNING Recompiling...")
    proof.line("INFO Successfully loaded")
    assert "Recompiling" in str(proof.fault())


def test_a_compiler_process_is_a_fault(prepare: Prepare) -> None:
    serving = prepare("torchscript")
    proof = serving.proof()
    assert proof.fault() is None
    process = serving.processes / "4711"
    process.mkdir()
    (process / "cmdline").write_bytes(b"/usr/bin/python3\0/opt/venv/bin/neuronx-cc\0compile\0")
    assert "a compiler" in str(proof.fault())


@pytest.mark.parametrize("change", ["written", "added", "removed", "replaced"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_change_of_a_tree_is_found_and_named(change: str, runtime: str, prepare: Prepare) -> None:
    """The second line behind the modes, which do not stop root."""
    laid_out = prepare(runtime).lay_out()
    tree = laid_out.contract.trees[0]
    path = Path(laid_out.places[tree.name], tree.files[0].path)
    path.parent.chmod(0o755)
    data = path.read_bytes()
    if change == "added":
        path = path.with_name("extra.bin")
        path.write_bytes(b"x")
    elif change == "written":
        with path.open("r+b") as file:
            file.write(bytes([data[0] ^ 1]))
    else:
        path.unlink()
        if change == "replaced":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(NotReady, match=path.name):
        laid_out.require_unchanged()


def test_trees_are_read_only_and_can_be_laid_out_again(prepare: Prepare) -> None:
    serving = prepare("vllm-nxdi")
    for laid_out in (serving.lay_out(), serving.lay_out()):
        for below, _, names in os.walk(laid_out.root):
            assert Path(below).stat().st_mode & 0o222 == 0 or Path(below) == laid_out.root
            assert all(Path(below, name).stat().st_mode & 0o222 == 0 for name in names)
        laid_out.require_unchanged()


def test_trees_are_copied_where_no_hard_link_is_possible(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(path: Path, source: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", no_link)
    laid_out = prepare("torchscript").lay_out()
    laid_out.require_unchanged()
    assert all(path.stat().st_nlink == 1 for path in Path(laid_out.places["artifact"]).iterdir())


def test_a_restarted_agent_fetches_nothing_again_and_another_artifact_leaves_a_running_server_its_files(
    prepare: Prepare, tmp_path: Path
) -> None:
    serving = prepare("vllm-nxdi")
    laid_out, store = serving.lay_out(), store_in(tmp_path / "store").store
    made = store.resolve("acme/tiny").manifest
    assert fetch(store.blobs, made, serving.fetched).bytes_written == 0
    fetch(store.blobs, put(store), serving.fetched)
    assert not (serving.fetched / "serving/vllm-nxdi.json").exists()
    laid_out.require_unchanged()


def test_a_folder_with_files_of_others_is_not_replaced_by_a_layout(prepare: Prepare) -> None:
    serving = prepare("torchscript")
    serving.root.mkdir()
    (serving.root / "notes.txt").write_text("mine")
    with pytest.raises(NotReady, match="no trees of a contract"):
        serving.lay_out()


def test_a_contract_that_was_changed_after_the_fetch_is_refused(prepare: Prepare) -> None:
    serving = prepare("vllm-nxdi")
    path = serving.fetched / "serving/vllm-nxdi.json"
    changed = replace_environment(serving.contract)
    path.write_bytes(changed.to_bytes())
    with pytest.raises(NotReady, match="not the one that the manifest names"):
        contract_of_folder(serving.fetched)


def replace_environment(contract: ServingContract) -> ServingContract:
    return contract.model_copy(update={"environment": {}})
