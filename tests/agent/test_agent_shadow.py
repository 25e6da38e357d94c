"""The shadow phase on an instance: the server follows the document of the rollout, and pairs become metrics."""

import json
import threading
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, open_store
from nxpipe.pipeline.canary.metrics import PAIR_METRICS, Arm, PairCounts
from nxpipe.pipeline.fleet.agent import shadow
from nxpipe.pipeline.fleet.agent.shadow import ShadowFollower, counts_of, following, mirror_path

ON = {
    "mirror": {"percent": 10, "from": "blue", "to": "green", "rollout": "r1"},
    "hosts": ["10.0.0.7", "10.0.0.8"],
}
OFF: dict[str, Any] = {"mirror": {"percent": 0}, "hosts": []}


@dataclass
class KeptLog:
    """The fleet's log, kept."""

    instance: str = "i-1"
    events: list[dict[str, Any]] = field(default_factory=list)

    def write(self, at: int, text: str) -> None:
        self.events.append(json.loads(text))


@dataclass
class Instance:
    store: Store
    folder: Path
    environment: str = "blue"
    said: list[str] = field(default_factory=list)
    log: KeptLog = field(default_factory=KeptLog)

    def follower(self) -> ShadowFollower:
        dimensions = {"Project": "demo", "Fleet": "search"}
        log: Any = self.log
        return ShadowFollower(
            self.store, "search", self.environment, 8000, self.folder, dimensions, log, self.said.append
        )

    def tell(self, document: object) -> None:
        path = self.folder.parent / "store" / mirror_path("search")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))

    @property
    def control(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "control.json").read_text())
        return document

    def record(self, rollout: str, counts: PairCounts, end: str = "\n") -> None:
        path = self.folder / rollout / "batches.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(counts.batch(7, Arm(counts.pairs, 0)).as_json()) + end)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(open_store(str(tmp_path / "store")), tmp_path / "shadow")


def test_the_server_mirrors_while_the_rollout_asks_for_it(instance: Instance) -> None:
    follower = instance.follower()
    assert instance.control == {}
    follower.look()
    assert instance.control == {}
    instance.tell(ON)
    follower.look()
    assert instance.control == {
        "urls": ["http://10.0.0.7:8000", "http://10.0.0.8:8000"],
        "percent": 10,
        "record": str(instance.folder / "r1"),
    }
    instance.tell(OFF)
    follower.look()
    assert instance.control == {}


def test_an_instance_of_the_new_version_mirrors_nothing(instance: Instance) -> None:
    instance.environment = "green"
    instance.tell(ON)
    instance.follower().look()
    assert instance.control == {}


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"mirror": {"percent": 5, "from": "blue"}, "hosts": ["h"]}'])
def test_a_document_that_cannot_be_read_ends_the_mirroring(instance: Instance, broken: str) -> None:
    follower = instance.follower()
    instance.tell(ON)
    follower.look()
    instance.tell(broken)
    follower.look()
    assert instance.control == {}
    assert len(instance.said) == (broken != "")


def test_a_server_that_ends_with_its_agent_finds_no_mirroring_afterwards(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_PERIOD", 0.01)
    monkeypatch.setenv(shadow.CONTROL, "")
    instance.tell(ON)
    seen = threading.Event()
    follower = instance.follower()
    look = follower.look

    def watched() -> None:
        look()
        seen.set()

    monkeypatch.setattr(follower, "look", watched)
    with following(follower):
        assert seen.wait(20)
        assert instance.control["percent"] == 10
    assert instance.control == {}


def test_pairs_are_published_once_with_their_rollout(instance: Instance) -> None:
    instance.follower()
    instance.record("r0", PairCounts(9, 9, 9, 0))
    follower = instance.follower()  # of an agent that was restarted: the first one may have published them
    instance.record("r1", PairCounts(10, 3, 2, 1))
    instance.record("r1", PairCounts(5, 1, 1, 0))
    instance.record("r2", PairCounts(1, 0, 0, 0))
    for _ in range(2):
        follower.look()
    assert [event["Rollout"] for event in instance.log.events] == ["r1", "r2"]
    (event, _) = instance.log.events
    assert [event[name] for name in PAIR_METRICS] == [15, 4, 3, 1]
    (directive,) = event["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "nxpipe"
    assert directive["Dimensions"] == [["Project", "Fleet", "Rollout"]]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(instance: Instance) -> None:
    follower = instance.follower()
    instance.record("r1", PairCounts(4, 1, 1, 0), end="")
    follower.look()
    assert instance.log.events == []
    (instance.folder / "r1" / "batches.jsonl").open("a").write("\n")
    follower.look()
    assert [event["shadow_pairs_total"] for event in instance.log.events] == [4]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_counts_come_back_from_the_minute_that_the_judge_takes(good: int, both: int, alone: int, stable: int) -> None:
    counts = PairCounts(good + both + alone + stable, both + alone, alone, stable)
    assert astuple(counts_of(counts.batch(3, Arm(counts.pairs, stable)).as_json())) == astuple(counts)
