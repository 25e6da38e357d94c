"""Traffic: when requests arrive and how long they are, from a rate and distributions or from a log.

Requests depend on the seed and their number alone; a rate only moves them closer together, so that two simulations at
two rates see the same requests.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, Final

from nxpipe.pipeline.util.errors import InputInvalid

_MOST_TOKENS: Final = 1 << 24
_LARGEST: Final = 1 << 30  # bytes of a log
_BURSTY: Final = 4.0  # the square of the coefficient of variation of bursty gaps; that of Poisson's is 1
_PARTS: Final = re.compile(r"(?:(fixed|uniform|lognormal|exponential):)?([^:]+)")
_UNITS: Final = {"": 1, "k": 1000, "ki": 1024, "m": 1_000_000}
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)(k|ki|m)?", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """A request: seconds from the start, tokens of its prompt and of its answer. The first `shared` tokens of the
    prompt were those of an earlier request too."""

    arrival: float
    prompt: int
    output: int
    shared: int = 0


class Arrivals(StrEnum):
    """The gaps between requests: exponential, equal, or gamma-distributed with twice Poisson's variation."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURSTY = "bursty"

    def gap(self, random: Random) -> float:
        """A gap of mean 1."""
        if self is Arrivals.CONSTANT:
            return 1.0
        if self is Arrivals.BURSTY:
            return random.gammavariate(1 / _BURSTY, _BURSTY)
        return random.expovariate(1.0)


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of tokens: fixed, uniform between two lengths, log-normal by mean and coefficient of variation,
    exponential by its mean, or the lengths of a sample."""

    kind: str
    figures: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "LengthDistribution":
        """`1k`, `uniform:100-2000`, `lognormal:800,0.6` or `exponential:300`."""
        match = _PARTS.fullmatch(text.strip())
        kind = (match[1] or "fixed") if match else ""
        parts = re.split(r"[-,]", match[2]) if match else []
        wanted = {"fixed": 1, "exponential": 1, "uniform": 2, "lognormal": 2}.get(kind)
        if len(parts) != wanted:
            raise _not_lengths(text)
        figures = [tokens(part, text) for part in parts]
        if kind == "uniform" and figures[0] > figures[1]:
            raise _not_lengths(text)
        return cls(kind, tuple(figures))

    def draw(self, random: Random) -> int:
        first, *others = self.figures
        match self.kind:
            case "uniform":
                value = random.uniform(first, others[0])
            case "lognormal":
                spread = math.log1p(others[0] ** 2)
                value = random.lognormvariate(math.log(first) - spread / 2, math.sqrt(spread))
            case "exponential":
                value = random.expovariate(1 / first)
            case "sample":
                value = random.choice(self.figures)
            case _:
                value = first
        return min(max(1, round(value)), _MOST_TOKENS)


def tokens(text: str, whole: str) -> float:
    """A number as people type it: 512, 1k, 1.5k, 2Ki."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0.0
    if not 0 < value <= _MOST_TOKENS:
        raise _not_lengths(whole)
    return value


def _not_lengths(text: str) -> InputInvalid:
    return InputInvalid(
        f"{text!r} is no number of tokens and no distribution; write 512, 1k, uniform:100-2000, exponential:300, or "
        "lognormal:800,0.6 with the mean and the coefficient of variation"
    )


@dataclass(frozen=True)
class Traffic:
    """Requests by distributions, or by a log, which is repeated as often as it takes."""

    prompts: LengthDistribution | None = None
    outputs: LengthDistribution | None = None
    arrivals: Arrivals = Arrivals.POISSON
    log: tuple[Request, ...] = ()

    @property
    def rate(self) -> float | None:
        """Requests a second of the log; None without times."""
        if len(self.log) < 2 or self.log[-1].arrival <= self.log[0].arrival:
            return None
        return (len(self.log) - 1) / (self.log[-1].arrival - self.log[0].arrival)

    def requests(self, count: int, seed: int, rate: float | None = None) -> Sequence[Request]:
        """So many requests at a rate; without one, at that of the log."""
        pace = rate or self.rate
        if pace is None:
            raise InputInvalid("the traffic has no rate; pass --rate")
        return list(self._repeated(count, pace, seed) if self.log else self._drawn(count, pace, seed))

    def _drawn(self, count: int, rate: float, seed: int) -> Iterator[Request]:
        if self.prompts is None or self.outputs is None:
            raise InputInvalid("the traffic has no lengths; pass --prompt and --output, or --log")
        gaps, prompts, outputs = (_random(seed, what) for what in ("gaps", "prompts", "outputs"))
        at = 0.0
        for _ in range(count):
            at += self.arrivals.gap(gaps)
            yield Request(at / rate, self.prompts.draw(prompts), self.outputs.draw(outputs))

    def _repeated(self, count: int, rate: float, seed: int) -> Iterator[Request]:
        own, gaps = self.rate, _random(seed, "gaps")
        span = self.log[-1].arrival - self.log[0].arrival + (1 / own if own else 0.0)
        at = 0.0
        for number in range(count):
            each = self.log[number % len(self.log)]
            if own:
                turn = number // len(self.log) * span + each.arrival - self.log[0].arrival
                yield Request(turn * own / rate, each.prompt, each.output, each.shared)
            else:
                at += self.arrivals.gap(gaps)
                yield Request(at / rate, each.prompt, each.output, each.shared)


def _random(seed: int, what: str) -> Random:
    return Random(f"{seed} {what}")  # noqa: S311 - a simulation


# Logs

_PROMPTS: Final = ("input_length", "prompt_tokens", "prompt_len", "input_tokens", "ContextTokens", "input_len", "isl")
_OUTPUTS: Final = (
    *(
        "output_length",
        "completion_tokens",
        "output_tokens",
        "output_len",
        "GeneratedTokens",
        "generated_tokens",
        "osl",
    ),
)
_TIMES: Final = ("timestamp", "TIMESTAMP", "arrival", "arrived_at", "time", "start_time")
_MILLISECONDS: Final = "timestamp"  # of traces in Mooncake's form, which AIPerf replays
_BLOCK: Final = 512  # tokens of a block in Mooncake's traces


def read_log(path: Path) -> Traffic:
    """A request log: JSON lines (Mooncake and AIPerf traces, or any with the columns below), conversations in
    ShareGPT's form, a result of `vllm bench serve`, or a CSV (Azure's LLM traces, or any with the columns).

    Columns are a number of prompt tokens, a number of generated tokens, and a time in seconds or as a date; Mooncake's
    `timestamp` is in milliseconds. InputInvalid names the line that is not understood."""
    try:
        if path.stat().st_size > _LARGEST:
            raise InputInvalid(f"{path}: larger than {_LARGEST >> 30} GiB; pass a part of it")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise InputInvalid(f"{path}: not a readable log ({fault}); pass a file of JSON lines or a CSV") from fault
    start = text.lstrip()[:1]
    if not start:
        raise InputInvalid(f"{path}: the log is empty; pass one with requests")
    if start not in "[{":
        found = _requests(path, enumerate(csv.DictReader(text.splitlines()), 2))
    elif (whole := _whole(text)) is not None:
        found = _requests(path, enumerate(_entries(path, whole), 1), "entry")
    else:
        found = _requests(path, _lines(path, text))
    if not found:
        raise InputInvalid(f"{path}: the log has no requests")
    return Traffic(log=tuple(sorted(found, key=lambda each: each.arrival)))


def _whole(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as fault:
                raise InputInvalid(f"{path}: line {number} is not JSON ({fault}); correct or remove it") from fault


def _entries(path: Path, whole: Any) -> Iterator[Any]:
    """The requests of one JSON document."""
    if isinstance(whole, dict) and isinstance(whole.get("input_lens"), list):  # `vllm bench serve --save-detailed`
        outputs = whole.get("output_lens")
        if not isinstance(outputs, list) or len(outputs) != len(whole["input_lens"]):
            raise InputInvalid(f"{path}: input_lens and output_lens differ; save the result with --save-detailed")
        starts = whole.get("start_times") or [None] * len(outputs)
        for prompt, output, start in zip(whole["input_lens"], outputs, starts, strict=False):
            yield {"input_len": prompt, "output_len": output} | ({} if start is None else {"start_time": start})
    elif isinstance(whole, list):
        yield from whole
    elif isinstance(whole, dict):
        yield whole
    else:
        raise InputInvalid(f"{path}: no list of requests; pass JSON lines, a list, or a CSV")


def _requests(path: Path, entries: Iterator[tuple[int, Any]], noun: str = "line") -> list[Request]:
    found: list[Request] = []
    start: float | None = None
    for number, entry in entries:
        where = f"{path}: {noun} {number}"
        if not isinstance(entry, Mapping):
            raise InputInvalid(f"{where}: {str(entry)[:40]!r} is not a request with named columns")
        entry = {key: value for key, value in entry.items() if key is not None}
        if "conversations" in entry:
            found += _conversation(where, entry["conversations"])
            continue
        prompt, output = (_count(where, entry, names) for names in (_PROMPTS, _OUTPUTS))
        at = _time(where, entry)
        if at is not None:
            start = at if start is None else start
            at -= start
        blocks = entry.get("hash_ids")
        shared = _shared(blocks, prompt) if isinstance(blocks, list) else 0
        found.append(Request(at or 0.0, prompt, output, shared))
    return found


def _shared(blocks: Sequence[Any], prompt: int) -> int:
    """Mooncake's numbers of blocks: the ones that begin a session are shared by all requests of it."""
    return min(prompt - 1, _BLOCK * sum(1 for number, each in enumerate(blocks) if each == number))


def _conversation(where: str, turns: Any) -> Iterator[Request]:
    """A prompt and its answer. Texts have no tokens: four characters count as one, as is usual for English."""
    if not isinstance(turns, list) or len(turns) < 2:
        return
    texts = [turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise InputInvalid(f"{where}: a turn of the conversation has no text `value`")
    prompt, output = (max(1, len(text) // 4) for text in texts if text is not None)
    yield Request(0.0, prompt, output)


def _count(where: str, entry: Mapping[str, Any], names: Sequence[str]) -> int:
    name = next((name for name in names if name in entry), None)
    if name is None:
        raise InputInvalid(f"{where}: no column {names[0]}; known names are {', '.join(names)}")
    try:
        value = float(entry[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 1 <= value <= _MOST_TOKENS:
        raise InputInvalid(f"{where}: {name} is {str(entry[name])[:40]!r}, not a number of tokens; correct it")
    return int(value)


def _time(where: str, entry: Mapping[str, Any]) -> float | None:
    name = next((name for name in _TIMES if name in entry), None)
    if name is None:
        return None
    value = entry[name]
    readers: tuple[Callable[[], float], ...] = (
        lambda: float(value) / (1000 if name == _MILLISECONDS and not isinstance(value, str) else 1),
        lambda: _date(str(value)),
    )
    for reader in readers:
        try:
            if math.isfinite(at := reader()):
                return at
        except (TypeError, ValueError):
            continue
    raise InputInvalid(f"{where}: {name} is {str(value)[:40]!r}, neither seconds nor a date; correct it")


def _date(text: str) -> float:
    """A date of ISO 8601; Azure's have seven digits of a second."""
    found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
