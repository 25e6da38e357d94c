"""No silent wrong answers: unsuitable input is refused, and omissions are reported."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.pipeline.conftest import LLAMA, bert, llama, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.test_config import is_a_sentence

pytestmark = pytest.mark.sample(4)

__all__ = ["bert", "llama", "nxpipe"]

LONG: Final = json.dumps([5] * 40)


def small(model: Path, *more: str, buckets: str = "16") -> tuple[str, ...]:
    return ("--model-id", str(model), "--weights", "random:0", "--buckets", buckets, *more)


def asked(nxpipe: InProcess, *words: str) -> list[dict[str, Any]]:
    answer = nxpipe(*words, "--json", "-q")
    assert answer.code == 0, answer.err
    found: list[dict[str, Any]] = json.loads(answer.out)
    return found


def test_a_text_longer_than_the_largest_bucket_is_refused(nxpipe: InProcess, llama: Path) -> None:
    answer = nxpipe("run", *small(llama, "--phases", "prefill"), "--text", "[1, 2]", "--text", LONG)
    is_a_sentence(answer)
    assert answer.code == 2
    assert "Text 2 has 40 tokens, and the largest bucket 16: pass a longer one to --buckets" in answer.err
    assert answer.out == ""


def test_truncate_says_how_much_is_left_out(nxpipe: InProcess, llama: Path) -> None:
    (ran,) = asked(
        nxpipe, "run", *small(llama, "--phases", "prefill"), "--text", "[1, 2]", "--text", LONG, "--truncate"
    )
    assert ran["inputs"] == "2 texts, cut to 16 tokens: 24 left out"
    assert ran["outputs"]["logits"]["shape"][0] == 2


def test_texts_run_in_the_smallest_bucket_that_holds_all_of_them(nxpipe: InProcess, llama: Path) -> None:
    for texts, bucket in ((("[1, 2]", "[3]"), 16), (("[1, 2]", LONG), 64)):
        words = [word for text in texts for word in ("--text", text)]
        (ran,) = asked(nxpipe, "run", *small(llama, "--phases", "prefill", *words, buckets="16,64"))
        assert (ran["program"], ran["inputs"]) == (f"prefill-b1-s{bucket}", "2 texts")
        assert ran["outputs"]["logits"]["shape"][0] == 2


def test_a_text_longer_than_the_named_programs_bucket_is_refused(nxpipe: InProcess, llama: Path) -> None:
    words = small(llama, "--phases", "prefill", "--text", LONG, "--program", "prefill-b1-s16", buckets="16,64")
    answer = nxpipe("run", *words)
    is_a_sentence(answer)
    assert answer.code == 2
    assert "Text 1 has 40 tokens, and the largest bucket 16" in answer.err
    (ran,) = asked(nxpipe, "run", *words, "--truncate")
    assert ran["inputs"] == "1 text, cut to 16 tokens: 24 left out"


def test_so_are_prompts_of_verify(nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"[1, 2]\n[3]\n{LONG}\n")
    words = ("verify", *small(bert), "--prompts", str(prompts))
    answer = nxpipe(*words)
    is_a_sentence(answer)
    assert answer.code == 2
    assert "Prompt 3 has 40 tokens, and the largest bucket 16" in answer.err
    (found,) = asked(nxpipe, *words, "--truncate")
    assert found["inputs"] == "3 prompts, cut to 16 tokens: 24 left out"


@pytest.mark.sample(4)
def test_steps_leave_room_for_less_of_a_prompt_and_say_so(nxpipe: InProcess, llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(json.dumps([5] * 14) + "\n[3]\n")
    words = ("verify", *small(llama, "--phases", "prefill"), "--prompts", str(prompts), "--steps", "4")
    answer = nxpipe(*words)
    is_a_sentence(answer)
    assert answer.code == 2
    assert "a bucket of 16 holds 12 tokens before --steps 4" in answer.err
    _, followed = asked(nxpipe, *words, "--truncate")
    assert followed["inputs"] == "the first 1 of 2 prompts, cut to 12 tokens: 2 left out"


IDS: Final = np.full((1, 16), 5)
MASK: Final = np.ones((1, 16), np.int64)
WRONG: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "an id behind the table": ({"input_ids": IDS + 92}, "holds 97, which is outside the lookup table of size 97"),
    "a negative id": ({"input_ids": IDS - 6}, "holds -1, which is outside the lookup table of size 97"),
    "an id that is far too large": ({"input_ids": IDS + 2**40}, "1099511627781"),
    "another batch": ({"input_ids": np.repeat(IDS, 3, 0)}, "has batch 3, and this program was compiled for batch 1"),
    "another length": (
        {"attention_mask": MASK[:, :7]},
        "has 7 tokens, and this program was compiled for a bucket of 16",
    ),
    "floats": ({"input_ids": IDS.astype(np.float32)}, "is float32 [1, 16], but the program takes int64 [1, 16]"),
    "not-a-number": ({"input_ids": np.full((1, 16), np.nan)}, "is float64 [1, 16], but the program takes int64"),
    "booleans": ({"input_ids": IDS > 0}, "is bool [1, 16], but the program takes int64 [1, 16]"),
    "a mask of other numbers": ({"attention_mask": MASK * 7}, "holds 7; a mask is 1 for a token, 0 for padding"),
    "a name misspelt": (
        {"input_idz": IDS},
        "unknown input 'input_idz'; the program takes attention_mask, input_ids; did",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ["fast", "isa"])
def test_inputs_that_do_not_suit_the_program_are_refused(
    mode: str, nxpipe: InProcess, bert: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given.safetensors"
    cases = WRONG if mode == "fast" else {name: WRONG[name] for name in list(WRONG)[:1]}
    for name, (wrong, says) in cases.items():
        save_file({"input_ids": IDS, "attention_mask": MASK} | wrong, given)
        answer = nxpipe("run", *small(bert), "--input", str(given), "--mode", mode)
        is_a_sentence(answer)
        assert answer.code == 2, (name, answer.err)
        assert says in answer.err, name
        assert answer.out == ""


@pytest.mark.sample(8)
def test_so_are_ids_of_a_vocabulary_that_ranks_divide(nxpipe: InProcess, llama: Path, tmp_path: Path) -> None:
    """Each rank looks up its own rows: an id that no rank has would be zeros in all of them. So in a stored program."""
    store, out = str(tmp_path / "store"), tmp_path / "out"
    words = small(llama, "--phases", "prefill", "--tp", "2")
    assert nxpipe("build", *words, "--store", store, "-q").code == 0
    for order in (("run", *words), ("run", "tiny-llama", "--store", store)):
        assert nxpipe(*order, "--text", "[1, 2]", "--output", str(out / order[1]), "-q").code == 0
        answer = nxpipe(*order, "--text", "[1, 128]")
        assert answer.code == 2
        assert "token 128 is not in the vocabulary of 128" in answer.err
    given = tmp_path / "given.safetensors"
    save_file({"input_ids": np.full((1, 16), 128), "attention_mask": MASK}, given)
    for order in (("run", *words), ("run", "tiny-llama", "--store", store)):
        answer = nxpipe(*order, "--input", str(given))
        is_a_sentence(answer)
        assert answer.code == 2, answer.err
        assert "holds 128, which is outside the lookup table of size 128" in answer.err
    first, second = (load_file(next((out / name).rglob("*.safetensors"))) for name in ("--model-id", "tiny-llama"))
    np.testing.assert_array_equal(first["logits"], second["logits"])


def test_places_beyond_the_cache_are_refused(nxpipe: InProcess, llama: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.safetensors"
    save_file({"input_ids": np.array([[5]]), "position": np.array([16])}, given)
    answer = nxpipe("run", *small(llama), "--input", str(given))
    is_a_sentence(answer)
    assert answer.code == 2, answer.err
    assert "holds 16, but the KV cache has positions 0 to 15" in answer.err


def test_numbers_that_the_type_cannot_hold_are_refused(nxpipe: InProcess, tmp_path: Path) -> None:
    vit = {
        "model_type": "vit",
        "architectures": ["ViTModel"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 16,
        "torch_dtype": "float16",
    }
    model = write_model(tmp_path / "vit", vit)
    given = tmp_path / "given.safetensors"
    for pixels, code in ((np.full((1, 3, 32, 32), 1e6, np.float32), 2), (np.ones((1, 3, 32, 32), np.float32), 0)):
        save_file({"pixel_values": pixels}, given)
        answer = nxpipe("run", *small(model), "--input", str(given))
        is_a_sentence(answer)
        assert answer.code == code, answer.err
        assert code == 0 or "beyond the range of float16" in answer.err


def test_layers_beyond_the_thresholds_fail_a_verification(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the outputs say: here they are allowed to be anything."""
    from nxpipe.pipeline.verify.comparison import VariantResult

    model = write_model(tmp_path / "deep", {**LLAMA, "torch_dtype": "float32"})
    config = tmp_path / "nxpipe.toml"
    config.write_text('[project]\nname = "x"\n\n[verify]\nmin_cosine = 0.9999999\nmax_relative_error = 1e-9\n')
    monkeypatch.setattr(VariantResult, "faults", lambda *_: [])
    words = ("verify", *small(model), "--config", str(config))
    assert nxpipe(*words).code == 0
    answer = nxpipe(*words, "--layers")
    is_a_sentence(answer)
    assert answer.code == 12
    assert "layer model.embed_tokens " in answer.err or "layer model.layers.0 " in answer.err


def test_an_input_file_is_a_regular_one(nxpipe: InProcess, bert: Path) -> None:
    answer = nxpipe("run", *small(bert), "--input", "/dev/zero")
    is_a_sentence(answer)
    assert answer.code == 2
    assert "Not a regular file" in answer.err
