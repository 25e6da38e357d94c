"""Fast path for the three requests that move small objects: SigV4 and HTTP without botocore's per-request overhead.

botocore sends the first request and resolves endpoint, region and credentials; similar requests are then sent by this
module, once each. Any response but a simple one falls back to botocore with its retries and errors, so this module
affects only speed. It is off for unusual request configurations, and `before-send` hooks see its requests too.
`benchmarks/store.py` measures the savings; docs/results/store-speed.md has the figures.
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

# The signature covers the checksum header of the body, so it need not cover the body itself.
_BODY: Final = "UNSIGNED-PAYLOAD"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class RequestSigner:
    """SigV4 signer for one region and service; thread-safe."""

    def __init__(self, region: str, service: str) -> None:
        self._region = region
        self._service = service
        self._signing_key: tuple[str, str, bytes] = ("", "", b"")  # secret, day, and the key derived from them

    def sign(self, credentials: Any, method: str, path: str, headers: dict[str, str], now: float | None = None) -> None:
        """Add the authorization to headers, whose names are in lower case. `path` is encoded and has no query."""
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
        known_secret, known_day, key = self._signing_key
        if (known_secret, known_day) != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, self._service, "aws4_request"):
                key = _mac(key, part)
            self._signing_key = (secret, day, key)
        return key


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


R = TypeVar("R")

_PAUSE: Final = 5.0  # seconds of botocore only after a failure of the fast path, since failures cluster
_PORTS: Final = {"http": 80, "https": 443}
_CODE: Final = re.compile(rb"<Code>(\w+)</Code>")
_META: Final = "x-amz-meta-"
_REQUESTS: Final = {
    "put_object": ("PUT", "PutObject"),
    "get_object": ("GET", "GetObject"),
    "head_object": ("HEAD", "HeadObject"),
}
_REQUEST_HEADERS: Final = {
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
_REFUSALS: Final = (404, 409, 412)  # statuses of a request that the server understood
_RESPONSE_FIELDS: Final = {
    "etag": "ETag",
    "x-amz-checksum-sha256": "ChecksumSHA256",
    "x-amz-checksum-type": "ChecksumType",
    "x-amz-storage-class": "StorageClass",
    "x-amz-version-id": "VersionId",
}
_UNUSUAL: Final = ("use_accelerate_endpoint", "use_dualstack_endpoint")


@dataclass(frozen=True)
class _SignedRequest:
    """The endpoint, region, signer and user agent of a request that botocore has signed."""

    url: str
    region: str
    signer: Any
    user_agent: str


class _LastSigned(threading.local):
    """The last request that botocore has signed in this thread."""

    request: _SignedRequest | None = None

    def take(self) -> _SignedRequest | None:
        request, self.request = self.request, None
        return request


_LAST_SIGNED: Final = _LastSigned()


def _before_sign(
    request: Any, signing_name: str, region_name: str, signature_version: Any, request_signer: Any, **_: Any
) -> None:
    signing = request.context.get("signing", {})
    plain = signature_version == "s3v4" and signing.get("signing_name", signing_name) == "s3"
    if plain and not signing.keys() & {"request_credentials", "identity_cache"}:
        region = signing.get("region", region_name)
        user_agent = request.headers.get("User-Agent", "")
        _LAST_SIGNED.request = _SignedRequest(request.url, region, request_signer, user_agent)


@dataclass(frozen=True)
class _Endpoint:
    """The endpoint of a bucket's objects, with credentials and connections."""

    base: str  # the URL of an object without its key
    path: str  # the path of `base`
    host: str
    user_agent: str
    credentials: Callable[[], Any]
    signer: RequestSigner
    connections: Connections


class FastPath:
    """Fast path for the objects of one bucket; thread-safe."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._endpoint: _Endpoint | None = None
        self._paused_until = 0.0
        self._known: dict[tuple[str, str], Connections] = {}
        client.meta.events.register("before-sign.s3", _before_sign, unique_id="nxpipe-quick")

    def request(self, operation: str, key: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a request; return or raise what botocore would. None: the caller must use botocore."""
        endpoint = self._endpoint
        headers = _headers(parameters)
        body = parameters.get("Body", b"")
        if endpoint is None or operation not in _REQUESTS or headers is None or not isinstance(body, bytes):
            return None
        method, name = _REQUESTS[operation]
        try:
            answer = self._send(endpoint, method, name, key, headers, body)
            return _parse(name, answer, parameters)
        except (FallBackToBotocore, BotoCoreError, ValueError):
            self._endpoint, self._paused_until = None, time.monotonic() + _PAUSE
            return None

    def watch(self, key: str, call: Callable[[], R]) -> R:
        """Call botocore for this object, and learn the endpoint from its signed request if it is unknown."""
        if self._endpoint or time.monotonic() < self._paused_until:
            return call()
        _LAST_SIGNED.take()
        try:
            answer = call()
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in _REFUSALS:
                self._learn(key)
            raise
        self._learn(key)
        return answer

    def _learn(self, key: str) -> None:
        request = _LAST_SIGNED.take()
        if request is not None:
            self._endpoint = self._endpoint_of(request, quote(key))

    def _endpoint_of(self, request: _SignedRequest, key: str) -> _Endpoint | None:
        config = self._client.meta.config
        url = urlsplit(request.url)
        base = request.url.removesuffix(key)
        unusual = (
            any((config.s3 or {}).get(name) for name in _UNUSUAL) or config.use_fips_endpoint or config.client_cert
        )
        signed = (config.s3 or {}).get("payload_signing_enabled") is not False
        proxied = url.scheme in {**get_environ_proxies(request.url), **(config.proxies or {})}
        if unusual or signed or proxied or base == request.url or url.query or url.username or url.scheme not in _PORTS:
            return None
        connections = self._known.get(url[:2]) or self._connections(url.scheme, url.hostname or "", url.port)
        if connections is None:
            return None
        self._known[url[:2]] = connections
        host = url.netloc.removesuffix(f":{_PORTS[url.scheme]}")
        return _Endpoint(
            base,
            urlsplit(base).path,
            host,
            request.user_agent,
            lambda: request.signer.get_auth_instance("s3", request.region, "s3v4").credentials,
            RequestSigner(request.region, "s3"),
            connections,
        )

    def _connections(self, scheme: str, host: str, port: int | None) -> Connections | None:
        config = self._client.meta.config
        tls = None
        if scheme == "https":
            # The only place where a client exposes its trusted certificate authorities.
            session = getattr(getattr(self._client, "_endpoint", None), "http_session", None)
            trusted = getattr(session, "_verify", None)
            if not trusted:
                return None
            try:
                tls = ssl.create_default_context(cafile=get_cert_path(trusted))
            except OSError:
                return None
        return Connections(Server(host, port or _PORTS[scheme], tls, config.connect_timeout, config.read_timeout))

    def _send(
        self, endpoint: _Endpoint, method: str, name: str, key: str, headers: dict[str, str], body: bytes
    ) -> Answer:
        path = endpoint.path + quote(key)
        headers["host"] = endpoint.host
        credentials = endpoint.credentials()
        if credentials is None:
            raise FallBackToBotocore("no credentials")
        endpoint.signer.sign(credentials, method, path, headers)
        headers["user-agent"] = endpoint.user_agent
        request = AWSPreparedRequest(method, endpoint.base + quote(key), HeadersDict(headers), body, False)
        response = self._client.meta.events.emit_until_response(f"before-send.s3.{name}", request=request)[1]
        if response is not None:
            raise FallBackToBotocore("a before-send hook returned a response")
        lines = "".join([f"{header}: {value}\r\n" for header, value in headers.items()])
        return endpoint.connections.send(method, f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)


def _headers(parameters: Mapping[str, Any]) -> dict[str, str] | None:
    """The headers of a request; None if it has a parameter that the fast path does not support."""
    headers: dict[str, str] = {}
    for name, value in parameters.items():
        if name == "Metadata":
            headers |= {f"{_META}{field}": text for field, text in value.items()}
        elif name == "BucketKeyEnabled":
            headers["x-amz-server-side-encryption-bucket-key-enabled"] = str(value).lower()
        elif name in _REQUEST_HEADERS:
            headers[_REQUEST_HEADERS[name]] = str(value)
        elif name != "Body":
            return None
    return headers if all(value.isascii() and value.isprintable() for value in headers.values()) else None


def _parse(name: str, answer: Answer, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A simple response as botocore's result or ClientError; any other raises FallBackToBotocore."""
    status = answer.status
    if status == (206 if "Range" in parameters else 200) and answer.headers.get("etag"):
        return _result(name, answer)
    answer.body.close()
    match = _CODE.search(answer.error)
    code = match[1].decode() if match else str(status)
    refused = name == "PutObject" and "IfNoneMatch" in parameters and status in (409, 412)
    absent = status == 404 and (name == "HeadObject" or code == "NoSuchKey")
    if refused or absent:
        response = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(response, name)
    raise FallBackToBotocore(f"{status} {code}")


def _result(name: str, answer: Answer) -> dict[str, Any]:
    headers = answer.headers
    result: dict[str, Any] = {field: headers[header] for header, field in _RESPONSE_FIELDS.items() if header in headers}
    if name == "GetObject":
        return result | {"Body": answer.body}
    if name == "HeadObject":
        result["ContentLength"] = int(headers.get("content-length", ""))
        result["LastModified"] = parsedate_to_datetime(headers.get("last-modified", ""))
        metadata = (header for header in headers if header.startswith(_META))
        result["Metadata"] = {header.removeprefix(_META): headers[header] for header in metadata}
    for _ in answer.body.iter_chunks(answer.body.left or 1):
        continue
    return result
