"""`nxpipe store fetch`: from the store, from a mirror, from the offline index."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import MODEL, S3, bucket, folder, put, s3_server, tree, with_device_programs
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

SERVED = {
    *("manifest.json", "weights.safetensors", ".nxpipe"),
    *("executables/forward-b1-s128.nxe", "files/tokenizer/config.json"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """A bucket named in nxpipe.toml."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    place = bucket(f"test-{tmp_path.name.replace('_', '-').strip('-')[:40]}")
    describe(place.store.url)
    return place


def describe(url: str, **more: object) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in {"url": url, "cache": "cache", **more}.items()]
    Path("nxpipe.toml").write_text("\n".join(['[project]\nname = "test"\n\n[store]', *lines]))


def test_an_artifact_of_a_folder_is_fetched_by_name(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = folder(tmp_path / "store").store
    published = store.publish(put(store))
    answer = nxpipe("store", "fetch", MODEL, "--to", "served", "--store", "store", "--json")
    assert answer.code == 0, answer.err
    assert tree(tmp_path / "served") == SERVED
    document = json.loads(answer.out)
    assert document["manifest_digest"] == published.manifest_digest
    assert document["bytes_written"] > 0
    again = nxpipe("store", "fetch", MODEL, "--to", "served", "--store", "store")
    assert again.out == "served\n"
    assert "up to date" in again.err
    assert not (tmp_path / "cache").exists()


def test_of_an_artifact_for_devices_no_program_of_the_emulator_is_fetched_unless_asked_for(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = folder(tmp_path / "store").store
    store.publish(with_device_programs(store, put(store)))
    words = ("store", "fetch", MODEL, "--to", "served", "--store", "store")
    program = "executables/forward-b1-s128"
    assert nxpipe(*words).code == 0
    assert tree(tmp_path / "served") == SERVED - {f"{program}.nxe"} | {f"{program}.neff", f"{program}.json"}
    assert (tmp_path / f"served/{program}.neff").read_bytes() == b"neff of forward-b1-s128"
    assert nxpipe(*words, "--programs", "emulator").code == 0
    assert tree(tmp_path / "served") == SERVED | {"files/graphs/forward-b1-s128"}
    emulated = store.publish(put(store, request="no NEFF"))
    refused = nxpipe(*words[:2], emulated.request_key, *words[3:], "--programs", "device")
    assert (refused.code, "--backend neuronx" in refused.err) == (exit_codes.REFUSED.number, True)
    assert tree(tmp_path / "served") == SERVED | {"files/graphs/forward-b1-s128"}


def test_what_was_fetched_once_is_served_offline_with_its_age(nxpipe: InProcess, s3: S3, tmp_path: Path) -> None:
    published = s3.store.publish(put(s3.store))
    tip = first_generation("prod", [Served.of(published)])
    assert ChannelLog(s3.backend, "prod").append(lambda _: tip).changed
    assert nxpipe("store", "fetch", "--channel", "prod", "--to", "first").code == 0
    assert nxpipe("store", "fetch", MODEL, "--to", "second").code == 0
    for path in s3.objects():
        s3.remove(path)
    for words in (["--channel", "prod", "--model", MODEL, "--target", "inf2"], [MODEL]):
        served = "-".join(words).replace("/", "-").strip("-")
        answer = nxpipe("store", "fetch", *words, "--offline", "--to", served)
        assert answer.code == 0, answer.err
        assert "last seen less than a minute ago" in answer.err
        assert tree(tmp_path / served) == SERVED
    # What a key names never changes, so nobody need be asked.
    assert nxpipe("store", "fetch", published.request_key, "--to", "third").code == 0
    assert nxpipe("store", "fetch", MODEL, "--to", "fourth").code == exit_codes.NOT_FOUND.number


def test_what_was_never_seen_cannot_be_had_offline(nxpipe: InProcess, s3: S3) -> None:
    s3.store.publish(put(s3.store))
    answer = nxpipe("store", "fetch", MODEL, "--offline", "--to", "served")
    assert answer.code == exit_codes.NOT_FOUND.number
    assert "as last seen from here" in answer.err


def test_a_blob_that_the_store_has_lost_comes_from_its_replica_and_that_is_said(
    nxpipe: InProcess, s3: S3, tmp_path: Path
) -> None:
    replica = folder(tmp_path / "replica").store
    wanted = put(replica)
    s3.store.publish(put(s3.store))
    s3.remove(blob_path(wanted.executables[0].blob))
    describe(s3.store.url, endpoints=[f"file://{tmp_path}/replica"])
    answer = nxpipe("store", "fetch", MODEL, "--to", "served")
    assert answer.code == 0, answer.err
    assert f"was read from file://{tmp_path}/replica" in answer.err
    assert tree(tmp_path / "served") == SERVED


def test_replicas_belong_to_the_store_of_the_file_alone(nxpipe: InProcess, s3: S3, tmp_path: Path) -> None:
    replica = folder(tmp_path / "replica").store
    replica.publish(put(replica))
    describe(s3.store.url, endpoints=[f"file://{tmp_path}/replica"])
    assert nxpipe("store", "fetch", MODEL, "--to", "a", "--store", f"{s3.store.url}-other").code != 0
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "words",
    [[], [MODEL, "--channel", "prod"], [MODEL, "--model", MODEL], [MODEL, "--target", "inf2"]],
    ids=["nothing", "both", "a model of no channel", "a target of no channel"],
)
def test_words_that_do_not_fit_together_are_refused(nxpipe: InProcess, tmp_path: Path, words: list[str]) -> None:
    answer = nxpipe("store", "fetch", *words, "--to", str(tmp_path / "served"), "--store", str(tmp_path / "store"))
    assert answer.code == exit_codes.USAGE.number
    assert not (tmp_path / "served").exists()


def test_a_channel_that_serves_several_asks_which(nxpipe: InProcess, tmp_path: Path) -> None:
    place = folder(tmp_path / "store")
    served = [Served.of(place.store.publish(put(place.store, request=n, model=f"acme/m{n}"))) for n in (1, 2)]
    assert ChannelLog(place.backend, "prod").append(lambda _: first_generation("prod", served)).changed
    fetch = ("store", "fetch", "--channel", "prod", "--store", str(tmp_path / "store"), "--to", str(tmp_path / "to"))
    answer = nxpipe(*fetch)
    assert answer.code == exit_codes.NOT_FOUND.number
    assert "acme/m1 for inf2, acme/m2 for inf2" in answer.err
    assert nxpipe(*fetch, "--model", "acme/m2").code == 0
    assert nxpipe(*fetch, "--model", "acme/m3").code == exit_codes.NOT_FOUND.number


ENDPOINT = """
[project]
name = "demo"
[[models]]
name = "bert"
id = "acme/tiny-bert"
task = "fill-mask"
target = "inf2.xlarge"
[[endpoints]]
name = "answers"
model = "bert"
artifact = "DIGEST"
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:DIGEST"
instance_type = "ml.inf2.xlarge"
instances = 1
shift = { kind = "all-at-once", bake = "10m" }
""".replace("DIGEST", "0" * 64)


def test_an_endpoint_gets_only_artifacts_that_it_can_run(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = folder(tmp_path / "store").store
    emulated = store.publish(put(store))
    compiled = store.publish(with_device_programs(store, put(store, request="for devices")))
    other = store.publish(put(store, model="acme/other", request="another model"))
    words = ("--endpoint", "answers", "--to", "served", "--store", "store")
    Path("nxpipe.toml").write_text(ENDPOINT)
    for artifact, reason in ((emulated, "and endpoint answers needs those of backend neuronx"), (other, "acme/other")):
        refused = nxpipe("store", "fetch", artifact.request_key, *words)
        assert (refused.code, reason in refused.err) == (exit_codes.REFUSED.number, True), refused.err
        assert not Path("served").exists()
    assert nxpipe("store", "fetch", compiled.request_key, *words).code == 0
    Path("nxpipe.toml").write_text(f"{ENDPOINT}rehearsal = true\n")
    assert nxpipe("store", "fetch", emulated.request_key, *words, "--to", "rehearsed").code == 0
    unknown = nxpipe("store", "fetch", compiled.request_key, *words, "--endpoint", "answer")
    assert (unknown.code, "did you mean 'answers'" in unknown.err) == (exit_codes.USAGE.number, True)
