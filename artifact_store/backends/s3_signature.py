"""AWS Signature Version 4 of one plain request: botocore's own takes several times as long, in every request."""

import hashlib
import hmac
import time
from typing import Any, Final

# The signature covers the body's checksum, and so need not cover the body.
_BODY: Final = "UNSIGNED-PAYLOAD"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class Signer:
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
