"""Shadow requests: the client sees the stable version alone, and the judge sees a version that answers otherwise."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.canary.metrics import Batch, fault
from tests.serving.server_process import Running, build, serving

pytestmark = pytest.mark.sample(8, "shadow")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "the river", "max_tokens": 8, "temperature": 0}),
    ("/v1/completions", {"prompt": ["the town", "dark"], "max_tokens": 8, "temperature": 1.2, "n": 2}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 8, "stream": True}),
    ("/v1/chat/completions", CHAT | {"temperature": 0.7}),
    ("/v1/chat/completions", CHAT | {"stream": True, "temperature": 0}),
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    words = ("--phases", "extend,decode", "--batches", "4", "--buckets", "16,64")
    first = build(tmp_path_factory.mktemp("first"), "llama", *words)
    return first, build(tmp_path_factory.mktemp("other"), "llama", *words, seed=1)


@pytest.fixture(scope="module")
def same(artifacts: Any) -> Iterator[Running]:
    with serving(*artifacts[0]) as running:
        yield running


def pairs_after(stable: Any, canary: str, folder: Path) -> tuple[list[dict[str, Any]], Batch]:
    """The pairs of all requests, and the sum of the minutes."""
    with serving(*stable, "--shadow", canary, "--shadow-record", str(folder), "--drain-delay", "0") as server:
        for path, body in REQUESTS:
            status, document, _ = server.request("POST", path, body)
            assert status == 200, document
        ends = time.monotonic() + 20
        while server.metric("serving_shadow_sent_total") < len(REQUESTS) and time.monotonic() < ends:
            time.sleep(0.02)
        server.terminate()
        assert server.process.wait(20) == 0
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    batches = [Batch.from_json(json.loads(line)) for line in (folder / "batches.jsonl").read_text().splitlines()]
    assert [fault(batch) for batch in batches] == [None] * len(batches)
    assert sum(int(batch.canary.requests) for batch in batches) == len(pairs) == len(REQUESTS)
    return pairs, batches[0]


def test_equal_versions_are_equal_pairs_also_where_they_sample(artifacts: Any, same: Running, tmp_path: Path) -> None:
    pairs, _ = pairs_after(artifacts[0], same.url, tmp_path / "record")
    assert [(pair["match"], pair["bad"]) for pair in pairs] == [(1.0, False)] * len(REQUESTS)
    assert all(pair["stable"]["tokens"] == pair["canary"]["tokens"] for pair in pairs)


def test_a_version_that_answers_otherwise_is_bad_in_the_form_of_the_judge(
    artifacts: Any, same: Running, tmp_path: Path
) -> None:
    pairs, batch = pairs_after(artifacts[1], same.url, tmp_path / "record")
    assert sum(pair["bad"] for pair in pairs) >= 4
    assert all(pair["diverged_at"] is not None for pair in pairs if pair["bad"])
    assert batch.pairs is not None
    assert batch.canary.errors == batch.pairs.canary_alone[0]
    assert batch.pairs.stable_alone[0] == 0


def test_a_version_that_does_not_answer_is_bad_and_delays_no_client(artifacts: Any, tmp_path: Path) -> None:
    pairs, batch = pairs_after(artifacts[0], "http://127.0.0.1:9", tmp_path / "record")
    assert [(pair["canary"]["status"], pair["bad"]) for pair in pairs] == [(0, True)] * len(REQUESTS)
    assert batch.stable.errors == 0
