"""Which instance this is, by its own metadata service: version 2 of it, the only one that our templates allow."""

import http.client
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal
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
class FleetInstance:
    id: str
    type: str
    region: str
    group: str | None  # the Auto Scaling group that launched it


def this_instance(environ: Mapping[str, str]) -> FleetInstance:
    endpoint = environ.get(_ENDPOINT) or _USUAL
    try:
        with closing(_Metadata(endpoint)) as metadata:
            return FleetInstance(
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


@contextmanager
def lifecycle_gate(name: str | None, environ: Mapping[str, str]) -> Iterator[FleetInstance]:
    """Whoever comes through is ready, and the hook is told so; whatever goes wrong inside gives the instance up, so
    that its group tries another one at once: an error as well as a SIGTERM, by which systemd ends the agent when the
    instance is shut down before it could serve. Without a name nobody is told.
    """
    instance = this_instance(environ)
    hook = LifecycleHook(name, instance) if name else None
    try:
        yield instance
    except BaseException:
        if hook:
            hook.give_up()
        raise
    if hook:
        hook.answer("CONTINUE")


@dataclass(frozen=True)
class LifecycleHook:
    name: str
    instance: FleetInstance

    def answer(self, result: Literal["CONTINUE", "ABANDON"]) -> bool:
        """False: nobody waits for an answer, as after a restart of the server on an instance that serves already."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client().complete_lifecycle_action(
                AutoScalingGroupName=self._group,
                LifecycleHookName=self.name,
                InstanceId=self.instance.id,
                LifecycleActionResult=result,
            )
        except ClientError as refused:
            if "No active Lifecycle Action" in refused.response["Error"]["Message"]:
                return False
            raise self._unanswered(result, refused) from refused
        except BotoCoreError as failed:
            raise self._unanswered(result, failed) from failed
        return True

    def give_up(self) -> None:
        """Why is what the caller tells; that nobody could be told is said beside it."""
        try:
            self.answer("ABANDON")
        except NotReady as unheard:
            sys.stderr.write(f"{unheard}\n")

    @property
    def _group(self) -> str:
        if self.instance.group is None:
            raise NotReady(
                f"instance {self.instance.id} does not know its Auto Scaling group, whose hook {self.name} waits; its "
                "launch template must allow instance tags in the metadata, or the agent be run without --hook"
            )
        return self.instance.group

    def _client(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        retries = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 5})
        return Session().create_client("autoscaling", region_name=self.instance.region, config=retries)

    def _unanswered(self, result: str, problem: Exception) -> NotReady:
        return NotReady(
            f"hook {self.name} of group {self._group} could not be told {result} for instance {self.instance.id}: "
            f"{problem}; the instance's role needs autoscaling:CompleteLifecycleAction, and the network a way there"
        )
