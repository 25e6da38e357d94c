"""Text from Neuron devices: the stand-in device, whose programs XLA computes, gives what the emulator gives."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.util.exit_codes import NOT_READY, OK, USAGE
from tests.pipeline.command import NXPIPE
from tests.pipeline.conftest import LLAMA, World
from tests.pipeline.device_artifacts import build_for_devices
from tests.pipeline.in_process import InProcess, nxpipe
from tests.serving.server_process import Running, await_ready, free_port

__all__ = ["nxpipe"]

PROMPT = "[5, 6, 7, 8]"
WORDS = ("--max-tokens", "6", "--json", "-q")

pytestmark = pytest.mark.sample(8, "serving devices")


def text_of(nxpipe: InProcess, *words: str) -> Any:
    answer = nxpipe("generate", *words, *WORDS)
    assert answer.code == OK.number, answer.err
    return json.loads(answer.out)[0]["tokens"]


def test_two_ranks_of_a_device_generate_what_the_emulator_generates(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    _, published = world("decoder", 2)
    device()
    expected = text_of(nxpipe, published.name, PROMPT)
    assert text_of(nxpipe, published.name, PROMPT, "--device") == expected
    assert nxpipe("store", "fetch", published.name, "--to", "served").code == OK.number
    assert text_of(nxpipe, "--folder", "served", PROMPT, "--device") == expected


def test_a_server_on_a_device_answers_and_leaves_no_rank_behind(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], tmp_path: Path
) -> None:
    _, published = world("decoder", 2)
    device()
    expected = text_of(nxpipe, published.name, PROMPT)
    port = free_port()
    command = [str(NXPIPE), "serve", published.name, "--device", "--port", str(port), "--drain-delay", "0"]
    path = str(tmp_path / "site")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        server = Running(process, port)
        await_ready(server)
        body = {"prompt": json.loads(PROMPT), "max_tokens": 6, "temperature": 0}
        for _ in range(3):
            assert server.post("/v1/completions", **body)["choices"][0]["token_ids"] == expected
        ranks = _children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        status, document, _ = server.request("POST", "/v1/completions", body)
        assert status in (500, 503), document
        assert server.request("GET", "/healthz")[0] == 503
        assert "rank" in server.get("/healthz")
        process.terminate()
        process.wait(30)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        process.kill()
        process.communicate()


def test_without_a_device_the_command_says_so(
    nxpipe: InProcess, world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, published = world("decoder", 2)
    answer = nxpipe("generate", published.name, PROMPT, "--device")
    assert answer.code == NOT_READY.number, answer.err
    answer = nxpipe("generate", published.name, PROMPT, "--device", "--mode", "isa")
    assert (answer.code, "--mode is of the emulator" in answer.err) == (USAGE.number, True)


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sorted({int(child) for task in tasks for child in (task / "children").read_text().split()})


@pytest.mark.slow
def test_rows_of_a_device_s_cache_take_prompts_in_chunks(
    nxpipe: InProcess, device: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continuous batching on devices: extend and decode share the states of the rank."""
    published = build_for_devices(
        tmp_path, LLAMA, *("--phases", "extend,decode", "--batches", "2"), *("--buckets", "4,16")
    )
    device()
    monkeypatch.chdir(tmp_path)
    store = ("--store", str(tmp_path / "store"))
    prompt = "[5, 6, 7, 8, 9, 10, 11]"
    for words in ((prompt,), ("[7]",)):
        tokens = [text_of(nxpipe, published.name, *words, *more, *store) for more in ((), ("--device",))]
        assert tokens[0] == tokens[1]
