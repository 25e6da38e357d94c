"""Fakes of AWS's packages, as strict as their public reference: they refuse all that it does not list.

`neuronx-cc` writes a NEFF, unless the variable PLAY has an error to fail with. `trace` is not cached, as documented;
with PLAY_CACHED it leaves the files of a cached compilation in the cache, its lock included.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

NEURONX_CC = """#!{python}
import argparse, gzip, io, json, os, pathlib, sys, tarfile

assert "--retry_failed_compilation" in os.environ["NEURON_CC_FLAGS"].split()
assert os.environ["NEURON_COMPILE_CACHE_URL"]
assert "XLA_USE_BF16" not in os.environ
parser = argparse.ArgumentParser(prog="neuronx-cc", allow_abbrev=False)
compile = parser.add_subparsers(required=True).add_parser("compile", allow_abbrev=False)
compile.add_argument("module")
compile.add_argument("--framework", required=True, choices=["XLA"])
compile.add_argument("--target", required=True, choices=["inf2", "trn1", "trn1n", "trn2"])
compile.add_argument("--model-type", default="generic", choices=["generic", "transformer", "unet-inference"])
compile.add_argument("--auto-cast", default="none", choices=["none", "matmult", "all"])
compile.add_argument("--auto-cast-type", default="bf16", choices=["bf16", "fp16", "tf32", "fp8_e4m3"])
compile.add_argument("--logical-nc-config", "-lnc", type=int, choices=[1, 2])
compile.add_argument("--optlevel", "-O", type=int, choices=[1, 2, 3])
compile.add_argument("--output", default="file.neff")
compile.add_argument("--logfile", default="log-neuron-cc.txt")
asked = parser.parse_args()
lnc = asked.logical_nc_config or (2 if asked.target == "trn2" else 1)
assert os.environ["NEURON_LOGICAL_NC_CONFIG"] == str(lnc)

def fail(text, status=70):
    pathlib.Path(asked.logfile).write_text("2026-11-21T00:00:00Z ERROR 1 [neuronx-cc]: " + text + "\\n")
    sys.exit(status)

if lnc == 2 and asked.target != "trn2":
    fail("[NCC_EARG001] Logical Neuron Core config 2 is not valid for " + asked.target + ".")
if play := os.environ.get("PLAY"):
    fail(play)
content = json.dumps([sys.argv[3:], json.loads((pathlib.Path(asked.module) / "graph.hlo").read_text())]).encode()
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as archive:
    member = tarfile.TarInfo("sg00/def.json")
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
body = gzip.compress(packed.getvalue(), mtime=0)
pathlib.Path(asked.output).write_bytes(b"\\1" * 1024 + body)
"""

# The module represents torch-xla's HLO: the model's outputs for its example.
TORCH_NEURONX = """
import hashlib, json, os, pathlib, shlex, shutil, subprocess
from importlib.metadata import version
import torch

def leave_in_cache(module, flags, neff):
    digests = hashlib.md5(module).hexdigest()[:20], hashlib.md5(" ".join(flags).encode()).hexdigest()[:8]
    cache = pathlib.Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / f"neuronxcc-{version('neuronx-cc')}+0acef03a"
    entry = cache / "MODULE_{}+{}".format(*digests)
    entry.mkdir(parents=True)
    (entry / "model.hlo_module.pb.lock").write_bytes(b"")
    (entry / "model.hlo_module.pb").write_bytes(module)
    (entry / "compile_flags.json").write_text(json.dumps(flags))
    (entry / "model.neff").write_bytes(neff)
    (entry / "model.done").write_bytes(b"")

def trace(func, example_inputs, *_, input_output_aliases={}, compiler_workdir=None, compiler_args=None,
          partitioner_config=None, inline_weights_to_neff=True, cpu_backend=False):
    assert not _, "keyword arguments are no longer taken by position"
    assert isinstance(example_inputs, tuple) and all(isinstance(each, torch.Tensor) for each in example_inputs)
    assert not func.training and not any(parameter.is_meta for parameter in func.parameters())
    arguments = shlex.split(compiler_args) if isinstance(compiler_args, str) else list(compiler_args or [])
    assert not cpu_backend or "--target" in arguments, "cpu_backend needs --target in compiler_args"
    answer = func(*example_inputs)
    assert isinstance(answer, tuple) and all(isinstance(each, torch.Tensor) for each in answer)
    model = pathlib.Path(compiler_workdir) / "model"
    model.mkdir(parents=True)
    (model / "graph.hlo").write_text(json.dumps({
        "inputs": [[str(each.dtype), list(each.shape)] for each in example_inputs],
        "outputs": [[list(each.shape), float(each.float().abs().sum())] for each in answer],
    }))
    neff = pathlib.Path(compiler_workdir) / "graph.neff"
    command = [shutil.which("neuronx-cc"), "compile", str(model), "--framework", "XLA", "--output", str(neff)]
    status = subprocess.run([*command, *arguments]).returncode
    if status != 0:
        raise RuntimeError(f"neuronx-cc failed with {status}")
    made = neff.read_bytes()
    if os.environ.get("PLAY_CACHED"):
        leave_in_cache((model / "graph.hlo").read_bytes(), arguments, made)
    return torch.jit.ScriptModule()
"""

RELEASES = {"neuronx-cc": "2.27.5334.0", "torch-neuronx": "2.9.0.2.11", "torch-xla": "2.9.0"}


@dataclass(frozen=True)
class Toolchain:
    """The folders, and functions that change their content."""

    packages: Path
    programs: Path
    monkeypatch: pytest.MonkeyPatch

    def play(self, what: str) -> None:
        self.monkeypatch.setenv("PLAY", what)

    def cache(self) -> None:
        self.monkeypatch.setenv("PLAY_CACHED", "1")

    def release(self, name: str, release: str) -> None:
        folder = self.packages / f"{name.replace('-', '_')}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    made = Toolchain(tmp_path / "neuron" / "lib", tmp_path / "neuron" / "bin", monkeypatch)
    made.packages.mkdir(parents=True)
    made.programs.mkdir()
    (made.packages / "torch_neuronx.py").write_text(TORCH_NEURONX)
    for name, release in RELEASES.items():
        made.release(name, release)
    program = made.programs / "neuronx-cc"
    program.write_text(NEURONX_CC.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.syspath_prepend(str(made.packages))
    monkeypatch.setenv("PATH", str(made.programs), prepend=":")
    for name in ("PLAY", "PLAY_CACHED", "NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_USE_BF16", "1")
    return made
