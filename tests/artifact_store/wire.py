"""The connection between an S3 client and its server. Both and their retries are real, the connection is simulated."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session

Fate = Callable[[Any], Any]


class Wire:
    """Decides the outcome of each attempt at an operation, in order, and counts the bytes sent."""

    def __init__(self, client: Any) -> None:
        self._session = URLLib3Session()
        self.sent: Counter[str] = Counter()
        self._fates: dict[str, list[Fate | None]] = {}
        self._one_at_a_time = threading.Lock()
        client.meta.events.register("before-send.s3", self._decide)

    def on(self, operation: str, *fates: Fate | None) -> None:
        self._fates[operation] = list(fates)

    def off(self, operation: str) -> None:
        self._fates.pop(operation)

    def deliver_and_cut(self, request: Any) -> None:
        """The server handles the request; its response is lost."""
        self._session.send(request)
        self.cut(request)

    def cut(self, request: Any) -> None:
        raise ConnectionClosedError(endpoint_url=request.url)

    def _decide(self, request: Any, event_name: str, **kwargs: object) -> Any:
        operation = event_name.rpartition(".")[2]
        with self._one_at_a_time:
            self.sent[operation] += 1
            fates = self._fates.get(operation)
            fate = fates.pop(0) if fates else None
        return fate(request) if fate else None


def answer(
    status: int, code: str = "", said: str = "as told by the test", **headers: str
) -> Callable[[Any], AWSResponse]:
    """An error response with this code, or an empty response."""
    body = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode() if code else b""

    class Raw(BytesIO):
        def stream(self, *args: object, **kwargs: object) -> Iterator[bytes]:
            yield self.read()

    return lambda request: AWSResponse(request.url, status, {"content-type": "application/xml", **headers}, Raw(body))


def impatient_client() -> Any:
    """A client with two short attempts, so that its own silent retry is part of every test."""
    return boto3.client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 2},
            max_pool_connections=32,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        ),
    )
