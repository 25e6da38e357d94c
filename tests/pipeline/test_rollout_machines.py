"""`nxpipe rollout` with the real machines on a local AWS, with a second for a minute.

tests/localaws/test_rollout_demo.py tests the end of a successful rollout.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.samples import publish_verified, put
from tests.localaws.formation.provider import client_of
from tests.localaws.server import local_aws
from tests.localaws.visitors import Fleet, visitors
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.local import REGION
from tests.stacks.rollout_world import MACHINE, QUICK, bootstrapped, deployed, until

__all__ = ["nxpipe"]

pytestmark = pytest.mark.slow

MODEL = "acme/bert"
SLOW = '[rollout]\nsteps = [25, 100]\nbake_min = "1h"\nbake_max = "2h"\n'  # so that it is there while it is talked to


@dataclass(frozen=True)
class Account:
    """Its fleet runs the first artifact; the others can be rolled out."""

    folder: Path
    bucket: str
    fleet: Fleet
    versions: tuple[str, ...]
    errors: dict[str, float]

    def looked_at(self, version: int) -> bool:
        """Whether the judge has evaluated its newest rollout."""
        states, s3 = client_of("stepfunctions", REGION), client_of("s3", REGION)
        key = self.versions[version].rpartition("@")[2]
        names = [execution["name"] for execution in states.list_executions(stateMachineArn=MACHINE)["executions"]]
        if not names or not names[0].startswith(key):
            return False
        folder = f"models/rollouts/search/{names[0]}"
        return bool(s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{folder}/000002")["KeyCount"])


@dataclass(frozen=True)
class User:
    """A user of the account's project."""

    account: Account
    nxpipe: InProcess

    def rollout(self, *words: str) -> Answer:
        return self.nxpipe("rollout", *words)

    def start(self, version: int, *words: str) -> Answer:
        return self.rollout("start", "search", self.account.versions[version], "--minute", "1", *words)

    def status(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.rollout("status", "search", "--json").out)
        return document

    def served(self, channel: str) -> str:
        document = json.loads(self.nxpipe("channel", "show", channel, "--json").out)
        (artifact,) = (document[0] if isinstance(document, list) else document)["artifacts"]
        return f"{MODEL}@{artifact['request_key'][:12]}"


@pytest.fixture(autouse=True)
def sealed_environment() -> None:
    """Sealed for all tests together, in `account`: its server and its simulated users have the same environment."""


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as sealed, local_aws():
        for name in [entry for entry in os.environ if entry.startswith("NXPIPE_")]:
            sealed.delenv(name)
        sealed.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        bootstrapped()
        deployed(folder, f"{QUICK}\nrehearsal = true")  # the artifacts have programs of the emulator
        buckets = client_of("s3", REGION).list_buckets()["Buckets"]
        bucket = next(entry["Name"] for entry in buckets if "artifacts" in entry["Name"])
        with (folder / "nxpipe.toml").open("a") as file:
            file.write(f'[store]\nurl = "s3://{bucket}/models"\n{SLOW}')
        store = open_store(f"s3://{bucket}/models")
        made = [put(store, request=n, model=MODEL) for n in range(4)]
        versions = tuple(f"{MODEL}@{publish_verified(store, entry).request_key[:12]}" for entry in made)
        errors = {"blue": 0.002, "green": 0.002}
        fleet = Fleet.find(REGION, "demo-search")
        with visitors(fleet, errors, requests=400):
            yield Account(folder, bucket, fleet, versions, errors)


@pytest.fixture
def user(account: Account, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.chdir(account.folder)
    assert nxpipe("promote", account.versions[0], "--channel", "production").code == 0
    return User(account, nxpipe)


def test_a_person_ends_a_rollout_that_is_under_way(user: User, account: Account) -> None:
    assert user.start(1).code == 0
    # Each colour has its own artifact from now on, and the fleet's channel has not moved.
    served = [user.served(channel) for channel in ("search--blue", "search--green", "production")]
    assert served == [account.versions[0], account.versions[1], account.versions[0]]
    until(lambda: account.looked_at(1), within=120)
    assert account.fleet.weights() == {"blue": 75, "green": 25}
    assert user.rollout("pause", "search").code == 0
    assert user.status()["signal"] == "pause"
    assert user.rollout("abort", "search").code == 0
    waited = user.rollout("status", "search", "--wait")
    assert waited.code == exit_codes.ROLLED_BACK.number
    assert "Aborted at 25 % after" in waited.out
    assert account.fleet.weights() == {"blue": 100, "green": 0}


def test_a_version_that_fails_goes_back_and_its_record_can_be_judged_again(user: User, account: Account) -> None:
    account.errors["green"] = 0.05
    answer = user.start(2, "--wait")
    assert answer.code == exit_codes.ROLLED_BACK.number, answer.err
    assert "Rolled back at" in answer.out
    assert "of the stable version" in " ".join(answer.out.split())
    assert user.served("production") == account.versions[0]

    log = user.rollout("log", "search")
    assert "roll_back" in log.out.splitlines()[-1]
    (account.folder / "record.jsonl").write_text(user.rollout("log", "search", "--json").out)
    replayed = user.rollout("replay", "record.jsonl", "--json")
    assert replayed.code == 0, replayed.err
    assert json.loads(replayed.out)[-1]["verdict"]["decision"] == "roll_back"


def test_ctrl_c_leaves_the_rollout_alone_and_says_how_to_come_back(user: User, account: Account) -> None:
    account.errors["green"] = 0.002
    words = [str(NXPIPE), "rollout", "start", "search", account.versions[3], "--minute", "1", "--wait"]
    process = subprocess.Popen(words, cwd=account.folder, stderr=subprocess.PIPE, text=True, env={**os.environ})
    until(lambda: account.looked_at(3), within=120)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED.number
    assert "follow it with: nxpipe rollout status search --wait" in told
    assert user.status()["phase"] == "step"
    user.rollout("abort", "search")
    assert user.rollout("status", "search", "--wait").code == exit_codes.ROLLED_BACK.number
