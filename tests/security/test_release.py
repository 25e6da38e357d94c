"""Findings 11 and 17 of the review: production gets approved artifacts only, and no key has two duties."""

from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.trust.policy import signing_with
from nxpipe.artifact_store.trust.signers import open_signer
from nxpipe.pipeline.release import state
from nxpipe.pipeline.util import exit_codes
from tests.agent.project import CONFIG
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import Folder, folder, publish_verified, put
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

WORDS = ("release", "--from", "staging", "--to", "production", "--skip", "verify", "--skip", "bench")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Staging serves an approved artifact; `evil` is published and not served."""
    monkeypatch.chdir(tmp_path)
    Path("nxpipe.toml").write_text('[project]\nname = "demo"\n[store]\nurl = "file://store"\n')
    held = folder(tmp_path / "store")
    move_staging(held, request=1)
    return held


def move_staging(held: Folder, *, request: int) -> Generation:
    served = Served.of(publish_verified(held.store, put(held.store, request=request)))

    def follow(tip: Generation | None) -> Generation:
        first = first_generation("staging", [served])
        after = {"generation": tip.generation + 1, "previous": tip.digest} if tip else {}
        return Generation.model_validate(first.model_dump() | after)

    return ChannelLog(held.backend, "staging").append(follow).generation


def tip(backend: Backend, channel: str) -> Generation | None:
    return ChannelLog(backend, channel).tip()


def approved(held: Folder) -> str:
    found = tip(held.backend, "staging")
    assert found is not None
    return f"{found.generation}@{found.digest}"


def test_what_was_approved_is_released(nxpipe: InProcess, store: Folder) -> None:
    answer = nxpipe(*WORDS, "--expect", approved(store))
    assert answer.code == 0, answer.err
    production, staging = tip(store.backend, "production"), tip(store.backend, "staging")
    assert production is not None
    assert staging is not None
    assert production.artifacts == staging.artifacts


@pytest.mark.attempt("R07")
def test_what_came_to_staging_after_the_approval_is_not_released(nxpipe: InProcess, store: Folder) -> None:
    expected = approved(store)
    move_staging(store, request=2)
    answer = nxpipe(*WORDS, "--expect", expected)
    assert answer.code == exit_codes.REFUSED.number
    assert f"not the expected {expected}" in answer.err
    assert tip(store.backend, "production") is None


@pytest.mark.attempt("R07")
def test_what_comes_to_staging_while_it_is_released_is_not_released(
    nxpipe: InProcess, store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the look at the channel."""
    was = tip(store.backend, "staging")
    looked = state.ReleaseContext.tip

    def look(self: state.ReleaseContext, channel: str | None = None) -> Generation | None:
        found = looked(self, channel)
        if channel == "staging":
            move_staging(store, request=3)
        return found

    monkeypatch.setattr(state.ReleaseContext, "tip", look)
    answer = nxpipe(*WORDS, "--expect", approved(store))
    assert answer.code == 0, answer.err
    production = tip(store.backend, "production")
    assert was is not None
    assert production is not None
    assert production.artifacts == was.artifacts


@pytest.mark.parametrize("said", ["1", "1@", "@" + "0" * 64, "0@" + "0" * 64, "1@" + "0" * 63, "1@" + "g" * 64, "-1@a"])
def test_what_names_no_generation_is_a_wrong_word(nxpipe: InProcess, store: Folder, said: str) -> None:
    answer = nxpipe(*WORDS, "--expect", said)
    assert (answer.code, tip(store.backend, "production")) == (exit_codes.USAGE.number, None)


def test_a_generation_of_no_channel_is_a_wrong_word(nxpipe: InProcess, store: Folder) -> None:
    assert nxpipe("release", "--expect", approved(store)).code == exit_codes.USAGE.number


def test_a_digest_of_another_generation_is_refused(nxpipe: InProcess, store: Folder) -> None:
    assert nxpipe(*WORDS, "--expect", "1@" + "0" * 64).code == exit_codes.REFUSED.number
    assert tip(open_store("store").backend, "production") is None


# A key for each duty (finding 17)

TRUST = """
[[signing.trusted]]
name = "build"
key = "file:build.key.pub"
signs = "artifacts"
[[signing.trusted]]
name = "production"
key = "file:production.key.pub"
signs = "channels"
"""
DUTIES = """
[signing]
key = "file:build.key"
require = ["production"]
[[signing.promoting]]
channel = "production"
key = "file:production.key"
"""


@pytest.mark.attempt("D10")
@pytest.mark.parametrize("trust", [TRUST, ""], ids=["said", "by the keys that sign"])
def test_the_key_of_builds_cannot_promote_and_that_of_a_channel_cannot_vouch_for_artifacts(
    nxpipe: InProcess, store: Folder, trust: str
) -> None:
    (served,) = (tip(store.backend, "staging") or pytest.fail("staging is empty")).artifacts
    for name in ("build", "production"):
        assert nxpipe("store", "keygen", f"{name}.key").code == 0
    Path("nxpipe.toml").write_text(CONFIG + DUTIES + trust)
    promote = ("promote", served.name, "--channel", "production")
    assert nxpipe("store", "sign", served.name, "--key", "file:production.key").code == 0
    unsigned = nxpipe(*promote)
    assert (unsigned.code, "no key that it trusts has signed" in unsigned.err) == (exit_codes.REFUSED.number, True)
    assert nxpipe("store", "sign", served.name).code == 0
    by_the_build = nxpipe(*promote, "--key", "file:build.key")
    assert (by_the_build.code, tip(store.backend, "production")) == (exit_codes.REFUSED.number, None)
    assert nxpipe(*promote).code == 0
    assert nxpipe("channel", "show", "production").code == 0


@pytest.mark.attempt("D10")
def test_a_generation_that_the_key_of_builds_has_signed_is_not_believed(nxpipe: InProcess, store: Folder) -> None:
    """As a job that was taken over writes it, which asks no policy of ours."""
    for name in ("build", "production"):
        assert nxpipe("store", "keygen", f"{name}.key").code == 0
    Path("nxpipe.toml").write_text(CONFIG + DUTIES)
    (served,) = (tip(store.backend, "staging") or pytest.fail("staging is empty")).artifacts
    forged = first_generation("production", [served])
    signature = signing_with(open_signer("file:build.key", Path()))(forged.signed_bytes())
    ChannelLog(store.backend, "production").append(lambda _: forged.model_copy(update={"signatures": (signature,)}))
    assert nxpipe("channel", "show", "production").code == exit_codes.REFUSED.number


@pytest.mark.parametrize(
    "keys",
    [
        '[[signing.promoting]]\nchannel = "production"\nkey = "file:a"\n' * 2,
        '[[signing.promoting]]\nchannel = "Production"\nkey = "file:a"\n',
        '[[signing.promoting]]\nchannel = "production"\nkey = "a"\n',
        '[[signing.trusted]]\nname = "build"\nkey = "file:a"\nsigns = "all"\n',
        'require = ["production"]\n[[signing.trusted]]\nname = "build"\nkey = "file:a"\nsigns = "artifacts"\n',
        'require = ["production"]\n[[signing.trusted]]\nname = "build"\nkey = "file:a"\nsigns = "channels"\n',
    ],
)
def test_duties_that_make_no_sense_are_refused(nxpipe: InProcess, store: Folder, keys: str) -> None:
    Path("nxpipe.toml").write_text(f"{CONFIG}[signing]\n{keys}")
    assert nxpipe("config", "check").code == exit_codes.CONFIGURATION.number
