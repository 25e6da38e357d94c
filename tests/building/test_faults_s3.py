"""A bucket that fails in the middle of a build, from one request on: S3 is refused, or not to be reached any more."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nxpipe.pipeline.util.exit_codes import INCOMPLETE
from tests.building.test_faults import ONE_AT_A_TIME, Case, ends_well
from tests.building.world import World, saved_world
from tests.faults import buckets
from tests.faults.conftest import S3, bucket, credentials, faulty_s3, new_bucket, s3
from tests.faults.plan import CutBefore, Fault, Plan, Refuse, Request, where
from tests.faults.proxy import Proxy

__all__ = ["bucket", "credentials", "faulty_s3", "new_bucket", "s3"]


@dataclass
class InBucket(World):
    """A project whose store is a bucket; it is looked at behind the proxy's back."""

    look: Callable[[], dict[str, bytes]] = field(default=dict)

    def objects(self) -> dict[str, bytes]:
        return self.look()


def from_the_third_part_on() -> Callable[[Request], bool]:
    """One program's two parts are committed, and the next one's first is to be."""
    begun = set[str]()

    def is_late(request: Request) -> bool:
        name = request.path.rpartition("/parts/")[2]
        if request.operation == "PutObject" and len(name) == 64:
            begun.add(name)
        return len(begun) >= 3

    return is_late


@pytest.mark.sample(24)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Refuse(400, "ExpiredToken"), "ExpiredToken"),
        (CutBefore(), "s3://"),
    ],
    ids=["credentials expire", "the network is gone"],
)
def test_a_build_that_loses_its_bucket_is_finished_when_it_is_back(
    fault: Fault, says: str, s3: S3, bucket: str, faulty_s3: Callable[[Plan], Proxy], tmp_path: Path
) -> None:
    proxy = faulty_s3(Plan(where(from_the_third_part_on(), fault)))
    snapshots = buckets.Snapshots(buckets.client(s3.moto.url, attempts=5))
    words = saved_world(tmp_path, targets="inf2.48xlarge").words
    url = f"s3://{bucket}/{buckets.PREFIX.rstrip('/')}"
    world = InBucket(tmp_path, (*words, "--store", url), look=lambda: dict(snapshots.of(bucket)))
    answer = world.build(*ONE_AT_A_TIME, "--retries", "0")
    proxy.start_over(Plan())
    ends_well(world, answer, Case(World.build, INCOMPLETE.number, says, 1))
