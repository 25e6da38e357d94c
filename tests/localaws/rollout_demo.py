"""`python -m tests.localaws.rollout_demo`: two rollouts on the local AWS, from an empty account to their ends.

Everything is the real thing but the account: the stacks as they go to AWS, deployed by the CDK's own command; the state
machines executed, the judge's function run, the weights those of the listener's rule. A minute of the plan is a second.
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
# CDK unpacked, by its digest: nine seconds less for tests, which have a home of their own.
_UNPACKED: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"
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

[rollout]
steps = [10, 50, 100]
bake_min = "5m"
"""
_USUAL, _WORSE = 0.002, 0.03  # the share of requests that fails

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Project:
    """A folder with an nxpipe.toml, and the commands that are run there."""

    folder: Path
    environment: dict[str, str]

    def nxpipe(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(_NXPIPE), *words], self.folder)

    def cdk(self, *words: str, within: Path) -> None:
        settings = ("-c", f"config={self.folder / 'nxpipe.toml'}", "-o", str(self.folder / "cdk.out"))
        done = self._run([str(_CDK), *words, *settings], within)
        if done.returncode:
            raise RuntimeError(f"cdk {' '.join(words)} has failed:\n{done.stdout}{done.stderr}")

    def _run(self, command: list[str], within: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=within, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )


@dataclass(frozen=True)
class Story:
    """What came of it, for whoever wants to be sure."""

    versions: list[str]
    good: int  # exit codes
    bad: int
    weights: list[dict[str, int]]
    served: str
    replayed: int


def demo(tell: Tell) -> Story:
    with _project() as project:
        tell("An empty account on this machine. Deploying network, store, cache, fleet, alarms and machines by cdk:")
        _deploy(project, tell)
        versions = _publish(project)
        _insist(project.nxpipe("promote", versions[0], "--channel", "production"))
        tell(f"Channel production serves {versions[0]}; people come, 500 a second, and 0.2 % of requests fail.")
        fleet = Fleet.found(_REGION, "demo-search")
        with visitors(fleet, {"blue": _USUAL, "green": _USUAL}, requests=500) as people:
            time.sleep(4)  # of history, to freeze latencies from
            tell(f"\nA good version, {versions[1]}. A minute is a second here.")
            good = _roll_out(project, versions[1], tell)
            people.errors["blue"] = _WORSE
            tell(f"\nA bad one, {versions[2]}: 3 % of its requests fail.")
            bad = _roll_out(project, versions[2], tell)
            replayed = _replay(project, tell)
            served = json.loads(_insist(project.nxpipe("channel", "show", "production", "--json")).stdout)
            told = ", ".join(f"{colour} {weight}" for colour, weight in fleet.weights().items())
        tell(f"\nTraffic in the end: {told}. Nothing of this is left behind.")
        return Story(versions, good, bad, people.seen, _name_of(served), replayed)


def _name_of(channel: list[dict[str, Any]] | dict[str, Any]) -> str:
    found = channel[0] if isinstance(channel, list) else channel
    return f"{_MODEL}@{found['artifacts'][0]['request_key'][:12]}"


@contextmanager
def _project() -> Iterator[Project]:
    with TemporaryDirectory() as folder, local_aws() as there, hosts_answer("CONTINUE"):
        logging.getLogger("moto").setLevel(logging.CRITICAL)  # a choice that finds no signal is no error
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        own = {
            "CDK_HOME": f"{folder}/cdk-home",
            "XDG_STATE_HOME": f"{folder}/state",  # the account is new each time, and nothing was seen of it
            "CDK_VALIDATION": "false",  # the guards have tests of their own, and take ten seconds
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(_UNPACKED),
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            "NO_COLOR": "1",
        }
        made = Project(Path(folder), {**kept, **own, **there})
        certificate = client_of("acm", _REGION).request_certificate(DomainName="search.example.com")["CertificateArn"]
        (made.folder / "nxpipe.toml").write_text(_CONFIG.replace("CERTIFICATE", certificate))
        (made.folder / "nxpipe.agent.lock").write_text(json.dumps({"sha256": "0" * 64, "packages": []}))
        yield made


def _deploy(project: Project, tell: Tell) -> None:
    began = time.monotonic()
    _insist(project.nxpipe("ami", "lock"))
    project.cdk("bootstrap", f"aws://{_ACCOUNT}/{_REGION}", within=project.folder)
    project.cdk("deploy", "--all", "--concurrency", "4", "--require-approval", "never", within=_ROOT)
    told = client_of("cloudformation", _REGION).describe_stacks(StackName="demo-storage")["Stacks"][0]["Outputs"]
    bucket = next(each["OutputValue"] for each in told if each["OutputKey"] == "BucketName")
    with (project.folder / "nxpipe.toml").open("a") as file:
        file.write(f'\n[store]\nurl = "s3://{bucket}"\n')
    tell(f"  {time.monotonic() - began:.0f} s")


def _publish(project: Project) -> list[str]:
    """Three artifacts of one model, small and without a program that anybody runs."""
    found = re.search(r'url = "(.+)"', (project.folder / "nxpipe.toml").read_text())
    assert found
    store = open_store(found[1])
    made = [put(store, request=number, model=_MODEL) for number in range(3)]
    return [f"{_MODEL}@{publish_verified(store, each).request_key[:12]}" for each in made]


def _roll_out(project: Project, version: str, tell: Tell) -> int:
    """Told line by line, as it happens."""
    words = ("rollout", "start", "search", version, "--minute", "1", "--wait")
    tell(f"$ nxpipe {' '.join(words)}")
    command, both = [str(_NXPIPE), *words], subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, stderr=both, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            tell(f"  {line.rstrip()}")
    tell(f"  exit code {running.returncode}")
    return running.returncode


def _replay(project: Project, tell: Tell) -> int:
    """How many judgements of the last rollout came out the same again."""
    record = project.folder / "rollout.jsonl"
    record.write_text(_insist(project.nxpipe("rollout", "log", "search", "--json")).stdout)
    again = _insist(project.nxpipe("rollout", "replay", str(record), "--json"))
    tell(f"$ nxpipe rollout log search\n{_insist(project.nxpipe('rollout', 'log', 'search')).stdout}")
    return len(json.loads(again.stdout))


def _insist(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args))} has failed:\n{done.stdout}{done.stderr}")
    return done


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    demo(_say)
