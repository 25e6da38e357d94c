"""What stands in a template for what is not locked yet, so that a fresh checkout synthesises: each with a warning that
names the command to run.

An image is a reference that CloudFormation resolves (`stacks/amis.py`), and can be deployed. An agent has no public
name, so it is a parameter without a default: a deployment ends before it changes anything, for CDK and CloudFormation
both refuse a parameter without a value.
"""

from typing import Final

from aws_cdk import Annotations, CfnParameter, Stack

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.locks import AmiLock
from nxpipe.stacks.agents import LOCK
from nxpipe.stacks.amis import is_unlocked

IMAGE: Final = "nxpipe:ami-not-locked"  # the ids of the warnings
AGENT: Final = "nxpipe:agent-not-locked"


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
