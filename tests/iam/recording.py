"""Records the AWS requests of commands in this process, as what IAM authorizes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.handlers import BUILTIN_HANDLERS, REGISTER_FIRST

from tests.iam.calls import FREE, Call, Wire, authorizations

ACCESS_KEY: Final = "recorded"  # of the commands; moto's state machines have one of their own
_EVENT: Final = "before-send"


@dataclass
class Recorder:
    """`keys` has the ARN of each bucket's KMS key. `calls` has the calls of each session, without repeats."""

    keys: Mapping[str, str]
    calls: dict[str, set[Call]] = field(default_factory=dict)
    _sessions: list[str] = field(default_factory=list)

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """Everything that the block sends belongs to the session; with an empty name it is the harness's own."""
        self._sessions.append(name)
        try:
            yield
        finally:
            self._sessions.pop()

    def __call__(self, request: Any, **_: object) -> None:
        if not self._sessions or not self._sessions[-1]:
            return
        wire = Wire(request.method, request.url, _text(request.headers), _bytes(request.body))
        if wire.access_key == ACCESS_KEY:
            found = {call for call in authorizations(wire, self.keys) if call.action not in FREE}
            self.calls.setdefault(self._sessions[-1], set()).update(found)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Clients that are created within the block pass each request to the recorder, before moto answers it."""
    entry = (_EVENT, recorder, REGISTER_FIRST)
    BUILTIN_HANDLERS.append(entry)
    try:
        yield
    finally:
        BUILTIN_HANDLERS.remove(entry)


def _text(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name.lower(): value.decode() if isinstance(value, bytes) else str(value) for name, value in headers.items()}


def _bytes(body: Any) -> bytes:
    """The body, if it is in memory; only S3 streams bodies, and none is looked at there."""
    if isinstance(body, str):
        return body.encode()
    return bytes(body) if isinstance(body, (bytes, bytearray)) else b""
