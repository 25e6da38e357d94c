"""Operations on a store that is killed or disconnected meanwhile: each is a row, uses tiny artifacts, and can be
repeated.

A world is created once without faults; each attempt in it has a key or a channel of its own, so that the next attempt
finds the remains of the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from secrets import token_hex
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.channel.change import Author, Requirements, promote, rollback
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import Blob, written_now
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.weights import Elements, put_weights
from tests.artifact_store.samples import MODEL, contents, manifest, publish_verified

AUTHOR: Final = Author("ann", "because")
Work = Callable[[Store], object]


@dataclass(frozen=True)
class Attempt:
    """An operation, and all that it may change for readers. `work` runs in another process, so it is no lambda."""

    work: Work
    key: str | None = None  # the request key that gets an artifact
    channel: str | None = None  # the channel whose history grows by an entry
    gives_up: frozenset[str] = frozenset()  # the request keys that lose their artifact


@dataclass(frozen=True)
class Operation:
    name: str
    world: Callable[[Store, Random], None]
    attempt: Callable[[Store, Random, str], Attempt]


def artifact(store: Store, seed: str, request: object, *, tensors: int = 2, model: str = MODEL) -> Manifest:
    """A verified artifact whose blobs are in the store; the last tensors are in a pack, as small ones are."""
    asked, program, *data, file = [*contents(seed, request, tensors=tensors)]
    blobs = [store.put_blob(entry) for entry in (asked, program, file)]
    made = manifest(blobs, model=model)
    elements = [
        Elements(f"layer.{number}", "uint8", (len(value),), memoryview(value)) for number, value in enumerate(data)
    ]
    return made.model_copy(update={"weights": put_weights(store.blobs, elements)})


def publish(store: Store, *, seed: str, request: str, tensors: int) -> str:
    return publish_verified(store, artifact(store, seed, request, tensors=tensors)).manifest_digest


def promote_keys(store: Store, *, channel: str, keys: list[str]) -> bool:
    wanted = [one for key in keys if (one := store.find(key))]
    return promote(store, channel, wanted, AUTHOR, Requirements()).changed


def roll_back(store: Store, *, channel: str, to: int) -> bool:
    return rollback(store, channel, AUTHOR, to=to).changed


def pin(store: Store, *, name: str, digest: str, size: int) -> None:
    Pins(store.backend).add(name, Blob(sha256=digest, size=size), actor="ann", reason="because")


def make_part(store: Store, *, name: str) -> None:
    """Publish a step result as a builder does."""
    program = store.put_blob(f"the program of {name}".encode())
    kept = keep_step_result(store, Blob.of(name.encode()).sha256, {"program": program}, {"bytes": program.size})
    assert step_result(store, kept.key) == kept


def collect(store: Store) -> None:
    """Collect all unreachable objects, without a grace period."""
    ruthless = Store(store.backend, grace=-10.0)
    ruthless.backend.recover()
    apply_plan(ruthless, plan(ruthless, Rules(max_age=-10.0), ruthless.backend.now()))


def _a_neighbour(store: Store, chance: Random) -> None:
    """A published artifact, with which the next may share blobs."""
    publish(store, seed="shared", request="neighbour", tensors=chance.randint(1, 3))


def _publish(store: Store, chance: Random, name: str) -> Attempt:
    seed = chance.choice(["shared", f"own {name}"])
    return Attempt(partial(publish, seed=seed, request=name, tensors=chance.randint(1, 3)), key=_keys(name)[0])


def _make_part(store: Store, chance: Random, name: str) -> Attempt:
    return Attempt(partial(make_part, name=name))


def _three_artifacts(store: Store, chance: Random) -> None:
    for request in ("one", "two", "three"):
        publish(store, seed=request, request=request, tensors=chance.randint(1, 2))


def _promote(store: Store, chance: Random, name: str) -> Attempt:
    keys = _keys("one", "two", "three")
    _serve(store, name, keys[: chance.randint(0, 2)])
    return Attempt(partial(promote_keys, channel=name, keys=[keys[2]]), channel=name)


def _roll_back(store: Store, chance: Random, name: str) -> Attempt:
    keys = _keys("one", "two", "three")
    length = chance.randint(2, 3)
    _serve(store, name, keys[:length])
    return Attempt(partial(roll_back, channel=name, to=chance.randint(1, length - 1)), channel=name)


def _serve(store: Store, channel: str, keys: list[str]) -> None:
    """Append a generation for each key, without the checks of a promotion, which take most of a sweep's time."""
    log = ChannelLog(store.backend, channel)
    for key in keys:
        one = store.find(key)
        assert one is not None
        log.append(partial(_next, channel, Served.of(one)))


def _next(channel: str, served: Served, tip: Generation | None) -> Generation:
    return Generation(
        channel=channel,
        generation=tip.generation + 1 if tip else 1,
        previous=tip.digest if tip else None,
        action="promote",
        artifacts=(served,),
        restores=None,
        actor="ann",
        reason="because",
        at=written_now(),
        write_id=token_hex(16),
        signatures=(),
    )


def _pin(store: Store, chance: Random, name: str) -> Attempt:
    one = chance.choice(store.list()).record.manifest
    return Attempt(partial(pin, name=name, digest=one.sha256, size=one.size))


def _served_and_pinned(store: Store, chance: Random) -> None:
    publish(store, seed="shared", request="one", tensors=chance.randint(1, 2))
    publish(store, seed="two", request="two", tensors=1)
    served, pinned = _keys("one", "two")
    _serve(store, "prod", [served])
    found = store.find(pinned)
    assert found is not None
    pin(store, name="kept", digest=found.manifest_digest, size=found.record.manifest.size)


def _collect(store: Store, chance: Random, name: str) -> Attempt:
    """A collectable artifact that may share blobs with a served one, and orphans."""
    publish(store, seed=chance.choice(["shared", name]), request=name, tensors=chance.randint(1, 2))
    make_part(store, name=name)
    return Attempt(collect, gives_up=frozenset(_keys(name)))


def _keys(*requests: str) -> list[str]:
    return [Blob.of(contents("", request)[0]).sha256 for request in requests]


OPERATIONS: Final = (
    Operation("publish", _a_neighbour, _publish),
    Operation("part", _a_neighbour, _make_part),
    Operation("promote", _three_artifacts, _promote),
    Operation("rollback", _three_artifacts, _roll_back),
    Operation("pin", _three_artifacts, _pin),
    Operation("gc", _served_and_pinned, _collect),
)
