"""One recording for all workers of a run: it takes seconds, and its calls are data."""

import fcntl
import pickle
from pathlib import Path

import pytest

from tests.iam.project import Recorded, recorded


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Recorded:
    """The templates of a project, and the calls of its users. Tests must not change them."""
    folder = tmp_path_factory.mktemp("project")
    if worker_id == "master":
        return recorded(folder)
    shared: Path = tmp_path_factory.getbasetemp().parent / "recorded.pickle"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            shared.write_bytes(pickle.dumps(recorded(folder)))
        found: Recorded = pickle.loads(shared.read_bytes())
        return found
