"""A user's environment: stores with content, an S3 server with faults, and every command on a store."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import boto3
import pytest

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.util.exit_codes import ExitCode
from tests.faults.proxy import Proxy
from tests.pipeline.command import NXPIPE, TIMEOUT, Answer, nxpipe
from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.test_store_commands import MODEL, publish

IDENTITY: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET: Final = "my-artifacts"

# Arguments of each command, beside its store; the world fills in the words in braces.
READERS: Final = {
    "store ls": "",
    "store show": "{first}",
    "store explain": "{first}",
    "store diff": "{first} {second}",
    "store export": "{first} --to out.tar",
    "store fetch": "{first} --to served",
    "store gc --dry-run": "",
    "store fsck": "",
    "store du": "",
    "store pin": "",
    "store verify-signature": "{first} --public-key {root}/release.key.pub",
    "channel log": "prod",
    "channel show": "prod",
}
WRITERS: Final = {
    "build": "--model-id {root}/tiny-bert --weights random:0 --buckets 32",
    "store import": "{root}/third.tar",
    "store gc": "",
    "store pin ": "{first} --as mine",
    "store unpin": "kept",
    "store sign": "{first} --key file:{root}/release.key",
    "promote": "{first} --channel prod",
    "rollback": "--channel prod",
}
ALL: Final = READERS | WRITERS


@dataclass(frozen=True)
class World:
    """A folder `store` with two artifacts of one model, a pin, an old orphan, and a channel `prod`."""

    root: Path
    store: Path
    first: str
    second: str
    proxy: Proxy

    @property
    def s3(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": self.proxy.url, **IDENTITY}

    def words(self, command: str) -> list[str]:
        result = ALL[command].format(root=self.root, first=self.first, second=self.second)
        return [*command.split(), *result.split()]


def run(*words: str, cwd: Path, before: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Answer:
    """Run a command; `before` is a prefix that starts it as another user."""
    if not before:
        return nxpipe(*words, cwd=cwd, **(environment or {}))
    done = subprocess.run(
        [*before, str(NXPIPE), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=TIMEOUT,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def at_once(runs: Mapping[str, Callable[[], Answer]]) -> Iterator[tuple[str, Answer]]:
    """Parallel processes, of which each mostly starts up."""
    with ThreadPoolExecutor(4) as pool:
        yield from zip(runs, pool.map(lambda each: each(), runs.values()), strict=True)


def each_command(
    world: World,
    url: str,
    folder: Path,
    commands: Iterable[str],
    *,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Answer]]:
    """The result of each command on this store, each in an empty folder."""

    def runs(command: str) -> Callable[[], Answer]:
        here = folder / command.replace(" ", "-").replace("/", "-")
        here.mkdir()
        here.chmod(0o777)
        return lambda: run(*world.words(command), "--store", url, cwd=here, before=before, environment=environment)

    yield from at_once({command: runs(command) for command in commands})


def is_one_sentence(answer: Answer, code: ExitCode, *says: str) -> None:
    """Whether the last line of stderr is one sentence, with the documented exit code; progress may precede it."""
    assert answer.code == code.number, answer.err
    *before, error = answer.err.splitlines()
    assert error.startswith("Error: "), answer.err
    assert [line for line in before if not line.startswith("  ")] == [], answer.err
    assert "Traceback" not in answer.err
    assert "internal error" not in answer.err
    for text in says:
        assert text in answer.err, answer.err


def make_world(root: Path, proxy: Proxy) -> World:
    store = root / "store"
    first, second = (publish(store, note=note) for note in ("plain", "other"))
    names = [f"{MODEL}@{entry.request_key[:12]}" for entry in (first, second)]
    write_model(root / "tiny-bert", dict(BERT))
    publish(root / "elsewhere", note="third")
    for words in (
        ["store", "keygen", "release.key"],
        ["store", "export", MODEL, "--to", "third.tar", "--store", "elsewhere"],
        ["store", "sign", names[0], "--key", "file:release.key", "--store", "store"],
        ["store", "pin", names[0], "--as", "kept", "--store", "store"],
        ["promote", names[0], "--channel", "prod", "--store", "store"],
        ["promote", names[1], "--channel", "prod", "--store", "store"],
    ):
        answer = run(*words, cwd=root)
        assert answer.code == 0, answer.err
    orphan = open_store(str(store)).put_blob(b"orphan")
    os.utime(store / "cas" / "sha256" / orphan.sha256[:2] / orphan.sha256, (1_000_000_000, 1_000_000_000))
    world = World(root, store, names[0], names[1], proxy)
    _fill_bucket(world)
    return world


def _fill_bucket(world: World) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=world.proxy.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    for path in world.store.rglob("*"):
        if path.is_file():
            key = f"nxpipe/{path.relative_to(world.store).as_posix()}"
            client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes(), ChecksumAlgorithm="SHA256")


@contextmanager
def small_disk(at: Path, *options: str, size: str = "1m") -> Iterator[Path]:
    """A file system of its own that is full at once."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(at)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this machine lets us mount no file system")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return
