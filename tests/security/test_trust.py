"""Channels whose store an attacker can write to: operations that must fail, and their messages."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.channel.generation import PAYLOAD_TYPE as GENERATION_TYPE
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.artifact_store.channel.watermarks import Marks
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import ChannelEmpty, Corrupt, NotFound, Refused, StoreError
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.fetch.selection import by_channel
from nxpipe.artifact_store.layout import generation_path, head_path
from nxpipe.artifact_store.maintenance.collection import fsck
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
from nxpipe.artifact_store.trust.envelope import PAYLOAD_TYPE
from nxpipe.artifact_store.trust.keys import as_base64
from nxpipe.artifact_store.url import open_offline
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.afar import afar
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.signing_world import ATTACKS, CHANNEL, RULES, WAYS, World, copied, make, trusted

__all__ = ["nxpipe"]

FLEET, ALONE, TWO, RESTRICTED = RULES


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {rule: make(folder / str(number), rule, time.time()) for number, rule in enumerate(RULES)}


@pytest.fixture
def world(worlds: dict[str, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return moved(worlds[FLEET], tmp_path, monkeypatch)


def moved(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    one = copied(world, tmp_path / "project")
    monkeypatch.chdir(one.root)
    return one


def attempt(*ids: str) -> pytest.MarkDecorator:
    return pytest.mark.attempt(*ids)


def _envelope_of_a_generation(world: World, payload_type: str) -> None:
    """The good key's signature over a generation, in the form of one over an unsigned manifest."""
    one = world.forged(3, "bare")
    payload = canonical_json(one.model_dump(exclude={"signatures"}))
    (signature,) = one.signatures
    envelope = {
        "payload": as_base64(payload),
        "payloadType": payload_type,
        "signatures": [{"keyid": signature.key_id, "sig": signature.signature}],
    }
    world.write(world.signature("bare", "good"), canonical_json(envelope))
    world.add(one)


def _signed_once(world: World) -> None:
    """A generation signed by the promoter only, where two signatures are required."""
    world.publish("once", ("good",))
    world.add(world.forged(3, "once"))


def _one_key_under_two_names(world: World) -> None:
    text = world.config_path.read_text()
    again = trusted("good").replace('name = "good"', 'name = "again"')
    world.config_path.write_text(text.replace(trusted("second"), again))
    _signed_once(world)


def _expired(world: World) -> None:
    world.add(world.forged(3, signer="old"))


def _gap(world: World) -> None:
    world.add(world.forged(3, "c"))
    world.add(world.forged(4, "a"))
    world.remove(generation_path(CHANNEL, 3))


def _seal(world: World) -> None:
    world.write(generation_path(CHANNEL, 3), b"garbage")


def _is(attack: str) -> Callable[[World], None]:
    return ATTACKS[attack].do


_GARBAGE: Final = "garbage in the place of another trusted key's signature"

# id, rule, what is done, the error of an agent that is new here (None: it serves what it did before), and its sentence
REPLAYED: Final = [
    ("B01", FLEET, _is("a generation without a signature"), Refused, "generation 3 of channel production is not sig"),
    ("B02", FLEET, _is("a generation signed by a key that is not trusted"), Refused, "by no key of the policy"),
    ("B03", FLEET, _is("the same under the id of a trusted key"), Refused, "that of good is wrong, expired, or not"),
    ("B04", FLEET, _is("an artifact without a signature"), Refused, "sign it with: nxpipe store sign acme/tiny-bert@"),
    (
        "B05",
        FLEET,
        _is("a signature of another manifest under an unsigned one"),
        Corrupt,
        "it is a signature of manifest",
    ),
    ("B06", TWO, _signed_once, Refused, "requires 2 signatures"),
    ("B07", TWO, _one_key_under_two_names, Refused, "requires 2 signatures"),
    ("B08", FLEET, lambda w: _envelope_of_a_generation(w, GENERATION_TYPE), Corrupt, "its payload has the type"),
    ("B09", FLEET, lambda w: _envelope_of_a_generation(w, PAYLOAD_TYPE), Corrupt, "has not signed this payload"),
    ("B10", FLEET, _is("a signed generation of another channel"), Corrupt, "it is the record of channels/staging/log"),
    ("B11", FLEET, _expired, Refused, "that of old is wrong, expired"),
    ("B12", FLEET, lambda w: w.add(w.forged(3, signer="old", days_ago=200)), Corrupt, "after it is dated"),
    ("B12", RESTRICTED, _is("an expired key that dates back"), Refused, "that of old is wrong, expired"),
    ("B13", FLEET, _is("the newest generation removed, its head left"), Corrupt, "generation 2, which is missing"),
    ("B14", FLEET, lambda w: w.head(1), None, ""),
    ("B15", FLEET, lambda w: w.write(head_path(CHANNEL), b"garbage"), None, ""),
    ("B16", FLEET, lambda w: w.head(99), Corrupt, "it names generation 99, which is missing from the log"),
    ("B17", FLEET, _is("a signed generation of another store's channel"), Corrupt, "and generation 3 follows"),
    ("B18", FLEET, _gap, None, ""),
    ("B19", FLEET, _is("a signed generation beyond a gap, with a head to it"), Corrupt, "it is missing, and the log"),
    ("B20", FLEET, _seal, Corrupt, "0000000003 is corrupt"),
    ("B430", FLEET, _is(_GARBAGE), None, ""),
]


@pytest.mark.parametrize(
    ("rule", "attack", "kind", "said"),
    [pytest.param(*row[1:], id=f"{row[0]}-{row[1]}", marks=attempt(row[0])) for row in REPLAYED],
)
def test_an_agent_serves_nothing_but_what_is_believed(
    worlds: dict[str, World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    attack: Callable[[World], None],
    kind: type[StoreError] | None,
    said: str,
) -> None:
    world = moved(worlds[rule], tmp_path, monkeypatch)
    attack(world)
    if kind is None:
        assert WAYS["agent run"](world) == world.artifact("b").manifest_digest
    else:
        with pytest.raises(kind) as refused:
            WAYS["agent run"](world)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


UNBELIEVED: Final = {
    "B21": _is("a generation without a signature"),
    "B22": _is("a generation signed by a key that is not trusted"),
    "B23": _is("the same under the id of a trusted key"),
}


@pytest.mark.parametrize("attack", [pytest.param(do, id=key, marks=attempt(key)) for key, do in UNBELIEVED.items()])
@pytest.mark.parametrize(
    "words",
    [
        ("store", "fetch", "--channel", CHANNEL, "--to", "out"),
        ("bench", "acme/tiny-bert@KEY", "--against", CHANNEL),
        ("diff", CHANNEL, "acme/tiny-bert@KEY"),
        ("release", "--from", CHANNEL, "--to", "next", "--dry-run"),
        ("channel", "show", CHANNEL),
        ("channel", "log", CHANNEL),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_that_reads_a_channel_ends_in_23_and_one_sentence(
    world: World, nxpipe: InProcess, attack: Callable[[World], None], words: tuple[str, ...]
) -> None:
    attack(world)
    key = world.artifact("c").request_key
    answer = nxpipe(*(word.replace("KEY", key) for word in words))
    assert answer.code == exit_codes.REFUSED.number
    assert answer.err.startswith("Error: generation 3 of channel production ")
    assert answer.err.count("\n") == 1
    assert not Path("out").exists()


def test_nothing_in_the_pipeline_reads_a_channels_log_by_itself() -> None:
    """Whoever did would have to remember the policy; `Trust` cannot be built without one."""
    sources = [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "stacks").rglob("*.py")]
    assert [path.name for path in sources if "ChannelLog" in path.read_text()] == []


# What this machine has seen


def test_a_channel_that_is_turned_back_is_refused_with_the_way_out(world: World, nxpipe: InProcess) -> None:
    """B13, by somebody who puts the head back as well."""
    words = ("store", "fetch", "--channel", CHANNEL, "--to", "out")
    assert nxpipe(*words).code == 0
    world.remove(generation_path(CHANNEL, 2))
    world.head(1)
    answer = nxpipe(*words)
    assert answer.code == exit_codes.CORRUPT.number
    assert "it ends at generation 1, and this machine has seen generation 2" in answer.err
    mark = answer.err.rstrip("\n").rpartition("on purpose, remove ")[2]
    assert nxpipe("channel", "show").code == exit_codes.CORRUPT.number
    promote = ("promote", world.artifact("c").name, "--channel", CHANNEL, "--key", "file:good.key")
    assert nxpipe(*promote).code == exit_codes.CORRUPT.number, "a fork of the log would be refused by all others"
    Path(mark).unlink()
    shutil.rmtree("out")
    assert nxpipe(*words).code == 0
    assert nxpipe("channel", "show").code == 0


def test_a_store_that_was_emptied_is_no_channel_without_history(world: World) -> None:
    assert WAYS["store fetch"](world)
    shutil.rmtree(world.root / "store" / "channels")
    with pytest.raises(Corrupt, match="it ends at generation 0, and this machine has seen generation 2"):
        WAYS["store fetch"](world)


def test_what_was_not_believed_is_not_what_this_machine_has_seen(world: World) -> None:
    """An administrator removes a forged generation, and nothing stands in the way."""
    world.add(world.forged(3, signer=None))
    with pytest.raises(Refused):
        WAYS["store fetch"](world)
    world.remove(generation_path(CHANNEL, 3))
    assert WAYS["store fetch"](world) == world.artifact("b").manifest_digest


def test_a_folder_where_nobody_signs_may_be_made_anew(world: World, tmp_path: Path) -> None:
    """What was seen binds where the log cannot be forged: in a bucket, and where signatures are asked for."""
    marks = Marks(tmp_path / "seen", world.store.url)
    free, strict = ChannelVerifier(None, marks), ChannelVerifier(world.trust().policy, marks)
    bucket = Marks(tmp_path / "seen", "s3://a-bucket/store")
    bucket.keep(world.generation(2))
    assert free.tip(world.store, CHANNEL) is not None
    world.remove(generation_path(CHANNEL, 2))
    world.head(1)
    with pytest.raises(Corrupt, match="this machine has seen generation 2"):
        strict.tip(world.store, CHANNEL)
    with pytest.raises(Corrupt, match="this machine has seen generation 2"):
        ChannelVerifier(None, bucket).tip(world.store, CHANNEL)
    found = free.tip(world.store, CHANNEL)
    assert found is not None
    assert found.generation == 1
    mark = marks.read(CHANNEL)
    assert mark is not None
    assert mark.generation == 1


def test_a_mark_is_never_set_back_and_a_damaged_one_is_named(world: World, tmp_path: Path) -> None:
    marks = Marks(tmp_path / "state", world.store.url)
    first, second = world.generation(1), world.generation(2)
    marks.keep(second)
    marks.keep(first)
    kept = marks.read(CHANNEL)
    assert kept is not None
    assert (kept.generation, kept.digest) == (2, second.digest)
    marks.file(CHANNEL).write_bytes(b"torn")
    with pytest.raises(Corrupt, match="remove that file, and this machine starts again"):
        marks.read(CHANNEL)
    other = Marks(tmp_path / "state", "s3://another/store")
    other.file(CHANNEL).parent.mkdir()
    marks.file(CHANNEL).unlink()
    marks.keep(second)
    shutil.copy(marks.file(CHANNEL), other.file(CHANNEL))
    with pytest.raises(Corrupt, match="it is the mark of channel production of file://"):
        other.read(CHANNEL)


def test_a_machine_that_can_keep_nothing_proves_the_whole_log_and_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nxpipe: InProcess
) -> None:
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for _ in range(2):
        answer = nxpipe("store", "fetch", "--channel", CHANNEL, "--to", "out")
        assert answer.code == 0
        assert "the watermark of channel production cannot be written on this machine: cannot write" in answer.err


def test_the_second_look_at_a_long_log_reads_no_more_than_its_end(world: World) -> None:
    for number in range(3, 40):
        world.add(world.forged(number, "a" if number % 2 else "b", days_ago=90 - number))
    world.head(39)
    reads: list[str] = []
    store, read = world.store, world.store.backend.read

    def counted(path: str, *arguments: object, **named: object) -> object:
        reads.append(path)
        return read(path, *arguments, **named)  # type: ignore[arg-type]

    trust = world.trust()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.backend, "read", counted)
        assert trust.tip(store, CHANNEL)
        first = len(reads)
        reads.clear()
        assert trust.tip(store, CHANNEL)
    assert first > 39
    assert len(reads) == 3  # the head, what it names, and that nothing follows


# Offline


def test_what_is_remembered_is_asked_by_the_policy_again(world: World, tmp_path: Path) -> None:
    url, cache = "s3://a-bucket/that-is-not-there", tmp_path / "cache"
    remember = OfflineIndex(cache, url)
    online = by_channel(world.store, CHANNEL, None, None, world.trust(), remember)
    offline = open_offline(url, cache)
    tip = world.trust(offline).tip(offline, CHANNEL)
    assert tip is not None
    assert tip.artifacts[0].manifest.sha256 == online.digest
    world.trust(offline).require_signatures(offline, CHANNEL, tip.artifacts[0])
    # Meanwhile the key is taken out of the policy.
    world.config_path.write_text(world.config_path.read_text().replace(trusted("good"), trusted("second")))
    later = World(world.root, world.now).trust(offline)
    with pytest.raises(Refused, match="by no key of the policy"):
        by_channel(offline, CHANNEL, None, None, later)


def test_a_state_that_was_not_believed_is_not_remembered(world: World, tmp_path: Path) -> None:
    url, cache = "s3://a-bucket/that-is-not-there", tmp_path / "cache"
    world.add(world.forged(3, "bare"))
    with pytest.raises(Refused):
        by_channel(world.store, CHANNEL, None, None, world.trust(), OfflineIndex(cache, url))
    with pytest.raises(NotFound):
        by_channel(open_offline(url, cache), CHANNEL, None, None, world.trust())


def test_a_mirror_that_lags_is_passed_over_and_one_that_does_not_is_told_of(world: World, tmp_path: Path) -> None:
    """The store was turned back; a mirror has what this machine has seen."""
    assert WAYS["store fetch"](world)
    mirror = LocalFolder(shutil.copytree(world.root / "store", tmp_path / "mirror"))
    lagging = LocalFolder(shutil.copytree(world.root / "store", tmp_path / "lagging"))
    for root in (world.root / "store", tmp_path / "lagging"):
        (root / generation_path(CHANNEL, 2)).unlink()
        (root / head_path(CHANNEL)).unlink()
    heard: list[str] = []
    store = afar([world.store.backend, lagging, mirror], heard=heard)
    assert by_channel(store, CHANNEL, None, None, world.trust(store)).digest == world.artifact("b").manifest_digest
    assert [f"channel production was read from {mirror.url}: " in entry for entry in heard] == [True, True]
    assert all("it ends at generation 1, and this machine has seen generation 2" in entry for entry in heard)
    both = afar([world.store.backend, lagging])
    with pytest.raises(Corrupt, match="it ends at generation 1"):
        by_channel(both, CHANNEL, None, None, world.trust(both))


def test_what_was_seen_last_is_what_is_remembered(world: World, tmp_path: Path) -> None:
    """Also where an administrator has restored an older store, and said so to this machine."""
    url, cache = "s3://a-bucket/that-is-not-there", tmp_path / "cache"
    trust = ChannelVerifier(world.trust().policy, None)
    by_channel(world.store, CHANNEL, None, None, trust, OfflineIndex(cache, url))
    world.remove(generation_path(CHANNEL, 2))
    world.head(1)
    by_channel(world.store, CHANNEL, None, None, trust, OfflineIndex(cache, url))
    offline = open_offline(url, cache)
    tip = trust.tip(offline, CHANNEL)
    assert tip is not None
    assert tip.generation == 1


# Ways back


def test_what_only_an_unbelieved_generation_says_is_not_signed_by_the_way(world: World, nxpipe: InProcess) -> None:
    """Somebody adds another model's artifact without a signature; a promotion of the first must not vouch for it."""
    stranger = world.publish("elsewhere").record
    forged = world.forged(3, signer=None)
    other = forged.artifacts[0].model_copy(
        update={"model_id": "acme/another", "request_key": stranger.request_key, "manifest": stranger.manifest}
    )
    state = tuple(sorted((*world.generation(2).artifacts, other), key=lambda one: one.slot))
    world.add(Generation.model_validate(forged.model_dump() | {"artifacts": [entry.model_dump() for entry in state]}))
    words = ("promote", world.artifact("c").name, "--channel", CHANNEL, "--key", "file:good.key")
    answer = nxpipe(*words)
    assert answer.code == exit_codes.REFUSED.number
    assert "is not signed, and no trusted generation serves acme/another@" in answer.err
    assert nxpipe("rollback", "--channel", CHANNEL, "--to", "2", "--key", "file:good.key").code == 0
    assert nxpipe(*words).code == 0


def test_promoting_what_an_unbelieved_generation_serves_writes_one_that_is_believed(
    world: World, nxpipe: InProcess
) -> None:
    world.add(world.forged(3, "c", signer=None))
    answer = nxpipe("promote", world.artifact("c").name, "--channel", CHANNEL, "--key", "file:good.key")
    assert answer.code == 0, answer.err
    assert world.generation(4).signatures
    assert nxpipe("channel", "show", CHANNEL).code == 0


def test_a_rollback_to_an_unbelieved_state_needs_a_reason(world: World, nxpipe: InProcess) -> None:
    world.add(world.forged(3, "c", signer=None))
    words = ("--channel", CHANNEL, "--key", "file:good.key")
    assert nxpipe("promote", world.artifact("a").name, *words).code == 0
    answer = nxpipe("rollback", *words)
    assert answer.code == exit_codes.REFUSED.number
    assert "generation 3, the target of the rollback, is not signed; choose another with --to" in answer.err
    assert nxpipe("rollback", *words, "--to", "2").code == 0


def test_a_promotion_is_never_dated_before_the_last_one(world: World, nxpipe: InProcess) -> None:
    """The clock of whoever promoted last was fast; the chain's dates do not fall all the same."""
    world.add(world.forged(3, "c", days_ago=-2))
    assert nxpipe("promote", world.artifact("a").name, "--channel", CHANNEL, "--key", "file:good.key").code == 0
    assert world.generation(4).at == world.generation(3).at


def test_nothing_is_written_that_nobody_would_believe(
    worlds: dict[str, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nxpipe: InProcess
) -> None:
    """The date of what it has to follow is beyond the expiry of the promoter's key."""
    world = moved(worlds[RESTRICTED], tmp_path, monkeypatch)
    world.add(world.forged(3, "a", days_ago=-3000))
    answer = nxpipe("promote", world.artifact("c").name, "--channel", CHANNEL, "--key", "file:good.key")
    assert answer.code == exit_codes.REFUSED.number
    assert "generation 4 of channel production would not be trusted" in answer.err
    assert not (world.root / "store" / generation_path(CHANNEL, 4)).exists()


# Damaged signatures


def test_fsck_reports_a_damaged_signature_that_is_passed_over(world: World) -> None:
    assert fsck(world.store).is_sound
    world.write(world.signature("b", "second"), b"garbage")
    (finding,) = fsck(world.store).unrepaired
    assert finding.path == world.signature("b", "second")


def test_fsck_reports_generations_beyond_a_gap(world: World) -> None:
    _gap(world)
    (finding,) = fsck(world.store).unrepaired
    assert finding.path == generation_path(CHANNEL, 3)
    assert "the log holds generation 4" in finding.fault


def test_a_date_that_the_folder_tells_is_what_an_expired_key_is_judged_by(world: World) -> None:
    """What docs/guides/security.md does not promise of a folder: its writers can set dates, Amazon's customers
    cannot.
    """
    one = world.forged(3, signer="old", days_ago=60)
    world.add(one)
    with pytest.raises(Refused, match="expired"):
        WAYS["store fetch"](world)
    then = world.now - 60 * 24 * 3600
    os.utime(world.root / "store" / one.path, (then, then))
    assert WAYS["store fetch"](world) == world.artifact("a").manifest_digest


# Channels that are misspelt, and what is said to those who sign


@pytest.mark.parametrize(
    "words",
    [
        ("store", "fetch", "--channel", "prodction", "--to", "out"),
        ("bench", "acme/tiny-bert@KEY", "--against", "prodction"),
        ("diff", "prodction", "acme/tiny-bert@KEY"),
        ("release", "--from", "prodction", "--to", "next", "--dry-run"),
        ("channel", "show", "prodction"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_misspelt_channel_switches_nothing_off(world: World, nxpipe: InProcess, words: tuple[str, ...]) -> None:
    key = world.artifact("c").request_key
    answer = nxpipe(*(word.replace("KEY", key) for word in words))
    assert answer.code == exit_codes.NOT_FOUND.number
    assert "there is no channel 'prodction' in file://" in answer.err
    assert "did you mean 'production'?" in answer.err


@pytest.mark.parametrize(("rule", "words"), [(FLEET, ()), (ALONE, ()), (FLEET, ("--allow-empty",))])
def test_a_channel_that_is_declared_may_still_be_empty(
    worlds: dict[str, World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nxpipe: InProcess,
    rule: str,
    words: tuple[str, ...],
) -> None:
    world = moved(worlds[rule], tmp_path, monkeypatch)
    shutil.rmtree(world.root / "store" / "channels")
    channel = "brand-new" if words else CHANNEL
    answer = nxpipe("bench", world.artifact("c").request_key, "--against", channel, *words)
    assert answer.code == 0, answer.err
    assert f"channel {channel} serves no acme/tiny-bert" in answer.err


def test_a_promotion_says_what_its_key_has_signed(world: World, nxpipe: InProcess) -> None:
    plain = world.config_path.read_text().partition("[signing]")[0]
    world.config_path.write_text(plain)
    name, key = world.artifact("bare").name, world.key("good").public.key_id
    words = ("promote", name, "--channel", "next", "--key", "file:good.key")
    first = nxpipe(*words).err
    assert f"signed generation 1 with key {key}\n" in first
    assert f"{name} is not signed; sign it with: nxpipe store sign {name}\n" in first
    assert "the channel did not change, so nothing was signed" in nxpipe(*words).err
    assert "not signed" in nxpipe("channel", "show", "next").out


def test_a_channel_without_a_fleet_may_ask_for_signatures(
    worlds: dict[str, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nxpipe: InProcess
) -> None:
    world = moved(worlds[ALONE], tmp_path, monkeypatch)
    assert nxpipe("config", "check").code == 0
    assert nxpipe("store", "fetch", "--channel", CHANNEL, "--to", "out").code == 0
    world.add(world.forged(3, signer=None))
    assert nxpipe("store", "fetch", "--channel", CHANNEL, "--to", "out").code == exit_codes.REFUSED.number


def test_a_channel_of_nothing_is_still_empty_to_agents(world: World) -> None:
    """The colours of a fleet have no channel before their first rollout."""
    with pytest.raises(ChannelEmpty):
        by_channel(world.store, "search--blue", None, None, trust_in(world.config, world.root, world.store))


def test_the_manifest_that_is_believed_is_the_one_that_is_fetched(world: World) -> None:
    assert Blob.of(world.artifact("b").manifest.to_bytes()).sha256 == WAYS["agent run"](world)
