"""Faults of a user's environment: each command reports them in one sentence, with its exit code."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.backends.s3_client import ATTEMPTS, s3_client
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, KEY, NOT_FOUND, PIPE_CLOSED, REFUSED, STORE, USAGE, ExitCode
from tests.artifact_store.samples import tree
from tests.faults.moto_process import moto_process
from tests.faults.plan import CutBefore, Fault, Hold, Plan, Refuse, on, where
from tests.faults.proxy import Proxy
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.test_store_commands import MODEL
from tests.pipeline.user_world import (
    ALL,
    BUCKET,
    IDENTITY,
    READERS,
    WRITERS,
    World,
    at_once,
    each_command,
    fill,
    is_one_sentence,
    make_world,
    run,
    small_disk,
)
from tests.serving.standins import compiled

pytestmark = pytest.mark.sample(8)

URL = f"s3://{BUCKET}/nxpipe"
# What they ask first: for a listing; with a HEAD of an object, and of the bucket, which is refused without a reason.
SEVERAL = ("store ls", "store import", "store gc")
DAY = 86400.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world outside of pytest's own folder, which other users may not enter."""
    with tempfile.TemporaryDirectory() as name, moto_process() as moto, Proxy(moto) as proxy:
        root = Path(name).resolve()
        root.chmod(0o755)
        yield make_world(root, proxy)


@pytest.fixture(autouse=True)
def good_day(world: World) -> None:
    world.proxy.start_over(Plan())


@pytest.fixture
def store(world: World, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(world.store, tmp_path / "store"))


def test_on_a_good_day_every_command_ends_well(world: World, store: Path, tmp_path: Path) -> None:
    """Without this, the tests below would prove nothing."""
    for command, answer in each_command(world, str(store), tmp_path, sorted(ALL.keys() - {"build"})):
        assert answer.code == 0, (command, answer.err)


# S3


@pytest.mark.sample(8)
def test_a_bucket_that_does_not_exist(world: World, tmp_path: Path) -> None:
    for _, answer in each_command(world, "s3://my-artefacts/nxpipe", tmp_path, ALL, environment=world.s3):
        is_one_sentence(answer, STORE, "s3://my-artefacts/nxpipe", "NoSuchBucket", "create the bucket, or correct")


def test_no_credentials(world: World, tmp_path: Path) -> None:
    environment = {"AWS_ENDPOINT_URL": world.proxy.url, "AWS_DEFAULT_REGION": "us-east-1"}
    for _, answer in each_command(world, URL, tmp_path, (*SEVERAL, "build", "store fetch"), environment=environment):
        is_one_sentence(answer, STORE, URL, "no usable AWS credentials", "set AWS_PROFILE, or AWS_ACCESS_KEY_ID")


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Refuse(403, "AccessDenied"), "allow this identity s3:GetObject"),
        pytest.param(Refuse(403, "InvalidAccessKeyId"), "renew AWS_ACCESS_KEY_ID", marks=pytest.mark.slow),
        pytest.param(Refuse(403, "SignatureDoesNotMatch"), "renew AWS_ACCESS_KEY_ID", marks=pytest.mark.slow),
        (Refuse(400, "ExpiredToken"), "log in to AWS again"),
        (Refuse(403, "RequestTimeTooSkewed"), "set this machine's clock"),
        (Refuse(400, "AuthorizationHeaderMalformed"), "set AWS_REGION"),
        (Refuse(301, "PermanentRedirect"), "set AWS_ENDPOINT_URL"),
        (Refuse(500, "InternalError"), "the server failed"),
        (CutBefore(), "check the network"),
        pytest.param(Refuse(503, "SlowDown"), "try again in a minute", marks=pytest.mark.slow),  # it is tried for long
    ],
    ids=lambda value: getattr(value, "code", type(value).__name__) if isinstance(value, Fault) else "",
)
def test_what_s3_refuses_is_told_with_the_way_out(world: World, tmp_path: Path, fault: Fault, says: str) -> None:
    """Also by the commands whose first request is a HEAD, which S3 answers without a reason."""
    world.proxy.start_over(Plan(where(lambda request: True, fault)))
    for _, answer in each_command(world, URL, tmp_path, SEVERAL, environment=world.s3):
        is_one_sentence(answer, STORE, "s3://my-artifacts", says)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "check the network, AWS_REGION and AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://store.invalid"}, "check the network, AWS_REGION and AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "store.example"}, "correct AWS_ENDPOINT_URL"),
        ({"AWS_DEFAULT_REGION": "us east"}, "'us east'"),
        ({"AWS_PROFILE": "nobodys"}, "profile (nobodys) could not be found"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "no usable AWS credentials"),
    ],
)
def test_an_environment_that_leads_nowhere(
    world: World, tmp_path: Path, environment: dict[str, str], says: str
) -> None:
    answer = run("store", "ls", "--store", URL, cwd=tmp_path, environment={**world.s3, **environment})
    is_one_sentence(answer, STORE, "s3://my-artifacts", says)


class _OfAnotherRegion(BaseHTTPRequestHandler):
    """A server that has the bucket `abroad` in eu-west-1 and redirects other requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        at_home = "/eu-west-1/" in self.headers["Authorization"]
        self.send_response(200 if at_home else 301)
        if self.path.startswith("/abroad"):
            self.send_header("x-amz-bucket-region", "eu-west-1")
        else:
            self.send_header("Location", "https://store.example/")
        body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" if at_home else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No log in tests."""


def test_a_bucket_of_another_region_is_followed_and_a_redirect_of_another_kind_is_told(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OfAnotherRegion) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", **IDENTITY}
        followed = run("store", "ls", "--store", "s3://abroad/x", cwd=tmp_path, environment=environment)
        result = run("store", "ls", "--store", "s3://other/x", cwd=tmp_path, environment=environment)
        server.shutdown()
    assert (followed.code, followed.out) == (0, ""), followed.err
    is_one_sentence(result, STORE, "s3://other/x", "redirects to https://store.example/; set AWS_ENDPOINT_URL")


def test_a_server_that_never_answers_is_given_up_after_minutes_and_not_hours() -> None:
    config = s3_client().meta.config
    assert ATTEMPTS * (config.connect_timeout + config.read_timeout) <= 6 * 60


# Folders


def test_a_store_that_is_a_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to do")
    for _, answer in each_command(world, str(tmp_path / "notes.txt"), tmp_path, (*SEVERAL, "build", "promote")):
        is_one_sentence(
            answer, STORE, f"{tmp_path}/notes.txt", "Not a directory; move the file or folder in its place away"
        )
    assert (tmp_path / "notes.txt").read_text() == "to do"


def test_a_folder_of_other_things_holds_no_artifact_and_keeps_its_things(world: World, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    url = str(tmp_path / "home")
    named = ("store show", "store fetch", "store export", "store sign", "store unpin", "promote", "rollback")
    for _, answer in each_command(world, url, tmp_path, (*named, "channel log")):
        is_one_sentence(answer, NOT_FOUND, url)
    for command, answer in each_command(world, url, tmp_path, ("store ls", "store gc", "store fsck", "store du")):
        assert answer.code == 0, (command, answer.err)
    assert tree(tmp_path / "home") == {"letter.txt"}


@pytest.fixture(scope="module")
def as_somebody_else(world: World) -> list[str]:
    """A command prefix that drops root, for which file permissions do not count."""
    if os.geteuid() != 0:
        return []
    before = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if shutil.which("setpriv") is None or run("version", cwd=world.root, before=before).code != 0:
        pytest.skip("this machine lets us be no other user")
    (world.root / "release.key").chmod(0o600)
    os.chown(world.root / "release.key", 65534, 65534)
    return before


@pytest.mark.sample(8)
def test_a_store_that_we_may_only_read(world: World, as_somebody_else: list[str]) -> None:
    """Looking at it works in every way; what would change it says that it may not."""
    with tempfile.TemporaryDirectory(dir=world.root) as name:
        here = Path(name)
        here.chmod(0o755)
        url = str(shutil.copytree(world.store, here / "store"))
        subprocess.run(["chmod", "-R", "a+rX,a-w", url], check=True)
        (here / "home").mkdir(mode=0o777)
        environment = {name: str(here / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
        (here / "home").chmod(0o777)
        before = tree(Path(url))
        for command, answer in each_command(
            world, url, here, READERS, before=as_somebody_else, environment=environment
        ):
            assert answer.code == 0, (command, answer.err)
        for _, answer in each_command(world, url, here, WRITERS, before=as_somebody_else, environment=environment):
            is_one_sentence(answer, STORE, f"{url}/", "Permission denied; make it readable and writable for this user")
        assert tree(Path(url)) == before
        subprocess.run(["chmod", "-R", "u+w", url], check=True)


def test_a_store_that_we_may_not_even_read(world: World, as_somebody_else: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=world.root) as name:
        here = Path(name)
        here.chmod(0o755)
        (here / "closed").mkdir(mode=0o000)
        for _, answer in each_command(world, str(here / "closed"), here, SEVERAL, before=as_somebody_else):
            is_one_sentence(answer, STORE, f"{here}/closed/", "Permission denied; make it readable and writable")


def test_a_disk_that_is_mounted_read_only(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="8m") as disk:
        url = str(shutil.copytree(world.store, disk / "store"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for command, answer in each_command(world, url, tmp_path, READERS):
            assert answer.code == 0, (command, answer.err)
        for _, answer in each_command(world, url, tmp_path, WRITERS):
            is_one_sentence(answer, STORE, f"{disk}/store/", "Read-only file system; make the folder writable")
        is_one_sentence(run("store", "doctor", "--store", url, cwd=tmp_path), STORE, f"{disk}/store")
        for command, *words in (("export", "--to", f"{disk}/out.tar"), ("fetch", "--to", f"{disk}/served")):
            answer = run("store", command, world.first, *words, "--store", str(world.store), cwd=tmp_path)
            is_one_sentence(answer, STORE, f"{disk}/", "Read-only file system")
        is_one_sentence(run("store", "keygen", f"{disk}/new.key", cwd=tmp_path), KEY, "Read-only", "another path")


# A full disk


def test_a_store_on_a_full_disk_can_still_be_read_and_collected(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(shutil.copytree(world.store, disk / "store"))
        before = tree(Path(url))
        fill(disk)
        for command, answer in each_command(world, url, tmp_path, READERS):
            assert answer.code == 0, (command, answer.err)
        changing = ("store import", "store sign", "store pin ", "promote", "rollback")
        for _, answer in each_command(world, url, tmp_path, changing):
            is_one_sentence(answer, STORE, "No space left on device; free some space")
        doctor = run("store", "doctor", "--store", url, cwd=tmp_path)
        is_one_sentence(doctor, STORE, "No space left on device; free some space")
        assert tree(Path(url)) == before
        answer = run("store", "gc", "--store", url, cwd=tmp_path)
        assert answer.code == 0, answer.err
        assert "1 steps freed" in answer.err


def test_a_disk_that_becomes_full_leaves_nothing_half_written(world: World, tmp_path: Path) -> None:
    shown = str(world.root / "elsewhere")
    with small_disk(tmp_path / "disk", size="64k") as disk:
        words = {
            "import": ("import", str(world.root / "third.tar"), "--store", f"{disk}/store"),
            "export to a file": ("export", MODEL, "--to", f"{disk}/out.tar", "--store", shown),
            "export to a folder": ("export", MODEL, "--to", f"{disk}/out", "--store", shown),
            "fetch": ("fetch", MODEL, "--to", f"{disk}/served", "--store", shown),
        }
        for name, word in words.items():
            fill(disk)
            with (disk / "fill").open("r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) - 8192)  # room for the beginning
            is_one_sentence(run("store", *word, cwd=tmp_path), STORE, f"{disk}/", "free some space")
            left = {path for path in tree(disk) if path != "fill"}
            assert not [path for path in left if path.endswith((".part", ".tar", "manifest.json"))], (name, left)
            assert not (disk / "out").exists()
            (disk / "fill").unlink()
            again = run("store", *word, cwd=tmp_path)
            assert again.code == 0, (name, again.err)
            for folder in ("store", "out", "served"):
                shutil.rmtree(disk / folder, ignore_errors=True)
            (disk / "out.tar").unlink(missing_ok=True)


def test_a_cache_on_a_full_disk_is_named(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        (tmp_path / "nxpipe.toml").write_text(
            f'[project]\nname = "test"\n[store]\nurl = "{URL}"\ncache = "{disk}/cache"\n'
        )
        answer = run("store", "fetch", world.first, "--to", "served", cwd=tmp_path, environment=world.s3)
    is_one_sentence(
        answer, STORE, f"{disk}/cache/", "No space left on device; free some space, or use another location"
    )
    assert not (tmp_path / "served" / "manifest.json").exists()


# A clock that is off

_CLOCK = """
import datetime, os, time
ahead, now = float(os.environ["CLOCK_AHEAD"]), time.time
time.time = lambda: now() + ahead

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=ahead)

datetime.datetime = Shifted
"""


@pytest.fixture
def off(tmp_path: Path) -> "partial[dict[str, str]]":
    """The environment of a process with a clock off by so many seconds."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(_CLOCK)
    return partial(dict, PYTHONPATH=str(tmp_path / "clock"))


def test_a_collection_goes_by_the_clock_of_the_store_and_refuses_where_that_of_this_machine_is_far_off(
    store: Path, tmp_path: Path, off: "partial[dict[str, str]]"
) -> None:
    young = blob_path(open_store(str(store)).put_blob(b"young"))
    collect = partial(run, "store", "gc", "--dry-run", "--json", "--store", str(store), cwd=tmp_path)
    answer = collect(environment=off(CLOCK_AHEAD="3000"))
    assert answer.code == 0, answer.err
    steps = [step["path"] for step in json.loads(answer.out)["steps"]]
    assert len(steps) == 1  # the orphan that is old
    assert young not in steps
    for ahead in (-9000 * DAY, 3 * DAY):
        words = ("store", "gc", "--dry-run", "--store", str(store))
        refused = run(*words, cwd=tmp_path, environment=off(CLOCK_AHEAD=str(ahead)))
        is_one_sentence(refused, REFUSED, "one of them may be wrong")


def test_a_collection_of_a_bucket_refuses_where_the_clocks_disagree(world: World, tmp_path: Path) -> None:
    for ahead, code in ((0.0, 0), (3000.0, 0), (3 * DAY, REFUSED.number), (-3 * DAY, REFUSED.number)):
        world.proxy.start_over(Plan(clock_ahead=ahead))
        answer = run("store", "gc", "--dry-run", "--json", "--store", URL, cwd=tmp_path, environment=world.s3)
        assert answer.code == code, answer.err
        assert code or not json.loads(answer.out)["steps"]


@pytest.mark.sample(8)
def test_doctor_says_that_the_clock_is_off(store: Path, tmp_path: Path, off: "partial[dict[str, str]]") -> None:
    answer = run("store", "doctor", "--store", str(store), cwd=tmp_path, environment=off(CLOCK_AHEAD=str(3 * DAY)))
    assert answer.code == 0, answer.err
    assert "this machine's clock differs from the store's by +259200 s; set it" in answer.out


_FLEET = f"""
[[models]]
name = "bert"
id = "{MODEL}"
task = "fill-mask"
target = "inf2.xlarge"

[[fleets]]
kind = "serving"
name = "live"
model = "bert"
channel = "prod"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, max = 2 }}
rehearsal = true

"""


@pytest.mark.parametrize(("expires_in", "ahead"), [(DAY, 3 * DAY), (-DAY, -3 * DAY)])
def test_a_key_expires_by_the_clock_of_the_store(
    world: World, store: Path, tmp_path: Path, off: "partial[dict[str, str]]", expires_in: float, ahead: float
) -> None:
    expires = (datetime.now(UTC) + timedelta(seconds=expires_in)).strftime("%Y-%m-%dT%H:%M:%SZ")
    trusted = f'name = "release"\nkey = "file:{world.root}/release.key.pub"\nexpires = {expires}\n'
    signing = f'[signing]\nkey = "file:{world.root}/release.key"\nrequire = ["prod"]\n[[signing.trusted]]\n{trusted}'
    (tmp_path / "nxpipe.toml").write_text(f'[project]\nname = "test"\n{_FLEET}{signing}')
    words = ("promote", world.first, "--channel", "prod", "--store", str(store))
    answer = run(*words, cwd=tmp_path, environment=off(CLOCK_AHEAD=str(ahead)))
    if expires_in < 0:
        is_one_sentence(answer, REFUSED, "may not sign for channel prod")
        return
    assert answer.code == 0, answer.err
    shown = run("channel", "show", "prod", "--store", str(store), cwd=tmp_path)
    assert shown.code == 0, shown.err


# What was typed


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("store ls --store s3:/x", STORE, "starts with 's3:/', which is not a supported scheme; allowed are"),
        ("store ls --store s3://", STORE, "not a bucket name (3-63 of a-z, 0-9, '-' and '.')"),
        ("store ls --store s3://My_Bucket/x", STORE, "not a bucket name"),
        ("store ls --store gs://x", STORE, "starts with 'gs://', which is not a supported scheme"),
        ("store ls --store=", STORE, "names no folder"),
        ("store fsck --repair-from gs://x --store {store}", STORE, "starts with 'gs://'"),
        ("store show acme/tiny-bret --store {store}", NOT_FOUND, "did you mean acme/tiny-bert@"),
        ("store show acme/tiny-bert --store {store}", NOT_FOUND, "matches 2 artifacts"),
        ("store show 000000 --store {store}", NOT_FOUND, "there is no artifact '000000'"),
        ("store unpin keept --store {store}", NOT_FOUND, "it has kept"),
        ("store pin {first} --as Mine! --store {store}", USAGE, "'Mine!' is not a valid pin name"),
        ("store pin {first} --as mine --reason \033[2J --store {store}", USAGE, "printable characters"),
        ("promote {first} --channel Prod --store {store}", USAGE, "'Prod' is not a valid channel name"),
        ("promote {first} --channel prod --actor= --store {store}", USAGE, "one line of 1 to 512"),
        ("store sign {first} --key file:{root}/release.key --builder x\ny --store {store}", USAGE, "--builder"),
        ("channel show prd --store {store}", NOT_FOUND, "did you mean 'prod'?"),
        ("rollback --channel prod --to 99 --store {store}", NOT_FOUND, "has no generation 99; it has 1 to 2"),
        ("store fetch {first} --to {root}/release.key --store {store}", USAGE, "is a file"),
        ("store fetch {first} --to {root} --store {store}", REFUSED, "name a new or an empty folder"),
        ("store export {first} --to {root}/third.tar --store {store}", REFUSED, "cannot export to"),
        ("store import nowhere.tar --store {store}", NOT_FOUND, "create it with `nxpipe store export`"),
        ("store import {root}/release.key --store {store}", STORE, "export the artifact again"),
        ("store sign {first} --key nothing --store {store}", KEY, "allowed are file:PATH and kms:arn"),
        ("store sign {first} --key file:none.key --store {store}", KEY, "cannot be read"),
        ("store keygen {root}/release.key", KEY, "choose another path"),
        ("store verify-signature {first} --public-key {root}/third.tar --store {store}", KEY, "third.tar"),
        ("store verify-signature {second} --public-key {root}/release.key.pub --store {store}", REFUSED, "not signed"),
        ("store gc --keep many --store {store}", USAGE, "--keep"),
        ("store gc --max-age 90 --store {store}", USAGE, "is not a duration, as in"),
        ("store explain {first} --nearest 0 --store {store}", USAGE, "--nearest"),
        ("store lss", USAGE, "did you mean 'ls'?"),
    ],
)
def test_words_that_mean_nothing(world: World, tmp_path: Path, words: str, code: ExitCode, says: str) -> None:
    result = words.format(root=world.root, store=world.store, first=world.first, second=world.second)
    is_one_sentence(run(*result.split(" "), cwd=tmp_path), code, says)
    assert tree(tmp_path) == set()


# What the help says

EXAMPLES = (
    *("store keygen", "store ls", "store show", "store diff", "store explain", "store sign", "store verify-signature"),
    *("store export", "store import", "store pin", "store unpin", "store du", "store fsck", "store gc", "store fetch"),
    *("promote", "channel log", "channel show"),
)
# What no stranger has: a key in KMS, a second store, weights, two ranks, and a channel that was fetched before.
ELSEWHERE = ("kms:", "my-replica", "--model-id", "acme/rank", "--offline")


def test_examples_of_the_help_do_what_they_say(world: World, tmp_path: Path) -> None:
    """With existing names in place of the invented ones of the help."""
    shutil.copytree(world.root / "elsewhere", tmp_path / "artifacts")
    key = open_store(str(tmp_path / "artifacts")).list()[0].request_key[:6]
    (tmp_path / "nxpipe.toml").write_text(
        '[project]\nname = "test"\n[store]\nurl = "file://artifacts"\n[signing]\n[[signing.trusted]]\n'
        'name = "release"\nkey = "file:release.key.pub"\n'
    )
    shutil.copy(world.root / "release.key.pub", tmp_path)
    compiled("torchscript", tmp_path / "built").folder.rename(tmp_path / "traced")
    ran = 0
    for command in EXAMPLES:
        shown = run(*command.split(), "-h", cwd=tmp_path)
        whole = re.sub(r" \\\n +", " ", shown.out)  # a long example goes on in the next line
        for line in re.findall(rf"^    (nxpipe {command}(?: .*)?)$", whole, re.MULTILINE):
            if any(word in line for word in ELSEWHERE):
                continue
            if command == "store keygen":
                (tmp_path / "release.key.pub").unlink()
            result = line.replace("4e9ce0", key).replace("a41f07", key).replace("bert-base-uncased", MODEL)
            answer = run(*shlex.split(result)[1:], cwd=tmp_path, environment=world.s3)
            assert answer.code == 0, (line, answer.err)
            ran += 1
    assert ran >= len(EXAMPLES)


# Leaving early


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("command", "held"),
    [
        ("store fetch", "GetObject"),
        ("store fsck", "GetObject"),
        ("store import", "PutObject"),
        ("store ls", "ListObjectsV2"),
    ],
)
def test_ctrl_c_is_heeded_while_a_server_is_silent_and_a_retry_goes_on(
    world: World, tmp_path: Path, command: str, held: str
) -> None:
    """Every request is held, so that all threads wait for answers that never come."""
    url = URL if command != "store import" else f"s3://{BUCKET}/empty"
    words = [*world.words(command), "--store", url]
    world.proxy.start_over(Plan(on(held, Hold("before"), nth=None if held != "GetObject" else 4)))
    heeding = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [str(NXPIPE), *words],
        cwd=tmp_path,
        env={**os.environ, **world.s3},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heeding,
    ) as process:
        world.proxy.wait_held()
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=30)
    world.proxy.release(drop=True)
    assert process.returncode == INTERRUPTED.number, said
    assert said.strip().splitlines()[-1].startswith("Interrupted")
    assert ("Traceback" in said, out) == (False, "")
    assert not (tmp_path / "served" / "manifest.json").exists()
    world.proxy.settle()
    world.proxy.start_over(Plan())
    if command == "store import":
        assert json.loads(run("store", "ls", "--json", "--store", url, cwd=tmp_path, environment=world.s3).out) == []
    again = run(*words, cwd=tmp_path, environment=world.s3)
    assert again.code == 0, again.err
    assert not [path for path in tree(tmp_path / "served") if path.endswith(".part")]


def test_a_reader_that_leaves_early_is_no_error(world: World, tmp_path: Path) -> None:
    def with_a_closed_stdout(command: str) -> Answer:
        reading, writing = os.pipe()
        os.close(reading)
        words = [str(NXPIPE), *world.words(command), "--json", "--store", str(world.store)]
        done = subprocess.run(words, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writing)
        return Answer(done.returncode, "", done.stderr)

    shown = ("store ls", "store show", "store diff", "store du", "channel log")
    for command, answer in at_once({command: partial(with_a_closed_stdout, command) for command in shown}):
        assert answer.code == PIPE_CLOSED.number, (command, answer.err)
        assert "Error" not in answer.err
        assert "Traceback" not in answer.err


@pytest.mark.sample(8)
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_narrow_terminal_without_colours_gets_plain_words(
    world: World, tmp_path: Path, environment: dict[str, str]
) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = [str(NXPIPE), "store", "show", "nothing", "--store", str(world.store)]
    env = {**os.environ, "COLUMNS": "40", **environment}
    process = subprocess.Popen(words, cwd=tmp_path, stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    result = b""
    while chunk := _read(ours):
        result += chunk
    os.close(ours)
    assert process.wait() == NOT_FOUND.number
    assert b"\x1b" not in result
    assert result.startswith(b"Error: there is no artifact 'nothing' in")
    assert max(map(len, result.decode().splitlines())) <= 40


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that nobody has the other end any more
        return b""
