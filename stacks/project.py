"""Project-wide parts of all stacks: the site, cost-allocation tag, log groups, warnings for unlocked inputs."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aws_cdk import Annotations, App, CfnParameter, Environment, RemovalPolicy, Stack, Tags, aws_logs
from constructs import Construct

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.locks import AmiLock
from nxpipe.stacks.handles import NetworkHandle, StoreHandle
from nxpipe.stacks.locks import AGENT, IMAGE, LOCK, is_unlocked
from nxpipe.stacks.names import PROJECT_TAG

__all__ = ["PROJECT_TAG", "tag_project"]


def tag_project(stack: Stack, project: str) -> None:
    Tags.of(stack).add(PROJECT_TAG, project)


def log_group(scope: Construct, id_: str, name: str | None = None) -> aws_logs.LogGroup:
    """Without a name CloudFormation gives it one."""
    return aws_logs.LogGroup(
        scope,
        id_,
        log_group_name=name,
        retention=aws_logs.RetentionDays.THREE_MONTHS,
        removal_policy=RemovalPolicy.DESTROY,
    )


@dataclass(frozen=True)
class Site:
    app: App
    config: Config
    folder: Path  # of nxpipe.toml, where relative paths of it start
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
    """Where the store lies in its bucket, as the keys of objects begin: "" or "models/", say."""
    url = urlsplit(config.store.url)
    folder = url.path.strip("/") if url.scheme == "s3" else ""
    return f"{folder}/" if folder else ""


def warn_of_image(stack: Stack, image: str, config: Config, lock: AmiLock) -> None:
    if is_unlocked(image):
        region = config.project.region
        Annotations.of(stack).add_warning_v2(
            IMAGE,
            f"{lock.path.name} has no image for {region}, so instances start from the newest one on the day of the "
            f"deployment; to choose it now, run: nxpipe ami lock --region {region}",
        )


def unlocked_agent(stack: Stack) -> str:
    """What stands for the digest until it is known."""
    Annotations.of(stack).add_warning_v2(
        AGENT,
        f"{LOCK} is missing, which names the agent that instances install, so this stack cannot be deployed yet; "
        "run: nxpipe agent bundle PACKAGES",
    )
    parameter = CfnParameter(
        stack,
        "AgentSha256",
        type="String",
        allowed_pattern="[0-9a-f]{64}",
        description=f"The digest of the agent's bundle. {LOCK} names it, which `nxpipe agent bundle PACKAGES` writes.",
        constraint_description=f"the digest that `nxpipe agent bundle PACKAGES` writes into {LOCK}",
    )
    digest: str = parameter.value_as_string
    return digest
