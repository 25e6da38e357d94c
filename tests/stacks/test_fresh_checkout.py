"""A fresh checkout synthesises: what is not locked yet is a reference, with a warning that names the command to run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nxpipe.pipeline.cli.init import configuration
from nxpipe.pipeline.config.locks import FLEETS_PARAMETER, TRAINING_PARAMETER
from nxpipe.stacks.app import main
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read
from tests.conftest import ROOT
from tests.stacks.local import new_app

CDK = ROOT / "node_modules/.bin/cdk"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files from git and those from `make setup`."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    (folder / "node_modules").symlink_to(ROOT / "node_modules")
    (folder / ".venv").symlink_to(sys.prefix)
    assert not list(folder.glob("nxpipe.*.lock"))
    return folder


@pytest.fixture(scope="module")
def synthesised(checkout: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CDK_", "NXPIPE_"))}
    nowhere = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_VALIDATION": "false",  # test_cdk_app.py switches it on: it takes ten seconds
        "CDK_HOME": str(checkout.parent / "cdk-home"),
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
    }
    command = [str(CDK), "synth", "--quiet"]
    return subprocess.run(command, cwd=checkout, env=kept | nowhere, capture_output=True, text=True, check=False)


@pytest.mark.runs
@pytest.mark.sample(2, "fresh checkout")
def test_the_cdk_command_synthesises_a_fresh_checkout_without_credentials(
    checkout: Path, synthesised: subprocess.CompletedProcess[str]
) -> None:
    assert synthesised.returncode == 0, synthesised.stderr
    assert "nxpipe ami lock --region us-east-1" in synthesised.stderr
    assert "nxpipe agent bundle PACKAGES" in synthesised.stderr
    serving = json.loads((checkout / "cdk.out/nxpipe-serve-search.template.json").read_text())
    assert f"{{{{resolve:ssm:{FLEETS_PARAMETER}}}}}" in json.dumps(serving)
    training = (checkout / "cdk.out/nxpipe-train-tuning.template.json").read_text()
    assert f"{{{{resolve:ssm:{TRAINING_PARAMETER}}}}}" in training


@pytest.mark.runs
@pytest.mark.sample(2, "fresh checkout")
def test_an_agent_that_is_not_locked_is_a_parameter_that_a_deployment_lacks(
    checkout: Path, synthesised: subprocess.CompletedProcess[str]
) -> None:
    assert synthesised.returncode == 0, synthesised.stderr
    serving = json.loads((checkout / "cdk.out/nxpipe-serve-search.template.json").read_text())
    parameter = serving["Parameters"]["AgentSha256"]
    assert "Default" not in parameter
    assert parameter["AllowedPattern"] == "[0-9a-f]{64}"
    assert "nxpipe agent bundle" in parameter["Description"]
    assert {"Ref": "AgentSha256"} in serving["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"][
        "Fn::Base64"
    ]["Fn::Join"][1]


@pytest.mark.parametrize("fleets", [(), ("training", "serving")], ids=["as a comment", "training and serving"])
def test_the_fleets_that_init_writes_synthesise(tmp_path: Path, fleets: tuple[str, ...]) -> None:
    text = configuration(tmp_path, "bert-base-uncased", None, fleets)
    config = tmp_path / "nxpipe.toml"
    config.write_text(text if fleets else _without_marks(text))
    output = tmp_path / "out"
    assert main(new_app({"config": str(config)}, outdir=str(output))) == 0
    assert all("ImageDigest" in path.read_text() for path in output.glob("*train*.template.json"))
    assert any("AgentSha256" in path.read_text() for path in output.glob("*serve*.template.json"))
    assert len([*output.glob("*train*.template.json")]) == ("training" in fleets)
    assert len([*output.glob("*-release.template.json")]) == (not fleets)


def _without_marks(text: str) -> str:
    """As a person takes the marks away: of the region, the fleet, what accepts its finding, and the repository."""
    return re.sub(r"(?m)^# (\[\[(fleets|acknowledge)\]\]$|\[release\]$|\w+ = )", r"\1", text)


# Rules

LAUNCH = """{"Resources": {"Launch": {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData":
{"ImageId": "IMAGE", "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}}}}}}"""


@pytest.mark.parametrize(
    ("image", "facts", "count"),
    [
        ("{{resolve:ssm:/x}}", Facts(unlocked_images=frozenset({"{{resolve:ssm:/x}}"})), 0),
        ("{{resolve:ssm:/y}}", Facts(unlocked_images=frozenset({"{{resolve:ssm:/x}}"})), 1),
        ("resolve:ssm:/x", Facts(unlocked_images=frozenset({"{{resolve:ssm:/x}}"})), 1),
        ("{{resolve:ssm:/x}}", Facts(), 1),
    ],
)
def test_a_rule_takes_what_stands_for_an_unlocked_image_and_no_other_moving_one(
    image: str, facts: Facts, count: int
) -> None:
    template = read("demo", json.loads(LAUNCH.replace("IMAGE", image)), "us-east-1")
    found = [entry for entry in lint(Templates((template,)), facts) if entry.rule == "NXP-HOST-2"]
    assert len(found) == count


# An image of the team's own

LOCKED = """\
[[image]]
region = "us-east-2"
sdk = "2.32.0"
id = "ami-0000000000000000b"
name = "search-serving-41"
created = 2026-10-30
source = "[amis] image"
python = "3.12"
glibc = "2.39"
owner = "123456789012"
root_device = "/dev/xvda"
root_gib = 120
"""


def test_a_fleet_starts_from_the_image_that_the_project_names_and_its_root_volume_is_that_of_the_image(
    tmp_path: Path,
) -> None:
    text = configuration(tmp_path, "bert-base-uncased", None, ("serving",))
    config = tmp_path / "nxpipe.toml"
    config.write_text(f'{text}\n[amis]\nimage = "ami-0000000000000000b"\nowner = "self"\n')
    (tmp_path / "nxpipe.amis.lock").write_text(LOCKED)
    output = tmp_path / "out"
    assert main(new_app({"config": str(config)}, outdir=str(output))) == 0
    (serving,) = (json.loads(path.read_text()) for path in output.glob("*-serve-*.template.json"))
    launch = serving["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    assert launch["ImageId"] == "ami-0000000000000000b"
    assert [disk["DeviceName"] for disk in launch["BlockDeviceMappings"]] == ["/dev/xvda"]


def test_an_image_that_the_project_names_and_that_is_not_locked_is_used_with_a_warning(tmp_path: Path) -> None:
    text = configuration(tmp_path, "bert-base-uncased", None, ("serving",))
    config = tmp_path / "nxpipe.toml"
    config.write_text(f'{text}\n[amis]\nimage = "ami-0000000000000000b"\nowner = "self"\n')
    output = tmp_path / "out"
    assert main(new_app({"config": str(config)}, outdir=str(output))) == 0
    (serving,) = (path.read_text() for path in output.glob("*-serve-*.template.json"))
    assert "ami-0000000000000000b" in serving
    assert "nxpipe.amis.lock does not have ami-0000000000000000b" in (output / "validation-report.json").read_text()
