"""Removal of a smoke test: its stacks, what they retain, and a search by tag for the rest; and the steps it reports.

Only stacks and resources with the tags of the smoke test are touched.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.fleet.account import Account
from nxpipe.pipeline.util.aws import error_code
from nxpipe.pipeline.util.errors import AwsError, InputInvalid, PipelineError, sentence_of
from nxpipe.stacks.names import PROJECT_TAG, SMOKE_TAG

State: TypeAlias = Literal["ok", "fails"]

FLEET: Final = "one"
PARTS: Final = ("storage", "network", f"serve-{FLEET}", "probe")  # the stacks, by the ends of their names

_REVIEW: Final = "REVIEW_IN_PROGRESS"  # only a change set; the stack has no resources and no tags
_GROUP: Final = "AWS::AutoScaling::AutoScalingGroup"
_RETAINED: Final = ("AWS::S3::Bucket", "AWS::ECR::Repository", "AWS::KMS::Key")
_BATCH: Final = 1000  # DeleteObjects' limit
_KEY_DAYS: Final = 7  # the shortest waiting period of KMS
_LISTED_FOR: Final = 300  # seconds: the tagging API lists deleted resources for some time


class StepFailed(PipelineError):
    """A step of a smoke test found something else than it needs."""


@dataclass(frozen=True)
class SmokeRow:
    """One step of a smoke test: what it found, and whether that is enough."""

    step: str
    found: str
    state: State
    seconds: float


@dataclass
class SmokeSteps:
    """Runs steps and keeps their rows. A step returns what it found, or raises."""

    show: Callable[[str], AbstractContextManager[None]]
    say: Callable[[str], None]
    poll: float  # seconds between two looks at AWS
    rows: list[SmokeRow] = field(default_factory=list)
    latest: str = ""  # what the current step last saw, for its row if it is interrupted

    def run(self, step: str, title: str, action: Callable[[], str]) -> bool:
        """True if the later steps can follow. Every exception that is not an expected one leaves a row and goes on."""
        began, self.latest = time.monotonic(), ""
        state: State = "fails"
        found = "interrupted"
        try:
            with self.show(title):
                found, state = action(), "ok"
        except (PipelineError, StoreError, OSError) as error:
            found = sentence_of(error)
        finally:
            if found == "interrupted" and self.latest:
                found = f"interrupted; {self.latest}"
            self.rows.append(SmokeRow(step, found, state, round(time.monotonic() - began, 1)))
            if state != "ok":
                self.say(f"  {step} fails: {found}")
        return state == "ok"

    def until(self, look: Callable[[], str | None]) -> str:
        """Look again and again until there is a result."""
        while (found := look()) is None:
            time.sleep(self.poll)
        return found


def smoke_stacks(account: Account, project: str) -> list[dict[str, Any]]:
    """The stacks of the smoke test that exist. Another stack with such a name is an error, and is left alone."""
    stacks = account.items("cloudformation", "describe_stacks", "Stacks")
    named = [stack for stack in stacks if stack["StackName"].startswith(f"{project}-")]
    foreign = [stack["StackName"] for stack in named if not _is_own(stack, project)]
    if foreign:
        raise InputInvalid(
            f"{account.region} has stacks that are named as those of the smoke test and have no tag {SMOKE_TAG}: "
            f"{', '.join(foreign)}; rename the project, or delete them if nothing needs them"
        )
    return named


def _is_own(stack: dict[str, Any], project: str) -> bool:
    """By its tag. A stack that an interrupted deployment has only begun has no tags and no resources."""
    if {"Key": SMOKE_TAG, "Value": "true"} in stack.get("Tags", []):
        return True
    return stack["StackStatus"] == _REVIEW and stack["StackName"] in {f"{project}-{part}" for part in PARTS}


@dataclass(frozen=True)
class Teardown:
    """Removal of all that a smoke test has created, from any state, any number of times."""

    account: Account
    project: str
    steps: SmokeSteps

    def run(self) -> bool:
        """True if nothing is left. Later steps run even if one fails, because each reduces the costs."""
        retained: list[tuple[str, str]] = []
        steps: tuple[tuple[str, str, Callable[[], str]], ...] = (
            ("instances", "set the Auto Scaling groups to zero", self._empty_groups),
            ("stacks", "delete the stacks", partial(self._delete_stacks, retained)),
            ("retained", "delete buckets, images and key", partial(self._delete_retained, retained)),
            ("left", "search for resources by tag", self._search),
        )
        clean, faults = True, []
        for step in steps:
            try:
                clean &= self.steps.run(*step)
            except Exception as fault:  # one of this program, which is raised when all steps have run
                faults.append(fault)
        if faults:
            raise faults[0]
        return clean

    def _empty_groups(self) -> str:
        """First, because instances cost the most and the deletion of a stack can take half an hour."""
        names = [
            name
            for stack in smoke_stacks(self.account, self.project)
            for type_, name in self._resources(stack["StackName"])
            if type_ == _GROUP
        ]
        described = self.account.call("autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=names)
        found = [entry["AutoScalingGroupName"] for entry in described["AutoScalingGroups"]] if names else []
        for name in found:
            self.account.call(
                "autoscaling",
                "update_auto_scaling_group",
                AutoScalingGroupName=name,
                MinSize=0,
                MaxSize=0,
                DesiredCapacity=0,
            )
        return f"set to zero: {', '.join(found)}" if found else "no group"

    def _resources(self, stack: str) -> list[tuple[str, str]]:
        """Type and physical id of each resource of a stack that exists."""
        entries = self.account.items(
            "cloudformation", "list_stack_resources", "StackResourceSummaries", StackName=stack
        )
        return [(entry["ResourceType"], entry["PhysicalResourceId"]) for entry in entries if _exists(entry)]

    def _delete_stacks(self, retained: list[tuple[str, str]]) -> str:
        """Callers before the network, the network before the store, whose log bucket the load balancer writes to."""
        stacks = smoke_stacks(self.account, self.project)
        for waves in (self._callers, self._named("network"), self._named("storage")):
            wave = [stack for stack in stacks if waves(stack["StackName"])]
            for stack in wave:
                retained += [entry for entry in self._resources(stack["StackName"]) if entry[0] in _RETAINED]
                self._begin(stack)
            for stack in wave:
                self.steps.until(partial(self._deleted, stack))
        return f"deleted: {', '.join(stack['StackName'] for stack in stacks)}" if stacks else "no stack"

    def _callers(self, name: str) -> bool:
        return name not in {f"{self.project}-network", f"{self.project}-storage"}

    def _named(self, part: str) -> Callable[[str], bool]:
        return lambda name: name == f"{self.project}-{part}"

    def _begin(self, stack: dict[str, Any]) -> None:
        """Delete a stack as soon as CloudFormation accepts it: an operation that runs may have to end first."""
        name: str = stack["StackName"]
        if stack.get("EnableTerminationProtection"):
            self.account.call(
                "cloudformation", "update_termination_protection", StackName=name, EnableTerminationProtection=False
            )

        def accepted() -> str | None:
            try:
                self.account.call("cloudformation", "delete_stack", StackName=name)
            except AwsError as error:
                if error_code(error) != "ValidationError" or "_IN_PROGRESS" not in str(error):
                    raise
                self.steps.latest = f"{name} is {self._status(stack)}"
                return None
            return name

        self.steps.until(accepted)

    def _deleted(self, stack: dict[str, Any]) -> str | None:
        status = self._status(stack)
        self.steps.latest = f"{stack['StackName']} is {status}"
        if status == "DELETE_FAILED":
            raise StepFailed(
                f"{stack['StackName']} could not be deleted: {self._reason(stack)}; correct the cause and run "
                "`nxpipe infra smoke --destroy`"
            )
        if not status.startswith("DELETE_") and not status.endswith("_IN_PROGRESS"):
            # An operation of before ended after the request.
            self.account.call("cloudformation", "delete_stack", StackName=stack["StackName"])
        return status if status == "DELETE_COMPLETE" else None

    def _status(self, stack: dict[str, Any]) -> str:
        """By id, because CloudFormation does not find a deleted stack by its name."""
        try:
            found = self.account.call("cloudformation", "describe_stacks", StackName=stack["StackId"])["Stacks"]
        except AwsError as error:
            if "does not exist" not in str(error):
                raise
            return "DELETE_COMPLETE"
        status: str = found[0]["StackStatus"]
        return status

    def _reason(self, stack: dict[str, Any]) -> str:
        events = self.account.items(
            "cloudformation", "describe_stack_events", "StackEvents", StackName=stack["StackId"]
        )
        failed = [event for event in events if event["ResourceStatus"] == "DELETE_FAILED"]
        reasons = [event.get("ResourceStatusReason", "") for event in failed if event["PhysicalResourceId"]]
        return reasons[-1] if reasons else "no reason is known"

    def _delete_retained(self, retained: Collection[tuple[str, str]]) -> str:
        """Those of the stacks, and those of an earlier attempt, which only their tags show."""
        orphans = [orphan for arn in self._tagged((SMOKE_TAG, "true")) if (orphan := _orphan(arn)) is not None]
        removed = [
            f"{name}"
            for type_, name in dict.fromkeys([*retained, *orphans])
            if {
                "AWS::S3::Bucket": self._delete_bucket,
                "AWS::ECR::Repository": self._delete_repository,
                "AWS::KMS::Key": self._schedule_key,
            }[type_](name)
        ]
        return f"deleted: {', '.join(removed)}" if removed else "nothing"

    def _delete_bucket(self, name: str) -> bool:
        """Services deliver their last logs late, so a bucket may not be empty at the first attempt."""

        def deleted() -> str | None:
            try:
                for objects in self._versions(name):
                    self.account.call("s3", "delete_objects", Bucket=name, Delete={"Objects": objects, "Quiet": True})
                self.account.call("s3", "delete_bucket", Bucket=name)
            except AwsError as error:
                if error_code(error) == "BucketNotEmpty":
                    self.steps.latest = f"{name} is not empty yet"
                    return None
                if error_code(error) != "NoSuchBucket":
                    raise
                return "gone"
            return "deleted"

        return self.steps.until(deleted) == "deleted"

    def _versions(self, bucket: str) -> Iterator[list[dict[str, str]]]:
        for kind in ("Versions", "DeleteMarkers"):
            entries = self.account.items("s3", "list_object_versions", kind, Bucket=bucket)
            objects = [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in entries]
            for start in range(0, len(objects), _BATCH):
                yield objects[start : start + _BATCH]

    def _delete_repository(self, name: str) -> bool:
        try:
            self.account.call("ecr", "delete_repository", repositoryName=name, force=True)
        except AwsError as error:
            if error_code(error) != "RepositoryNotFoundException":
                raise
            return False
        return True

    def _schedule_key(self, key: str) -> bool:
        if self._key_ends(key):
            return False
        self.account.call("kms", "schedule_key_deletion", KeyId=key, PendingWindowInDays=_KEY_DAYS)
        return True

    def _key_ends(self, key: str) -> bool:
        state: str = self.account.call("kms", "describe_key", KeyId=key)["KeyMetadata"]["KeyState"]
        return state == "PendingDeletion"

    def _tagged(self, *tags: tuple[str, str]) -> list[str]:
        filters = [{"Key": key, "Values": [value]} for key, value in ((PROJECT_TAG, self.project), *tags)]
        found = self.account.items(
            "resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList", TagFilters=filters
        )
        return [entry["ResourceARN"] for entry in found]

    def _search(self) -> str:
        """The tagging API lists deleted resources for a while, so it is read until it lists none, or for minutes."""
        ends = time.monotonic() + _LISTED_FOR

        def looked() -> str | None:
            left = [stack["StackName"] for stack in smoke_stacks(self.account, self.project)]
            left += [arn for arn in self._tagged() if not self._is_gone(arn)]
            if not left:
                return "nothing"
            self.steps.latest = f"still listed: {', '.join(left)}"
            if time.monotonic() < ends:
                return None
            raise StepFailed(
                f"{self.steps.latest}; AWS lists deleted resources for some time: check these, or run "
                "`nxpipe infra smoke --destroy` again"
            )

        return self.steps.until(looked)

    def _is_gone(self, arn: str) -> bool:
        """True for what AWS keeps listing: keys that wait for their deletion, and terminated instances."""
        service, resource = arn.split(":")[2], arn.split(":", 5)[5]
        if service == "kms" and resource.startswith("key/"):
            return self._key_ends(arn)
        if service == "ec2" and resource.startswith("instance/"):
            id_ = resource.partition("/")[2]
            try:
                found = self.account.call("ec2", "describe_instances", InstanceIds=[id_])["Reservations"]
            except AwsError as error:
                if error_code(error) != "InvalidInstanceID.NotFound":
                    raise
                return True
            return all(entry["State"]["Name"] == "terminated" for part in found for entry in part["Instances"])
        return False


def _exists(entry: dict[str, Any]) -> bool:
    return bool(entry.get("PhysicalResourceId")) and entry["ResourceStatus"] != "DELETE_COMPLETE"


def _orphan(arn: str) -> tuple[str, str] | None:
    """Type and name of a tagged resource of a type that stacks retain."""
    service, resource = arn.split(":")[2], arn.split(":", 5)[5]
    if service == "s3" and "/" not in resource:
        return "AWS::S3::Bucket", resource
    if service == "ecr" and resource.startswith("repository/"):
        return "AWS::ECR::Repository", resource.partition("/")[2]
    if service == "kms" and resource.startswith("key/"):
        return "AWS::KMS::Key", resource.partition("/")[2]
    return None
