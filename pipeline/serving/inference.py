"""Inference in this process: text, labels, embeddings and arrays from an artifact's programs, without a server.

`nxpipe.load` and `nxpipe generate` use it. A text runs in the smallest bucket that holds it, and several prompts run
together, batched continuously. Neither PyTorch nor transformers is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, Unpack, overload

import numpy as np

from nxpipe.pipeline.serving.encoder import Encoder, Pooling, class_scores, label_of, softmax
from nxpipe.pipeline.serving.images import ImageProcessor, is_image
from nxpipe.pipeline.serving.model import ServingModel, folder_model, served_model
from nxpipe.pipeline.serving.programs import DecoderPrograms, Session
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.text_generation import (
    GeneratedText,
    SamplingKeywords,
    TextGenerator,
    TextStream,
    sampling_params,
)
from nxpipe.pipeline.util.display import BarsPart, Displayed, Part, TablePart
from nxpipe.pipeline.util.errors import InputInvalid, PromptTooLong
from nxpipe.pipeline.util.text import did_you_mean
from nxpipe.pipeline.verify.device import DEVICES, DeviceOptions
from nxpipe.pipeline.verify.execution import ExecutionOptions

if TYPE_CHECKING:
    from PIL.Image import Image
    from tokenizers import Encoding as Tokenized

    from nxpipe.artifact_store import Published, Store
    from nxpipe.emulator.numerics import Array

Prompt: TypeAlias = "str | Sequence[int]"  # a text for the model's tokenizer, or token ids
Message: TypeAlias = Mapping[str, Any]
_SHOWN: Final = 5
_LONGEST_ANSWER: Final = 30  # tokens of an answer to a question


@dataclass(frozen=True, repr=False)
class Classification(Displayed):
    """The class of a text or an image: the likeliest label, and the score of each label."""

    label: str
    score: float
    scores: Mapping[str, float]

    def __repr__(self) -> str:
        return f"Classification({self.label!r}, {self.score:.4f})"

    def display(self) -> Iterator[Part]:
        ranked = sorted(self.scores.items(), key=lambda item: -item[1])
        yield BarsPart(self.label, [(label, score, f"{score:.3f}") for label, score in ranked[: 2 * _SHOWN]])


@dataclass(frozen=True)
class LabelledToken:
    """A token of a text with its class; `start` and `end` are its characters in the text."""

    token: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class MaskFill:
    """A token in place of a mask, and the text with it."""

    token: str
    score: float
    text: str


@dataclass(frozen=True)
class ExtractedAnswer:
    """The part of a context that answers a question; `start` and `end` are its characters."""

    text: str
    score: float
    start: int
    end: int


class LoadedModel(Displayed):
    """An artifact whose programs are loaded in this process. Calling it answers by its task:

    text generation: `generate`; text classification: `classify`; token classification: `classify_tokens`; fill-mask:
    `fill`; feature extraction: `embed`; question answering: `answer`; image classification: `classify_images`; any
    other task: `run`, with arrays by name. A context manager; `close` frees the programs.
    """

    def __init__(self, model: ServingModel, rows: int | None = None, *, resources: ExitStack | None = None) -> None:
        """`rows`: serve prompts by the programs of this batch size; by default the smallest that holds those of a call.
        `resources` are closed with the model."""
        self._model, self._rows, self._resources = model, rows, resources or ExitStack()
        self._generators: dict[int, TextGenerator] = {}
        self._encoder: Encoder | None = None
        self._processor: ImageProcessor | None = None
        self._session: Session | None = None
        self._lock, self._is_closed = RLock(), False
        if model.generates:
            self._generator(1)  # what cannot be loaded is known at once
        elif model.inputs is not None and _reads_text(model):
            self._encoding()

    @property
    def name(self) -> str:
        """The artifact's name, MODEL@KEY."""
        return self._model.artifact or self._model.name

    @property
    def task(self) -> str:
        return self._model.task

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sequence lengths of the programs."""
        return tuple(sorted({program.sequence for program in self._model.programs}))

    @property
    def predicted_ms(self) -> float:
        """The predicted time on the device of all text generated so far, in milliseconds."""
        return sum(each.scheduler.counts.predicted_ms for each in self._generators.values())

    # Text generation

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is no list
        self, prompts: str, *, stream: Literal[False] = ..., **sampling: Unpack[SamplingKeywords]
    ) -> GeneratedText: ...

    @overload
    def generate(self, prompts: str, *, stream: Literal[True], **sampling: Unpack[SamplingKeywords]) -> TextStream: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, stream: Literal[False] = ..., **sampling: Unpack[SamplingKeywords]
    ) -> list[GeneratedText]: ...

    def generate(
        self, prompts: str | Sequence[Prompt], *, stream: bool = False, **sampling: Unpack[SamplingKeywords]
    ) -> GeneratedText | list[GeneratedText] | TextStream:
        """Continue a text, or each text or list of token ids of a list, which run together.

        `stream` returns the parts of one text as they come. Raises PromptTooLong.
        """
        params = sampling_params(sampling)
        if isinstance(prompts, str):
            started = self._generator(1).stream(self._tokens(prompts), params)
            return started if stream else started.finish()
        if stream:
            raise InputInvalid("stream: one text is streamed at a time; call generate for each")
        return self._together([self._tokens(prompt) for prompt in prompts], params)

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = ...,
        **sampling: Unpack[SamplingKeywords],
    ) -> GeneratedText: ...

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **sampling: Unpack[SamplingKeywords]
    ) -> TextStream: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **sampling: Unpack[SamplingKeywords]
    ) -> GeneratedText | TextStream:
        """Answer a conversation, a list of messages with `role` and `content`, by the model's chat template.

        A text is the message of a user. The beginning of a conversation is not read again: the cache keeps its tokens.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        started = self._generator(1).stream(self._model.text.chat(messages), sampling_params(sampling))
        return started if stream else started.finish()

    def _together(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[GeneratedText]:
        if not prompts:
            return []
        generator = self._generator(len(prompts))
        streams = []
        try:
            for number, prompt in enumerate(prompts):
                own = params if params.seed is None else replace(params, seed=params.seed + number)
                streams.append(generator.stream(prompt, own))
            return [each.finish() for each in streams]
        finally:
            for each in streams:
                each.close()

    def _generator(self, count: int) -> TextGenerator:
        """The generator of the smallest batch size that holds so many prompts, else of the largest."""
        if not self._model.generates:
            raise self._wrong_task("generates no text")
        with self._lock:
            self._require_open()
            sizes = list(DecoderPrograms.by_rows(self._model.programs))
            rows = self._rows or next((size for size in sizes if size >= count), sizes[-1])
            if self._model.inputs is None:  # a device loads one batch size
                rows = self._rows or sizes[-1]
            if rows not in self._generators:
                self._generators[rows] = TextGenerator(self._model, self._model.scheduler(rows))
            return self._generators[rows]

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self._model.text.encode(prompt) if isinstance(prompt, str) else prompt

    # Encoders

    @overload
    def classify(self, texts: str) -> Classification: ...  # type: ignore[overload-overlap]  # a text is no list

    @overload
    def classify(self, texts: Sequence[Prompt]) -> list[Classification]: ...

    def classify(self, texts: str | Sequence[Prompt]) -> Classification | list[Classification]:
        """The class of a text, or of each text of a list."""
        self._require_task("text-classification")
        found = [self._classified(logits) for logits, _ in self._logits(texts)]
        return found[0] if isinstance(texts, str) else found

    @overload
    def classify_tokens(  # type: ignore[overload-overlap]  # a text is no list
        self, texts: str
    ) -> list[LabelledToken]: ...

    @overload
    def classify_tokens(self, texts: Sequence[Prompt]) -> list[list[LabelledToken]]: ...

    def classify_tokens(self, texts: str | Sequence[Prompt]) -> list[LabelledToken] | list[list[LabelledToken]]:
        """The class of each token of a text, or of each text of a list, without those that the tokenizer adds."""
        self._require_task("token-classification")
        found = [self._labelled(logits, tokens) for logits, tokens in self._logits(texts)]
        return found[0] if isinstance(texts, str) else found

    def embed(self, texts: str | Sequence[Prompt], *, pooling: Pooling = "mean") -> "Array":
        """A vector of length 1 for each text: one row for each, or a vector for a single text."""
        self._require_task("feature-extraction")
        outputs = self._encoded([each.ids for each in self._tokenized(texts)])
        vectors = np.stack([self._encoding().embedding(output, pooling) for output in outputs])
        return np.asarray(vectors[0] if isinstance(texts, str) else vectors)

    def fill(self, text: str, *, most: int = _SHOWN) -> list[MaskFill]:
        """The likeliest tokens in place of the mask of a text, which has one."""
        self._require_task("fill-mask")
        mask = self._model.text.mask_token
        tokens = self._model.text.encode(text)
        number = None if mask is None else self._model.text.token(mask)
        places = [place for place, token in enumerate(tokens) if token == number]
        if mask is None or len(places) != 1:
            wanted = "the tokenizer has no mask token" if mask is None else f"it has {len(places)} {mask}, not one"
            raise InputInvalid(f"text: {wanted}; pass a text with one masked token")
        (output,) = self._encoded([tokens])
        shares = softmax(output["logits"][places[0]].astype(np.float64))
        best = np.argsort(-shares, kind="stable")[:most].tolist()
        fills = [(token, [*tokens[: places[0]], token, *tokens[places[0] + 1 :]]) for token in best]
        decode = self._model.text.decode
        return [MaskFill(decode([token]).strip(), float(shares[token]), decode(ids)) for token, ids in fills]

    def answer(self, question: str, context: str) -> ExtractedAnswer:
        """The part of the context that answers the question. Token types are not read: programs have no such input."""
        self._require_task("question-answering")
        tokenized = self._model.text.tokenizer.encode(question, context)
        (output,) = self._encoded([tokenized.ids])
        inside = np.array([sequence == 1 for sequence in tokenized.sequence_ids])
        if not inside.any():
            raise InputInvalid("context: no tokens; pass the text that holds the answer")
        start, end = (
            softmax(np.where(inside, output[name][: len(inside)].astype(np.float64), -np.inf))
            for name in ("start_logits", "end_logits")
        )
        scores = np.tril(np.triu(np.outer(start, end)), _LONGEST_ANSWER - 1)
        first, last = np.unravel_index(int(scores.argmax()), scores.shape)
        begin, stop = tokenized.offsets[first][0], tokenized.offsets[last][1]
        return ExtractedAnswer(context[begin:stop], float(scores[first, last]), begin, stop)

    def classify_images(self, images: "Sequence[Image | Array]") -> list[Classification]:
        """The class of each image of Pillow, or array of height, width and channels of 8 bits."""
        self._require_task("image-classification")
        logits = [output["logits"] for output in self.run_images(images)]
        return [self._classified(each[0]) for each in logits]

    def run_images(self, images: "Sequence[Image | Array]") -> "list[dict[str, Array]]":
        """The outputs for each image, which the artifact's preprocessor_config.json describes how to read."""
        with self._lock:
            if self._processor is None:
                self._processor = ImageProcessor(self.name, self._model.files)
            processor = self._processor
        pixels = [processor.pixel_values(image) for image in images]
        batches = sorted({each.batch for each in self._model.programs if each.phase == "forward"})
        found: list[dict[str, Array]] = []
        most = batches[-1] if batches else 1
        for first in range(0, len(pixels), most):
            part = pixels[first : first + most]
            outputs = self.run({"pixel_values": np.stack(part)})
            found += [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(part))]
        return found

    def _tokenized(self, texts: str | Sequence[Prompt]) -> "list[_Tokens]":
        return [_Tokens.of(self._model, text) for text in ([texts] if isinstance(texts, str) else texts)]

    def _logits(self, texts: str | Sequence[Prompt]) -> "list[tuple[Array, _Tokens]]":
        tokens = self._tokenized(texts)
        outputs = self._encoded([each.ids for each in tokens])
        return [(output["logits"], own) for output, own in zip(outputs, tokens, strict=True)]

    def _encoded(self, rows: Sequence[Sequence[int]]) -> "list[dict[str, Array]]":
        encoder = self._encoding()
        tokens = [encoder.tokens(row) for row in rows]
        with self._lock:
            self._require_open()
            return encoder.run(tokens)

    def _encoding(self) -> Encoder:
        with self._lock:
            if self._encoder is None:
                self._encoder = Encoder(self._model, self._loaded())
            return self._encoder

    def _classified(self, logits: "Array") -> Classification:
        scores = class_scores(self._model, logits)
        named = {label_of(self._model, number): float(score) for number, score in enumerate(scores)}
        label = max(named, key=named.__getitem__)
        return Classification(label, named[label], named)

    def _labelled(self, logits: "Array", tokens: "_Tokens") -> list[LabelledToken]:
        return [
            LabelledToken(
                self._model.text.token_text(token), label_of(self._model, int(row.argmax())), float(row.max()), *offsets
            )
            for token, row, offsets, special in zip(
                tokens.ids, class_scores(self._model, logits), tokens.offsets, tokens.special, strict=True
            )
            if not special
        ]

    # Any task

    def run(self, inputs: "Mapping[str, Array]", *, program: str | None = None) -> "dict[str, Array]":
        """The outputs of one program by name. Without `program`, it is the smallest one that holds the inputs: those
        with fewer rows are filled up, and `input_ids` with fewer tokens are padded."""
        if self._model.inputs is None and program is None:
            raise InputInvalid(f"{self.name} is on a device; name the program, as in program={self._names()[0]!r}")
        self._require_name(program)
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        name, padded, rows = self._fitted(arrays, program)
        with self._lock:
            self._require_open()
            outputs = self._loaded().run(name, padded)
        return {each: array[:rows] if rows and array.ndim else array for each, array in outputs.items()}

    def _fitted(self, arrays: "dict[str, Array]", program: str | None) -> "tuple[str, dict[str, Array], int]":
        """The program, its whole inputs, and the rows of the request; 0 if its outputs are not cut."""
        if self._model.inputs is None:
            return str(program), arrays, 0
        tried = []
        for name in [program] if program else self._names():
            wanted = {each: tuple(map(int, kind.shape)) for each, kind in self._model.inputs(name).items()}
            tried.append((name, wanted))
            fit = _fit(arrays, wanted)
            if fit is not None:
                return name, *fit
        raise _no_fit(self.name, arrays, tried)

    def _names(self) -> list[str]:
        forward = [each for each in self._model.programs if each.phase == "forward"]
        return [each.name for each in sorted(forward, key=lambda each: (each.sequence, each.batch))]

    def _require_name(self, program: str | None) -> None:
        known = self._names()
        if not known:
            raise self._wrong_task("has no program without a KV cache")
        if program is not None and program not in known:
            hint = did_you_mean(program, known) or f"; there are {', '.join(known)}"
            raise InputInvalid(f"{self.name} has no program {program!r}{hint}")

    def _loaded(self) -> Session:
        with self._lock:
            self._require_open()
            if self._session is None:
                self._session = self._model.forward_session()
            return self._session

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Answer by the task: a text or a list of texts, `question=` and `context=`, or arrays by name."""
        if len(inputs) == 1 and isinstance(inputs[0], Mapping) and not self._model.generates:
            given = inputs[0]
            return (
                self.answer(**given) if self.task == "question-answering" and "question" in given else self.run(given)
            )
        methods: dict[str, Any] = {
            "text-generation": self.generate,
            "text-classification": self.classify,
            "token-classification": self.classify_tokens,
            "fill-mask": self.fill,
            "feature-extraction": self.embed,
            "question-answering": self.answer,
        }
        images = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list | tuple) else inputs
        if images and all(map(is_image, images)):
            of_task = self.classify_images if self.task == "image-classification" else self.run_images
            found: Sequence[Any] = of_task(images)
            return found[0] if images is inputs else found
        if self.task not in methods:
            raise InputInvalid(f"{self.name} is of task {self.task}; pass its inputs as arrays by name")
        return methods[self.task](*inputs, **options)

    # Life

    def close(self) -> None:
        """Free the programs. The model answers nothing more."""
        with self._lock:
            self._is_closed = True
            for generator in self._generators.values():
                generator.close()
            self._generators.clear()
            if self._session is not None:
                self._session.close()
            self._session = self._encoder = None
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name}, {self.task}{', closed' if self._is_closed else ''}>"

    def display(self) -> Iterator[Part]:
        yield repr(self)[1:-1]
        rows = [(each.name, each.phase, str(each.batch), str(each.sequence)) for each in self._model.programs]
        yield TablePart("", ("program", "phase", "batch", "sequence"), rows)

    def _require_open(self) -> None:
        if self._is_closed:
            raise InputInvalid(f"{self.name} is closed; load it again")

    def _require_task(self, *tasks: str) -> None:
        if self.task not in tasks:
            raise self._wrong_task(f"is not of task {' or '.join(tasks)}")

    def _wrong_task(self, what: str) -> InputInvalid:
        return InputInvalid(f"{self.name} {what}: its task is {self.task}; call the model, or use run with its inputs")


def load_artifact(
    published: "Published", store: "Store", *, device: str = "emulator", mode: str = "fast", rows: int | None = None
) -> LoadedModel:
    """The artifact of a store, loaded; `device` is the emulator, or a library of this machine's Neuron devices."""
    machine = _machine(device, mode)
    with ExitStack() as resources:
        model = resources.enter_context(served_model(published, store, machine, _silent, _unwatched))
        return LoadedModel(model, rows, resources=resources.pop_all())


def load_folder(path: Path, *, device: str = "emulator", mode: str = "fast", rows: int | None = None) -> LoadedModel:
    """The artifact in a folder that a fetch has filled, loaded."""
    return LoadedModel(folder_model(path, _machine(device, mode), _silent), rows)


def _machine(device: str, mode: str) -> "ExecutionOptions | DeviceOptions":
    """Where programs run."""
    if device not in ("emulator", *DEVICES):
        raise InputInvalid(f"{device!r} is no device; pass emulator, {', '.join(DEVICES)}")
    if device != "emulator":
        return DeviceOptions(device)
    if mode == "fast":
        return ExecutionOptions("fast")
    if mode == "isa":
        return ExecutionOptions("isa")
    raise InputInvalid(f"{mode!r} is no mode; pass fast or isa")


def _silent(title: str) -> Any:
    """The progress of steps, without output."""
    return nullcontext()


def _unwatched(title: str, size: int) -> Any:
    """The progress of transfers, without output."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text: their ids, characters, and which the tokenizer has added."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    special: Sequence[bool]

    @classmethod
    def of(cls, model: ServingModel, text: Prompt) -> "_Tokens":
        if isinstance(text, str):
            found: Tokenized = model.text.tokenizer.encode(text)
            return cls(found.ids, found.offsets, [bool(each) for each in found.special_tokens_mask])
        return cls(text, [(0, 0)] * len(text), [False] * len(text))


_TOKEN_INPUTS: Final = frozenset({"input_ids", "attention_mask"})


def _reads_text(model: ServingModel) -> bool:
    forward = next((each for each in model.programs if each.phase == "forward"), None)
    return forward is not None and model.inputs is not None and model.inputs(forward.name).keys() == _TOKEN_INPUTS


def _fit(arrays: "Mapping[str, Array]", wanted: Mapping[str, tuple[int, ...]]) -> "tuple[dict[str, Array], int] | None":
    """The arrays filled up to the shapes of a program, and their rows; None if they do not fit.

    Inputs that all begin with the program's batch may have fewer rows, and texts fewer tokens.
    """
    if arrays.keys() != wanted.keys() or not arrays:
        return None
    batches = {shape[0] for shape in wanted.values() if shape}
    rows = {array.shape[0] for array in arrays.values() if array.ndim}
    has_rows = len(batches) == len(rows) == 1 and all(wanted.values())
    padded: dict[str, Array] = {}
    for name, shape in wanted.items():
        array, own = arrays[name], list(shape)
        missing = [(0, 0)] * len(shape)
        if array.ndim != len(shape):
            return None
        for axis, full in enumerate(own):
            short = full - array.shape[axis]
            if short and not (short > 0 and ((axis == 0 and has_rows) or (axis == 1 and name in _TOKEN_INPUTS))):
                return None
            missing[axis] = (0, short)
        padded[name] = np.pad(array, missing) if any(after for _, after in missing) else array
    wanted_rows = next(iter(rows)) if has_rows else 0
    if wanted_rows and "attention_mask" in padded:
        padded["attention_mask"][wanted_rows:, 0] = 1  # a row without a token would divide by zero
    return padded, wanted_rows if wanted_rows < max(batches, default=0) else 0


def _no_fit(
    model: str, arrays: "Mapping[str, Array]", tried: Sequence[tuple[str, Mapping[str, tuple[int, ...]]]]
) -> InputInvalid:
    names = sorted({name for _, wanted in tried for name in wanted})
    unknown = next((name for name in arrays if name not in names), None)
    if unknown is not None:
        return InputInvalid(f"unknown input {unknown!r}{did_you_mean(unknown, names) or f'; {model} takes {names}'}")
    missing = next((name for name in names if name not in arrays), None)
    if missing is not None:
        return InputInvalid(f"input {missing!r} is missing; {model} takes {', '.join(names)}")
    longest = max((wanted["input_ids"][1] for _, wanted in tried if "input_ids" in wanted), default=0)
    ids = arrays.get("input_ids")
    if ids is not None and ids.ndim == 2 and ids.shape[1] > longest:
        return PromptTooLong(
            f"input_ids has {ids.shape[1]:,} tokens, and the largest bucket {longest:,}; shorten it, or build the "
            "model with a longer one",
            ids.shape[1],
            longest,
        )
    given = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    takes = "; ".join(
        f"{name} takes {', '.join(f'{each} {list(shape)}' for each, shape in wanted.items())}" for name, wanted in tried
    )
    return InputInvalid(f"no program of {model} holds {given}: {takes}; send other shapes, or build it with these")
