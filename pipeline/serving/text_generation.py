"""Generated text: prompts of a model on one scheduler, each answer as a stream of its parts."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, TypedDict

from nxpipe.pipeline.serving.generation import RequestFailed
from nxpipe.pipeline.serving.model import ServingModel
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Finish, GenerationRequest, Output, Scheduler
from nxpipe.pipeline.serving.text import DEFAULT_TOKENS
from nxpipe.pipeline.util.display import Displayed, Part, TablePart
from nxpipe.pipeline.util.errors import InputInvalid

_ENDED: Final = (Finish.STOP, Finish.LENGTH)


class SamplingKeywords(TypedDict, total=False):
    """How a text is continued; all are optional.

    max_new_tokens: tokens at most; default: 64. temperature: 0, the default, takes the likeliest token; higher values
    up to 2 draw from more of them. top_p, top_k: draw from the likeliest tokens of this share, or of this number. seed:
    draw the same tokens in every call. stop: end before this text, or the first of these.
    """

    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str]


def sampling_params(sampling: SamplingKeywords) -> SamplingParams:
    """Sampling parameters; InputInvalid for one out of range, as the commands refuse them."""
    tokens, temperature = sampling.get("max_new_tokens", DEFAULT_TOKENS), sampling.get("temperature", 0.0)
    top_p, top_k, seed = sampling.get("top_p"), sampling.get("top_k"), sampling.get("seed")
    ranges = (
        ("max_new_tokens", tokens, tokens >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature <= 2, "from 0 to 2"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0 and at most 1"),
        ("top_k", top_k, top_k is None or top_k >= 0, "at least 0"),
        ("seed", seed, seed is None or seed >= 0, "at least 0"),
    )
    for name, value, is_valid, allowed in ranges:
        if not is_valid:
            raise InputInvalid(f"{name} is {value}; it must be {allowed}")
    stop = sampling.get("stop", ())
    stops = tuple(filter(None, (stop,) if isinstance(stop, str) else stop))
    given: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "seed": seed}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(tokens, temperature, stop=stops, **given)


@dataclass(frozen=True, repr=False)
class GeneratedText(Displayed):
    """An answer. `finish` is "stop" at the end of the text or a stop string, "length" at the limit of tokens. `seconds`
    are those of this machine's emulator, or of its devices."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: str
    seconds: float
    first_token_seconds: float
    reused_tokens: int = 0

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"GeneratedText({self.text!r}, {len(self.tokens)} tokens, finish={self.finish!r})"

    def display(self) -> Iterator[Part]:
        yield self.text
        each = (self.seconds - self.first_token_seconds) / max(len(self.tokens) - 1, 1)
        row = (
            *(f"{self.prompt_tokens:,}", f"{len(self.tokens):,}", self.finish),
            *(f"{self.first_token_seconds * 1e3:,.0f} ms", f"{each * 1e3:,.1f} ms"),
        )
        yield TablePart("", ("prompt tokens", "generated", "finish", "first token after", "each further token"), [row])


class TextStream(Iterator[str]):
    """The text of an answer as it comes. `answer` is whole once the iteration has ended; `close` ends it early."""

    def __init__(self, model: ServingModel, prompt: Sequence[int], outputs: Iterator[Output]) -> None:
        self._outputs, self._has_text = outputs, model.text.has_tokenizer
        self._prompt, self._started = len(prompt), time.monotonic()
        self._first: float | None = None
        self._texts, self._tokens = list[str](), list[int]()
        self._answer: GeneratedText | None = None
        self._reused = 0

    def __next__(self) -> str:
        for output in self._outputs:
            if self._first is None:
                self._first = time.monotonic() - self._started
            if output.chosen is not None:
                self._tokens.append(output.chosen.token)
            part = output.text if self._has_text else f"{self._tokens[-1]} "
            self._texts.append(part)
            self._reused = output.reused
            if output.finish is not None:
                self._answer = self._so_far(output.finish)
            if part:
                return part
        if self._answer is None:
            self._answer = self._so_far(Finish.CANCELLED)
        raise StopIteration

    @property
    def answer(self) -> GeneratedText:
        """The answer so far."""
        return self._answer or self._so_far("")

    def finish(self) -> GeneratedText:
        """The whole answer, after the rest of it has come."""
        deque(self, maxlen=0)
        return self.answer

    def close(self) -> None:
        """End the generation; `answer` keeps what has come."""
        self._outputs.close()  # type: ignore[attr-defined]  # a generator
        self._answer = self._answer or self._so_far(Finish.CANCELLED)

    def _so_far(self, finish: str) -> GeneratedText:
        seconds = time.monotonic() - self._started
        return GeneratedText(
            "".join(self._texts), tuple(self._tokens), self._prompt, str(finish), seconds, self._first or seconds,
            self._reused,
        )  # fmt: skip


class TextGenerator:
    """A model's prompts on one scheduler, from any thread: who waits for an output makes the next step, for all."""

    def __init__(self, model: ServingModel, scheduler: Scheduler) -> None:
        self.model, self.scheduler = model, scheduler
        self._lock = RLock()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream:
        """The answer to a prompt of token ids as it comes; InputInvalid for a prompt that the programs do not read."""
        ticket: deque[Output] = deque()
        request = GenerationRequest(self.model.require_tokens(prompt), params, ticket)
        with self._lock:
            request = self.scheduler.require_fits(request)
            self.scheduler.add(request)
        return TextStream(self.model, prompt, self._outputs(request, ticket))

    def _outputs(self, request: GenerationRequest, ticket: "deque[Output]") -> Iterator[Output]:
        is_over = False
        try:
            while not is_over:
                while not ticket:
                    self._step(ticket)
                output = ticket.popleft()
                is_over = output.finish is not None
                if output.finish is not None and output.finish not in _ENDED:
                    raise RequestFailed(output.finish)
                yield output
        finally:
            if not is_over:
                with self._lock:
                    self.scheduler.cancel(request)
                    self._deliver(self.scheduler.step())

    def _step(self, ticket: "deque[Output]") -> None:
        with self._lock:
            if ticket:  # another thread has made the step
                return
            try:
                self._deliver(self.scheduler.step())
            except BaseException:  # an interrupted step leaves rows half written: no request goes on
                self._deliver(self.scheduler.fail())
                raise

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            output.request.ticket.append(output)

    def close(self) -> None:
        self.scheduler.decoder.close()
