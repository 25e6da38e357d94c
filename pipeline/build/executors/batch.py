"""Items as children of array jobs, in the queue of the build farm's stack (`stacks/build_farm.py`).

The store is the only meeting place: the list of items is a blob there, and each child writes its outcome there
(`batch_worker.py`). A driver that dies leaves its arrays running. They commit what they make, and the plan of the next
driver finds it; where that one submits a cell that is still at work, the lease on the cell's key keeps the two apart.

Batch repeats a child by itself when its machine was taken away, for nobody else was there to tell of it. All other
failures are the driver's to judge: a worker ends in the exit code of its item's failure, which Batch does not repeat.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Fault, Said, from_document
from nxpipe.pipeline.build.executors.batch_array import ENDED, ArrayJob, Told, children, counts_of, describe
from nxpipe.pipeline.build.executors.batch_farm import PROJECT_TAG, BuildFarm, Room
from nxpipe.pipeline.build.executors.batch_faults import fault_of, forgotten, may_pass
from nxpipe.pipeline.build.executors.batch_items import put_items, require_nothing_of_this_machine
from nxpipe.pipeline.build.executors.protocol import Limits
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.errors import AwsError, BuildRefused

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

LARGEST_ARRAY: Final = 10_000
_SHORTEST: Final = 60  # seconds: Batch knows no shorter limit of a job
_KEPT: Final = 3600.0  # seconds after which a list is looked at: children may wait longer than a store's grace


@dataclass(frozen=True)
class Pace:
    """Seconds: between two looks at the jobs; until somebody is told what jobs wait for; and for which AWS, or the
    store, may be silent."""

    poll: float = 10.0
    waiting: float = 300.0
    silence: float = 900.0


USUAL: Final = Pace()


class BatchExecutor:
    name: Final = "batch"

    def __init__(self, store: "Store", farm: BuildFarm, limits: Limits, pace: Pace = USUAL) -> None:
        _require_one_store(store.url, farm)
        self._store = store
        self._farm = farm
        self._limits = limits
        self._pace = pace
        self._buffer: list[Item] = []
        self._arrays: list[ArrayJob] = []
        self._looked_at = -math.inf
        self._answered_at = time.monotonic()
        self._silent = False

    def takes(self, item: Item) -> bool:
        return len(self._buffer) < LARGEST_ARRAY

    def start(self, item: Item) -> None:
        require_nothing_of_this_machine(item.asked)
        self._buffer.append(item)
        self._looked_at = -math.inf  # to be submitted when events are asked for next

    def events(self, patience: float) -> Sequence[Event]:
        until = time.monotonic() + patience
        while True:
            due = self._looked_at + self._pace.poll
            time.sleep(max(0.0, min(due, until) - time.monotonic()))
            if time.monotonic() >= due:
                self._looked_at = time.monotonic()
                if found := self._round():
                    return found
            if time.monotonic() >= until:
                return ()

    def close(self) -> None:
        """The children end with their array. What is left running, as AWS cannot be told, is named in the error."""
        self._buffer.clear()
        left: dict[str, AwsError] = {}
        while self._arrays:
            job = self._arrays.pop().id
            try:
                with asking(f"end job {job}"):
                    self._farm.batch.terminate_job(jobId=job, reason="The build that submitted it has ended.")
            except AwsError as error:
                left[job] = error
        if left:
            raise AwsError(
                f"{len(left)} jobs of the build farm may still run ({', '.join(left)}), for they could not be ended: "
                f"{next(iter(left.values()))}"
            )

    def _round(self) -> list[Event]:
        """What was found out before a fault is told; one that may pass is not the end of a build of hours."""
        found: list[Event] = []
        try:
            self._submit()
            for event in self._look():
                found.append(event)
            self._answered_at, self._silent = time.monotonic(), False
        except Exception as error:
            lasting = time.monotonic() - self._answered_at > self._pace.silence
            if not found and (lasting or not may_pass(error)):
                raise
            if not self._silent and may_pass(error):
                self._silent = True
                found += [Said(key, f"asked again in a while: {error}") for key in self._keys()[:1]]
        return found

    def _keys(self) -> list[str]:
        waiting = [item.key for item in self._buffer]
        return waiting + [array.keys[place] for array in self._arrays for place in array.open]

    def _submit(self) -> None:
        """An array for all items that need about as much memory: one large model does not make all jobs large."""
        while self._buffer:
            rooms = {item.key: self._farm.room_for(item, self._limits) for item in self._buffer}
            room = rooms[self._buffer[0].key]
            items = [item for item in self._buffer if rooms[item.key] == room][:LARGEST_ARRAY]
            self._arrays.append(self._submitted(items, room))
            submitted = {item.key for item in items}
            self._buffer = [item for item in self._buffer if item.key not in submitted]

    def _submitted(self, items: Sequence[Item], room: Room) -> ArrayJob:
        blob = put_items(self._store, items)
        asked: dict[str, Any] = {}
        if len(items) > 1:
            asked["arrayProperties"] = {"size": len(items)}
        if self._limits.seconds is not None:
            asked["timeout"] = {"attemptDurationSeconds": max(_SHORTEST, math.ceil(self._limits.seconds))}
        with asking(f"submit {len(items)} items to {self._farm.queue}"):
            told = self._farm.batch.submit_job(
                jobName=f"{self._farm.project}-build-{blob.sha256[:12]}",
                jobQueue=self._farm.queue,
                jobDefinition=self._farm.definition,
                containerOverrides={
                    "command": ["nxpipe", "worker", "--items", blob.sha256],
                    "resourceRequirements": [
                        {"type": "VCPU", "value": str(room.vcpus)},
                        {"type": "MEMORY", "value": str(room.memory)},
                    ],
                },
                tags={PROJECT_TAG: self._farm.project},
                **asked,
            )
        return ArrayJob(told["jobId"], blob, [item.key for item in items], time.monotonic())

    def _look(self) -> Iterator[Event]:
        told = describe(self._farm.batch, [array.id for array in self._arrays])
        for array in self._arrays:
            if array.id in told:
                yield from self._news(array, told[array.id])
            else:
                yield from (self._end(array, place, forgotten(array.id)) for place in sorted(array.open))
            self._keep_list(array)
        self._arrays = [array for array in self._arrays if array.open]

    def _news(self, array: ArrayJob, told: Told) -> Iterator[Event]:
        """Batch is asked before the store: what a child has written before it ended is there then."""
        counts = counts_of(array, told)
        if counts != array.counts and counts.get("RUNNING"):
            for place, _ in children(self._farm.batch, array, told, "RUNNING"):
                yield from self._begin(array, place)
        array.counts = counts
        self._note_failed(array, told, counts)
        if sum(counts.get(status, 0) for status in ENDED) > len(array.keys) - len(array.open):
            yield from self._outcomes(array)
        yield from self._without_outcome(array, array.failed & array.open)
        if told["status"] in ENDED and len(array.failed) >= counts.get("FAILED", 0):
            yield from (self._end(array, place, fault_of(told)) for place in sorted(array.open))
        yield from self._waiting(array, told, counts)

    def _begin(self, array: ArrayJob, place: int) -> Iterator[Event]:
        if place not in array.begun:
            array.begun.add(place)
            yield Begun(array.keys[place], array.child(place))

    def _note_failed(self, array: ArrayJob, told: Told, counts: Mapping[str, int]) -> None:
        """No more pages are read than it takes to find those that are new."""
        if len(array.failed) < counts.get("FAILED", 0):
            for place, _ in children(self._farm.batch, array, told, "FAILED"):
                array.failed.add(place)
                if len(array.failed) == counts["FAILED"]:
                    break

    def _outcomes(self, array: ArrayJob) -> Iterator[Event]:
        from nxpipe.artifact_store.builds import outcomes_of

        for outcome in outcomes_of(self._store, array.items.sha256, array.open):
            event = from_document(outcome.ended)
            if isinstance(event, Ended):
                yield from self._begin(array, outcome.place)
                array.open.discard(outcome.place)
                yield event

    def _without_outcome(self, array: ArrayJob, places: set[int]) -> Iterator[Event]:
        told = describe(self._farm.batch, [array.child(place) for place in sorted(places)])
        for place in sorted(places):
            one = told.get(array.child(place))
            yield self._end(array, place, fault_of(one) if one else forgotten(array.child(place)))

    def _end(self, array: ArrayJob, place: int, fault: Fault) -> Ended:
        array.open.discard(place)
        return Ended(array.keys[place], seconds=0.0, fault=fault)

    def _waiting(self, array: ArrayJob, told: Told, counts: Mapping[str, int]) -> Iterator[Said]:
        """Capacity waits and does not fail; but a person may know better how long it is worth to."""
        if not counts.get("RUNNABLE") or counts.get("STARTING") or counts.get("RUNNING"):
            array.waits_since = None
            return
        if array.waits_since is None:
            array.waits_since = time.monotonic()
        if time.monotonic() - array.waits_since >= self._pace.waiting:
            array.waits_since = math.inf  # it has been said
            for place, one in children(self._farm.batch, array, told, "RUNNABLE"):
                why = one.get("statusReason") or "AWS Batch has not found a machine for it yet"
                yield Said(array.keys[place], f"job {array.id} waits for machines, and so do its items: {why}")
                break

    def _keep_list(self, array: ArrayJob) -> None:
        if array.open and time.monotonic() - array.kept_at > _KEPT:
            self._store.blobs.is_kept(array.items)
            array.kept_at = time.monotonic()


def _require_one_store(url: str, farm: BuildFarm) -> None:
    """Parts that the workers commit must be found by this driver, and so must their outcomes."""
    if not url.startswith("s3://"):
        raise BuildRefused(
            f"the build farm and this machine must see the same store, and {url} is a folder here; pass --store "
            f"{farm.store or 's3://BUCKET/PREFIX'}"
        )
    if url.rstrip("/") != farm.store.rstrip("/"):
        raise BuildRefused(
            f"the jobs of the build farm publish to {farm.store or 'no store'}, and this build to {url}; pass --store "
            f"{farm.store}, or deploy the farm of the project that has {url}"
        )
