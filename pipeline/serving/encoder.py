"""Encoders: texts through their programs, and as a service of embeddings and classes, batched as requests come.

A text runs in the smallest bucket that holds it. In a service it runs with texts of the same bucket that wait at that
moment: a batch starts when it is full or when its first text has waited for `window` seconds.
"""

import asyncio
import base64
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from nxpipe.pipeline.serving.engine import Limits, NotServing, Overloaded
from nxpipe.pipeline.serving.model import ServingModel
from nxpipe.pipeline.serving.openai import EmbeddingRequest, Json, parsed
from nxpipe.pipeline.serving.programs import ProgramShape, Session
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, PromptTooLong

if TYPE_CHECKING:
    from nxpipe.emulator.numerics import Array

Pooling: TypeAlias = Literal["mean", "cls", "last"]
_ENDPOINTS: Final[Mapping[str, str]] = {
    "feature-extraction": "embeddings",
    "text-classification": "classify",
    "token-classification": "classify",
}
_HIDDEN: Final = "last_hidden_state"


@dataclass
class _Item:
    """A text that waits: its tokens, and where its outputs go."""

    tokens: Sequence[int]
    bucket: int
    answer: "asyncio.Future[dict[str, Array]]"
    arrival: float = field(default_factory=time.monotonic)


class EncoderPrograms:
    """The forward programs of an encoder, by bucket and batch."""

    def __init__(self, model: str, executables: Sequence[ProgramShape]) -> None:
        forward = [each for each in executables if each.phase == "forward"]
        if not forward:
            raise BuildRefused(f"{model}: it has no forward program to serve; build it with --phases forward")
        self._names = {(each.sequence, each.batch): each.name for each in forward}
        self.buckets = sorted({bucket for bucket, _ in self._names})

    def bucket(self, tokens: int) -> int:
        fitting = [bucket for bucket in self.buckets if bucket >= tokens]
        if not fitting:
            longest = self.buckets[-1]
            raise PromptTooLong(
                f"the text has {tokens:,} tokens, and the largest bucket {longest:,}; shorten it, or build the model "
                "with a longer one",
                tokens,
                longest,
            )
        return fitting[0]

    def largest_batch(self, bucket: int) -> int:
        return max(batch for own, batch in self._names if own == bucket)

    def program(self, bucket: int, count: int) -> tuple[str, int]:
        """The program of the smallest batch that holds so many texts, and its batch."""
        batch = min(batch for own, batch in self._names if own == bucket and batch >= count)
        return self._names[bucket, batch], batch


class Encoder:
    """An encoder's programs in a session, by the tokens of texts. Not safe for threads: one calls it at a time."""

    def __init__(self, model: ServingModel, session: Session) -> None:
        self.model, self.programs = model, EncoderPrograms(model.name, model.programs)
        self._session = session

    def tokens(self, text: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a text, or of ids, which the model must have."""
        tokens = self.model.text.encode(text) if isinstance(text, str) else text
        if not tokens:
            raise InputInvalid("input: no tokens")
        return self.model.require_tokens(tokens, "input")

    def run(self, rows: Sequence[Sequence[int]]) -> "list[dict[str, Array]]":
        """The outputs of any number of texts, in their order, each without padding."""
        buckets = [self.programs.bucket(len(row)) for row in rows]
        outputs: dict[int, dict[str, Array]] = {}
        for bucket in sorted(set(buckets)):
            own, most = [n for n, each in enumerate(buckets) if each == bucket], self.programs.largest_batch(bucket)
            for first in range(0, len(own), most):
                batch = own[first : first + most]
                found = self.run_batch(bucket, [rows[number] for number in batch])
                outputs |= zip(batch, found, strict=True)
        return [outputs[number] for number in range(len(rows))]

    def run_batch(self, bucket: int, texts: Sequence[Sequence[int]]) -> "list[dict[str, Array]]":
        """The outputs of texts in one run of the smallest program that holds so many."""
        program, rows = self.programs.program(bucket, len(texts))
        ids, mask = np.zeros((rows, bucket), np.int64), np.zeros((rows, bucket), np.int64)
        mask[len(texts) :, 0] = 1  # a row without a token would divide by zero
        for row, tokens in enumerate(texts):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        outputs = self._session.run(program, {"input_ids": ids, "attention_mask": mask})
        return [
            {name: _own(array[row], len(tokens), bucket) for name, array in outputs.items()}
            for row, tokens in enumerate(texts)
        ]

    def embedding(self, output: "Mapping[str, Array]", pooling: Pooling) -> "Array":
        """The vector of a text, of length 1."""
        hidden = output.get(_HIDDEN)
        if hidden is None:
            raise InputInvalid(f"{self.model.name} gives {', '.join(output)}, not {_HIDDEN}")
        pooled = {"mean": lambda: hidden.mean(axis=0), "cls": lambda: hidden[0], "last": lambda: hidden[-1]}
        vector = pooled[pooling]()
        result: Array = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
        return result

    def close(self) -> None:
        self._session.close()


class Encoding:
    """An encoder's programs behind a queue, on a thread of its own."""

    def __init__(
        self,
        model: ServingModel,
        session: Session,
        limits: Limits,
        *,
        window: float = 0.002,
        pooling: Pooling = "mean",
    ) -> None:
        self.model, self.limits = model, limits
        self.task = model.task
        if self.task not in _ENDPOINTS:
            raise BuildRefused(f"{model.name}: task {self.task} has no endpoint; it can be run with `nxpipe run`")
        self.endpoint = _ENDPOINTS[self.task]
        self._encoder = Encoder(model, session)
        self._programs = self._encoder.programs
        self._window, self._pooling = window, pooling
        self._waiting: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._is_closed, self._is_accepting, self._is_running = False, True, False
        self.fault: BaseException | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._is_accepting and self.fault is None

    async def drain(self, seconds: float | None) -> None:
        def wait() -> None:
            with self._changed:
                self._is_accepting = False
                self._changed.wait_for(lambda: not self._waiting and not self._is_running, seconds)

        await asyncio.to_thread(wait)

    async def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)
        self._encoder.close()

    async def answer(self, endpoint: str, document: Json, model: str) -> Any:
        """The answer of an endpoint, for the texts of a request."""
        if endpoint != self.endpoint:
            raise InputInvalid(f"{model} is served at {self.endpoint}, not at {endpoint}: its task is {self.task}")
        wanted = parsed(EmbeddingRequest, document)
        tokens = [self._encoder.tokens(each) for each in wanted.inputs()]
        outputs = await self._outputs(tokens)
        usage = {"prompt_tokens": sum(map(len, tokens)), "total_tokens": sum(map(len, tokens))}
        if endpoint == "embeddings":
            data = [
                {"object": "embedding", "index": index, "embedding": self._embedding(output, wanted.encoding_format)}
                for index, output in enumerate(outputs)
            ]
        else:
            data = [
                {"index": index, **self._classified(output, own)}
                for index, (output, own) in enumerate(zip(outputs, tokens, strict=True))
            ]
        return {"object": "list", "data": data, "model": model, "usage": usage}

    # Queue

    async def _outputs(self, rows: Sequence[Sequence[int]]) -> "list[dict[str, Array]]":
        items = [_Item(row, self._programs.bucket(len(row)), self._loop.create_future()) for row in rows]
        with self._changed:
            if not self.is_ready:
                raise NotServing(
                    "the server is shutting down, or a program has failed; send the request to another one"
                )
            if len(self._waiting) + len(items) > self.limits.waiting:
                raise Overloaded(len(self._waiting), 1.0)
            self._waiting.extend(items)
            self._changed.notify()
        return list(await asyncio.gather(*(item.answer for item in items)))

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                results: list[Any] = list(self._encoder.run_batch(batch[0].bucket, [item.tokens for item in batch]))
            except BaseException as fault:
                self.fault = fault
                results = [NotServing(f"a program has failed: {fault}; restart the server")] * len(batch)
            self._loop.call_soon_threadsafe(_settle, batch, results)
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def _next_batch(self) -> list[_Item]:
        """The texts of the first one's bucket that are there when it has waited long enough; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                return []
            first = self._waiting[0]
            most = self._programs.largest_batch(first.bucket)
            self._changed.wait_for(
                lambda: self._is_closed or self._count(first.bucket) >= most,
                max(first.arrival + self._window - time.monotonic(), 0),
            )
            batch = [item for item in self._waiting if item.bucket == first.bucket and not item.answer.cancelled()][
                :most
            ]
            taken = {id(item) for item in batch}
            self._waiting = deque(
                item for item in self._waiting if id(item) not in taken and not item.answer.cancelled()
            )
            self._is_running = bool(batch)
            if batch or self._is_closed:
                return batch
        return self._next_batch()

    def _count(self, bucket: int) -> int:
        return sum(item.bucket == bucket for item in self._waiting)

    # Answers

    def _embedding(self, output: "Mapping[str, Array]", form: str) -> Any:
        vector = self._encoder.embedding(output, self._pooling)
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()

    def _classified(self, output: "Mapping[str, Array]", tokens: Sequence[int]) -> Json:
        shares = class_scores(self.model, output["logits"])
        if shares.ndim == 1:
            best = int(shares.argmax())
            return {"label": label_of(self.model, best), "probs": shares.tolist(), "num_classes": len(shares)}
        entities = [
            {
                "token": self.model.text.token_text(token),
                "label": label_of(self.model, int(row.argmax())),
                "score": float(row.max()),
            }
            for token, row in zip(tokens, shares, strict=True)
        ]
        return {"tokens": entities, "num_classes": shares.shape[1]}


def label_of(model: ServingModel, number: int) -> str:
    """The name that the configuration gives to a class."""
    labels = model.config.get("id2label")
    return str(labels.get(str(number), f"LABEL_{number}")) if isinstance(labels, Mapping) else f"LABEL_{number}"


def class_scores(model: ServingModel, logits: "Array") -> "Array":
    """The scores of classes: shares of 1, or each by itself for a model of several labels or of a single one."""
    logits = logits.astype(np.float64)
    if model.config.get("problem_type") == "regression":
        return logits
    if model.config.get("problem_type") == "multi_label_classification" or logits.shape[-1] == 1:
        single: Array = 1 / (1 + np.exp(-logits))
        return single
    return softmax(logits)


def _own(array: "Array", length: int, bucket: int) -> "Array":
    """The part of a row's output that is not padding."""
    return array[:length] if array.ndim and array.shape[0] == bucket and array.ndim > 1 else array


def softmax(logits: "Array") -> "Array":
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = shares / shares.sum(axis=-1, keepdims=True)
    return result


def _settle(batch: Sequence[_Item], results: Sequence[Any]) -> None:
    for item, result in zip(batch, results, strict=True):
        if item.answer.done():
            continue
        if isinstance(result, BaseException):
            item.answer.set_exception(result)
        else:
            item.answer.set_result(result)
