"""The fast path of small requests: it changes their duration and nothing else."""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import ResponseStreamingError
from botocore.session import Session
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends import s3_connection, s3_quick
from nxpipe.artifact_store.backends.protocol import CHUNK, Payload
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.backends.s3_client import s3_client
from nxpipe.artifact_store.backends.s3_connection import Connections, FallBackToBotocore, Server
from nxpipe.artifact_store.backends.s3_multipart import WRITE_ID, spelled
from nxpipe.artifact_store.backends.s3_quick import RequestSigner
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.layout import blob_path
from tests.artifact_store.samples import put
from tests.artifact_store.scripted import OK, Script, scripted
from tests.artifact_store.wire import Wire, impatient_client

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
OURS, THEIRS = Payload.of(b"ours"), Payload.of(b"theirs")


@dataclass
class Ways:
    """The path of each request, by its operation."""

    taken: list[str]

    @classmethod
    def of(cls, client: Any) -> "Ways":
        ways = cls([])

        def note(request: Any, event_name: str, **_: object) -> None:
            way = "sdk" if "amz-sdk-request" in request.headers else "quick"
            ways.taken.append(f"{way} {event_name.rpartition('.')[2]}")

        client.meta.events.register("before-send.s3", note)
        return ways


@pytest.fixture
def warm(backend: Bucket) -> Bucket:
    """A backend that uses the fast path."""
    backend.create("warm", Payload.of(b"warm"))
    return backend


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with scripted() as script:
        monkeypatch.setenv("AWS_ENDPOINT_URL", script.url)
        yield script


@pytest.fixture
def told(script: Script) -> Bucket:
    """A bucket of the scripted server, with the fast path in use."""
    backend = Bucket("bucket", "p", impatient_client())
    script.answers = [OK]
    backend.create("warm", OURS)
    script.asked.clear()
    return backend


def answer(status: str, headers: str = "", body: bytes = b"", *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {size}\r\n\r\n".encode() + body


def refusal(status: str, code: str) -> bytes:
    return answer(status, body=f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())


HEAD = answer(
    "200 OK", f'ETag: "e"\r\nLast-Modified: {DATE}\r\nx-amz-checksum-sha256: {spelled(bytes(32))}\r\n', length=3
)
GET = answer("200 OK", 'ETag: "e"\r\n', b"abc")


# The way is taken


def test_after_one_request_of_the_sdk_small_objects_go_the_quick_way(backend: Bucket, client: Any) -> None:
    ways = Ways.of(client)
    for path in ("a", "b"):
        assert backend.create(path, OURS)
    assert not backend.create("b", OURS)
    assert b"".join(backend.read("b") or ()) == b"ours"
    assert (stat := backend.stat("b")) is not None
    assert stat.sha256 == OURS.sha256
    assert backend.stat("none") is None
    assert backend.read("none") is None
    assert ways.taken[0] == "sdk PutObject"
    assert {entry for entry in ways.taken[1:] if not entry.startswith("quick")} == set()


def test_what_is_larger_than_a_chunk_is_sent_by_the_sdk_and_read_the_quick_way(warm: Bucket, client: Any) -> None:
    ways, data = Ways.of(client), secrets.token_bytes(2 * CHUNK + 1)
    warm.create("large", Payload.of(data))
    assert b"".join(warm.read("large") or ()) == data
    assert b"".join(warm.read("large", 5, CHUNK + 9) or ()) == data[5 : CHUNK + 9]
    assert ways.taken == ["sdk PutObject", "quick GetObject", "quick GetObject"]


def test_both_ways_tell_the_same_of_an_object(warm: Bucket, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways.of(client)
    warm.create("a", OURS)
    quick = warm.stat("a")
    monkeypatch.setattr(s3_quick.FastPath, "request", lambda *_: None)
    assert warm.stat("a") == quick
    assert ways.taken == ["quick PutObject", "quick HeadObject", "sdk HeadObject"]


def test_connections_are_used_again_and_by_one_thread_at_a_time(told: Bucket, script: Script) -> None:
    script.answers = [answer("200 OK", 'ETag: "e"\r\n', b"%d" % number) for number in range(8)]
    read = [b"".join(told.read("a") or ()) for _ in range(8)]
    assert read == [b"%d" % number for number in range(8)]
    assert len({entry.connection for entry in script.asked}) == 1
    script.answers = [GET] * 64
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: b"".join(told.read("a") or ()), range(64))) == {b"abc"}
    assert set(script.ways) == {"quick"}


def test_a_connection_whose_body_was_left_is_not_used_again(told: Bucket, script: Script) -> None:
    script.answers = [answer("200 OK", 'ETag: "e"\r\n', bytes(2 * CHUNK)), GET]
    chunks = told.read("a")
    assert chunks is not None
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert b"".join(told.read("a") or ()) == b"abc"
    assert script.asked[0].connection != script.asked[1].connection


# Whatever is not plain counts for nothing

ODD: dict[str, bytes | None] = {
    "no answer": None,
    "not HTTP": b"220 smtp.example\r\n",
    "an older HTTP": b'HTTP/1.0 200 OK\r\nETag: "e"\r\nContent-Length: 3\r\n\r\nxyz',
    "a head that breaks off": b"HTTP/1.1 200 OK\r\nConnection: close\r\nETag:",
    "a line that is no header": b"HTTP/1.1 200 OK\r\nhello\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nETag:\r\n more\r\nContent-Length: 0\r\n\r\n",
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "no length": b'HTTP/1.1 200 OK\r\nETag: "e"\r\nConnection: close\r\n\r\nxyz',
    "two lengths": b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nxyz',
    "a negative length": b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: -3\r\n\r\n',
    "an object in chunks": b'HTTP/1.1 200 OK\r\nETag: "e"\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n',
    "no ETag": answer("200 OK", body=b"xyz"),
    "a part of it": answer("206 Partial Content", 'ETag: "e"\r\n', b"xyz"),
    "a redirection": answer("307 Temporary Redirect", "Location: http://127.0.0.1:9/\r\n"),
    "busy": refusal("503 Slow Down", "SlowDown"),
    "broken": refusal("500 Internal Error", "InternalError"),
    "forbidden": refusal("403 Forbidden", "AccessDenied"),
    "another region": refusal("400 Bad Request", "AuthorizationHeaderMalformed"),
    "no bucket": refusal("404 Not Found", "NoSuchBucket"),
    "an endless error": answer("404 Not Found", length=10**9),
    "an error that breaks off": b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 99\r\n\r\n<Error>",
    "chunks without an end": (
        b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n"
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_after_an_odd_answer_the_sdk_asks_again(told: Bucket, script: Script, kind: str) -> None:
    script.answers = [ODD[kind], GET, GET]
    assert b"".join(told.read("a") or ()) == b"abc"
    assert script.ways == ["quick", "sdk"]
    assert b"".join(told.read("a") or ()) == b"abc"
    assert script.ways == ["quick", "sdk", "sdk"]  # what is odd seldom comes alone


@pytest.mark.parametrize(
    "kind", sorted(ODD.keys() - {"no length", "two lengths", "a negative length", "an object in chunks"})
)
def test_after_an_odd_answer_to_a_look_or_a_write_the_sdk_asks_again(told: Bucket, script: Script, kind: str) -> None:
    if kind not in ("no bucket", "an endless error", "an error that breaks off", "chunks without an end"):
        script.answers = [ODD[kind], HEAD]  # to a HEAD every 404 is plain: it has no body
        assert told.stat("a") is not None
        assert script.ways == ["quick", "sdk"]
    backend = Bucket("bucket", "p", impatient_client())
    script.answers = [OK, ODD[kind], OK]
    assert backend.create("warm", OURS)
    assert backend.create("a", OURS)
    assert script.ways[-3:] == ["sdk", "quick", "sdk"]
    writes = script.asked[-2:]
    assert len({write.headers[f"x-amz-meta-{WRITE_ID}"] for write in writes}) == 1
    assert {write.body for write in writes} == {b"ours"}


def test_a_range_that_is_answered_with_all_is_asked_for_again(told: Bucket, script: Script) -> None:
    script.answers = [GET, answer("206 Partial Content", 'ETag: "e"\r\n', b"b")]
    assert b"".join(told.read("a", 1, 2) or ()) == b"b"
    assert script.ways == ["quick", "sdk"]


def test_a_body_that_breaks_off_is_continued_from_the_byte_where_it_broke(told: Bucket, script: Script) -> None:
    data = secrets.token_bytes(CHUNK + 100)
    first = answer("200 OK", 'Connection: close\r\nETag: "e"\r\n', data[: CHUNK + 10], length=len(data))
    rest = answer("206 Partial Content", 'ETag: "e"\r\n', data[CHUNK + 10 :])
    script.answers = [first, rest]
    assert b"".join(told.read("a") or ()) == data
    again = script.asked[1].headers
    assert (again["range"], again["if-match"]) == (f"bytes={CHUNK + 10}-", '"e"')


SIZES = [0, 1, 8191, 8192, 8193, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def joined(views: Iterable[bytes | memoryview] | None) -> bytes:
    """The bytes of parts that hold only until the next one."""
    assert views is not None
    return b"".join(map(bytes, views))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("excess", [0, 1])
def test_the_views_of_a_body_are_its_bytes_and_leave_the_connection_to_the_next_request(
    told: Bucket, script: Script, size: int, excess: int
) -> None:
    data = secrets.token_bytes(size + excess)
    script.answers = [answer("206 Partial Content", 'ETag: "e"\r\n', data), GET]
    assert joined(told.read_views("a", 0, size + 1, 0)) == data
    assert joined(told.read("a")) == b"abc"
    assert len({entry.connection for entry in script.asked}) == 1
    assert set(script.ways) == {"quick"}


@given(at=st.integers(0, 5 * CHUNK))
def test_the_views_of_a_body_are_of_one_buffer_and_end_at_large_pages_of_the_file(at: int) -> None:
    with scripted() as server:
        size = 7 * CHUNK
        server.answers = [answer("200 OK", body=bytes(size))]
        connections = Connections(Server("127.0.0.1", int(server.url.rpartition(":")[2]), None, 5.0, 5.0))
        views = list(connections.send("GET", b"GET / HTTP/1.1\r\n\r\n").body.views(at))
    ends = list(accumulate(map(len, views), initial=at))
    assert ends[-1] == at + size
    assert {end % (2 * CHUNK) for end in ends[1:-1]} <= {0}
    assert len({id(view.obj) for view in views}) == 1


def test_a_part_does_not_wait_for_a_slow_server(script: Script) -> None:
    connections = Connections(Server("127.0.0.1", int(script.url.rpartition(":")[2]), None, 5.0, 0.5))
    script.answers = [answer("200 OK", body=b"abc", length=10)]
    body = connections.send("GET", b"GET / HTTP/1.1\r\n\r\n").body
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_connection, "_PATIENCE", 0.0)
        assert bytes(next(body.views(0))) == b"abc"


@pytest.mark.parametrize("received", [1, CHUNK + 10, 4 * CHUNK + 10])
def test_after_a_break_the_views_of_a_body_continue_with_the_first_byte_that_is_missing(
    told: Bucket, script: Script, received: int
) -> None:
    data = secrets.token_bytes(5 * CHUNK + 100)
    head = 'Connection: close\r\nETag: "e"\r\n'
    first = answer("206 Partial Content", head, data[:received], length=len(data))
    script.answers = [first, answer("206 Partial Content", 'ETag: "e"\r\n', data[received:])]
    assert joined(told.read_views("a", 0, len(data), 0)) == data
    assert script.asked[-1].headers["range"] == f"bytes={received}-{len(data) - 1}"


def test_a_silent_server_ends_the_views_of_a_body_after_the_timeout(script: Script) -> None:
    connections = Connections(Server("127.0.0.1", int(script.url.rpartition(":")[2]), None, 5.0, 0.05))
    script.answers = [answer("200 OK", body=b"abc", length=10)]
    body = connections.send("GET", b"GET / HTTP/1.1\r\n\r\n").body
    with pytest.raises(ResponseStreamingError, match="timed out"):
        list(body.views(0))


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchBucket"])
def test_an_absent_object_is_known_by_its_code_however_it_is_sent(told: Bucket, script: Script, code: str) -> None:
    result = f"<Error><Code>{code}</Code></Error>"
    chunked = f"HTTP/1.1 404 Not Found\r\n{CHUNKED}{len(result):x}\r\n{result}\r\n0\r\n\r\n".encode()
    script.answers = [chunked, GET]
    assert (told.read("a") is None) == (code == "NoSuchKey")
    assert script.ways == (["quick"] if code == "NoSuchKey" else ["quick", "sdk"])


def test_a_look_that_finds_nothing_needs_no_second_one(told: Bucket, script: Script) -> None:
    script.answers = [f"HTTP/1.1 404 Not Found\r\n{CHUNKED}".encode(), HEAD]  # as S3 says it, with no chunk to come
    assert told.stat("a") is None
    assert told.stat("a") is not None
    assert script.ways == ["quick", "quick"]


# Lost answers


def test_a_quick_write_whose_answer_was_lost_is_still_ours(warm: Bucket, wire: Wire) -> None:
    wire.on("PutObject", wire.deliver_and_cut)
    assert warm.create("ac/x", OURS)
    assert b"".join(warm.read("ac/x") or ()) == b"ours"
    assert wire.sent["PutObject"] == 2


def test_losing_to_another_writer_is_told_apart_from_meeting_oneself(warm: Bucket, wire: Wire) -> None:
    assert warm.create("ac/x", THEIRS)
    wire.on("PutObject", wire.deliver_and_cut)
    assert not warm.create("ac/x", OURS)
    assert b"".join(warm.read("ac/x") or ()) == b"theirs"


# Signatures

SECRET = ReadOnlyCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", None)
KEYS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=40)


@given(key=KEYS | st.sampled_from(["a b", "a+b", "ü/é", "~x", "a//b", "%41", "a&b=c?d", "'()*!"]), token=st.booleans())
def test_a_signature_is_the_one_that_botocore_makes(key: str, token: bool) -> None:
    credentials = SECRET._replace(token="session+token/=") if token else SECRET
    headers = {"host": "b.s3.example.com", "range": "bytes=0-1", "x-amz-meta-a": "two  blanks", "if-none-match": "*"}
    path = f"/p/{quote(key)}"
    request = AWSRequest("PUT", f"https://b.s3.example.com{path}", headers=dict(headers))
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    S3SigV4Auth(Credentials(*credentials), "s3", "eu-west-1").add_auth(request)
    moment = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    RequestSigner("eu-west-1", "s3").sign(credentials, "PUT", path, headers, moment.timestamp())
    assert headers["authorization"] == request.headers["Authorization"]


@pytest.mark.parametrize("key", ["a b", "a+b", "ü", "~x", "a/b/c", "100%", "a&b=c", "'()*!"])
def test_both_ways_reach_the_same_object(warm: Bucket, client: Any, key: str) -> None:
    ways = Ways.of(client)
    warm.create(key, OURS)
    assert ways.taken == ["quick PutObject"]
    assert client.get_object(Bucket=warm.url.split("/")[2], Key=f"p/{key}")["Body"].read() == b"ours"


def test_a_signers_key_is_of_its_day_and_of_its_secret() -> None:
    signer, told = RequestSigner("us-east-1", "s3"), []
    for secret, day in (("a", 0), ("a", 1), ("b", 1), ("a", 0)):
        headers = {"host": "h"}
        signer.sign(SECRET._replace(secret_key=secret), "GET", "/", headers, day * 86400.0)
        told.append(headers["authorization"])
    assert told[0] == told[3]
    assert len(set(told)) == 3


def test_credentials_that_are_renewed_meanwhile_are_used(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def renew() -> dict[str, str]:
        made.append(f"AK{len(made)}")
        end = datetime.now(UTC) + timedelta(hours=-1 if len(made) == 1 else 1)
        return {"access_key": made[-1], "secret_key": "s", "token": f"t{made[-1]}", "expiry_time": end.isoformat()}

    session = Session()
    session._credentials = RefreshableCredentials.create_from_metadata(
        {**renew(), "expiry_time": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}, renew, "test"
    )
    client = session.create_client("s3", config=Config(s3={"payload_signing_enabled": False}))
    backend = Bucket("bucket", "p", client)
    script.answers = [OK, OK, OK]
    backend.create("a", OURS)
    backend.create("b", OURS)
    session._credentials._expiry_time = datetime.now(UTC) - timedelta(hours=1)
    backend.create("c", OURS)
    assert script.ways == ["sdk", "quick", "quick"]
    tokens = [entry.headers["x-amz-security-token"] for entry in script.asked]
    assert tokens == ["tAK0", "tAK0", "tAK1"]
    assert "Credential=AK1/" in script.asked[2].headers["authorization"]


# What is unusual goes the SDK's way

UNUSUAL: dict[str, Callable[[pytest.MonkeyPatch, str], Any]] = {
    "a proxy": lambda patch, url: patch.setenv("http_proxy", url),
    "a proxy of the client": lambda patch, url: Config(proxies={"http": url}),
    "a body that is signed": lambda patch, url: Config(s3={"payload_signing_enabled": True}),
    "an older signature": lambda patch, url: Config(signature_version="s3"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_goes_the_sdks_way(script: Script, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    usual = Config(s3={"payload_signing_enabled": False})
    config = UNUSUAL[what](monkeypatch, script.url) or usual
    client = Session().create_client("s3", config=usual.merge(config))
    backend = Bucket("bucket", "p", client)
    script.answers = [OK, OK]
    backend.create("a", OURS)
    backend.create("b", OURS)
    assert script.ways == ["sdk", "sdk"]


def test_nobody_in_particular_goes_the_sdks_way(backend: Bucket) -> None:
    from botocore import UNSIGNED

    client = Session().create_client("s3", config=Config(signature_version=UNSIGNED))
    anonymous, ways = Bucket(backend.url.split("/")[2], "p", client), Ways.of(client)
    for _ in range(2):
        anonymous.stat("a")
    assert ways.taken == ["sdk HeadObject"] * 2


def test_the_stores_own_client_takes_the_quick_way(script: Script) -> None:
    backend = Bucket("bucket", "p", s3_client())
    script.answers = [OK, OK]
    backend.create("a", OURS)
    backend.create("b", OURS)
    assert script.ways == ["sdk", "quick"]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of an authority that is not trusted by default."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    spelled_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "certificate.pem"
    path.write_bytes(signed.public_bytes(Encoding.PEM) + spelled_key)
    return path


def test_over_tls_it_trusts_whom_the_sdk_trusts(
    script: Script, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(certificate) as secure:
        port = int(secure.url.rpartition(":")[2])
        stranger = s3_quick.FastPath(s3_client())._connections("https", "127.0.0.1", port)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        trusting = s3_quick.FastPath(s3_client())._connections("https", "127.0.0.1", port)
        assert stranger is not None
        assert trusting is not None
        secure.answers = [OK, OK]
        for _ in range(2):
            assert trusting.send("PUT", b"PUT / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx").status == 200
        assert [(entry.body, entry.connection) for entry in secure.asked] == [(b"x", 1)] * 2
        with pytest.raises(FallBackToBotocore, match="certificate verify failed"):
            stranger.send("GET", b"GET / HTTP/1.1\r\n\r\n")


def test_the_views_of_a_body_over_tls_are_its_bytes(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = secrets.token_bytes(CHUNK + 9)
    with scripted(certificate) as secure:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        trusting = s3_quick.FastPath(s3_client())._connections("https", "127.0.0.1", int(secure.url.rpartition(":")[2]))
        assert trusting is not None
        secure.answers = [answer("200 OK", body=data)]
        body = trusting.send("GET", b"GET / HTTP/1.1\r\n\r\n").body
        views = [bytes(view) for view in body.views(0)]
    assert b"".join(views) == data
    assert len(views) <= 5  # not one for each record of TLS, which has 16 KiB


# What a creation's answer proves


def kept(payload: Payload, sha256: str | None) -> bytes:
    checksum = f"x-amz-checksum-sha256: {sha256}\r\n" if sha256 else ""
    return answer("200 OK", f'ETag: "e"\r\n{checksum}')


@pytest.mark.parametrize("way", ["sdk", "quick"])
@pytest.mark.parametrize(("states", "proves"), [("the same", True), ("another", False), ("nothing", False)])
def test_only_an_answer_that_states_the_right_digest_spares_a_look(
    told: Bucket, script: Script, monkeypatch: pytest.MonkeyPatch, way: str, states: str, proves: bool
) -> None:
    if way == "sdk":
        monkeypatch.setattr(s3_quick.FastPath, "request", lambda *_: None)
    checksum = spelled(hashlib.sha256(b"ours").digest())
    stated = {"the same": checksum, "another": spelled(bytes(32)), "nothing": None}[states]
    script.answers = [
        kept(OURS, stated),
        answer("200 OK", f'ETag: "e"\r\nLast-Modified: {DATE}\r\nx-amz-checksum-sha256: {checksum}\r\n', length=4),
        *[refusal("404 Not Found", "NoSuchKey")] * 9,
    ]
    store = Store(told)
    monkeypatch.setattr(told, "now", lambda: 1445412480.0)
    blob = store.put_blob(b"ours")
    assert list(store.blobs.settle([blob], sent_by_us=True)) == []
    assert [entry.start.split()[0] for entry in script.asked] == (["PUT"] if proves else ["PUT", "HEAD"])
    assert script.ways[0] == way
    wrong = Blob(sha256=blob.sha256, size=5)
    assert told.has_just_proved(blob_path(blob), blob.sha256, blob.size) == proves
    assert not told.has_just_proved(blob_path(wrong), wrong.sha256, wrong.size)


def test_what_was_replaced_or_removed_since_is_looked_at(told: Bucket, script: Script) -> None:
    proof = kept(OURS, spelled(hashlib.sha256(b"ours").digest()))
    script.answers = [proof]
    told.create("a", OURS)
    assert told.has_just_proved("a", OURS.sha256, OURS.size)
    script.answers = [kept(THEIRS, None)]
    told.replace("a", THEIRS)
    assert not told.has_just_proved("a", OURS.sha256, OURS.size)


def test_a_proof_lasts_an_hour(warm: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    warm._proved["a"] = ("0" * 64, 4, 0.0)
    for seconds, holds in ((3599.0, True), (3601.0, False)):
        monkeypatch.setattr("nxpipe.artifact_store.backends.s3.time.monotonic", lambda seconds=seconds: seconds)
        assert warm.has_just_proved("a", "0" * 64, 4) == holds


# How a blob is kept


def test_a_small_blob_is_sent_without_a_look_and_a_large_one_is_looked_for(warm: Bucket, wire: Wire) -> None:
    store = Store(warm)
    store.put_blob(b"small")
    assert wire.sent == {"PutObject": 1}
    store.put_blob(bytes(256 * 1024 + 1))
    assert wire.sent == {"PutObject": 2, "HeadObject": 1}


def test_a_store_that_had_the_last_blob_is_asked_for_the_next(warm: Bucket, wire: Wire) -> None:
    blobs = [b"blob %d" % number for number in range(10)]
    for data in blobs:
        Store(warm).put_blob(data)
    wire.sent.clear()
    store = Store(warm)
    result: list[int] = []
    for data in blobs:
        store.blobs.put(data, result.append)
    assert (wire.sent["PutObject"], wire.sent["HeadObject"]) == (1, 11)
    assert sum(result) == sum(map(len, blobs))
    store.put_blob(b"a new one")
    store.put_blob(b"another")
    assert wire.sent["PutObject"] == 3


def test_a_damaged_small_blob_is_repaired_though_it_was_sent_first(warm: Bucket, client: Any) -> None:
    blob = Blob.of(b"right")
    client.put_object(Bucket=warm.url.split("/")[2], Key=f"p/{blob_path(blob)}", Body=b"wrong")
    assert Store(warm).put_blob(b"right") == blob
    assert Store(warm).read_blob(blob) == b"right"


def test_an_artifact_of_small_blobs_takes_one_request_a_blob(warm: Bucket, wire: Wire) -> None:
    store = Store(warm)
    manifest = put(store)
    assert wire.sent == {"PutObject": 5}
    store.publish(manifest)
    assert wire.sent["HeadObject"] <= 5  # where a server states no checksum
