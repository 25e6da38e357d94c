"""`python -m tests.localaws.rollout_demo`: two rollouts on the local AWS, from an empty account to their ends.

Only the account is simulated: the CDK's own command deploys the real stacks, the state machines run, the judge's
function runs, and the weights are those of the listener's rule. A minute of the plan lasts one second.
"""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from nxpipe.artifact_store import open_store
from tests.artifact_store.samples import publish_verified, put
from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.localaws.server import local_aws
from tests.localaws.visitors import Fleet, visitors

_ROOT: Final = Path(__file__).parents[2]
_CDK: Final = _ROOT / "node_modules" / ".bin" / "cdk"
_NXPIPE: Final = Path(sys.executable).parent / "nxpipe"
# The unpacked CDK package, shared by digest: tests have a new HOME each, and unpacking takes nine seconds.
_PACKAGE_CACHE: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"
_ACCOUNT, _REGION = "123456789012", "us-east-2"
_MODEL: Final = "acme/tiny-bert"
_CONFIG: Final = f"""\
[project]
name = "demo"
account = "{_ACCOUNT}"
region = "{_REGION}"

[[models]]
name = "bert"
id = "{_MODEL}"
task = "fill-mask"
target = "inf2.xlarge"

[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, desired = 2, max = 4 }}
command = ["python", "-m", "server"]
certificate = "CERTIFICATE"
rehearsal = true

[rollout]
steps = [10, 50, 100]
bake_min = "5m"
"""
_USUAL, _WORSE = 0.002, 0.03  # share of failed requests

Report = Callable[[str], None]


@dataclass(frozen=True)
class Project:
    """A folder with an nxpipe.toml, and the commands that run in it."""

    folder: Path
    environment: dict[str, str]

    def nxpipe(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(_NXPIPE), *arguments], self.folder)

    def cdk(self, *arguments: str, within: Path) -> None:
        settings = ("-c", f"config={self.folder / 'nxpipe.toml'}", "-o", str(self.folder / "cdk.out"))
        done = self._run([str(_CDK), *arguments, *settings], within)
        if done.returncode:
            raise RuntimeError(f"cdk {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")

    def _run(self, command: list[str], within: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=within, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration, for its test."""

    versions: list[str]
    good: int  # exit codes
    bad: int
    weights: list[dict[str, int]]
    served: str
    replayed: int


def demo(report: Report) -> DemoResult:
    with _project() as project:
        report("An empty local account. Deploying network, store, fleet, alarms and state machines with cdk:")
        _deploy(project, report)
        versions = _publish(project)
        _check(project.nxpipe("promote", versions[0], "--channel", "production"))
        report(f"Channel production serves {versions[0]}; 500 requests a second, of which 0.2 % fail.")
        fleet = Fleet.find(_REGION, "demo-search")
        with visitors(fleet, {"blue": _USUAL, "green": _USUAL}, requests=500) as people:
            time.sleep(4)  # history for the latency baseline
            report(f"\nA good version, {versions[1]}. A minute is a second here.")
            good = _roll_out(project, versions[1], report)
            people.errors["blue"] = _WORSE
            report(f"\nA bad one, {versions[2]}: 3 % of its requests fail.")
            bad = _roll_out(project, versions[2], report)
            replayed = _replay(project, report)
            served = json.loads(_check(project.nxpipe("channel", "show", "production", "--json")).stdout)
            traffic = ", ".join(f"{colour} {weight}" for colour, weight in fleet.weights().items())
        report(f"\nTraffic at the end: {traffic}. The account is removed.")
        return DemoResult(versions, good, bad, people.weight_history, _name_of(served), replayed)


def _name_of(channel: list[dict[str, Any]] | dict[str, Any]) -> str:
    result = channel[0] if isinstance(channel, list) else channel
    return f"{_MODEL}@{result['artifacts'][0]['request_key'][:12]}"


@contextmanager
def _project() -> Iterator[Project]:
    with TemporaryDirectory() as folder, local_aws() as endpoint, hosts_answer("CONTINUE"):
        logging.getLogger("moto").setLevel(
            logging.CRITICAL
        )  # moto logs a Choice state whose variable is absent as an error
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        own = {
            "CDK_HOME": f"{folder}/cdk-home",
            "XDG_STATE_HOME": f"{folder}/state",  # the account is new each time, so no cached state applies
            "CDK_VALIDATION": "false",  # the template checks have tests of their own, and take ten seconds
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(_PACKAGE_CACHE),
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            "NO_COLOR": "1",
        }
        project = Project(Path(folder), {**inherited, **own, **endpoint})
        certificate = client_of("acm", _REGION).request_certificate(DomainName="search.example.com")["CertificateArn"]
        (project.folder / "nxpipe.toml").write_text(_CONFIG.replace("CERTIFICATE", certificate))
        (project.folder / "nxpipe.agent.lock").write_text(json.dumps({"sha256": "0" * 64, "packages": []}))
        yield project


def _deploy(project: Project, report: Report) -> None:
    began = time.monotonic()
    _check(project.nxpipe("ami", "lock"))
    project.cdk("bootstrap", f"aws://{_ACCOUNT}/{_REGION}", within=project.folder)
    project.cdk("deploy", "--all", "--concurrency", "4", "--require-approval", "never", within=_ROOT)
    outputs = client_of("cloudformation", _REGION).describe_stacks(StackName="demo-storage")["Stacks"][0]["Outputs"]
    bucket = next(entry["OutputValue"] for entry in outputs if entry["OutputKey"] == "BucketName")
    with (project.folder / "nxpipe.toml").open("a") as file:
        file.write(f'\n[store]\nurl = "s3://{bucket}"\n')
    report(f"  {time.monotonic() - began:.0f} s")


def _publish(project: Project) -> list[str]:
    """Publish three small artifacts of one model; nothing runs their programs."""
    match = re.search(r'url = "(.+)"', (project.folder / "nxpipe.toml").read_text())
    assert match
    store = open_store(match[1])
    artifacts = [put(store, request=number, model=_MODEL) for number in range(3)]
    return [f"{_MODEL}@{publish_verified(store, artifact).request_key[:12]}" for artifact in artifacts]


def _roll_out(project: Project, version: str, report: Report) -> int:
    """Start a rollout and report its output line by line."""
    arguments = ("rollout", "start", "search", version, "--minute", "1", "--wait")
    report(f"$ nxpipe {' '.join(arguments)}")
    command, merged = [str(_NXPIPE), *arguments], subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, stderr=merged, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            report(f"  {line.rstrip()}")
    report(f"  exit code {running.returncode}")
    return running.returncode


def _replay(project: Project, report: Report) -> int:
    """The number of evaluations of the last rollout that a replay reproduces."""
    record = project.folder / "rollout.jsonl"
    record.write_text(_check(project.nxpipe("rollout", "log", "search", "--json")).stdout)
    replayed = _check(project.nxpipe("rollout", "replay", str(record), "--json"))
    report(f"$ nxpipe rollout log search\n{_check(project.nxpipe('rollout', 'log', 'search')).stdout}")
    return len(json.loads(replayed.stdout))


def _check(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args))} failed:\n{done.stdout}{done.stderr}")
    return done


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    demo(_print)
