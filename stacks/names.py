"""Resource names that both stacks and other tools use. This module does not import CDK."""

from typing import Final

PROJECT_TAG: Final = "nxpipe:project"
REHEARSAL_TAG: Final = "nxpipe:rehearsal"  # "true" on what rehearses, and absent otherwise
SHORT_JOBS_TAG: Final = "nxpipe:short-jobs"  # "true" on Batch environments that run for minutes a week, not for months
SMOKE_TAG: Final = "nxpipe:smoke"  # "true" on the stacks of a smoke test; also the key of CDK's context that marks them
SMOKE_END: Final = "SmokeEnd"  # parameter of its fleet: the time at which EC2 Auto Scaling ends the instances
PROBE: Final = "ProbeFunction"  # output: the name of the function that calls the load balancer
NAMESPACE: Final = "nxpipe"  # of pods that run artifacts
SERVICE_ACCOUNT: Final = "artifacts"  # of those pods; its role may read the store
NEURON: Final = "aws.amazon.com/neuron"  # taint of nodes with accelerators


def cluster_name(project: str) -> str:
    return project


def node_profile(project: str) -> str:
    """The instance profile of nodes outside of node groups, such as Karpenter's."""
    return f"{project}-nodes"


def efa_group(project: str) -> str:
    """The name of the security group of nodes that train together."""
    return f"{project}-efa"


def environment_channel(fleet: str, colour: str) -> str:
    """The channel of one environment of a serving fleet, as in pipeline/artifacts/channels.py."""
    return f"{fleet}--{colour}"


def fleet_log(project: str, fleet: str) -> str:
    """The log group of a fleet."""
    return f"/nxpipe/{project}/{fleet}"


def proving_queue(project: str, instance_type: str) -> str:
    """The name of the job queue, and of the job definition, of `nxpipe prove --on batch` for an instance type."""
    return f"{project}-prove-{instance_type.replace('.', '-')}"
