"""Continuous batching: which tokens each run of a decoder's programs reads, and whose answers they give.

A step runs one chunk of one prompt and then one token of every row that has its prompt read; rows that end are taken by
waiting requests before the next step. What a request generates does not depend on the requests beside it: its prompt is
cut by its length alone, each program has one shape, and rows share nothing. A prefix that a free row holds is reused in
whole chunks, which the same program has read from the same tokens.

Decoders without `extend` programs run in static batches: prompts are read together, and all end before the next begin.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from nxpipe.pipeline.serving.programs import Decoder
from nxpipe.pipeline.serving.sampling import Chosen, Sampler, SamplingParams, choose_all
from nxpipe.pipeline.serving.text import StopStrings, Text, TokenStream
from nxpipe.pipeline.util.errors import InputInvalid, PromptTooLong

if TYPE_CHECKING:
    from nxpipe.emulator.numerics import Array


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "error"


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it. `ticket` is the caller's own; `deadline` is a time of `time.monotonic`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    ticket: Any = None
    deadline: float | None = None


@dataclass(frozen=True)
class Output:
    """What a step added to the answer of a request. The last output has a reason."""

    request: GenerationRequest
    chosen: Chosen | None = None
    text: str = ""
    finish: Finish | None = None
    reused: int = 0  # tokens of the prompt whose keys and values a row had already


@dataclass
class Counts:
    """Work since the start."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    predicted_ms: float = 0.0  # by the emulator's clock


class _Sequence:
    """A request in a row: its prompt is read up to `position`, then it generates."""

    def __init__(self, request: GenerationRequest, text: Text | None, end_tokens: frozenset[int]) -> None:
        self.ends = request.params.stop_tokens | (frozenset() if request.params.ignore_eos else end_tokens)
        self.request, self.sampler = request, Sampler(request.params, self.ends)
        self.stream: TokenStream | None = text.stream() if text else None
        self.stop = StopStrings(request.params.stop)
        self.position = 0  # tokens in the cache
        self.last = -1  # the token that the next decode reads
        self.generated = 0
        self.reused = 0

    @property
    def has_read_prompt(self) -> bool:
        return self.position >= len(self.request.prompt)


@dataclass(eq=False)
class _Row:
    """A row of the KV cache. `held` are the tokens at its beginning that whole chunks have read."""

    number: int
    held: list[int] = field(default_factory=list)
    sequence: _Sequence | None = None
    freed: int = 0  # the step in which it became free

    @property
    def position(self) -> int:
        """Where a decode of all rows writes in this one; what it leaves in an idle row is never read."""
        return self.sequence.position if self.sequence else len(self.held)


_Outputs = list[Output]


class Scheduler:
    """Requests on the rows of one decoder. Not safe for threads: one calls it at a time."""

    def __init__(
        self,
        decoder: Decoder,
        text: Text | None = None,
        *,
        end_tokens: Iterable[int] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder, self._text, self._now = decoder, text, now
        self._programs, self._end_tokens = decoder.programs, frozenset(end_tokens)
        self._waiting: deque[GenerationRequest] = deque()
        self._rows = [_Row(number) for number in range(self._programs.rows)]
        self._reading: deque[_Row] = deque()  # rows whose prompt is being read, in the order of arrival
        self._cancelled: set[int] = set()  # identities of requests
        self.counts = Counts()

    # Requests

    def require_fits(self, request: GenerationRequest) -> GenerationRequest:
        """The request with as many tokens as the cache holds; InputInvalid for a prompt that is too long."""
        length, longest = len(request.prompt), self._programs.longest_prompt
        if not length:
            raise InputInvalid("the prompt has no tokens; pass at least one")
        if length > longest:
            raise PromptTooLong(
                f"the prompt has {length:,} tokens, and at most {longest:,} are read; shorten it, or build the model "
                "with a longer bucket",
                length,
                longest,
            )
        left = self._programs.capacity - length + (not self._programs.is_continuous)
        if request.params.max_tokens > left:
            return replace(request, params=replace(request.params, max_tokens=left))
        return request

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(self.require_fits(request))

    def cancel(self, request: GenerationRequest) -> None:
        """End a request with the next step."""
        self._cancelled.add(id(request.ticket))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(row.sequence is not None for row in self._rows)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.running

    @property
    def cache_usage(self) -> float:
        """The part of the KV cache that running requests use."""
        used = sum(row.sequence.position for row in self._rows if row.sequence)
        return used / (self._programs.capacity * self._programs.rows)

    # Steps

    def step(self) -> _Outputs:
        """Run one chunk and one token of each row; the outputs in the order of their rows."""
        outputs = list(self._ended())
        if self._programs.is_continuous:
            self._admit()
            outputs += self._read_chunk()
        elif not self.running and self._waiting:
            outputs += self._read_batch()
        outputs += self._decode()
        self.counts.steps += 1
        return outputs

    def fail(self) -> _Outputs:
        """End all requests, after a program failed."""
        requests = [*(row.sequence.request for row in self._rows if row.sequence), *self._waiting]
        self._waiting.clear()
        for row in self._rows:
            self._free(row)
            row.held = []
        return [self._final(request, Finish.FAILED) for request in requests]

    def _ended(self) -> Iterator[Output]:
        """End what was cancelled or is late."""
        now = self._now()
        due = [request.deadline for request in self._requests() if request.deadline is not None]
        if not self._cancelled and not (due and min(due) <= now):
            return
        for row in self._rows:
            if row.sequence and (reason := self._reason_to_end(row.sequence.request, now)):
                yield self._final(row.sequence.request, reason)
                self._free(row)
        for request in list(self._waiting):
            if reason := self._reason_to_end(request, now):
                yield self._final(request, reason)
                self._waiting.remove(request)
        self._cancelled.clear()

    def _requests(self) -> Iterator[GenerationRequest]:
        yield from (row.sequence.request for row in self._rows if row.sequence)
        yield from self._waiting

    def _reason_to_end(self, request: GenerationRequest, now: float) -> Finish | None:
        if id(request.ticket) in self._cancelled:
            return Finish.CANCELLED
        return Finish.TIMEOUT if request.deadline is not None and request.deadline <= now else None

    def _admit(self) -> None:
        """Give free rows to waiting requests, each the one that holds most of its prompt, else the longest free."""
        free = [row for row in self._rows if row.sequence is None]
        while free and self._waiting:
            request = self._waiting.popleft()
            row = max(free, key=lambda each: (self._held(each, request.prompt), -each.freed))
            free.remove(row)
            self._occupy(row, request)
            self._reading.append(row)

    def _occupy(self, row: _Row, request: GenerationRequest) -> _Sequence:
        text = self._text if self._text and self._text.has_tokenizer else None
        row.sequence = sequence = _Sequence(request, text, self._end_tokens)
        sequence.position = sequence.reused = self._held(row, request.prompt)
        row.held = row.held[: sequence.position]
        self.counts.prompt_tokens += len(request.prompt)
        self.counts.reused_tokens += sequence.reused
        return sequence

    def _held(self, row: _Row, prompt: Sequence[int]) -> int:
        """The tokens of a prompt that a row holds, in whole chunks; one is left to be read, for its logits."""
        chunk, same = self._programs.chunk, 0
        most = min(len(row.held), (len(prompt) - 1) // chunk * chunk)
        while same < most and list(prompt[same : same + chunk]) == row.held[same : same + chunk]:
            same += chunk
        return same

    def _read_chunk(self) -> _Outputs:
        """Read the next chunk of the oldest prompt that is not read."""
        if not self._reading:
            return []
        row = self._reading[0]
        sequence = row.sequence
        assert sequence is not None
        prompt = sequence.request.prompt
        start, end, length = self._programs.next_chunk(len(prompt), sequence.position)
        logits = self.decoder.extend(row.number, prompt[start:end], start, length)
        self._charge(self._programs.prompts[length])
        self.counts.chunks += 1
        if start == sequence.position and end - start == self._programs.chunk:
            row.held = list(prompt[:end])
        elif start < len(row.held):
            del row.held[start // self._programs.chunk * self._programs.chunk :]
        sequence.position = end
        if not sequence.has_read_prompt:
            return []
        self._reading.remove(row)
        return [self._advance(row, sequence.sampler.choose(logits))]

    def _read_batch(self) -> _Outputs:
        """Read the prompts of a static batch."""
        rows = self._rows[: len(self._waiting)]
        sequences = {row.number: self._occupy(row, self._waiting.popleft()) for row in rows}
        logits = self.decoder.prefill({number: each.request.prompt for number, each in sequences.items()})
        longest = max(len(each.request.prompt) for each in sequences.values())
        self._charge(self._programs.prompts[self._programs.length_for(longest)])
        self.counts.chunks += 1
        for sequence in sequences.values():
            sequence.position = len(sequence.request.prompt)
        return self._advance_all(rows, logits[: len(rows)])

    def _decode(self) -> _Outputs:
        """Read the last token of each row that has its prompt read."""
        rows = [row for row in self._rows if row.sequence and row.sequence.has_read_prompt]
        if not rows:
            return []
        tokens, positions = np.zeros(len(self._rows), np.int64), np.zeros(len(self._rows), np.int64)
        for row in self._rows:
            positions[row.number] = row.position
        for row in rows:
            tokens[row.number] = row.sequence.last  # type: ignore[union-attr]  # chosen by it
        logits = self.decoder.decode(tokens, positions)
        self._charge(self._programs.decode)
        for row in rows:
            row.sequence.position += 1  # type: ignore[union-attr]
        return self._advance_all(rows, logits if len(rows) == len(self._rows) else logits[[r.number for r in rows]])

    def _advance_all(self, rows: Sequence[_Row], logits: "Array") -> _Outputs:
        sequences = [row.sequence for row in rows if row.sequence]
        chosen = choose_all([sequence.sampler for sequence in sequences], logits)
        return [self._advance(row, own) for row, own in zip(rows, chosen, strict=True)]

    def _advance(self, row: _Row, chosen: Chosen) -> Output:
        """Add a token to the answer of a row, and free the row if it is the last."""
        sequence = row.sequence
        assert sequence is not None
        request, params = sequence.request, sequence.request.params
        sequence.last = chosen.token
        sequence.generated += 1
        self.counts.generated_tokens += 1
        ends = chosen.token in sequence.ends
        text, stopped = "", False
        if sequence.stream is not None and not ends:
            text = sequence.stream.add(chosen.token)
            if sequence.generated > params.min_tokens:
                text, stopped = sequence.stop.add(text)
        finish = Finish.STOP if ends or stopped else Finish.LENGTH if sequence.generated >= params.max_tokens else None
        if finish is None:
            return Output(request, chosen, text, reused=sequence.reused)
        self._free(row)
        self.counts.finished[finish] += 1
        return Output(request, chosen, text if stopped else text + sequence.stop.end(), finish, sequence.reused)

    def _final(self, request: GenerationRequest, reason: Finish) -> Output:
        self.counts.finished[reason] += 1
        return Output(request, finish=reason)

    def _free(self, row: _Row) -> None:
        row.sequence, row.freed = None, self.counts.steps
        if row in self._reading:
            self._reading.remove(row)

    def _charge(self, program: str) -> None:
        self.counts.predicted_ms += self.decoder.latency_ms(program) or 0.0
