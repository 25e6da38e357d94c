"""Resource names that stacks give and other tools refer to. Needs no CDK."""

from typing import Final

PROJECT_TAG: Final = "nxpipe:project"
NAMESPACE: Final = "nxpipe"  # of pods that run artifacts
SERVICE_ACCOUNT: Final = "artifacts"  # of those pods: it may read the store
NEURON: Final = "aws.amazon.com/neuron"  # keeps other pods off nodes with accelerators


def cluster_name(project: str) -> str:
    return project


def node_profile(project: str) -> str:
    """The instance profile of nodes that no node group starts."""
    return f"{project}-nodes"


def efa_group(project: str) -> str:
    """The name of the security group of nodes that train together."""
    return f"{project}-efa"
