"""A release that is killed between its gates goes on with the same words, and does nothing twice."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from nxpipe.pipeline.util import exit_codes
from tests.pipeline.command import NXPIPE
from tests.release.world import GATES, Team, states

pytestmark = pytest.mark.sample(12)


def ended_at(line_begins: str, with_signal: signal.Signals) -> tuple[int, list[str]]:
    """A release that hears this signal as soon as it has told this; what it had told by then."""
    process = subprocess.Popen(
        [str(NXPIPE), "release"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    result: list[str] = []
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            result.append(line)
            if line.startswith(line_begins):
                process.send_signal(with_signal)
                break
        process.stderr.read()
    return process.returncode, result


def test_a_release_that_is_killed_between_its_gates_goes_on_and_does_nothing_twice(team: Team) -> None:
    """By Ctrl-C while it builds; then it is killed after it has verified, and after it has promoted."""
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 48]")
    code, _ = ended_at("  cache miss", signal.SIGINT)
    assert code == exit_codes.INTERRUPTED.number
    newest = max(Path(".nxpipe/releases").glob("*/release.json"))
    interrupted = json.loads(newest.read_text())
    assert (interrupted["verdict"], states(interrupted)["promote"]) == ("interrupted", "not run")
    assert len(team.log("staging")) == 1

    code, told = ended_at("verify", signal.SIGKILL)
    assert code == -signal.SIGKILL, told
    assert len(team.log("staging")) == 1
    code, told = ended_at("promote", signal.SIGKILL)
    assert code == -signal.SIGKILL, told
    gates = {line.split()[0]: line.split()[1] for line in told if line.split()[0] in GATES}
    assert [gates[name] for name in ("check", "build", "verify")] == ["done"] * 3
    assert len(team.log("staging")) == 2

    report = team.release()
    assert states(report) == dict.fromkeys(GATES, "done") | {"rollout": "skipped"}
    assert len(team.log("staging")) == 2
    assert report["way_back"] == ["nxpipe rollback --channel staging --to 1 --expect 2"]
