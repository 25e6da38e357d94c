"""The control file of a server: requests are mirrored while it says so, in its share and to its addresses."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.canary.metrics import PairCounts
from nxpipe.pipeline.fleet.agent.shadow import counts_of
from nxpipe.pipeline.serving import shadow
from nxpipe.pipeline.serving.shadow import ControlFile, Mirroring, Shadow, ShadowAnswer
from nxpipe.pipeline.util.errors import InputInvalid


@contextmanager
def endpoint(tokens: list[int]) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """A second version with one answer, and the headers of the requests that it got."""
    seen: list[Mapping[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"token_ids": tokens}]}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def counted(record: Path) -> list[PairCounts]:
    return [counts_of(json.loads(line)) for line in (record / "batches.jsonl").read_text().splitlines()]


def test_requests_are_mirrored_while_the_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_REREAD", 0.0)
    file = tmp_path / "control.json"
    mirrored = Shadow(ControlFile(file))
    assert mirrored.sampled() is None
    file.write_text(json.dumps({"urls": ["http://10.0.0.7:8000"], "record": str(tmp_path / "r1")}))
    assert mirrored.sampled() == Mirroring(("http://10.0.0.7:8000",), tmp_path / "r1")
    for off in ("{}", '{"urls": [], "record": "r"}', '{"urls": ["http://h"], "record": "r", "percent": 0}'):
        (tmp_path / "next").write_text(off)
        (tmp_path / "next").replace(file)
        assert mirrored.sampled() is None
    file.unlink()
    assert mirrored.sampled() is None


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"urls": ["ftp://h"], "record": "r"}', '{"urls": ["http://h"]}'])
def test_a_file_that_is_invalid_mirrors_nothing(tmp_path: Path, broken: str) -> None:
    (tmp_path / "control.json").write_text(broken)
    assert Shadow(ControlFile(tmp_path / "control.json")).sampled() is None


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_a_share_is_more_than_zero_and_at_most_all(percent: float, tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match="percent"):
        Mirroring(("http://h",), tmp_path, percent)


@given(st.sampled_from([1.0, 10.0, 50.0, 100.0]))
def test_the_share_of_requests_is_the_one_asked_for(percent: float) -> None:
    mirrored = Shadow(Mirroring(("http://h",), Path("unused"), percent))
    share = sum(mirrored.sampled() is not None for _ in range(4000)) / 40
    assert abs(share - percent) <= 5


def test_all_addresses_get_their_turn_with_the_headers_and_each_rollout_has_its_own_record(tmp_path: Path) -> None:
    async def run(first: str, second: str) -> Shadow:
        mirrored = Shadow(Mirroring((first, second), tmp_path / "r1", 100, {"x-nxpipe-group": "green"}))
        for _ in range(4):
            to = mirrored.sampled()
            assert to is not None
            mirrored.mirror(to, "/v1/completions", {"prompt": "a"}, ShadowAnswer(((1, 2),), 0.1))
        mirrored.mirror(
            Mirroring((first,), tmp_path / "r2"), "/v1/completions", {"prompt": "a"}, ShadowAnswer(((9,),), 0.1)
        )
        await mirrored.close()
        return mirrored

    with endpoint([1, 2]) as (first, ours), endpoint([1, 3]) as (second, theirs):
        mirrored = asyncio.run(run(first, second))
    assert {len(ours), len(theirs)} == {2, 3}
    assert Counter(header.get("x-nxpipe-group") for header in (*ours, *theirs)) == {"green": 4, None: 1}
    pairs, bad, alone = (sum(getattr(each, name) for each in counted(tmp_path / "r1")) for name in _NAMES)
    assert (pairs, bad, alone) == (4, 2, 2)
    assert sum(each.pairs for each in counted(tmp_path / "r2")) == 1
    assert mirrored.counts.sent == 5


_NAMES = ("pairs", "canary_bad", "canary_alone")
