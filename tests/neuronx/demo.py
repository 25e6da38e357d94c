"""`python -m tests.neuronx.demo`: a model from its description to the device of an instance, and back. A rehearsal.

The compiler and the device are stand-ins: the compiler checks a module and wraps it in a NEFF, and the device executes
the module in the NEFF by XLA on the CPU, for each of two ranks. Everything else is nxpipe as users run it: commands,
store, keys, the agent's fetch, and the loader of devices.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Evidence
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.requirements import artifact_requirements
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.root import serving_fleet
from nxpipe.pipeline.fleet.agent.run import FleetArtifact
from nxpipe.pipeline.models.thresholds import Thresholds, complete_evidence
from nxpipe.pipeline.verify.prove import ProveOptions
from nxpipe.pipeline.verify.prove import replay as replay_folder
from tests.neuronx import stand_in
from tests.pipeline.conftest import LLAMA, write_model
from tests.runtime.devices import library

_NXPIPE: Final = Path(sys.executable).parent / "nxpipe"
_ROOT: Final = Path(__file__).parents[2]
_MODEL: Final = "tiny-llama"
_SOURCE: Final = ("--model-id", f"./{_MODEL}", "--task", "text-generation")
_PROGRAMS: Final = ("--phases", "prefill,decode", "--buckets", "16", "--tp", "2", "--target", "inf2.xlarge")
_CONFIG: Final = f"""\
[project]
name = "demo"

[store]
url = "file://store"

[[models]]
name = "llama"
path = "./{_MODEL}"
task = "text-generation"
target = "inf2.xlarge"
weights = "random:0"

# Real devices, not a rehearsal: promotions to its channel need evidence of devices.
[[fleets]]
kind = "serving"
name = "chat"
model = "llama"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, desired = 1, max = 2 }}

[signing]
key = "file:release.key"
require = ["production"]
"""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Ran:
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Project:
    """A user's folder on a build machine that has the stand-ins, and the commands that run in it."""

    folder: Path
    environment: dict[str, str]
    report: Report

    @property
    def store(self) -> Store:
        return open_store(str(self.folder / "store"))

    @property
    def compilations(self) -> int:
        """How often neuronx-cc has run."""
        log = self.folder / "compiler.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def nxpipe(self, *arguments: str, **variables: str) -> Ran:
        self.report(f"$ nxpipe {' '.join(arguments)}")
        command, environment = [str(_NXPIPE), *arguments], self.environment | variables
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        for line in (done.stderr + done.stdout).splitlines():
            self.report(f"  {line}")
        if done.returncode:
            self.report(f"  exit code {done.returncode}")
        return Ran(done.returncode, done.stdout, done.stderr)

    def build(self, weights: str) -> str:
        """Build and publish a version with these weights; its name."""
        answer = self.nxpipe("build", *_SOURCE, *_PROGRAMS, "--backend", "neuronx", "--weights", weights)
        assert answer.code == 0, answer.err
        newest = self.store.list()[0]
        return newest.name

    def promote(self, version: str, *more: str) -> Ran:
        return self.nxpipe("promote", version, "--channel", "production", *more)

    def prove(self, version: str, **variables: str) -> Ran:
        return self.nxpipe("prove", version, "--runs", "20", **variables)


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration, for its test."""

    versions: list[str]
    kinds: list[str]  # of the first version's evidence
    compilations: list[int]  # after each version
    refused: dict[str, Ran]
    served: list[list[str]]  # the files of an instance after each change of the channel
    replayed: list[list[str]]  # programs whose golden answers an instance gave
    rolled_back: str


def demo(report: Report) -> DemoResult:
    report("A REHEARSAL: compiler and device are stand-ins, and nothing here has run on AWS hardware.\n")
    with project(report) as user:
        _check(user.nxpipe("check", *_SOURCE, *_PROGRAMS))
        versions, compilations = [user.build("random:0")], [user.compilations]
        refused = {"unsigned": user.promote(versions[0])}
        _check(user.nxpipe("store", "sign", versions[0]))
        refused["no device evidence"] = user.promote(versions[0])
        _check(user.prove(versions[0]))
        _check(user.promote(versions[0]))
        first = instance(user)

        report("\nNew weights: no program is compiled again.")
        versions.append(user.build("random:1"))
        compilations.append(user.compilations)
        _check(user.nxpipe("store", "sign", versions[1]))
        refused["device too far off"] = user.prove(versions[1], STANDIN_DEFECT="wrong")
        _forge(user.store, *versions)
        refused["evidence of another version"] = user.promote(versions[1])
        _check(user.prove(versions[1]))
        _check(user.promote(versions[1]))
        second = instance(user)

        report("\nBack to the first version: nothing is compiled or proved again.")
        _check(user.nxpipe("rollback", "--channel", "production"))
        third = instance(user)
        compilations.append(user.compilations)
        kinds = [each.kind for each in user.store.evidence(user.store.resolve(versions[0]).manifest_digest)]
    every = (first, second, third)
    return DemoResult(
        versions, sorted(kinds), compilations, refused, [files for files, _, _ in every],
        [replayed for _, replayed, _ in every], third[2],
    )  # fmt: skip


def instance(user: Project) -> tuple[list[str], list[str], str]:
    """What the agent of a fleet with devices fetches, the programs that answer as their evidence, and the artifact."""
    config = load_config(user.folder / "nxpipe.toml", {})
    served = ServedModel.of(config, serving_fleet(config, "chat", "--fleet"), None)
    artifact = FleetArtifact.of(user.store, served, trust_in(config, user.folder, user.store))
    artifact.require_evidence(user.store, artifact_requirements(user.store, config, user.folder, artifact.channel))
    manifest = artifact.manifest
    with TemporaryDirectory(prefix="nxpipe-instance-") as folder:
        artifact.fetch(user.store, Path(folder), rehearsal=False)
        files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
        command = [sys.executable, "-m", "tests.neuronx.demo", folder, str(user.folder / "store"), manifest.name]
        done = subprocess.run(command, cwd=_ROOT, env=user.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout)
    user.report(f"  an instance fetches {manifest.name}: {', '.join(files)}")
    user.report(f"  it loads on two cores and answers as the evidence: {', '.join(replayed)}")
    return files, replayed, manifest.name


def replay(folder: Path, store: Store, name: str) -> list[str]:
    """The programs of a fetched folder, run on devices: each gives its golden answers, or an error is raised."""
    published = store.resolve(name)
    golden = complete_evidence(published.manifest, store.evidence(published.manifest_digest))
    assert golden is not None
    allowed, options = Thresholds(min_cosine=0.999, max_relative_error=0.05), ProveOptions(runs=20, limit=120.0)
    proofs = replay_folder(published.manifest, golden, store, folder, allowed, options, lambda _: nullcontext())
    return [proof.program.name for proof in proofs]


def _forge(store: Store, proved: str, other: str) -> None:
    """Give a version the device evidence of another one, as somebody who may write to the store could."""
    document = next(each for each in _evidence(store, proved) if each.kind == DEVICE)
    store.attest(document.model_copy(update={"manifest": store.resolve(other).manifest_digest}))


def _evidence(store: Store, version: str) -> list[Evidence]:
    found = list(store.evidence(store.resolve(version).manifest_digest))
    assert any(each.kind == EMULATED for each in found)
    return found


@contextmanager
def project(report: Report) -> Iterator[Project]:
    """A user's folder with a model, a key and an nxpipe.toml, and the stand-ins of compiler and device."""
    with TemporaryDirectory(prefix="nxpipe-demo-") as name:
        folder = Path(name)
        write_model(folder / _MODEL, dict(LLAMA))
        (folder / "nxpipe.toml").write_text(_CONFIG)
        user = Project(folder, _environment(folder), report)
        _check(user.nxpipe("store", "keygen", "release.key"))
        yield user


def _environment(folder: Path) -> dict[str, str]:
    programs, site = folder / "bin", folder / "site"
    programs.mkdir()
    site.mkdir()
    compiler = stand_in.install(programs)
    compiler.rename(programs / "stand-in")
    (programs / "neuronx-cc").write_text(f'#!/bin/sh\necho "$@" | grep "^compile" >> {folder}/compiler.log\n'
                                         f'exec {programs}/stand-in "$@"\n')  # fmt: skip
    (programs / "neuronx-cc").chmod(0o755)
    shutil.copy(Path(library.__file__).with_name("xla_nrtpy.py"), site / "nrtpy.py")
    device = library.copied(library.built(folder / "libnrt"), folder / "libnrt" / "aws")
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "NXPIPE_", "NEURON_", "GITHUB_"))
    }
    return {
        **inherited,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(site), str(_ROOT)]),
        "LD_LIBRARY_PATH": str(device.parent),
        "STANDIN_FAMILY": "inf2",
        "STANDIN_HBM": str(1 << 28),
        "STANDIN_LIBRARY": str(device),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NO_COLOR": "1",
    }


def _check(ran: Ran) -> Ran:
    if ran.code:
        raise RuntimeError(f"exit code {ran.code}:\n{ran.out}{ran.err}")
    return ran


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        demo(_print)
    else:
        fetched, url, artifact = sys.argv[1:]
        _print(json.dumps(replay(Path(fetched), open_store(url), artifact)))
