"""`nxpipe infra smoke` on the local AWS: the real commands, an instance that is a process, and an account as before."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import boto3
import pytest

from tests.localaws.census import inventory
from tests.localaws.instances import Hosts, hosts
from tests.localaws.server import local_aws

REGION: Final = "us-east-2"
ACCOUNT: Final = "123456789012"
INFERENTIA: Final = "L-1945791B"  # the quota of on-demand Inf instances, in vCPUs
ROOT: Final = Path(__file__).parents[2]
UNPACKED: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"
CONFIG: Final = f"""\
[project]
name = "demo"
region = "{REGION}"

[store]
url = "file://store"
"""


pytestmark = pytest.mark.timeout(600)  # each deploys one to two times, as the CDK does


@dataclass(frozen=True)
class Repository:
    """A user's repository with an nxpipe.toml, a bundle of the agent and the CDK CLI; and the account, bootstrapped."""

    folder: Path
    environment: dict[str, str]

    def smoke(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = self.run(str(Path(sys.executable).parent / "nxpipe"), "infra", "smoke", "--json", *arguments)
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    def hosts(self) -> AbstractContextManager[Hosts]:
        config = self.folder / ".nxpipe" / "smoke" / "nxpipe.toml"
        return hosts(REGION, "demo-smoke", "one", config, self.folder / "hosts")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=500
        )


@pytest.fixture
def repository(sealed_environment: None, tmp_path: Path) -> Iterator[Repository]:
    with local_aws() as there:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        own = {
            "CDK_HOME": str(tmp_path / "cdk-home"),
            "CDK_VALIDATION": "false",
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(UNPACKED),
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        }
        made = Repository(tmp_path, {**kept, **own, **there})
        (tmp_path / "nxpipe.toml").write_text(CONFIG)
        (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
        bundle_agent(tmp_path)
        # In another folder, so that the CDK runs no app.
        done = made.run(str(ROOT / "node_modules/.bin/cdk"), "bootstrap", f"aws://{ACCOUNT}/{REGION}")
        assert done.returncode == 0, done.stderr
        boto3.client("service-quotas").request_service_quota_increase(
            ServiceCode="ec2", QuotaCode=INFERENTIA, DesiredValue=8
        )
        yield made


def bundle_agent(folder: Path) -> None:
    """Any bytes: nothing installs them here."""
    from nxpipe.artifact_store import open_store
    from nxpipe.pipeline.fleet.agent.wheels import Bundle

    bundle = Bundle(("nxpipe",), "3.12", b"a tar file")
    bundle.put(open_store(f"file://{folder / 'store'}"))
    (folder / "nxpipe.agent.lock").write_text(bundle.lock())


def account() -> set[str]:
    """All that exists, without the public parameters, which the local AWS loads when they are read."""
    return {entry for entry in inventory(REGION) if not entry.startswith("ssm /aws/service/")}


def states() -> set[str]:
    return {entry["StackName"] for entry in boto3.client("cloudformation").describe_stacks()["Stacks"]}


def test_an_instance_serves_one_request_and_the_account_is_as_before(repository: Repository) -> None:
    before = account()
    with repository.hosts() as instances:
        code, report, err = repository.smoke("--yes")
    shown = f"{err}\n{json.dumps(report, indent=1)}\n{instances.faults[-3:]}"
    rows = {row["step"]: row for row in report["rows"]}
    assert [row["step"] for row in report["rows"] if row["state"] != "ok"] == [], shown
    assert code == 0, shown
    assert "the manifest of the promoted artifact" in rows["request"]["found"]
    assert "rehearsal" in rows["artifact"]["found"]
    assert (states(), account()) == ({"CDKToolkit"}, before)


def test_a_killed_test_has_a_last_minute_for_its_instance_and_can_be_resumed(repository: Repository) -> None:
    before, scaling = account(), boto3.client("autoscaling")
    command = [str(Path(sys.executable).parent / "nxpipe"), "infra", "smoke", "--yes"]
    with subprocess.Popen(
        command, cwd=repository.folder, env=repository.environment, stderr=subprocess.PIPE, text=True
    ) as running:
        ends = time.monotonic() + 250  # until it waits for the instance, which never comes
        while "demo-smoke-probe" not in states() and time.monotonic() < ends:
            time.sleep(0.5)
        time.sleep(2)
        running.kill()
        shown = running.communicate()[1]
    assert "demo-smoke-probe" in states(), shown
    actions = scaling.describe_scheduled_actions()["ScheduledUpdateGroupActions"]
    assert {entry["AutoScalingGroupName"] for entry in actions} == {"demo-smoke-one-blue", "demo-smoke-one-green"}
    for action in actions:
        assert (action["MinSize"], action["MaxSize"], action["DesiredCapacity"]) == (0, 0, 0)
        assert 50 < (action["StartTime"] - datetime.now(UTC)).total_seconds() / 60 < 60
    # The last minute: moto runs no schedules.
    scaling.update_auto_scaling_group(
        AutoScalingGroupName="demo-smoke-one-blue", MinSize=0, MaxSize=0, DesiredCapacity=0
    )
    with repository.hosts() as instances:
        code, report, err = repository.smoke("--resume", "--yes")
    assert code == 0, f"{err}\n{json.dumps(report, indent=1)}\n{instances.faults[-3:]}"
    assert (states(), account()) == ({"CDKToolkit"}, before)
