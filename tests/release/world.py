"""A team with two small models, six programs, a key and a store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.trust.keys import make_key_file
from tests.pipeline.command import Answer
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess

CELLS: Final = 6
GATES: Final = ("check", "build", "verify", "bench", "sign", "promote", "rollout")
CONFIG: Final = """
[project]
name = "demo"
region = "us-east-2"
[store]
url = "STORE"
[signing]
key = "file:release.key"
require = ["staging"]
[[models]]
name = "bert"
path = "models/tiny-bert"
task = "feature-extraction"
target = "inf2.xlarge"
buckets = [8, 16, 32]
weights = "random:0"
[[models]]
name = "llama"
path = "models/tiny-llama"
task = "text-generation"
target = "trn1.2xlarge"
phases = ["prefill"]
buckets = [8, 16, 32]
weights = "random:0"
""" + "".join(
    f"""
[[fleets]]
kind = "training"
name = "{channel}"
model = "llama"
channel = "{channel}"
instance_types = ["trn1.32xlarge"]
capacity = {{ kind = "on-demand" }}
nodes = 2
zone = "us-east-2a"
"""
    for channel in ("staging", "production")
)


def make_project(folder: Path, store: str = "file://store") -> Path:
    for name, config in (("tiny-bert", BERT), ("tiny-llama", LLAMA)):
        write_model(folder / "models" / name, config | {"num_hidden_layers": 1})
    (folder / "nxpipe.toml").write_text(CONFIG.replace("STORE", store))
    make_key_file(folder / "release.key")
    return folder


def deepen(config: Path) -> None:
    """Double the number of layers."""
    document = json.loads(config.read_text())
    config.write_text(json.dumps(document | {"num_hidden_layers": 2 * document["num_hidden_layers"]}))


@dataclass
class Team:
    """A team that works in the current folder."""

    nxpipe: InProcess
    store: str = "store"
    said: list[str] = field(default_factory=list)  # the last report of a release

    def release(self, *words: str, code: int = 0) -> dict[str, Any]:
        answer = self.nxpipe("release", *words, "--json")
        assert answer.code == code, answer.err
        self.said = answer.err.splitlines()
        report: dict[str, Any] = json.loads(answer.out)
        return report

    def does(self, command: str) -> Answer:
        """Run a command that a report proposes."""
        name, *words = command.split()
        assert name == "nxpipe"
        return self.nxpipe(*words)

    def log(self, channel: str) -> list[Generation]:
        """The log, newest first."""
        log = ChannelLog(open_store(self.store).backend, channel)
        return list(log.back_from(log.tip()))

    def served(self, channel: str) -> dict[str, str]:
        """The served manifests by model."""
        newest = next(iter(self.log(channel)), None)
        return {artifact.model_id: artifact.manifest.sha256 for artifact in newest.artifacts} if newest else {}

    def describes(self, old: str, new: str) -> None:
        path = Path("nxpipe.toml")
        text = path.read_text()
        assert text.count(old) >= 1
        path.write_text(text.replace(old, new, 1))


def states(report: Mapping[str, Any]) -> dict[str, str]:
    return {gate["gate"]: gate["state"] for gate in report["gates"]}


def gate(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in report["gates"] if entry["gate"] == name)
    return dict(found)
