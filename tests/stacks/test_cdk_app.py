"""The app as users run it: the real `cdk synth` on a real nxpipe.toml, with no AWS account and no network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CDK = ROOT / "node_modules" / ".bin" / "cdk"
RECOMMENDED_FLAGS = ROOT / "node_modules/aws-cdk/lib/init-templates/.recommended-feature-flags.json"

NXPIPE_TOML = """\
[project]
name = "demo"
"""

WHOLE = (
    NXPIPE_TOML
    + f"""\
region = "us-east-2"

[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
buckets = [128]
target = "trn1.32xlarge"

[[fleets]]
kind = "training"
name = "tune"
model = "bert"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2b"
nodes = 2
capacity = {{ kind = "on-demand" }}

[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["trn1.2xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, max = 2 }}
certificate = "arn:aws:acm:us-east-2:123456789012:certificate/0a1b2c3d"

[release]
repository = "example/models"

[farm]
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{"0" * 64}"
"""
)

IMAGES = """\
[[image]]
region = "us-east-2"
sdk = "2.32.0"
id = "ami-0a1b2c3d4e5f60718"
name = "Deep Learning AMI Neuron"
created = 2026-08-20
expires = 2099-01-01
source = "a test"

[[image]]
region = "us-east-2"
id = "ami-0b1a2c3d4e5f60718"
name = "Amazon ECS, Neuron"
created = 2026-08-20
expires = 2099-01-01
source = "a test"
"""
LOCKS = {"nxpipe.amis.lock": IMAGES, "nxpipe.agent.lock": json.dumps({"sha256": "0" * 64})}

# Every attempt to leave the machine is written down and refused, in node and in Python alike. Sockets without a port
# are pipes between processes, which jsii lives on.
NO_NETWORK_IN_NODE = """\
const fs = require("fs"), net = require("net"), dns = require("dns");
const refuse = (what) => {
  fs.appendFileSync(process.env.NETWORK_ATTEMPTS, what + "\\n");
  throw new Error("no network: " + what);
};
const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...args) {
  const options = Array.isArray(args[0]) ? args[0][0] : args[0];
  if (typeof options !== "object" || options.port !== undefined) refuse(`${options.host}:${options.port}`);
  return connect.apply(this, args);
};
for (const module of [dns, dns.promises]) module.lookup = (host) => refuse(host);
"""
NO_NETWORK_IN_PYTHON = """\
import os, sys

def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        with open(os.environ["NETWORK_ATTEMPTS"], "a") as attempts:
            attempts.write(f"{event} {args}\\n")
        raise OSError(f"no network: {event} {args}")

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a laptop in a tunnel: no credentials, no region, no network."""
    folder = tmp_path_factory.mktemp("offline")
    (folder / "no_network.cjs").write_text(NO_NETWORK_IN_NODE)
    (folder / "sitecustomize.py").write_text(NO_NETWORK_IN_PYTHON)
    (folder / "attempts").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CDK_", "NXPIPE_"))}
    return kept | {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_HOME": str(folder / "cdk-home"),
        "CDK_VALIDATION": "false",  # its own test switches it on: it costs ten seconds
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        "NETWORK_ATTEMPTS": str(folder / "attempts"),
        "NODE_OPTIONS": f"--require={folder / 'no_network.cjs'}",
        "PYTHONPATH": str(folder),
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "nxpipe.toml"
    path.write_text(NXPIPE_TOML)
    for name, text in LOCKS.items():
        (tmp_path / name).write_text(text)
    return path


def synth(config: Path, output: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(CDK), "synth", "--quiet", "-c", f"config={config}", "-o", str(output)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_synth_needs_no_credentials_and_no_network_and_gives_equal_bytes_twice(
    config: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    config.write_text(WHOLE)
    for output in ("first", "second"):
        done = synth(config, tmp_path / output, offline)
        assert done.returncode == 0, done.stderr
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    stacks = {name.removesuffix(".template.json") for name in first if name.endswith(".template.json")}
    parts = ("build-farm", "cache", "network", "observe", "release", "serve-search", "storage", "train-tune")
    assert {f"demo-{part}" for part in parts} == stacks
    assert first == second
    assert Path(offline["NETWORK_ATTEMPTS"]).read_text() == ""


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(
            [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 8009))"], id="python"
        ),
        pytest.param(["node", "-e", "require('net').connect({host: '127.0.0.1', port: 8009})"], id="node"),
        pytest.param(["node", "-e", "fetch('http://127.0.0.1:8009').catch(() => process.exit(1))"], id="node fetch"),
        pytest.param(["node", "-e", "require('https').get('https://127.0.0.1:8009')"], id="node https"),
    ],
)
def test_the_tunnel_has_no_holes(attempt: list[str], tmp_path: Path, offline: dict[str, str]) -> None:
    attempts = tmp_path / "attempts"
    done = subprocess.run(attempt, env=offline | {"NETWORK_ATTEMPTS": str(attempts)}, capture_output=True, check=False)
    assert done.returncode != 0
    assert attempts.read_text()


def test_cdks_own_validation_accepts_the_stacks(config: Path, tmp_path: Path, offline: dict[str, str]) -> None:
    config.write_text(WHOLE)
    env = {name: value for name, value in offline.items() if name != "CDK_VALIDATION"}
    done = synth(config, tmp_path / "out", env)
    assert done.returncode == 0, done.stderr


FAULTY = {
    "a key that is not known": (NXPIPE_TOML + "nmae = 3\n", "project.nmae"),
    "fleets without a place": (WHOLE.replace('region = "us-east-2"', ""), "project.region"),
    "a fleet in a zone without a subnet": (WHOLE.replace("us-east-2b", "us-east-2f"), "fleets[0].zone"),
    "a version of the SDK without an image": (WHOLE + '[amis]\nsdk = ["2.31.0"]\n', "no image of Neuron SDK 2.31.0"),
    "a place without an image of training hosts": (
        WHOLE.replace("us-east-2", "eu-west-1"),
        "no image of training hosts for eu-west-1",
    ),
    "a fleet that answers in plain text": (WHOLE.replace("certificate =", "#"), "NXP-NET-3"),
    "an image that a closed network does not reach": (
        WHOLE.replace("123456789012.dkr.ecr.us-east-2.amazonaws.com/", "ghcr.io/example/"),
        "copy it into the project's own repository",
    ),
}


@pytest.mark.parametrize("what", FAULTY)
def test_a_configuration_that_cannot_be_deployed_is_told_in_its_own_sentences_without_a_traceback(
    what: str, config: Path, offline: dict[str, str]
) -> None:
    text, told = FAULTY[what]
    config.write_text(text)
    flags = json.loads((ROOT / "cdk.json").read_text())["context"]
    env = offline | {"CDK_CONTEXT_JSON": json.dumps({**flags, "config": str(config)})}
    done = subprocess.run([sys.executable, "app.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_configuration_is_told_through_the_cdk_command_too(tmp_path: Path, offline: dict[str, str]) -> None:
    missing = tmp_path / "nowhere.toml"
    done = synth(missing, tmp_path / "out", offline)
    assert done.returncode != 0
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr


def test_account_and_region_of_the_project_pin_where_the_stacks_go(
    config: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    config.write_text(NXPIPE_TOML + 'account = "123456789012"\nregion = "eu-west-1"\n')
    done = synth(config, tmp_path / "out", offline)
    assert done.returncode == 0, done.stderr
    stack = json.loads((tmp_path / "out" / "manifest.json").read_text())["artifacts"]["demo-storage"]
    assert stack["environment"] == "aws://123456789012/eu-west-1"
    assert stack["properties"]["terminationProtection"] is True


def test_the_feature_flags_are_those_that_this_release_of_cdk_recommends() -> None:
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    flags = {name: value for name, value in context.items() if name.startswith("@aws-cdk")}
    ours = {"@aws-cdk/core:enableAdditionalMetadataCollection": False}  # templates report nothing to anyone
    assert flags == json.loads(RECOMMENDED_FLAGS.read_text()) | ours


def test_the_lock_file_pins_the_cdk_command_by_content_and_names_no_registry() -> None:
    lock = (ROOT / "package-lock.json").read_text()
    pinned = json.loads(lock)["packages"]["node_modules/aws-cdk"]
    asked = json.loads((ROOT / "package.json").read_text())["devDependencies"]
    assert asked == {"aws-cdk": pinned["version"]}
    assert pinned["integrity"].startswith("sha512-")
    assert "://" not in lock
