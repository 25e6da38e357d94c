"""Rebuilds after changes, and results that do not depend on the builder."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import step_result
from nxpipe.artifact_store.layout import PARTS, action_path, blob_path, part_path
from nxpipe.pipeline.build.cache import Timings
from nxpipe.pipeline.build.jobs import REPORT_WORDS
from nxpipe.pipeline.build.plan import make_plan
from nxpipe.pipeline.build.run import JobQueue, RetryPolicy, run_jobs
from nxpipe.pipeline.build.state import BuildState
from nxpipe.pipeline.build.worker import InlineExecutor
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.models.weights import WeightsSource
from tests.building.plans import THRESHOLDS
from tests.building.published import publish_all
from tests.building.world import World, described, model_text, saved_world
from tests.pipeline.command import NXPIPE
from tests.pipeline.conftest import BERT, write_model

pytestmark = pytest.mark.sample(12)

HEAVY = {"torch", "transformers", "numpy", "boto3", "botocore", "ml_dtypes", "ray"}


@dataclass
class Here:
    """A model built in this process, where torch is imported once for all builds."""

    store: Store
    order: ModelSpec

    def fates(self, **changes: object) -> dict[str, str]:
        """The statuses by program."""
        result = replace(self.order, **changes)  # type: ignore[arg-type]
        plan = make_plan([result], self.store, THRESHOLDS, Timings(Path("no file")))
        state = BuildState(plan)
        results = run_jobs(state, JobQueue.of(plan, THRESHOLDS), InlineExecutor(state.apply), RetryPolicy(retries=0))
        assert results.exit_code == 0, results.missing()
        return {cell.cell.shape.name: REPORT_WORDS[cell.status] for cell in results.cells()}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Here:
    """A project with two buckets of an encoder in its store."""
    folder = tmp_path_factory.mktemp("here")
    model = write_model(folder / "bert", BERT | {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16})
    task = "feature-extraction"
    seed = WeightsSource.parse("random:0")
    order = ModelSpec(str(model), None, task, "inf2.xlarge", 1, None, (1,), (8, 16), "matmult", "bf16", seed)
    built = Here(open_store(str(folder / "store")), order)
    assert built.fates() == {"forward-b1-s8": "built", "forward-b1-s16": "built"}
    return built


def test_a_changed_bucket_is_the_only_one_that_is_compiled(here: Here) -> None:
    assert here.fates(buckets=(8, 24)) == {"forward-b1-s8": "found", "forward-b1-s24": "built"}
    assert here.fates(buckets=(8,)) == {"forward-b1-s8": "found"}


def test_new_weights_are_verified_and_nothing_is_compiled_for_them(here: Here) -> None:
    before = set(here.store.backend.paths(PARTS))
    changed = replace(here.order, weights=WeightsSource.parse("random:1"))
    request = BuildSpec.of(changed)
    assert {part_path(request.program_key(shape)) for shape in request.shapes} <= before
    assert set(here.fates(weights=changed.weights).values()) == {"built"}
    new = set(here.store.backend.paths(PARTS)) - before
    assert new == {part_path(request.evidence_key(shape)) for shape in request.shapes}


def test_a_committed_cell_that_has_lost_a_blob_is_made_anew_when_its_artifact_is_published(here: Here) -> None:
    """No listing shows it: what was planned is to publish."""
    assert here.fates(buckets=(32,)) == {"forward-b1-s32": "built"}
    request = BuildSpec.of(replace(here.order, buckets=(32,)))
    part = step_result(here.store, request.program_key(request.shapes[0]))
    assert part is not None
    root = Path(here.store.url.removeprefix("file://"))
    (root / blob_path(part.blob("program"))).unlink()
    (root / action_path(digest_of(request.key_inputs()))).unlink()
    assert here.fates(buckets=(32,)) == {"forward-b1-s32": "found"}
    assert here.store.read_blob(part.blob("program"))


def clean(**changes: str) -> Mapping[str, str]:
    return {"TZ": "UTC", "LC_ALL": "C", "USER": "root", "PYTHONHASHSEED": "1", **changes}


def test_a_saved_program_makes_the_same_artifacts_wherever_and_whoever_builds_it(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "another place/of some user"
    (there / "home").mkdir(parents=True)
    one, other = (saved_world(folder, targets="inf2.xlarge,trn2.48xlarge") for folder in (here, there))
    one.words, other.words = (words(world, "--tp", "1,2") for world in (one, other))
    one.environment = clean()
    other.environment = clean(
        TZ="Asia/Kathmandu", LC_ALL="tr_TR.UTF-8", USER="ayşe", HOME=str(there / "home"), PYTHONHASHSEED="2"
    )
    one.build_all("--jobs", "2")
    before = os.umask(0o077)
    try:
        other.build_all("--jobs", "1")
    finally:
        os.umask(before)
    assert one.artifacts() == other.artifacts()
    assert len(one.artifacts()) == 4


def words(world: World, *more: str) -> tuple[str, ...]:
    """Verified, too."""
    return (*(word for word in world.words if word != "--no-verify"), *more)


def test_a_model_makes_the_same_artifact_in_this_process_and_in_a_pool(here: Here, tmp_path: Path) -> None:
    model = write_model(tmp_path / "bert", {**reversed_config(Path(here.order.model_id))})
    options = ("--model-id", str(model), "--task", "feature-extraction", "--weights", "random:0", "--buckets", "8,16")
    pool = World(tmp_path, (*options, "--store", "store"), clean(TZ="Asia/Kathmandu", HOME=str(tmp_path)))
    pool.build_all("--jobs", "1")
    here.fates()
    mine = {entry.request_key: entry.manifest_digest for entry in here.store.list()}
    assert pool.artifacts().items() <= mine.items()
    assert len(pool.artifacts()) == 1


def reversed_config(folder: Path) -> dict[str, object]:
    """The same configuration in another order."""
    config = json.loads((folder / "config.json").read_text())
    return dict(reversed(config.items()))


@pytest.mark.parametrize("artifacts", [5, 30])
def test_a_rebuild_of_thirty_cells_that_are_there_loads_no_library_that_builds(artifacts: int, tmp_path: Path) -> None:
    for number in range(artifacts):
        write_model(tmp_path / f"m{number}", BERT | {"intermediate_size": 64 + number})
    buckets = list(range(8, 8 + 30 // artifacts))
    models = (model_text(f"m{number}", "feature-extraction", buckets) for number in range(artifacts))
    world = described(tmp_path, "".join(models))
    publish_all(tmp_path)
    command = [sys.executable, "-X", "importtime", str(NXPIPE), "build"]
    done = subprocess.run(command, cwd=world.folder, capture_output=True, text=True, check=True)
    assert done.stdout.count("cached") == artifacts
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "nxpipe.artifact_store" in imported
    assert not {name.partition(".")[0] for name in imported} & HEAVY


def test_no_cluster_is_started_for_a_build_that_has_nothing_to_do(tmp_path: Path) -> None:
    world = saved_world(tmp_path, targets="inf2.48xlarge")
    world.build_all()
    assert world.build("--executor", "ray", "--address", "127.0.0.1:1").code == 0
    refused = world.build("--executor", "ray", "--address", "127.0.0.1:1", "--force")
    assert (refused.code, "no Ray cluster" in refused.err) == (17, True)
