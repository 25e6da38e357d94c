"""The lifecycle hook that keeps a new instance from traffic until somebody answers for it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from nxpipe.pipeline.fleet.agent.instance import Instance, this_instance
from nxpipe.pipeline.util.errors import NotReady


@contextmanager
def gate(name: str | None, environ: Mapping[str, str]) -> Iterator[Instance]:
    """Whoever comes through is ready, and the hook is told so; whatever goes wrong inside gives the instance up, so
    that its group tries another one at once: an error as well as a SIGTERM, by which systemd ends the agent when the
    instance is shut down before it could serve. Without a name nobody is told.
    """
    instance = this_instance(environ)
    hook = Hook(name, instance) if name else None
    try:
        yield instance
    except BaseException:
        if hook:
            hook.give_up()
        raise
    if hook:
        hook.answer("CONTINUE")


@dataclass(frozen=True)
class Hook:
    name: str
    instance: Instance

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
