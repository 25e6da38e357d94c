"""`python -m tests.serving.demo`: a laptop builds a tiny Llama, serves it, chats with it and reads its metrics.

The model has random weights and a tokenizer of a few sentences, so its answers are no language. Everything else is
nxpipe as users run it: the build, the server in a process of its own, OpenAI's client, the end by SIGTERM.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai

from nxpipe.pipeline.util.text import for_terminal
from tests.serving.server_process import Running, build, serving

_REQUESTS = 48


def main() -> None:
    started = time.monotonic()
    with TemporaryDirectory() as name:
        _say(
            "nxpipe build: a tiny Llama for inf2.xlarge, continuous batching of 8 rows, prompts in chunks of 16 tokens"
        )
        words = ("--phases", "extend,decode", "--batches", "8", "--buckets", "16,96")
        artifact, store = build(Path(name), "llama", *words)
        _say(f"nxpipe serve {artifact}")
        with serving(artifact, store) as server:
            _chat(server)
            _load(server)
            _say("SIGTERM: what was accepted is answered")
            server.terminate()
            assert server.process.wait(20) == 0
    _say(f"done in {time.monotonic() - started:.0f} s")


def _chat(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "where does the river begin?"}]
    _say("POST /v1/chat/completions, as a stream, by OpenAI's client")
    stream = client.chat.completions.create(model="llama", messages=messages, stream=True, max_tokens=24, temperature=0)
    _write("  ")
    for part in stream:
        _write(for_terminal(part.choices[0].delta.content or ""))
    _write("\n")


def _load(server: Running) -> None:
    def answer(number: int) -> int:
        body = {"prompt": "the town was dark " * (number % 4) + str(number), "max_tokens": 24, "temperature": 0}
        usage: dict[str, int] = server.post("/v1/completions", **body, ignore_eos=True)["usage"]
        return usage["completion_tokens"]

    _say(f"{_REQUESTS} requests at once")
    started = time.monotonic()
    with ThreadPoolExecutor(_REQUESTS) as threads:
        tokens = sum(threads.map(answer, range(_REQUESTS)))
    _write(f"  {tokens} tokens in {time.monotonic() - started:.2f} s on the emulator\n")
    _say("GET /metrics")
    for name in ("steps", "prompt_chunks", "prompt_tokens", "prefix_reused_tokens", "generation_tokens"):
        _write(f"  serving_{name}_total {server.metric(f'serving_{name}_total'):.0f}\n")


def _say(line: str) -> None:
    _write(f"* {line}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
