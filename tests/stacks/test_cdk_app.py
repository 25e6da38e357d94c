"""The app with the real `cdk synth` on a real nxpipe.toml, without an AWS account or network."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from aws_cdk import App

from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.fleet.preflight_rules import interface_services
from nxpipe.stacks.__main__ import run
from nxpipe.stacks.app import add_stacks, deployable, main
from nxpipe.stacks.lint.egress import GATEWAYS
from tests.stacks.local import new_app, template_of
from tests.stacks.whole import STACKS, WHOLE, write_locks, write_whole

ROOT = Path(__file__).parents[2]
CDK = ROOT / "node_modules" / ".bin" / "cdk"
RECOMMENDED_FLAGS = ROOT / "node_modules/aws-cdk/lib/init-templates/.recommended-feature-flags.json"

NXPIPE_TOML = """\
[project]
name = "demo"
"""

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
    """An environment without credentials, region and network."""
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_locks(tmp_path)
    path = tmp_path / "nxpipe.toml"
    path.write_text(NXPIPE_TOML)
    return path


def cdk_synth(config: Path, output: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(CDK), "synth", "--quiet", "-c", f"config={config}", "-o", str(output)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def run_app(config: Path, output: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the app as the command does."""
    given = {"config": str(config), "aws:cdk:enable-path-metadata": True, "aws:cdk:enable-asset-metadata": True}
    context = json.loads((ROOT / "cdk.json").read_text())["context"] | given
    own = {"CDK_CONTEXT_JSON": json.dumps(context), "CDK_OUTDIR": str(output)}
    command = [sys.executable, "app.py"]
    return subprocess.run(command, cwd=ROOT, env=env | own, capture_output=True, text=True, check=False)


def templates(folder: Path) -> dict[str, bytes]:
    return {path.name.removesuffix(".template.json"): path.read_bytes() for path in folder.glob("*.template.json")}


ASSEMBLY = pytest.mark.sample(6, "assembly of the whole project")  # it takes twelve seconds


@pytest.fixture(scope="module")
def first(whole: Path, tmp_path_factory: pytest.TempPathFactory, offline: dict[str, str]) -> Path:
    """The assembly of the whole project, under CDK's own validation."""
    output = tmp_path_factory.mktemp("first")
    done = cdk_synth(whole, output, {name: value for name, value in offline.items() if name != "CDK_VALIDATION"})
    assert done.returncode == 0, done.stderr
    return output


@ASSEMBLY
def test_synth_needs_no_credentials_and_no_network_and_cdks_own_validation_accepts_the_stacks(
    first: Path, offline: dict[str, str]
) -> None:
    assert set(templates(first)) == STACKS
    assert Path(offline["NETWORK_ATTEMPTS"]).read_text() == ""


LOCAL = {  # what `make cloud-up` prints, and what else says that an AWS is not the real one
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_ENDPOINT_URL": "http://localhost:5599",
    "AWS_ENDPOINT_URL_S3": "http://localhost:5599",
    "AWS_REGION": "eu-west-1",
    "CDK_DEFAULT_ACCOUNT": "000000000000",
    "CDK_DEFAULT_REGION": "eu-west-1",
    "CI": "true",
    "LOCALSTACK_HOSTNAME": "localhost",
    "MOTO_PORT": "5599",
    "TZ": "Asia/Tokyo",
}


@ASSEMBLY
def test_a_second_synthesis_gives_equal_bytes_beside_a_local_aws_too(
    first: Path, whole: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    done = run_app(whole, tmp_path / "second", offline | LOCAL | {"PYTHONHASHSEED": "1"})
    assert done.returncode == 0, done.stderr
    assert templates(tmp_path / "second") == templates(first)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (first, tmp_path / "second")]
    assert manifests[0]["artifacts"] == manifests[1]["artifacts"]
    assert Path(offline["NETWORK_ATTEMPTS"]).read_text() == ""


@ASSEMBLY
def test_the_preflight_checks_the_interface_endpoints_that_the_network_creates(first: Path, whole: Path) -> None:
    document = json.loads((first / "demo-network.template.json").read_text())
    endpoints = [entry["Properties"] for entry in document["Resources"].values() if entry["Type"].endswith("Endpoint")]
    names = [entry["ServiceName"] for entry in endpoints if entry["VpcEndpointType"] == "Interface"]
    created = {name.removeprefix("com.amazonaws.us-east-2.") for name in names}
    assert interface_services(load_config(whole, {})) == created


@pytest.mark.slow
@pytest.mark.parametrize("part", ['"search"', '"tune"', "[[endpoints]]", "[cluster", "[farm]"])
def test_the_preflight_knows_the_endpoints_of_each_part_of_a_project(part: str, tmp_path: Path) -> None:
    head, *tables = re.split(r"(?m)^(?=\[)", WHOLE)
    always = ("[project]", "[[models]]")
    text = "".join([head, *(table for table in tables if table.startswith(always) or part in table)])
    write_locks(tmp_path)
    path = tmp_path / "nxpipe.toml"
    path.write_text(text)
    cdk = new_app()
    add_stacks(cdk, deployable(path), tmp_path)
    endpoints = cdk.node.find_child("demo-network").node.find_child("Endpoints").node.children
    created = {child.node.id for child in endpoints} - {"Group", *GATEWAYS}
    assert interface_services(load_config(path, {})) == created


def test_a_project_that_only_trains_has_alarms_and_its_budget(config: Path) -> None:
    """But no dashboard, which would be empty."""
    _, training, rest = WHOLE.partition('[[fleets]]\nkind = "training"')
    config.write_text(
        WHOLE.partition("[[fleets]]")[0] + training + rest.partition("[[endpoints]]")[0] + "[budget]\nmonthly = 9\n"
    )
    cdk = new_app(outdir=str(config.parent / "out"))
    add_stacks(cdk, deployable(config), config.parent)
    names = {stack.node.id for stack in cdk.node.children}
    assert names >= {"demo-network", "demo-storage", "demo-train-tune", "demo-train-spare", "demo-observe"}
    assert not [name for name in names if "rollout" in name]
    resources = template_of(cdk.node.find_child("demo-observe"))["Resources"].values()
    alarms = {each["Properties"]["AlarmName"] for each in resources if each["Type"] == "AWS::CloudWatch::Alarm"}
    assert alarms == {"demo-tune-failed-hosts", "demo-spare-failed-hosts"}
    kinds = {each["Type"] for each in resources}
    assert "AWS::Budgets::Budget" in kinds
    assert "AWS::CloudWatch::Dashboard" not in kinds


@ASSEMBLY
def test_no_stack_gets_tags_that_cloudformation_would_hand_to_every_resource(first: Path) -> None:
    """The rule that weighs a fleet's groups would lose its weights by one."""
    artifacts = json.loads((first / "manifest.json").read_text())["artifacts"].values()
    stacks = [artifact for artifact in artifacts if artifact["type"] == "aws:cloudformation:stack"]
    assert len(stacks) == len(STACKS)
    assert [stack["properties"].get("tags") for stack in stacks] == [None] * len(stacks)
    assert "tags" not in json.loads((ROOT / "cdk.json").read_text())


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


FAULTY = {
    "a key that is not known": (NXPIPE_TOML + "nmae = 3\n", "project.nmae"),
    "fleets without a place": (WHOLE.replace('region = "us-east-2"', ""), "project.region"),
    "a fleet in a zone without a subnet": (WHOLE.replace("us-east-2b", "us-east-2f"), "fleets[1].zone"),
    "a fleet that answers in plain text": (
        WHOLE.partition('[[fleets]]\nkind = "training"')[0].replace("certificate =", "#"),
        "NXP-NET-3",
    ),
    "an image that a closed network does not reach": (
        WHOLE.replace("123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe", "ghcr.io/example/nxpipe"),
        "copy it into the project's own repository",
    ),
    "an endpoint whose image SageMaker would not take": (
        WHOLE.replace("us-east-2.amazonaws.com/serve", "us-west-2.amazonaws.com/serve"),
        "endpoints[0].image",
    ),
}
BROKEN_RULES = {"a fleet that answers in plain text"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", FAULTY)
def test_a_configuration_that_cannot_be_deployed_is_told_in_its_own_sentences(
    what: str, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, told = FAULTY[what]
    config.write_text(text)
    context = {"config": str(config)}
    code = main(new_app(context, outdir=str(config.parent / "out")))
    assert code == (33 if what in BROKEN_RULES else 3)
    assert told in capfd.readouterr().err


@pytest.mark.sample(6)
@pytest.mark.parametrize("what", [*BROKEN_RULES, "a key that is not known"])
def test_the_app_ends_without_a_traceback(what: str, config: Path, tmp_path: Path, offline: dict[str, str]) -> None:
    text, told = FAULTY[what]
    config.write_text(text)
    done = run_app(config, tmp_path / "out", offline)
    assert done.returncode == (33 if what in BROKEN_RULES else 3), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_cdk_json_without_feature_flags_is_told_in_a_sentence(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(App(context={"config": str(config)})) == 3
    flags = [name for name in json.loads((ROOT / "cdk.json").read_text())["context"] if name.startswith("@aws-cdk")]
    assert f"cdk.json does not set {len(flags)} of the feature flags" in capfd.readouterr().err


def test_a_feature_flag_of_another_value_is_named(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flag = "@aws-cdk/core:defaultCrossStackReferences"
    assert main(new_app({"config": str(config), flag: "weak"})) == 3
    assert f"does not set 1 of the feature flags that the stacks require, such as {flag};" in capfd.readouterr().err


def test_a_missing_nxpipe_toml_is_named_with_the_option_of_cdk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(new_app({"config": str(tmp_path / "nxpipe.toml")})) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(str(tmp_path / "nxpipe.toml"))
    assert "`nxpipe init`" in line
    assert "-c config=PATH" in line


def test_the_module_of_the_app_takes_no_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["synth"]) == 2
    assert "`npx cdk synth`" in capfd.readouterr().err


def test_an_interrupted_app_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(app: App) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("nxpipe.stacks.app.main", interrupted)
    monkeypatch.setattr(sys, "argv", ["nxpipe.stacks"])
    monkeypatch.delitem(sys.modules, "nxpipe.stacks.__main__")  # runpy warns of a module that is imported already
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("nxpipe.stacks", run_name="__main__")
    assert ended.value.code == 130


@pytest.mark.sample(4)
def test_a_missing_configuration_is_told_through_the_cdk_command_too(tmp_path: Path, offline: dict[str, str]) -> None:
    missing = tmp_path / "nowhere.toml"
    done = cdk_synth(missing, tmp_path / "out", offline)
    assert done.returncode != 0
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr


def test_account_and_region_of_the_project_pin_where_the_stacks_go(config: Path) -> None:
    config.write_text(NXPIPE_TOML + 'account = "123456789012"\nregion = "eu-west-1"\n')
    output = config.parent / "out"
    assert main(new_app({"config": str(config)}, outdir=str(output))) == 0
    stack = json.loads((output / "manifest.json").read_text())["artifacts"]["demo-storage"]
    assert stack["environment"] == "aws://123456789012/eu-west-1"
    assert stack["properties"]["terminationProtection"] is True


def test_stacks_ask_nothing_of_the_environment() -> None:
    """They could tell a local AWS from the real one by nothing else."""
    asking = {"environ", "environb", "getenv", "getenvb", "gethostname", "expanduser"}
    for path in sorted((ROOT / "stacks").rglob("*.py")):
        names = {
            getattr(entry, "attr", None) or getattr(entry, "id", None) or getattr(entry, "name", None)
            for entry in ast.walk(ast.parse(path.read_text()))
        }
        allowed = {"scripts.py": {"expanduser"}, "app.py": {"environ"}}  # the app reads NXPIPE_* beside nxpipe.toml
        assert not names & asking - allowed.get(path.name, set()), path


def test_the_feature_flags_are_those_that_this_release_of_cdk_recommends() -> None:
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    flags = {name: value for name, value in context.items() if name.startswith("@aws-cdk")}
    ours = {
        "@aws-cdk/core:defaultCrossStackReferences": "strong",  # a weak one goes stale (stacks/references.py)
        "@aws-cdk/core:enableAdditionalMetadataCollection": False,  # templates report nothing to anyone
        "@aws-cdk/core:target-partitions": ["aws"],  # nxpipe.toml accepts no region of another one
    }
    assert flags == json.loads(RECOMMENDED_FLAGS.read_text()) | ours


@pytest.mark.parametrize(("name", "own"), [("cdk.json", {"app"}), ("package.json", {"name", "license"})])
def test_init_writes_the_feature_flags_and_the_cdk_cli_of_this_checkout(name: str, own: set[str]) -> None:
    """Otherwise a user's stacks would not be those that are tested here."""
    ours, written = (json.loads((folder / name).read_text()) for folder in (ROOT, ROOT / "pipeline/templates"))
    ours.get("devDependencies", {}).pop("axe-core", None)  # of the tests of pages alone
    assert {key: ours[key] for key in ours.keys() - own} == {key: written[key] for key in written.keys() - own}


def test_the_lock_file_pins_the_cdk_command_by_content_and_names_no_registry() -> None:
    lock = (ROOT / "package-lock.json").read_text()
    pinned = json.loads(lock)["packages"]["node_modules/aws-cdk"]
    dev_dependencies = json.loads((ROOT / "package.json").read_text())["devDependencies"]
    assert dev_dependencies["aws-cdk"] == pinned["version"]
    assert pinned["integrity"].startswith("sha512-")
    assert "://" not in lock
