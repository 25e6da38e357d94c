"""Shadow phase on an instance: its server mirrors requests while the fleet's rollout asks for it, and the pairs become
metrics of the fleet.

The rollout keeps one document in the store, `rollouts/FLEET/mirror.json`: the share of requests, the environments, and
the addresses of the candidate's instances. The agent of a stable instance turns it into the control file of its server
(`nxpipe serve --shadow-control`). A document that cannot be read mirrors nothing.

The server writes the pairs of a minute when no more can come, some minutes later. They are published with the time of
that, in the embedded metric format: a minute of the judge is the minute in which pairs became known, which CloudWatch
settles as any other.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.canary.metrics import PAIR_METRICS, PAIR_NAMESPACE, ROLLOUT, Batch, PairCounts
from nxpipe.pipeline.fleet.agent.watch import FleetLog, Metric, log_event
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.files import write_whole

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

CONTROL: Final = "NXPIPE_SHADOW_CONTROL"  # environment variable of the server: its control file
_PERIOD: Final = 5.0  # seconds between two looks at the document
_OFF: Final[Mapping[str, Any]] = {}
_MOST_BYTES: Final = 2**20


def mirror_path(fleet: str) -> str:
    """Path of the document in the store; the rollout's state machine writes it."""
    return f"rollouts/{fleet}/mirror.json"


@dataclass
class PairLog:
    """The pairs that the server of an instance has recorded: one folder for each rollout. Each minute is returned once;
    those of an earlier run of the agent are not returned, since they may have been published.
    """

    folder: Path
    _positions: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = {path: path.stat().st_size for path in self._files()}

    def fresh(self) -> dict[str, PairCounts]:
        """Counts by rollout since the last call."""
        found: dict[str, PairCounts] = {}
        for path in self._files():
            if minutes := [counts_of(json.loads(line)) for line in self._lines(path)]:
                found[path.parent.name] = PairCounts(*map(sum, zip(*map(astuple, minutes), strict=True)))
        return found

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*/batches.jsonl"))

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Whole lines: the server may be writing the last one."""
        with path.open("rb") as file:
            file.seek(self._positions.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._positions[path] = self._positions.get(path, 0) + len(line)
                yield line


def counts_of(document: Mapping[str, Any]) -> PairCounts:
    """The counts of a minute that `nxpipe serve` has recorded."""
    batch = Batch.from_json(document)
    if batch.pairs is None:
        return PairCounts(0, 0, 0, 0)
    alone = (batch.pairs.canary_alone[0], batch.pairs.stable_alone[0])
    return PairCounts(batch.canary.requests, batch.canary.errors, *alone)


def control_of(document: Mapping[str, Any], environment: str, port: int, folder: Path) -> Mapping[str, Any]:
    """The server's control file by the rollout's document: nothing, unless this environment is the one that mirrors."""
    mirror, hosts = document.get("mirror", {}), document.get("hosts", ())
    if not mirror.get("percent") or mirror.get("from") != environment or not hosts:
        return _OFF
    urls = [f"http://{host}:{port}" for host in hosts]
    return {"urls": urls, "percent": mirror["percent"], "record": str(folder / Path(mirror["rollout"]).name)}


@dataclass
class ShadowFollower:
    """Follows the document of one fleet, and publishes what the server records."""

    store: "Store"
    fleet: str
    environment: str
    port: int
    folder: Path
    dimensions: Mapping[str, str]
    log: FleetLog
    say: Callable[[str], None]
    _written: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pairs = PairLog(self.folder)
        self.control(_OFF)

    @property
    def control_file(self) -> Path:
        return self.folder / "control.json"

    def control(self, wanted: Mapping[str, Any]) -> None:
        if wanted != self._written:
            write_whole(self.control_file, json.dumps(wanted).encode())
            self._written = wanted

    def look(self) -> None:
        """Follow the document once, and publish the pairs since the last look."""
        self.control(self._wanted())
        for rollout, counts in self.pairs.fresh().items():
            at = int(time.time() * 1000)
            try:
                self.log.write(at, pair_event(at, {**self.dimensions, ROLLOUT: rollout}, self.log.instance, counts))
            except AwsError as lost:
                self.say(f"{lost}; {counts.pairs:g} pairs are not judged")

    def run(self, over: threading.Event) -> None:
        while not over.wait(_PERIOD):
            try:
                self.look()
            except (OSError, ValueError, KeyError, TypeError) as broken:
                self.say(f"pairs in {self.folder} cannot be read ({broken}); no request is mirrored")
                with suppress(OSError):
                    self.control(_OFF)

    def _wanted(self) -> Mapping[str, Any]:
        try:
            content = b"".join(self.store.backend.read(mirror_path(self.fleet)) or ())
            if not content or len(content) > _MOST_BYTES:
                return _OFF
            return control_of(json.loads(content), self.environment, self.port, self.folder)
        except (StoreError, ValueError, KeyError, TypeError, AttributeError) as problem:
            if self._written:
                self.say(f"the shadow phase of fleet {self.fleet} cannot be read ({problem}); no request is mirrored")
            return _OFF


def pair_event(at: int, dimensions: Mapping[str, str], instance: str, counts: PairCounts) -> str:
    """The event of the fleet's log from which CloudWatch extracts the counts."""
    assert PAIR_NAMESPACE == "nxpipe"  # that of `log_event`
    sent = [Metric(name, "Count", value) for name, value in zip(PAIR_METRICS, astuple(counts), strict=True)]
    return log_event(at, dimensions, instance, sent)


@contextmanager
def following(follower: ShadowFollower) -> Iterator[None]:
    """Follows in a thread within the block. A server that starts in the block finds its control file in CONTROL."""
    os.environ[CONTROL] = str(follower.control_file)
    over = threading.Event()
    thread = threading.Thread(target=follower.run, args=(over,), name="shadow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        follower.control(_OFF)
