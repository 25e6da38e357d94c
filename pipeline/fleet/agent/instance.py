"""Which instance this is, by its own metadata service: version 2 of it, the only one that our templates allow."""

import http.client
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from nxpipe.pipeline.util.errors import NotReady

_ENDPOINT: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as the AWS SDKs call it
_USUAL: Final = "http://169.254.169.254"
_TOKEN: Final = "X-aws-ec2-metadata-token"  # noqa: S105, the name of a header
_LIFETIME: Final = f"{_TOKEN}-ttl-seconds"
_SECONDS: Final = 5
_LONGEST: Final = 1024  # bytes of an answer: a group's name has 255 characters
_NAME: Final = re.compile("[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Instance:
    id: str
    type: str
    region: str
    group: str | None  # the Auto Scaling group that launched it


def this_instance(environ: Mapping[str, str]) -> Instance:
    endpoint = environ.get(_ENDPOINT) or _USUAL
    try:
        with closing(_Metadata(endpoint)) as metadata:
            return Instance(
                id=metadata.wanted("instance-id"),
                type=metadata.wanted("instance-type"),
                region=metadata.wanted("placement/region"),
                group=metadata.get("tags/instance/aws:autoscaling:groupName"),
            )
    except (OSError, ValueError, http.client.HTTPException) as problem:
        raise NotReady(
            f"the instance metadata service at {endpoint} does not answer ({problem}), and only it says which instance "
            "this is; run the agent on an EC2 instance, outside of containers, or let its hop limit be 2"
        ) from problem


class _Metadata:
    """One session with the service."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._endpoint = endpoint
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_SECONDS)
        self._token = self._ask("PUT", "/latest/api/token", {_LIFETIME: "60"}) or ""

    def get(self, path: str) -> str | None:
        return self._ask("GET", f"/latest/meta-data/{path}", {_TOKEN: self._token})

    def wanted(self, path: str) -> str:
        found = self.get(path)
        if found is None:
            raise NotReady(f"the instance metadata service at {self._endpoint} has no {path}; is this an EC2 instance?")
        if not _NAME.fullmatch(found):
            raise self._nonsense(path)
        return found

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        self._connection.request(method, path, headers=dict(headers))
        answer = self._connection.getresponse()
        body = answer.read(_LONGEST + 1)
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise NotReady(f"the instance metadata service at {self._endpoint} answers {path} with {answer.status}")
        text = body.decode(errors="replace")
        if len(body) > _LONGEST or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
            raise self._nonsense(path)
        return text

    def _nonsense(self, path: str) -> NotReady:
        return NotReady(
            f"what the instance metadata service at {self._endpoint} answers to {path} is no such name; look at what "
            f"answers there in its place, and at {_ENDPOINT}"
        )
