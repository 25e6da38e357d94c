"""Fast path for the three requests that move small objects: SigV4 and HTTP without botocore's per-request overhead.

botocore makes the first request and so resolves endpoint, region and credentials; equal requests are then sent from
here, once each. Anything but a simple response falls back to botocore with its retries and errors, so nothing but
time depends on this module. It is off where requests are configured in unusual ways, and `before-send` hooks see
these requests too. `benchmarks/store.py` measures what it saves; docs/results/store-speed.md has the figures.
"""

import hashlib
import hmac
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from botocore.awsrequest import AWSPreparedRequest, HeadersDict
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from nxpipe.artifact_store.backends.s3_connection import Answer, Connections, FallBackToBotocore, Server

# The signature covers the body's checksum, and so need not cover the body.
_BODY: Final = "UNSIGNED-PAYLOAD"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class RequestSigner:
    """For one region and service; several threads may use it at once."""

    def __init__(self, region: str, service: str) -> None:
        self._region = region
        self._service = service
        self._of_today: tuple[str, str, bytes] = ("", "", b"")  # the secret, the day, and the key made of both

    def sign(self, credentials: Any, method: str, path: str, headers: dict[str, str], now: float | None = None) -> None:
        """Add to headers, whose names are in lower case, what proves who asks. `path` is encoded and has no query."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        headers["x-amz-date"] = moment
        headers["x-amz-content-sha256"] = _BODY
        if credentials.token:
            headers["x-amz-security-token"] = credentials.token
        names = sorted(headers)
        signed = ";".join(names)
        lines = "".join([f"{name}:{' '.join(headers[name].split())}\n" for name in names])
        request = f"{method}\n{path}\n\n{lines}\n{signed}\n{_BODY}"
        scope = f"{moment[:8]}/{self._region}/{self._service}/aws4_request"
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = _mac(self._key(credentials.secret_key, moment[:8]), text).hex()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={signed}, Signature={signature}"
        )

    def _key(self, secret: str, day: str) -> bytes:
        known_secret, known_day, key = self._of_today
        if (known_secret, known_day) != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, self._service, "aws4_request"):
                key = _mac(key, part)
            self._of_today = (secret, day, key)
        return key


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


R = TypeVar("R")

_RESTS: Final = 5.0  # seconds in which all goes the SDK's way: what is not plain seldom comes alone
_PORTS: Final = {"http": 80, "https": 443}
_CODE: Final = re.compile(rb"<Code>(\w+)</Code>")
_META: Final = "x-amz-meta-"
_REQUESTS: Final = {
    "put_object": ("PUT", "PutObject"),
    "get_object": ("GET", "GetObject"),
    "head_object": ("HEAD", "HeadObject"),
}
_ASKED: Final = {
    "ChecksumAlgorithm": "x-amz-sdk-checksum-algorithm",
    "ChecksumMode": "x-amz-checksum-mode",
    "ChecksumSHA256": "x-amz-checksum-sha256",
    "ContentLength": "content-length",
    "IfMatch": "if-match",
    "IfNoneMatch": "if-none-match",
    "Range": "range",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
}
_REFUSALS: Final = (404, 409, 412)  # by which a server shows that it has understood
_TOLD: Final = {
    "etag": "ETag",
    "x-amz-checksum-sha256": "ChecksumSHA256",
    "x-amz-checksum-type": "ChecksumType",
    "x-amz-storage-class": "StorageClass",
    "x-amz-version-id": "VersionId",
}
_UNUSUAL: Final = ("use_accelerate_endpoint", "use_dualstack_endpoint")


@dataclass(frozen=True)
class _Shown:
    """What the SDK has signed a moment ago."""

    url: str
    region: str
    signer: Any
    user_agent: str


class _Looking(threading.local):
    """What the SDK shows while this thread waits for it."""

    shown: _Shown | None = None

    def take(self) -> _Shown | None:
        shown, self.shown = self.shown, None
        return shown


_LOOKING: Final = _Looking()


def _see(
    request: Any, signing_name: str, region_name: str, signature_version: Any, request_signer: Any, **_: Any
) -> None:
    signing = request.context.get("signing", {})
    plain = signature_version == "s3v4" and signing.get("signing_name", signing_name) == "s3"
    if plain and not signing.keys() & {"request_credentials", "identity_cache"}:
        region = signing.get("region", region_name)
        _LOOKING.shown = _Shown(request.url, region, request_signer, request.headers.get("User-Agent", ""))


@dataclass(frozen=True)
class _Way:
    """Where requests about a bucket's objects go, and in whose name."""

    base: str  # the URL of an object without its key
    path: str  # of that
    host: str
    user_agent: str
    credentials: Callable[[], Any]
    signer: RequestSigner
    connections: Connections


class FastPath:
    """For the objects of one bucket; any number of threads may ask at once."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._way: _Way | None = None
        self._rests_until = 0.0
        self._known: dict[tuple[str, str], Connections] = {}
        client.meta.events.register("before-sign.s3", _see, unique_id="nxpipe-quick")

    def ask(self, operation: str, key: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """As the client would answer, or raise; None: the client is to be asked."""
        way = self._way
        headers = _headers(parameters)
        body = parameters.get("Body", b"")
        if way is None or operation not in _REQUESTS or headers is None or not isinstance(body, bytes):
            return None
        method, name = _REQUESTS[operation]
        try:
            answer = self._sent(way, method, name, key, headers, body)
            return _understood(name, answer, parameters)
        except (FallBackToBotocore, BotoCoreError, ValueError):
            self._way, self._rests_until = None, time.monotonic() + _RESTS
            return None

    def watch(self, key: str, call: Callable[[], R]) -> R:
        """The client's answer about this object; how it asks is noted if that is not known."""
        if self._way or time.monotonic() < self._rests_until:
            return call()
        _LOOKING.take()
        try:
            answer = call()
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in _REFUSALS:
                self._learn(key)
            raise
        self._learn(key)
        return answer

    def _learn(self, key: str) -> None:
        shown = _LOOKING.take()
        if shown is not None:
            self._way = self._way_of(shown, quote(key))

    def _way_of(self, shown: _Shown, key: str) -> _Way | None:
        config = self._client.meta.config
        url = urlsplit(shown.url)
        base = shown.url.removesuffix(key)
        odd = any((config.s3 or {}).get(name) for name in _UNUSUAL) or config.use_fips_endpoint or config.client_cert
        signed = (config.s3 or {}).get("payload_signing_enabled") is not False
        proxied = url.scheme in {**get_environ_proxies(shown.url), **(config.proxies or {})}
        if odd or signed or proxied or base == shown.url or url.query or url.username or url.scheme not in _PORTS:
            return None
        connections = self._known.get(url[:2]) or self._connections(url.scheme, url.hostname or "", url.port)
        if connections is None:
            return None
        self._known[url[:2]] = connections
        host = url.netloc.removesuffix(f":{_PORTS[url.scheme]}")
        return _Way(
            base,
            urlsplit(base).path,
            host,
            shown.user_agent,
            lambda: shown.signer.get_auth_instance("s3", shown.region, "s3v4").credentials,
            RequestSigner(shown.region, "s3"),
            connections,
        )

    def _connections(self, scheme: str, host: str, port: int | None) -> Connections | None:
        config = self._client.meta.config
        tls = None
        if scheme == "https":
            # Nowhere else does a client tell which authorities it trusts.
            session = getattr(getattr(self._client, "_endpoint", None), "http_session", None)
            trusted = getattr(session, "_verify", None)
            if not trusted:
                return None
            try:
                tls = ssl.create_default_context(cafile=get_cert_path(trusted))
            except OSError:
                return None
        return Connections(Server(host, port or _PORTS[scheme], tls, config.connect_timeout, config.read_timeout))

    def _sent(self, way: _Way, method: str, name: str, key: str, headers: dict[str, str], body: bytes) -> Answer:
        path = way.path + quote(key)
        headers["host"] = way.host
        credentials = way.credentials()
        if credentials is None:
            raise FallBackToBotocore("nobody to ask as")
        way.signer.sign(credentials, method, path, headers)
        headers["user-agent"] = way.user_agent
        request = AWSPreparedRequest(method, way.base + quote(key), HeadersDict(headers), body, False)
        answered = self._client.meta.events.emit_until_response(f"before-send.s3.{name}", request=request)[1]
        if answered is not None:
            raise FallBackToBotocore("somebody else answers")
        lines = "".join([f"{header}: {value}\r\n" for header, value in headers.items()])
        return way.connections.send(method, f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)


def _headers(parameters: Mapping[str, Any]) -> dict[str, str] | None:
    """A request's headers; None when it has more to say than these requests can."""
    headers: dict[str, str] = {}
    for name, value in parameters.items():
        if name == "Metadata":
            headers |= {f"{_META}{each}": text for each, text in value.items()}
        elif name == "BucketKeyEnabled":
            headers["x-amz-server-side-encryption-bucket-key-enabled"] = str(value).lower()
        elif name in _ASKED:
            headers[_ASKED[name]] = str(value)
        elif name != "Body":
            return None
    return headers if all(value.isascii() and value.isprintable() for value in headers.values()) else None


def _understood(name: str, answer: Answer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A plain answer in the client's words, or as its error."""
    status = answer.status
    if status == (206 if "Range" in asked else 200) and answer.headers.get("etag"):
        return _told(name, answer)
    answer.body.close()
    found = _CODE.search(answer.said)
    code = found[1].decode() if found else str(status)
    refused = name == "PutObject" and "IfNoneMatch" in asked and status in (409, 412)
    absent = status == 404 and (name == "HeadObject" or code == "NoSuchKey")
    if refused or absent:
        about = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(about, name)
    raise FallBackToBotocore(f"{status} {code}")


def _told(name: str, answer: Answer) -> dict[str, Any]:
    headers = answer.headers
    told: dict[str, Any] = {word: headers[header] for header, word in _TOLD.items() if header in headers}
    if name == "GetObject":
        return told | {"Body": answer.body}
    if name == "HeadObject":
        told["ContentLength"] = int(headers.get("content-length", ""))
        told["LastModified"] = parsedate_to_datetime(headers.get("last-modified", ""))
        told["Metadata"] = {each.removeprefix(_META): headers[each] for each in headers if each.startswith(_META)}
    for _ in answer.body.iter_chunks(answer.body.left or 1):
        continue
    return told
