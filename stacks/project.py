"""Parts that all stacks share: the site, the cost-allocation tag, log groups, warnings about missing lock files."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aws_cdk import Annotations, App, CfnParameter, Environment, RemovalPolicy, Stack, Tags, aws_logs
from constructs import Construct

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.capacity import Capacity, CapacityBlock, ServingReservation
from nxpipe.pipeline.config.locks import AmiLock
from nxpipe.pipeline.config.serving_fleet import ServingFleet
from nxpipe.stacks.handles import NetworkHandle, StoreHandle
from nxpipe.stacks.locks import AGENT, IMAGE, LOCK, unlocked_images
from nxpipe.stacks.names import PROJECT_TAG, REHEARSAL_TAG

__all__ = ["PROJECT_TAG", "tag_project"]

_ENDED: Final = "nxpipe:capacity-block-ended"
_UNKNOWN: Final = "nxpipe:reservation-not-counted"


def tag_project(stack: Stack, project: str) -> None:
    Tags.of(stack).add(PROJECT_TAG, project)


def description_of(what: str, project: str, *, rehearsal: bool) -> str:
    """Description of the stack of a fleet or an endpoint, such as "Fleet search of demo"."""
    return f"{what} of {project}" + (" (rehearsal: may serve programs of the emulator)" if rehearsal else "")


def tag_rehearsal(stack: Stack) -> None:
    Tags.of(stack).add(REHEARSAL_TAG, "true")


def current_time() -> datetime:
    return datetime.now(UTC)


def warn_of_ended_block(stack: Stack, capacity: Capacity) -> None:
    """A warning at synthesis about instances that a template can no longer start."""
    if isinstance(capacity, CapacityBlock) and current_time() >= capacity.drained:
        Annotations.of(stack).add_warning_v2(
            _ENDED,
            f"capacity block {capacity.id} ends at {capacity.end.isoformat()}, and its instances are drained "
            f"45 minutes before, which is in the past: {stack.stack_name} stays empty; name another block or remove it",
        )


def warn_of_unknown_reservation(stack: Stack, fleet: ServingFleet) -> None:
    """A warning at synthesis about a reservation whose size is not compared with what a rollout needs."""
    if isinstance(fleet.capacity, ServingReservation | CapacityBlock) and fleet.capacity.instances is None:
        Annotations.of(stack).add_warning_v2(
            _UNKNOWN,
            f"capacity of fleet {fleet.name} has no `instances`, so the reservation is not compared with the "
            f"{2 * fleet.size.max} instances of a rollout (blue/green); set `instances` to the number that is reserved",
        )


def log_group(scope: Construct, id_: str, name: str | None = None, *, days: int | None = None) -> aws_logs.LogGroup:
    """Log group with a retention of three months, or of `days`. CloudFormation generates a name if none is given."""
    group = aws_logs.LogGroup(
        scope,
        id_,
        log_group_name=name,
        retention=aws_logs.RetentionDays.THREE_MONTHS,
        removal_policy=RemovalPolicy.DESTROY,
    )
    resource = group.node.default_child
    if days is not None and isinstance(resource, aws_logs.CfnLogGroup):
        resource.retention_in_days = days
    return group


@dataclass(frozen=True)
class Site:
    """Arguments that most stacks of one project share."""

    app: App
    config: Config
    folder: Path  # of nxpipe.toml; relative paths start there
    env: Environment
    store: StoreHandle
    network: NetworkHandle

    @property
    def project(self) -> str:
        return self.config.project.name

    @property
    def prefix(self) -> str:
        return store_prefix(self.config)


def store_prefix(config: Config) -> str:
    """Key prefix of the store in its bucket, such as "" or "models/"."""
    url = urlsplit(config.store.url)
    folder = url.path.strip("/") if url.scheme == "s3" else ""
    return f"{folder}/" if folder else ""


def warn_of_image(stack: Stack, image: str, config: Config, lock: AmiLock) -> None:
    if image not in unlocked_images(config, lock):
        return
    region = config.project.region
    if image == config.amis.image:
        text = f"{lock.path.name} does not have {image}, which [amis] names, so it is not checked; to check and pin it"
    else:
        text = (
            f"{lock.path.name} has no image for {region}, so instances start from the newest one at the time of "
            "deployment; to pin it"
        )
    Annotations.of(stack).add_warning_v2(IMAGE, f"{text} now, run: nxpipe ami lock --region {region}")


def unlocked_agent(stack: Stack) -> str:
    """Parameter in place of the agent's digest while the lock file is missing."""
    Annotations.of(stack).add_warning_v2(
        AGENT,
        f"{LOCK}, which names the agent that instances install, is missing, so this stack cannot be deployed yet; "
        "run: nxpipe agent bundle PACKAGES",
    )
    parameter = CfnParameter(
        stack,
        "AgentSha256",
        type="String",
        allowed_pattern="[0-9a-f]{64}",
        description=f"SHA-256 of the agent's bundle, from {LOCK}, which `nxpipe agent bundle PACKAGES` writes",
        constraint_description=f"the digest that `nxpipe agent bundle PACKAGES` writes into {LOCK}",
    )
    digest: str = parameter.value_as_string
    return digest
