"""The build farm as it is deployed: where jobs are submitted, what they run, and how much of a machine each gets."""

import math
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.build.executors.protocol import Limits
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.util.aws import asking, client
from nxpipe.pipeline.util.errors import AwsError

PROJECT_TAG: Final = "nxpipe:project"  # by which whoever submits jobs may end them
_MIB: Final = 1024**2
_MIB_A_VCPU: Final = 7500  # the most that instances of the farm have, less what ECS keeps


@dataclass(frozen=True)
class Room:
    """What a job is promised."""

    vcpus: int
    memory: int  # MiB


@dataclass(frozen=True)
class BuildFarm:
    """`definition` is the ARN of one revision; `store` is where its jobs publish, `room` what they get unasked."""

    batch: Any
    project: str
    queue: str
    definition: str
    store: str
    room: Room

    def room_for(self, item: Item, limits: Limits) -> Room:
        """Never less than what the definition says; and twice as much or four times, as instances are twice as large,
        so that items of about one size go into one array.
        """
        if limits.memory is not None:
            memory = math.ceil(limits.memory / _MIB)
        else:
            times = max(1.0, item.memory / _MIB / self.room.memory)
            memory = self.room.memory * 2 ** math.ceil(math.log2(times))
        return Room(max(self.room.vcpus, math.ceil(memory / _MIB_A_VCPU)), memory)


def find_farm(project: str, region: str | None) -> BuildFarm:
    """What the stack of `[farm]` has made. Asks AWS; credentials come from where the AWS SDK always looks."""
    batch = client("batch", region, retries="adaptive")
    queue, job = f"{project}-builds", f"{project}-build"
    with asking("find the build farm"):
        queues = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
        jobs = batch.describe_job_definitions(jobDefinitionName=job, status="ACTIVE")["jobDefinitions"]
    for what, name, found in (("job queue", queue, queues), ("job definition", job, jobs)):
        if not found:
            raise AwsError(
                f"AWS Batch has no {what} {name} in {batch.meta.region_name}; describe `[farm]` in nxpipe.toml and run "
                f"`npx cdk deploy {project}-build-farm`, or name the region that it is in"
            )
    if queues[0]["state"] != "ENABLED":
        raise AwsError(f"the job queue {queue} in {batch.meta.region_name} takes no jobs; somebody has disabled it")
    newest = max(jobs, key=lambda one: one["revision"])
    container = newest["containerProperties"]
    environment = {one["name"]: one["value"] for one in container.get("environment", ())}
    asked = {one["type"]: int(one["value"]) for one in container.get("resourceRequirements", ())}
    return BuildFarm(
        batch=batch,
        project=project,
        queue=queues[0]["jobQueueArn"],
        definition=newest["jobDefinitionArn"],
        store=environment.get(VARIABLE, ""),
        room=Room(asked["VCPU"], asked["MEMORY"]),
    )
