"""`nxpipe release` on S3."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.localaws.server import local_aws
from tests.pipeline.in_process import InProcess
from tests.release.world import CELLS, GATES, Team, gate, make_project, states

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(sealed_environment: None) -> Iterator[str]:
    with local_aws() as there:
        where = {"LocationConstraint": there["AWS_REGION"]}
        boto3.client("s3").create_bucket(Bucket="my-artifacts", CreateBucketConfiguration=where)
        yield "s3://my-artifacts/nxpipe"


def test_the_whole_chain_runs_on_s3_and_is_taken_back(
    bucket: str, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_project(tmp_path / "project", bucket))
    team = Team(nxpipe, bucket)
    report = team.release("--jobs", "1")
    assert states(report) == dict.fromkeys(GATES, "passed") | {"rollout": "skipped"}
    assert [cell["fate"] for cell in gate(report, "build")["figures"]] == ["built"] * CELLS
    first = team.served("staging")
    assert first == {artifact["model_id"]: artifact["manifest"] for artifact in report["artifacts"]}
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 48]")
    second = team.release()
    assert len(team.log("staging")) == 2
    assert states(team.release()) == dict.fromkeys(GATES, "done") | {"rollout": "skipped"}
    assert team.does(second["way_back"][0]).code == 0
    assert team.served("staging") == first
