"""Serving: continuous against static batches, the host's overhead of a step, and many requests that come and go.

Usage: python benchmarks/serving.py batching|overhead|soak|http|paced|restart [--requests N] [--rows N] [--json]
       python benchmarks/serving.py paced --minutes 30 --rate 20

    batching   one trace on the programs of a tiny Llama, continuous and static, by the emulator's clock
    overhead   the scheduler's time of a decode step, beside a plain loop that takes the likeliest token of each row
    soak       requests with random lengths and cancellations through the engine's thread; every answer is compared
               with the one that the request gets alone
    http       the same through `nxpipe serve` over HTTP with clients that disconnect; resident memory at each eighth
    paced      the same with `--rate` arrivals a second (Poisson) for `--minutes`, half of them streamed; resident
               memory every ten seconds, and its slope over the second half
    restart    from the start of `nxpipe serve` to 200 of /readyz, of an artifact that was served before; beside the
               start of Python
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
_SETS = 64  # of random logits
sys.path.insert(0, str(ROOT))

from nxpipe.emulator.numerics import Array  # noqa: E402
from nxpipe.pipeline.serving.engine import Engine, Limits, Overloaded  # noqa: E402
from nxpipe.pipeline.serving.programs import Decoder, DecoderPrograms  # noqa: E402
from nxpipe.pipeline.serving.scheduler import Finish, GenerationRequest, Output, Scheduler  # noqa: E402
from nxpipe.pipeline.serving.text import Text  # noqa: E402
from tests.serving import checkpoints  # noqa: E402
from tests.serving.decoders import HashDecoder, greedy, programs  # noqa: E402
from tests.serving.server_process import build, serving  # noqa: E402


def trace(count: int, longest: int, seed: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Prompts and lengths of answers: most are short, some are long, as in published traces of chats."""
    generator = np.random.default_rng(seed)
    prompts = np.clip(generator.lognormal(3.0, 0.9, count), 1, longest // 2).astype(int)
    answers = np.clip(generator.lognormal(2.8, 1.1, count), 1, longest // 2 - 1).astype(int)
    return [
        (tuple(generator.integers(5, 90, prompt).tolist()), int(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def batching(count: int, rows: int) -> dict[str, Any]:
    """Tokens a second of both by the emulator's clock."""
    from nxpipe.artifact_store import open_store
    from nxpipe.pipeline.serving.model import ServingModel
    from nxpipe.pipeline.util.console import Console
    from nxpipe.pipeline.verify.execution import FAST

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, phases in (("continuous", "extend,decode"), ("static", "prefill,decode")):
            words = ("--phases", phases, "--batches", str(rows), "--buckets", "16,64,256")
            artifact, store = build(Path(name) / kind, "llama", *words, max_position_embeddings=256)
            opened = open_store(str(store))
            model = ServingModel.read(opened.resolve(artifact), opened, FAST, Console(quiet=True).step)
            scheduler = model.scheduler()
            for prompt, answer in trace(count, 256):
                scheduler.add(GenerationRequest(prompt, greedy(answer, ignore_eos=True)))
            started = time.perf_counter()
            while not scheduler.is_idle:
                scheduler.step()
            counts = scheduler.counts
            found[kind] = {
                "tokens": counts.generated_tokens,
                "steps": counts.steps,
                "predicted_s": counts.predicted_ms / 1e3,
                "tokens_per_s": counts.generated_tokens / counts.predicted_ms * 1e3,
                "host_s": time.perf_counter() - started,
            }
    found["ratio"] = found["continuous"]["tokens_per_s"] / found["static"]["tokens_per_s"]
    return found


class Instant(Decoder):
    """A decoder that takes no time: its logits are there already, another set in each step."""

    def __init__(self, own: DecoderPrograms, vocabulary: int) -> None:
        super().__init__(own, session=None)  # type: ignore[arg-type]
        random_logits = np.random.default_rng(0).random((_SETS, own.rows, vocabulary), np.float32)
        self._logits: list[Array] = list(random_logits)
        self._next = 0

    def extend(self, row: int, tokens: Sequence[int], position: int, length: int) -> Array:
        return np.asarray(self._logits[0][row])

    def decode(self, tokens: Array, positions: Array) -> Array:
        self._next = (self._next + 1) % _SETS
        return self._logits[self._next]

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Array:
        return self._logits[0]

    def close(self) -> None:
        """Nothing is held."""


def overhead(rows: int, vocabulary: int = 320, steps: int = 400) -> dict[str, Any]:
    """Milliseconds of a step with all rows in use, text included, beside a loop that keeps tokens in lists."""
    own = programs(rows, (16,), 4096)
    text = Text("tiny", {"tokenizer.json": checkpoints.tokenizer().to_str().encode()})
    result: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary}
    for name, shown in (("tokens", None), ("tokens and text", text)):
        scheduler = Scheduler(Instant(own, vocabulary), shown)
        for number in range(rows):
            scheduler.add(GenerationRequest((5, 6, number % 90), greedy(4000), number))
        for _ in range(rows + 20):
            scheduler.step()
        durations = [_seconds(scheduler.step) for _ in range(steps)]
        result[name] = {"p50_ms": statistics.median(durations) * 1e3, "p99_ms": _percentile(durations, 99) * 1e3}
    decoder, answers = Instant(own, vocabulary), [[0] for _ in range(rows)]
    positions = np.zeros(rows, np.int64)

    def plain() -> None:
        tokens = np.array([answer[-1] for answer in answers])
        chosen = decoder.decode(tokens, positions).argmax(axis=-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)

    result["plain loop"] = {"p50_ms": statistics.median([_seconds(plain) for _ in range(steps)]) * 1e3}
    return result


def soak(count: int, rows: int) -> dict[str, Any]:
    """Requests through the engine, most of which end; each answer is compared with that of the request alone."""
    own = programs(rows, (8,), 64)
    ends, lock = threading.Semaphore(0), threading.Lock()
    answers: dict[int, list[int]] = {}
    finishes: dict[int, list[Finish]] = {}

    def deliver(outputs: Sequence[Output]) -> None:
        with lock:
            for output in outputs:
                number = output.request.ticket
                if output.chosen is not None:
                    answers.setdefault(number, []).append(output.chosen.token)
                if output.finish is not None:
                    finishes.setdefault(number, []).append(output.finish)
                    ends.release()

    generator, refused = random.Random(1), 0
    requests = [
        GenerationRequest(
            tuple(generator.choices(range(90), k=generator.randint(1, 40))), greedy(generator.randint(1, 12)), number
        )
        for number in range(count)
    ]
    started = time.perf_counter()
    with Engine(Scheduler(HashDecoder(own)), deliver, Limits(waiting=512)) as engine:
        for request in requests:
            refused += _submit(engine, request)
            if generator.random() < 0.2:
                engine.cancel(request)
        for _ in requests:
            ends.acquire()
    seconds = time.perf_counter() - started
    alone = HashDecoder(programs(1, (8,), 64))
    return {
        "requests": count,
        "lost": count - len(finishes),
        "ended twice": sum(len(each) != 1 for each in finishes.values()),
        "cancelled": sum(each == [Finish.CANCELLED] for each in finishes.values()),
        "mixed up": sum(
            _differs(alone, each, answers.get(each.ticket, []), finishes[each.ticket]) for each in requests
        ),
        "refused and sent again": refused,
        "requests_per_s": count / seconds,
    }


def _submit(engine: Engine, request: GenerationRequest) -> int:
    """Submit a request until it is accepted; the number of refusals."""
    refused = 0
    while True:
        try:
            engine.submit(request)
        except Overloaded:
            refused += 1
            time.sleep(0.005)
        else:
            return refused


def _differs(alone: HashDecoder, request: GenerationRequest, answer: Sequence[int], finish: Sequence[Finish]) -> bool:
    """True if an answer is not the one of the request alone, or not its beginning if it was cancelled."""
    scheduler = Scheduler(alone)
    scheduler.add(request)
    expected: list[int] = []
    while not scheduler.is_idle:
        expected += [output.chosen.token for output in scheduler.step() if output.chosen]
    cancelled = list(finish) == [Finish.CANCELLED]
    return list(answer) != (expected[: len(answer)] if cancelled else expected)


def http(count: int, rows: int) -> dict[str, Any]:
    """Requests over HTTP, a fifth of which disconnect; the server's resident memory."""
    with tempfile.TemporaryDirectory() as name:
        words = ("--phases", "extend,decode", "--batches", str(rows), "--buckets", "16,64")
        artifact = build(Path(name) / "model", "llama", *words)
        with serving(*artifact, "--max-waiting", "256") as server:
            return asyncio.run(_clients(server.port, server.process.pid, count))


async def _clients(port: int, process: int, count: int, at_once: int = 48) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    expected: dict[tuple[int, int], str] = {}
    memory: list[float] = []
    generator, numbers, started = random.Random(2), iter(range(count)), time.perf_counter()

    async def client() -> None:
        for number in numbers:
            if number % max(1, count // 8) == 0:
                memory.append(_resident_mib(process))
            prompt, answer = generator.randint(1, 40), generator.randint(1, 16)
            leaves = generator.random() < 0.2
            status, text = await _post(port, prompt, answer, leaves)
            if status == "200" and expected.setdefault((prompt, answer), text) != text:
                status = "mixed up"
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    seconds = time.perf_counter() - started
    return {"requests": count, "statuses": statuses, "resident_mib": memory, "requests_per_s": count / seconds}


def paced(minutes: float, rate: float, rows: int) -> dict[str, Any]:
    """Requests at a pace, as a long-lived server gets them; the server's resident memory over time."""
    with tempfile.TemporaryDirectory() as name:
        words = ("--phases", "extend,decode", "--batches", str(rows), "--buckets", "16,64")
        artifact = build(Path(name) / "model", "llama", *words)
        with serving(*artifact, "--max-waiting", "256") as server:
            return asyncio.run(_arrivals(server.port, server.process.pid, minutes * 60, rate))


def restart(count: int, rows: int) -> dict[str, Any]:
    """Seconds of each start after the first, and of bare Python."""
    with tempfile.TemporaryDirectory() as name:
        words = ("--phases", "extend,decode", "--batches", str(rows), "--buckets", "16,64")
        artifact = build(Path(name) / "model", "llama", *words)
        starts, bare = [], []
        for _ in range(count + 1):
            bare.append(_seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)))
            began = time.perf_counter()
            with serving(*artifact, pause=0.005):
                starts.append(time.perf_counter() - began)
    return {"ready_s": statistics.median(starts[1:]), "starts_s": starts[1:], "python_s": statistics.median(bare[1:])}


async def _arrivals(port: int, process: int, seconds: float, rate: float) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    expected: dict[tuple[int, int], str] = {}
    memory: list[tuple[float, float]] = []
    generator, started = random.Random(3), time.perf_counter()

    async def arrive(prompt: int, answer: int, leaves: bool, is_stream: bool) -> None:
        status, text = await _post(port, prompt, answer, leaves, is_stream)
        if status == "200" and expected.setdefault((prompt, answer), text) != text:
            status = "mixed up"
        statuses[status] = statuses.get(status, 0) + 1

    async def sample() -> None:
        while True:
            memory.append((round(time.perf_counter() - started, 1), _resident_mib(process)))
            print(*memory[-1], sum(statuses.values()), file=sys.stderr, flush=True)
            await asyncio.sleep(10)

    sampler, due, count = asyncio.create_task(sample()), 0.0, 0
    async with asyncio.TaskGroup() as arrivals:
        while due < seconds:
            request = (generator.randint(1, 40), generator.randint(1, 16))
            arrivals.create_task(arrive(*request, generator.random() < 0.2, generator.random() < 0.5))
            count, due = count + 1, due + generator.expovariate(rate)
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
    sampler.cancel()
    late = memory[len(memory) // 2 :]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 2 else float("nan")
    return {"requests": count, "statuses": statuses, "resident_mib": memory, "mib_per_hour": slope * 3600}


async def _post(port: int, prompt: int, answer: int, leaves: bool, is_stream: bool = False) -> tuple[str, str]:
    """A completion whose prompt follows from its length; the status and the text."""
    body = json.dumps({"prompt": [5 + (prompt * 7 + place) % 80 for place in range(prompt)], "max_tokens": answer,
                       "temperature": 0, "ignore_eos": True, "stream": is_stream}).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if leaves:
            await asyncio.sleep(random.random() * 0.03)
            return "left", ""
        answer_bytes = await reader.read()
    finally:
        writer.close()
    status, _, rest = answer_bytes.partition(b"\r\n\r\n")
    code = status.split(b" ", 2)[1].decode() if status else "no answer"
    if code != "200":
        return code, ""
    return code, _text(_unchunked(rest) if b"transfer-encoding: chunked" in status.lower() else rest, is_stream)


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def _text(body: bytes, is_stream: bool) -> str:
    """The text of an answer, which must be whole."""
    if not is_stream:
        return str(json.loads(body)["choices"][0]["text"])
    *events, last, empty = body.decode().split("\n\n")
    if (last, empty) != ("data: [DONE]", ""):
        raise ValueError(f"a stream ended with {last[-80:]!r}")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def _resident_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return round(pages * 4096 / 2**20, 1)


def _seconds(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _percentile(durations: Sequence[float], percent: float) -> float:
    return sorted(durations)[min(int(len(durations) * percent / 100), len(durations) - 1)]


def _lines(document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name:<22} {value:,.3f}" if isinstance(value, float) else f"{indent}{name:<22} {value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["batching", "overhead", "soak", "http", "paced", "restart"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.what == "batching":
        result = batching(options.requests or 200, options.rows or 8)
    elif options.what == "overhead":
        result = overhead(options.rows or 64)
    elif options.what == "soak":
        result = soak(options.requests or 100_000, options.rows or 16)
    elif options.what == "paced":
        result = paced(options.minutes, options.rate, options.rows or 8)
    elif options.what == "restart":
        result = restart(options.requests or 9, options.rows or 8)
    else:
        result = http(options.requests or 5_000, options.rows or 8)
    print(json.dumps(result, indent=1) if options.json else "\n".join(_lines(result)))


if __name__ == "__main__":
    main()
