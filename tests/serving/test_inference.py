"""Inference in this process: what `nxpipe.load` returns, over a decoder and an encoder that need no compiler."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.pipeline.serving.images import SETTINGS, ImageProcessor
from nxpipe.pipeline.serving.inference import LoadedModel
from nxpipe.pipeline.serving.model import ServingModel
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Scheduler
from nxpipe.pipeline.serving.text import TOKENIZER
from nxpipe.pipeline.serving.text_generation import TextGenerator
from nxpipe.pipeline.util.errors import InputInvalid, PromptTooLong
from tests.serving import checkpoints, decoders

BUCKETS, BATCHES, LABELS = (8, 24), (1, 3), {"0": "bad", "1": "good"}


def generator(rows: int = 2, *, continuous: bool = True, capacity: int = 64) -> TextGenerator:
    own = decoders.programs(rows, (8, 16), capacity, continuous=continuous)
    model = ServingModel("hash", "text-generation", {"vocab_size": decoders.VOCABULARY}, {}, [], None, None)  # type: ignore[arg-type]
    return TextGenerator(model, Scheduler(decoders.HashDecoder(own)))


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0)


def alone(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    return generator().stream(prompt, params(tokens)).finish().tokens


prompts = st.lists(st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=16), st.integers(1, 12)), max_size=5)


@given(prompts, st.booleans(), st.lists(st.integers(0, 4), max_size=40))
def test_streams_that_are_read_in_turns_are_those_that_are_read_alone(
    wanted: list[tuple[list[int], int]], continuous: bool, turns: list[int]
) -> None:
    together = generator(continuous=continuous)
    streams = [together.stream(prompt, params(tokens)) for prompt, tokens in wanted]
    for turn in turns:
        if streams:
            next(streams[turn % len(streams)], None)
    answers = [stream.finish() for stream in streams]
    assert [answer.tokens for answer in answers] == [alone(*each) for each in wanted]
    assert [(answer.prompt_tokens, answer.finish) for answer in answers] == [
        (len(each), "length") for each, _ in wanted
    ]
    assert together.scheduler.is_idle


def test_threads_share_one_decoder_and_get_their_own_answers() -> None:
    together, found = generator(rows=3), dict[int, tuple[int, ...]]()

    def ask(number: int) -> None:
        found[number] = together.stream([number, 5, 7], params(10)).finish().tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: alone([number, 5, 7], 10) for number in range(8)}


@pytest.mark.parametrize("read", [0, 2])
def test_a_stream_that_is_left_frees_its_row_and_keeps_what_has_come(read: int) -> None:
    together = generator(rows=1)
    stream = together.stream([1, 2, 3], params(30))
    for _ in range(read):
        next(stream)
    stream.close()
    assert (len(stream.answer.tokens), stream.answer.finish) == (read, "cancelled")
    assert together.stream([4], params(3)).finish().tokens == alone([4], 3)


def test_an_interrupted_step_ends_all_streams_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    together = generator()
    first, second = (together.stream([number, 2], params(9)) for number in (1, 3))
    next(first)
    with monkeypatch.context() as patch:
        patch.setattr(together.scheduler.decoder, "decode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            first.finish()
    with pytest.raises(Exception, match="a program failed on the device"):
        second.finish()
    assert together.stream([8, 9], params(9)).finish().tokens == alone([8, 9], 9)


def test_a_prompt_that_is_too_long_is_an_error_with_its_numbers() -> None:
    together = generator()
    with pytest.raises(PromptTooLong, match="the prompt has 80 tokens, and at most 63 are read") as caught:
        together.stream([1] * 80, params(1))
    assert (caught.value.tokens, caught.value.longest) == (80, 63)
    with pytest.raises(InputInvalid, match="token 97 is not in the vocabulary of 97"):
        together.stream([97], params(1))


class Encoding:
    """A session whose outputs follow from the ids alone: logit 1 of a text is the mean of its ids, and of a token its
    own id; a program that gets padding in another shape than its own fails."""

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.outputs, self.programs = outputs, list[str]()
        self.is_closed = False

    def run(self, program: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert program == f"forward-b{ids.shape[0]}-s{ids.shape[1]}"
        assert mask.sum(axis=1).all()
        self.programs.append(program)
        return {name: np.stack([made(row, own) for row, own in zip(ids, mask, strict=True)]) for name, made in
                self.outputs.items()}  # fmt: skip

    def close(self) -> None:
        self.is_closed = True


def mean(ids: Array, mask: Array) -> Array:
    return np.array([0.0, (ids * mask).sum() / mask.sum() / 100])


def each(ids: Array, mask: Array) -> Array:
    return np.stack([0 * ids, ids - 50], axis=1)


def loaded(task: str, files: Mapping[str, bytes] | None = None, **outputs: Any) -> tuple[LoadedModel, Encoding]:
    session = Encoding(outputs)
    programs = [
        SimpleNamespace(name=f"forward-b{batch}-s{bucket}", phase="forward", batch=batch, sequence=bucket)
        for bucket in BUCKETS
        for batch in BATCHES
    ]
    shapes = {each.name: TensorType((each.batch, each.sequence), DType.INT64) for each in programs}
    model = ServingModel(
        "tiny", task, {"vocab_size": 320, "id2label": LABELS},
        {TOKENIZER: checkpoints.tokenizer().to_str().encode(), **(files or {})}, programs, lambda names, copy: session,
        lambda name: None, inputs=lambda name: dict.fromkeys(("input_ids", "attention_mask"), shapes[name]),
    )  # fmt: skip
    return LoadedModel(model), session


TEXTS = ["the river", "dark", "hello world, how are you today?", "the town", "night"]


def ids_of(text: str) -> list[int]:
    return list(checkpoints.tokenizer().encode(text).ids)


def test_texts_are_classified_in_their_order_in_the_smallest_buckets_and_batches() -> None:
    model, session = loaded("text-classification", logits=mean)
    found = model.classify(TEXTS)
    for text, own in zip(TEXTS, found, strict=True):
        good = 1 / (1 + np.exp(-np.mean(ids_of(text)) / 100))
        assert own.scores == pytest.approx({"bad": 1 - good, "good": good})
        assert (own.label, own.score) == ("good", own.scores["good"])
    lengths = [len(ids_of(text)) for text in TEXTS]
    assert [length <= 8 for length in lengths] == [True, True, False, True, True]
    assert session.programs == ["forward-b3-s8", "forward-b1-s8", "forward-b1-s24"]
    assert model("dark") == model.classify("dark") == found[1]
    assert model([ids_of("dark")]) == [found[1]]
    assert "good" in found[0]._repr_html_()


def test_tokens_are_labelled_with_their_characters_and_without_special_tokens() -> None:
    model, _ = loaded("token-classification", logits=each)
    found = model.classify_tokens("the river")
    assert [text.label for text in found] == ["good" if token > 50 else "bad" for token in ids_of("the river")[1:]]
    assert "".join("the river"[own.start : own.end] for own in found) == "the river"


def test_a_mask_is_filled_with_the_likeliest_tokens() -> None:
    river = checkpoints.tokenizer().encode(" river", add_special_tokens=False).ids[0]
    settings = {"tokenizer_config.json": b'{"mask_token": {"content": "<|user|>"}}'}
    model, _ = loaded("fill-mask", settings, logits=lambda ids, mask: np.eye(320)[np.full(len(ids), river)] * 9)
    first, *others = model.fill("the <|user|> rose")
    assert first.token == checkpoints.tokenizer().decode([river]).strip()
    assert (len(others), first.score > 0.5) == (4, True)
    for text in ("the river", "<|user|> <|user|>"):
        with pytest.raises(InputInvalid, match="pass a text with one masked token"):
            model.fill(text)
    with pytest.raises(InputInvalid, match="the tokenizer has no mask token"):
        loaded("fill-mask", logits=each)[0]("the <|user|> rose")


def test_an_answer_is_a_part_of_the_context_and_ends_behind_its_beginning() -> None:
    tokenizer = checkpoints.tokenizer()
    pair = tokenizer.encode("where?", "in the dark town")
    last = len(pair.ids) - 1

    def at(place: int, also: int) -> Any:
        # the question's own tokens score highest, and are no answer; an end before the beginning is none either
        return lambda ids, mask: (
            9.0 * (np.arange(len(ids)) == place)
            + 6.0 * (np.arange(len(ids)) == also)
            + (50.0 * (np.arange(len(ids)) == 1))
        )

    model, _ = loaded("question-answering", start_logits=at(last - 1, last - 2), end_logits=at(last - 3, last))
    found = model(question="where?", context="in the dark town")
    assert found == model({"question": "where?", "context": "in the dark town"})
    assert found.text == "in the dark town"[found.start : found.end]
    assert (found.start, found.end) == (pair.offsets[last - 1][0], pair.offsets[last][1])


def test_vectors_have_length_one_and_do_not_see_the_padding() -> None:
    model, _ = loaded("feature-extraction", last_hidden_state=lambda ids, mask: np.stack([ids, ids + 1.0], axis=1))
    found = model.embed(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        wanted = np.array([np.mean(ids_of(text)), np.mean(ids_of(text)) + 1])
        assert np.allclose(vector, wanted / np.linalg.norm(wanted))
    assert np.array_equal(model("dark"), found[1])
    assert np.allclose(np.linalg.norm(model.embed(TEXTS, pooling="cls"), axis=1), 1)


def test_arrays_by_name_run_in_the_smallest_program_that_holds_them() -> None:
    model, session = loaded("text-classification", logits=mean)
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    found = model.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert found["logits"].tolist() == [[0.0, 0.06], [0.0, 0.09]]
    assert session.programs == ["forward-b3-s8"]
    whole = np.full((1, 24), 4)
    assert model({"input_ids": whole, "attention_mask": whole // 4})["logits"].tolist() == [[0.0, 0.04]]
    assert session.programs[1:] == ["forward-b1-s24"]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"input_idz": [[1]], "attention_mask": [[1]]}, "unknown input 'input_idz'; did you mean 'input_ids'?"),
        ({"input_ids": [[1]]}, "input 'attention_mask' is missing; tiny takes attention_mask, input_ids"),
        ({"input_ids": [[1] * 25], "attention_mask": [[1] * 25]}, "input_ids has 25 tokens, and the largest bucket 24"),
        ({"input_ids": [[1]] * 4, "attention_mask": [[1]] * 4}, r"forward-b3-s8 takes input_ids \[3, 8\]"),
    ],
)
def test_arrays_that_no_program_holds_are_one_sentence(inputs: dict[str, Any], sentence: str) -> None:
    model, _ = loaded("text-classification", logits=mean)
    with pytest.raises(InputInvalid, match=sentence):
        model.run({name: np.array(rows) for name, rows in inputs.items()})


def test_wrong_calls_name_the_task_and_a_closed_model_answers_nothing() -> None:
    model, session = loaded("text-classification", logits=mean)
    with pytest.raises(InputInvalid, match="tiny generates no text: its task is text-classification"):
        model.generate("x")
    with pytest.raises(InputInvalid, match="tiny is not of task feature-extraction: its task is text-class"):
        model.embed("x")
    with pytest.raises(PromptTooLong, match="the text has 101 tokens, and the largest bucket 24"):
        model("0 " * 50)
    with pytest.raises(InputInvalid, match="tiny has no program 'forward-b1-s9'; did you mean 'forward-b1-s8'"):
        model.run({}, program="forward-b1-s9")
    with model:
        assert "forward-b3-s24" in str(model)
    assert session.is_closed
    ids = np.ones((1, 8), np.int64)
    for call in (lambda: model("x"), lambda: model.run({"input_ids": ids, "attention_mask": ids})):
        with pytest.raises(InputInvalid, match="tiny is closed; load it again"):
            call()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be from 0 to 2"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be more than 0 and at most 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(options: dict[str, Any], sentence: str) -> None:
    model, _ = loaded("text-generation", logits=mean)
    with pytest.raises(InputInvalid, match=sentence):
        model.generate("x", **options)


@pytest.mark.sample(12, "images")
@pytest.mark.parametrize(("height", "width"), [(32, 32), (50, 41), (20, 61)])
@pytest.mark.parametrize("kind", ["ViT", "CLIP"])
def test_images_are_read_as_transformers_reads_them(kind: str, height: int, width: int, tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"ViT": {"size": {"height": 24, "width": 16}}}.get(
        kind, {"size": {"shortest_edge": 30}, "crop_size": {"height": 28, "width": 28}}
    )
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**sizes)
    theirs.save_pretrained(tmp_path)
    ours = ImageProcessor("tiny", {SETTINGS: (tmp_path / SETTINGS).read_bytes()})
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    wanted = theirs(Image.fromarray(image), return_tensors="np")["pixel_values"][0]
    assert np.allclose(ours.pixel_values(image), wanted, atol=1e-6)
    assert np.array_equal(ours.pixel_values(Image.fromarray(image)), ours.pixel_values(image))


def test_images_are_classified_in_batches_and_unknown_settings_are_refused() -> None:
    settings = {"do_rescale": True, "rescale_factor": 1 / 255}
    programs = [
        SimpleNamespace(name=f"forward-b{batch}-s1", phase="forward", batch=batch, sequence=1) for batch in (1, 2)
    ]
    runs = list[str]()

    def run(program: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        runs.append(program)
        means = inputs["pixel_values"].mean(axis=(1, 2, 3))
        return {"logits": np.stack([0 * means, means], axis=1)}

    def model(**changes: Any) -> LoadedModel:
        files = {SETTINGS: json.dumps(settings | changes).encode()} if changes != {"none": 1} else {}
        session: Any = SimpleNamespace(run=run, close=lambda: None)
        shapes = {each.name: TensorType((each.batch, 3, 4, 5), DType.FLOAT32) for each in programs}
        return LoadedModel(
            ServingModel("tiny", "image-classification", {"id2label": LABELS}, files, programs, lambda *_: session,
                         lambda name: None, inputs=lambda name: {"pixel_values": shapes[name]})
        )  # fmt: skip

    images = [np.full((4, 5, 3), level, np.uint8) for level in (0, 100, 255)]
    found = model()(images)
    wanted = [1 / (1 + np.exp(-level / 255)) for level in (0, 100, 255)]
    assert [each.scores["good"] for each in found] == pytest.approx(wanted)
    assert runs == ["forward-b2-s1", "forward-b1-s1"]
    assert model()(images[1]) == found[1]
    for changes, sentence in (
        ({"do_pad": True}, "do_pad is not supported; pass pixel_values"),
        ({"none": 1}, "the artifact has no preprocessor_config.json"),
    ):
        with pytest.raises(InputInvalid, match=sentence):
            model(**changes)(images)
    with pytest.raises(InputInvalid, match=r"image: float64 of shape \[4, 5, 3\]; pass 8 bits"):
        model()([images[0].astype(np.float64)])
