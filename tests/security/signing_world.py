"""A channel that requires signatures, attacks on its store, and the ways by which clients get its artifacts."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.channel.generation import Generation, Head, Served, Signature
from nxpipe.artifact_store.documents import Blob, as_time
from nxpipe.artifact_store.fetch.cached_store import CachedStore, MirroredBlobs
from nxpipe.artifact_store.fetch.folder import MANIFEST
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.fetch.read_cache import DEFAULT_LIMIT, ReadCache
from nxpipe.artifact_store.fetch.selection import by_channel
from nxpipe.artifact_store.layout import generation_path, signature_folder
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
from nxpipe.artifact_store.trust.keys import KeyFile, make_key_file
from nxpipe.artifact_store.trust.policy import sign_evidence, signing_with
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.pipeline.artifacts.channel_log import ChannelView
from nxpipe.pipeline.artifacts.channels import ProgramHost, ServedModel
from nxpipe.pipeline.artifacts.lookup import find_match, pair
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.build.jobs import BuildOptions
from nxpipe.pipeline.config import Config, load_config
from nxpipe.pipeline.fleet.agent.run import FleetArtifact
from nxpipe.pipeline.release.options import ReleaseOptions
from nxpipe.pipeline.release.state import ReleaseContext
from nxpipe.pipeline.util.console import Console
from tests.artifact_store.afar import afar
from tests.artifact_store.samples import MODEL, manifest, publish_verified

DAY: Final = 24 * 3600.0
CHANNEL: Final = "production"
KEYS: Final = ("good", "second", "old", "stranger")

_PROJECT: Final = '[project]\nname = "demo"\n[store]\nurl = "file://store"\n'
_FLEET: Final = """
[[models]]
name = "bert"
id = "acme/tiny-bert"
task = "fill-mask"
target = "inf2.xlarge"
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 1 }
rehearsal = true
"""
_REQUIRE: Final = '[signing]\nrequire = ["production"]\n'


def trusted(name: str, *, channels: str = "", expires: str = "") -> str:
    lines = [f'[[signing.trusted]]\nname = "{name}"\nkey = "file:{name}.key.pub"']
    lines += [f'channels = ["{channels}"]'] if channels else []
    lines += [f"expires = {expires}"] if expires else []
    return "\n".join(lines) + "\n"


def _days_ago(days: float, now: float) -> str:
    return as_time(now - days * DAY)[:19] + "Z"


# Signing rules in nxpipe.toml. `old` is a key that expired fifty days ago and was stolen afterwards.
RULES: Final[dict[str, Callable[[float], str]]] = {
    "a channel that a fleet runs": lambda now: (
        f"{_PROJECT}{_FLEET}{_REQUIRE}{trusted('good')}{trusted('old', expires=_days_ago(50, now))}"
    ),
    "a channel without a fleet": lambda now: (
        f"{_PROJECT}{_REQUIRE}{trusted('good')}{trusted('old', expires=_days_ago(50, now))}"
    ),
    "two signatures": lambda now: (
        f"{_PROJECT}{_REQUIRE}threshold = 2\n{trusted('good')}{trusted('second')}"
        f"{trusted('old', expires=_days_ago(50, now))}"
    ),
    "a key for one channel that will expire": lambda now: (
        f"{_PROJECT}{_REQUIRE}{trusted('good', channels=CHANNEL, expires=_days_ago(-50, now))}"
        f"{trusted('old', channels=CHANNEL, expires=_days_ago(50, now))}"
    ),
}


@dataclass(frozen=True)
class World:
    """A project with its store, and the folder of this machine's state."""

    root: Path
    now: float

    @property
    def config_path(self) -> Path:
        return self.root / "nxpipe.toml"

    @cached_property
    def config(self) -> Config:
        return load_config(self.config_path, {})

    @cached_property
    def store(self) -> Store:
        return Store(LocalFolder(self.root / "store"))

    def trust(self, store: Store | None = None) -> ChannelVerifier:
        return trust_in(self.config, self.root, store or self.store)

    def key(self, name: str) -> KeyFile:
        return KeyFile.open(self.root / f"{name}.key")

    # Content of the store

    def publish(self, seed: str, signers: tuple[str, ...] = ("good", "second")) -> Published:
        """An artifact whose programs contain their predicted duration, for comparisons."""
        parts = [self.store.put_blob(data) for data in (f'{{"request":"{seed}"}}'.encode(), b"p" * 50, b"f" * 60)]
        published = publish_verified(self.store, manifest(parts))
        for name in signers:
            Signatures(self.store).add(published, self.key(name), "ci")
            sign_evidence(self.store, published, self.key(name), "ci")
        return published

    def artifact(self, seed: str) -> Published:
        key = Blob.of(f'{{"request":"{seed}"}}'.encode()).sha256
        found = self.store.find(key)
        assert found is not None
        return found

    def generation(self, number: int, channel: str = CHANNEL) -> Generation:
        found = self.store.records.read(Generation, generation_path(channel, number))
        assert found is not None
        return found

    def forged(
        self,
        number: int,
        seed: str = "a",
        *,
        signer: str | None = "good",
        claimed: str | None = None,
        previous: str | None = None,
        days_ago: float = 0.0,
        channel: str = CHANNEL,
    ) -> Generation:
        """A forged generation by an attacker with write access, without any check."""
        follows = self.generation(number - 1, channel).digest if number > 1 and previous is None else previous
        plain = Generation(
            channel=channel,
            generation=number,
            previous=follows,
            action="promote",
            artifacts=(Served.of(self.artifact(seed)),),
            restores=None,
            actor="somebody",
            reason="",
            at=as_time(self.now - days_ago * DAY),
            write_id=secrets.token_hex(16),
            signatures=(),
        )
        if signer is None:
            return plain
        made = signing_with(self.key(signer))(plain.signed_bytes())
        if claimed:
            made = Signature(key_id=self.key(claimed).public.key_id, signature=made.signature)
        return plain.model_copy(update={"signatures": (made,)})

    def write(self, path: str, data: bytes) -> None:
        file = self.root / "store" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def add(self, generation: Generation) -> None:
        self.write(generation.path, generation.to_bytes())

    def head(self, number: int) -> None:
        head = Head(channel=CHANNEL, generation=number)
        self.write(head.path, head.to_bytes())

    def remove(self, path: str) -> None:
        (self.root / "store" / path).unlink()

    def signature(self, seed: str, name: str) -> str:
        return f"{signature_folder(self.artifact(seed).manifest_digest)}{self.key(name).public.key_id}"


def make(root: Path, rule: str, now: float) -> World:
    """Two old generations: `a`, then `b`, which is served. `c` is signed but in no channel, `bare` is unsigned."""
    root.mkdir(parents=True)
    for name in KEYS:
        make_key_file(root / f"{name}.key")
    (root / "nxpipe.toml").write_text(RULES[rule](now))
    world = World(root, now)
    for seed in ("a", "b", "c"):
        world.publish(seed)
    world.publish("bare", ())
    for number, seed in ((1, "a"), (2, "b")):
        world.add(world.forged(number, seed, days_ago=100 - number))
    world.head(2)
    world.add(world.forged(1, "a", channel="staging", days_ago=90))
    world.add(world.forged(2, "a", channel="staging", days_ago=80))
    return world


def copied(world: World, root: Path) -> World:
    shutil.copytree(world.root, root)
    return replace(world, root=root)


# Attacks


def _remove_newest(world: World, head: int) -> None:
    world.remove(generation_path(CHANNEL, 2))
    world.head(head)


def _spliced(world: World) -> None:
    """A third generation, signed by the same key in another store with a channel of the same name."""
    other = World(world.root.parent / f"{world.root.name}-other", world.now)
    shutil.copytree(world.root, other.root)
    other.add(other.forged(2, "c", days_ago=90))
    world.add(other.forged(3, "a"))
    world.head(3)


def _beyond_a_gap(world: World) -> None:
    world.add(world.forged(3, "c"))
    world.add(world.forged(4, "a"))
    world.remove(generation_path(CHANNEL, 3))
    world.head(4)


def _replaced(world: World) -> None:
    world.add(world.forged(2, "a", days_ago=90))


def _garbage_beside(world: World) -> None:
    name = "old" if "second" not in world.config_path.read_text() else "second"
    if name == "second":  # two signatures are required, and a third key is trusted
        text = world.config_path.read_text() + trusted("stranger")
        world.config_path.write_text(text)
        name = "stranger"
    else:
        text = world.config_path.read_text().replace(trusted("good"), trusted("good") + trusted("second"))
        world.config_path.write_text(text)
        name = "second"
    world.write(world.signature("b", name), b"garbage")


def _another_manifests(world: World) -> None:
    source = world.root / "store" / world.signature("b", "good")
    for name in ("good", "second"):
        data = (world.root / "store" / world.signature("b", name)).read_bytes()
        world.write(world.signature("bare", name), data)
    assert source.exists()
    world.add(world.forged(3, "bare"))


@dataclass(frozen=True)
class Attack:
    """What is done to the store. `seen`: to a machine that has acted on the channel before; `b` it gets all the same
    where the attack `fails` to take it away."""

    do: Callable[[World], None]
    seen: bool = False
    fails: bool = False


ATTACKS: Final = MappingProxyType(
    {
        "a generation without a signature": Attack(lambda w: w.add(w.forged(3, signer=None))),
        "a generation signed by a key that is not trusted": Attack(lambda w: w.add(w.forged(3, signer="stranger"))),
        "the same under the id of a trusted key": Attack(
            lambda w: w.add(w.forged(3, signer="stranger", claimed="good"))
        ),
        "an artifact without a signature": Attack(lambda w: w.add(w.forged(3, "bare"))),
        "a signature of another manifest under an unsigned one": Attack(_another_manifests),
        "garbage in the place of another trusted key's signature": Attack(_garbage_beside, fails=True),
        "an expired key that dates back": Attack(lambda w: w.add(w.forged(3, signer="old", days_ago=60))),
        "a trusted key that dates back before the last generation": Attack(lambda w: w.add(w.forged(3, days_ago=99))),
        "the newest generation removed, its head left": Attack(lambda w: _remove_newest(w, 2)),
        "the newest generation removed, its head put back": Attack(lambda w: _remove_newest(w, 1), seen=True),
        "the newest generation replaced by another that is signed": Attack(_replaced, seen=True),
        "a signed generation of another store's channel": Attack(_spliced),
        "a signed generation beyond a gap, with a head to it": Attack(_beyond_a_gap),
        "a signed generation of another channel": Attack(
            lambda w: w.write(generation_path(CHANNEL, 3), w.generation(2, "staging").to_bytes())
        ),
    }
)

# Ways to get the artifact: each returns the digest of the manifest that a client would use.


def _fetch(world: World) -> str:
    return by_channel(world.store, CHANNEL, None, None, world.trust()).digest


def _offline(world: World) -> str:
    """The offline index after an online read under the policy, and then nothing else."""
    url, cache = world.store.url, world.root.parent / f"{world.root.name}-cache"
    remember = OfflineIndex(cache, url)
    online = by_channel(world.store, CHANNEL, None, None, world.trust(), remember)
    offline = CachedStore(remember, MirroredBlobs(world.store.backend, Sources([]), None), Sources([remember]))
    tip = world.trust(offline).tip(offline, CHANNEL)
    assert tip is not None
    world.trust(offline).require_signatures(offline, CHANNEL, tip.artifacts[0])
    assert tip.artifacts[0].manifest.sha256 == online.digest
    return online.digest


def _mirror(world: World) -> str:
    """The store itself cannot be read."""
    gone = world.root / "gone"
    gone.write_text("no folder")
    tier = ReadCache(world.root.parent / f"{world.root.name}-tier", DEFAULT_LIMIT)
    store = afar([LocalFolder(gone), LocalFolder(world.root / "store")], tier)
    return by_channel(store, CHANNEL, None, None, world.trust(store)).digest


def _agent(world: World) -> str:
    folder = world.root.parent / f"{world.root.name}-{secrets.token_hex(4)}"
    host = ProgramHost("fleet search", "[[fleets]]", rehearsal=True)
    artifact = FleetArtifact.of(world.store, ServedModel((CHANNEL,), MODEL, "inf2", host), world.trust())
    artifact.fetch(world.store, folder, rehearsal=True)
    return Blob.of((folder / MANIFEST).read_bytes()).sha256


def _bench(world: World) -> str:
    beside = find_match(CHANNEL, world.store, world.config_path).beside(world.artifact("c").manifest)
    assert beside is not None
    return Blob.of(beside.to_bytes()).sha256


def _diff(world: World) -> str:
    name = world.artifact("c").request_key
    before, _ = pair((CHANNEL, name), world.store, world.config_path)
    return Blob.of(before.to_bytes()).sha256


def _release(world: World) -> str:
    words = ReleaseOptions(
        "next", CHANNEL, None, (), 0.05, frozenset(), True, "somebody", "", (), None, BuildOptions(), {}
    )
    (one,) = ReleaseContext(Console(quiet=True), world.store, world.config, world.config_path, words).candidates
    found = world.store.find(one.request_key)
    assert found is not None
    return found.manifest_digest


def _show(world: World) -> str:
    """The command shows the content, and fails if it must not be used."""
    view = ChannelView.of(world.store, world.config_path, lambda _: None)
    (entry,) = view.history(CHANNEL, 1)
    view.require_trust(entry)
    return entry.generation.artifacts[0].manifest.sha256


WAYS: Final = MappingProxyType(
    {
        "store fetch": _fetch,
        "store fetch --offline": _offline,
        "store fetch, by a mirror": _mirror,
        "agent run": _agent,
        "bench --against": _bench,
        "diff": _diff,
        "release --from": _release,
        "channel show": _show,
    }
)


@contextmanager
def machine(state: Path) -> Iterator[None]:
    """A machine without state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        patch.setattr(
            "nxpipe.artifact_store.channel.watermarks.flush_to_disk", lambda _: None
        )  # no power failure, so no flushes
        yield
