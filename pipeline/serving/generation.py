"""Text generation as a service: requests of any endpoint to the engines, and their outputs back to the event loop."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.serving.engine import Engine, Limits
from nxpipe.pipeline.serving.model import ServingModel
from nxpipe.pipeline.serving.openai import Answer, Json, Style, Usage, error_document
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Finish, GenerationRequest, Output, Scheduler
from nxpipe.pipeline.serving.shadow import ShadowAnswer
from nxpipe.pipeline.util.errors import InputInvalid, PipelineError

_DONE: Final = b"data: [DONE]\n\n"


class RequestFailed(PipelineError):
    """A request that ended without an answer."""

    def __init__(self, finish: Finish) -> None:
        messages = {
            Finish.TIMEOUT: "the request reached its deadline; send a shorter one, or allow more time",
            Finish.FAILED: "a program failed on the device; send the request to another server",
        }
        super().__init__(messages.get(finish, "the request was cancelled"))
        self.finish = finish


class Ticket:
    """The queue of one sequence's outputs, on the event loop."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_over = False
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.arrival = time.monotonic()


@dataclass
class RequestTimings:
    """Durations that the metrics observe, in seconds."""

    first_token: float | None = None
    between_tokens: list[float] = field(default_factory=list)
    whole: float = 0.0


Observer: TypeAlias = Callable[[Output, RequestTimings], None]  # is called with each sequence that ends


class Generation:
    """Engines over copies of one decoder. `open` must be called on the event loop that awaits the answers."""

    def __init__(self, model: ServingModel, schedulers: Iterable[Scheduler], limits: Limits) -> None:
        self.model, self.limits = model, limits
        self._schedulers = list(schedulers)
        self._observers: list[Observer] = []
        self.engines: list[Engine] = []

    def open(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(outputs: Sequence[Output]) -> None:
            if outputs and not loop.is_closed():
                loop.call_soon_threadsafe(_dispatch, outputs)

        self.engines = [Engine(scheduler, deliver, self.limits) for scheduler in self._schedulers]

    async def drain(self, seconds: float | None) -> None:
        """Finish what has been accepted."""
        await asyncio.gather(*(asyncio.to_thread(engine.drain, seconds) for engine in self.engines))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(engine.close) for engine in self.engines))

    @property
    def is_ready(self) -> bool:
        return bool(self.engines) and all(engine.is_ready for engine in self.engines)

    @property
    def fault(self) -> BaseException | None:
        return next((engine.fault for engine in self.engines if engine.fault), None)

    @property
    def is_continuous(self) -> bool:
        return self._schedulers[0].decoder.programs.is_continuous

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    @asynccontextmanager
    async def sequences(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, most_tokens: int | None, copies: int = 1
    ) -> AsyncIterator[list[Ticket]]:
        """The tickets of `copies` answers for each prompt. What has not ended when the context ends is cancelled."""
        started: list[tuple[Engine, GenerationRequest]] = []
        deadline = time.monotonic() + self.limits.seconds if self.limits.seconds else None
        tickets = [Ticket(index) for index in range(len(prompts) * copies)]
        try:
            for ticket in tickets:
                prompt = tuple(prompts[ticket.index // copies])
                own = replace(
                    params, max_tokens=self._most_tokens(prompt, most_tokens), seed=_seed(params, ticket.index)
                )
                engine = min(self.engines, key=lambda each: each.waiting + each.running)
                request = GenerationRequest(prompt, own, ticket, deadline)
                engine.submit(request)
                started.append((engine, request))
            yield tickets
        finally:
            for engine, request in started:
                if not request.ticket.is_over:
                    engine.cancel(request)

    async def parts(self, ticket: Ticket) -> AsyncIterator[Output]:
        """The outputs of a sequence; RequestFailed for one that ends without its answer."""
        before, timings = ticket.arrival, RequestTimings()
        while True:
            output = await ticket.outputs.get()
            now = time.monotonic()
            if output.chosen is not None:
                if timings.first_token is None:
                    timings.first_token = now - ticket.arrival
                else:
                    timings.between_tokens.append(now - before)
                before = now
            if output.finish is not None:
                ticket.is_over = True
                timings.whole = now - ticket.arrival
                for observer in self._observers:
                    observer(output, timings)
            if output.finish in (Finish.TIMEOUT, Finish.FAILED, Finish.CANCELLED):
                raise RequestFailed(output.finish)
            yield output
            if output.finish is not None:
                return

    async def answer(self, ticket: Ticket) -> tuple[Answer, int]:
        """The whole answer of a sequence, and the tokens of its prompt that were not read again."""
        answer, reused = Answer(ticket.index), 0
        async for output in self.parts(ticket):
            add(answer, output)
            reused = output.reused
        return answer, reused

    def _most_tokens(self, prompt: Sequence[int], requested: int | None) -> int:
        left = max(self._schedulers[0].decoder.programs.capacity - len(prompt), 1)
        limit = self.limits.tokens
        allowed = left if limit is None else min(left, max(limit - len(prompt), 1))
        if limit is not None and len(prompt) >= limit:
            raise InputInvalid(
                f"the prompt has {len(prompt):,} tokens, and a request at most {limit:,} with its answer"
            )
        return allowed if requested is None else min(requested, allowed)


def add(answer: Answer, output: Output) -> None:
    """Add an output to an answer."""
    if output.chosen is not None:
        answer.chosen.append(output.chosen)
        answer.offsets.append(len(answer.text))
    answer.text += output.text
    answer.finish = output.finish


def _seed(params: SamplingParams, index: int) -> int | None:
    """A seed for each of several answers, so that they differ."""
    return None if params.seed is None else (params.seed + index) % (1 << 64)


def _dispatch(outputs: Sequence[Output]) -> None:
    for output in outputs:
        output.request.ticket.outputs.put_nowait(output)


Mirror: TypeAlias = Callable[[ShadowAnswer], None]  # takes what was answered, to be compared with another version


@dataclass(frozen=True)
class TextRequest:
    """One request for text: prompts, the answers of each, and how they are written."""

    generation: Generation
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams
    most_tokens: int | None
    answers: int
    style: Style
    wants_usage: bool
    mirror: Mirror | None = None

    async def whole(self) -> Json:
        """The document of all answers."""
        started = time.monotonic()
        try:
            async with self._sequences() as tickets:
                found = await asyncio.gather(*(self.generation.answer(ticket) for ticket in tickets))
        except RequestFailed:
            self._mirror(None, started)
            raise
        self._mirror([[each.token for each in answer.chosen] for answer, _ in found], started)
        answers, reused = [answer for answer, _ in found], sum(each for _, each in found)
        tokens = sum(len(answer.chosen) for answer in answers)
        return self.style.whole(answers, Usage(sum(map(len, self.prompts)), tokens, reused))

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, each as soon as a step has given it. Ends all sequences when it is closed."""
        reused, started = 0, time.monotonic()
        async with self._sequences() as tickets:
            tokens: list[list[int]] = [[] for _ in tickets]
            try:
                for index in range(len(tickets)):
                    if (first := self.style.first(index)) is not None:
                        yield _event(first)
                async for ticket, output in self._merged(tickets):
                    part = Answer(ticket.index)
                    add(part, output)
                    tokens[ticket.index] += [chosen.token for chosen in part.chosen]
                    reused += output.reused if output.finish else 0
                    if part.text or part.finish or self.shows_every_token:
                        yield _event(self.style.piece(part))
                if self.wants_usage:
                    usage = Usage(sum(map(len, self.prompts)), sum(map(len, tokens)), reused)
                    yield _event(self.style.usage(usage))
                self._mirror(tokens, started)
            except RequestFailed as failure:
                self._mirror(None, started)
                yield _event(error_document(str(failure), "server_error"))
        yield _DONE

    @property
    def shows_every_token(self) -> bool:
        """True if a token is an event even if it completes no character."""
        return self.params.logprobs is not None or self.style.has_token_ids

    def _sequences(self) -> AbstractAsyncContextManager[list[Ticket]]:
        return self.generation.sequences(self.prompts, self.params, self.most_tokens, self.answers)

    def _mirror(self, tokens: Sequence[Sequence[int]] | None, started: float) -> None:
        """Pass on the tokens of all answers, or None if a program failed, to be compared."""
        if self.mirror is not None:
            answered = None if tokens is None else tuple(map(tuple, tokens))
            self.mirror(ShadowAnswer(answered, time.monotonic() - started))

    async def _merged(self, tickets: list[Ticket]) -> AsyncIterator[tuple[Ticket, Any]]:
        """The outputs of all sequences as they come."""
        if len(tickets) == 1:
            async for output in self.generation.parts(tickets[0]):
                yield tickets[0], output
            return
        streams = {ticket: aiter(self.generation.parts(ticket)) for ticket in tickets}
        pending = {asyncio.ensure_future(anext(stream)): ticket for ticket, stream in streams.items()}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=lambda each: pending[each].index):
                    ticket = pending.pop(future)
                    with suppress(StopAsyncIteration):
                        yield ticket, future.result()
                        pending[asyncio.ensure_future(anext(streams[ticket]))] = ticket
        finally:
            for future in pending:
                future.cancel()


def _event(document: Json) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
