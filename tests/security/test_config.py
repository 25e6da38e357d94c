"""Hostile configurations: config.json (A01 to A40) and nxpipe.toml (C52, C61, C62)."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import transformers
from transformers.integrations import hub_kernels

from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.capture import budget as budget_module
from nxpipe.emulator.configuration import oversized, relevant
from nxpipe.emulator.errors import CaptureError
from nxpipe.pipeline import models
from nxpipe.pipeline.models.source import PretrainedModel
from tests.pipeline.command import Answer
from tests.pipeline.command import nxpipe as process
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.audit import watched

__all__ = ["nxpipe"]

BERT: Final[dict[str, Any]] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Hostile:
    content: dict[str, Any] | bytes
    code: int
    says: str = ""


def bert(**changes: Any) -> dict[str, Any]:
    return {**BERT, **changes}


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


WHOLE: Final = "it must be a whole number of at least 1"
CONFIGS: Final = {
    "A01": Hostile(bert(hidden_size=10**12), 10, "at most 16,777,216 elements of a row"),
    "A02": Hostile(bert(hidden_size=-5), 10, WHOLE),
    "A03": Hostile(bert(hidden_size=0), 10, WHOLE),
    "A04": Hostile(bert(hidden_size=float("nan")), 10, WHOLE),
    "A05": Hostile(bert(layer_norm_eps=float("inf")), 0),
    "A06": Hostile(bert(num_hidden_layers=10**9), 10, "num_hidden_layers is 1,000,000,000, and at most 512 layers"),
    "A07": Hostile(bert(num_hidden_layers=20_000), 10, "num_hidden_layers is 20,000, and at most 512 layers"),
    "A08": Hostile(bert(vocab_size=10**15), 10, "rows of a table"),
    "A09": Hostile(bert(hidden_size="32"), 10, WHOLE),
    "A10": Hostile(bert(hidden_size=2**63), 10, "at most 16,777,216 elements of a row"),
    "A11": Hostile(b'{"model_type": "bert", "hidden_size": ' + b"9" * 5000 + b"}", 10, "more than 4,300 digits"),
    "A12": Hostile(b'{"model_type": "bert", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 10, "nested deeper than"),
    "A13": Hostile(
        b'{"model_type": "bert", "x": ' + b"[" * 900 + b"]" * 900 + b"}", 10, "nested deeper than the limit"
    ),
    "A14": Hostile(bert(note="x" * ((4 << 20) - 400)), 0),
    "A15": Hostile(bert(note="x" * (4 << 20)), 10, "more than 4,194,304 bytes"),
    "A16": Hostile(bert(auto_map={"AutoModel": "evil.Evil"}, trust_remote_code=True), 0, "never runs"),
    "A17": Hostile(bert(dtype="load"), 11, "dtype 'load' is unknown"),
    "A18": Hostile(bert(torch_dtype="__builtins__"), 11, "dtype '__builtins__' is unknown"),
    "A19": Hostile(bert(hidden_act="eval"), 11, "eval"),
    "A20": Hostile(bert(attn_implementation="evil/kernel"), 0),
    "A21": Hostile(bert(attn_implementation="kernels-community/x@0123abcd:f"), 0),
    "A22": Hostile(bert(model_type="../../x"), 11, "is unknown to transformers"),
    "A23": Hostile(bert(model_type="\x1b[31mbert"), 11, "is unknown to transformers"),
    "A24": Hostile(bert(architectures=["\x1b[31mBertForMaskedLM"]), 0),
    "A25": Hostile(bert(id2label={str(n): f"L{n}" for n in range(100_000)}), 0),
    "A26": Hostile(bert(num_labels=10**8), 10, "num_labels is 100,000,000, and at most 1,000,000 labels"),
    "A27": Hostile(b"[]", 10, 'no "model_type"'),
    "A28": Hostile(b"", 10, "not valid JSON"),
    "A29": Hostile(json.dumps(BERT).encode("utf-16"), 0),
    "A33": Hostile(bert(cls="x", self="y", name_or_path="z"), 11, "cannot be built|rejects this|multiple values"),
    "A34": Hostile(bert(__class__="x", _name_or_path="/etc"), 0),
    "A35": Hostile(bert(quantization_config={"quant_method": "evil"}), 10, "quantised"),
    "A36": Hostile(bert(max_position_embeddings=10**12), 10, "at most 16,777,216 positions"),
    "A37": Hostile(
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "relative_attention_num_buckets": 10**18},
        10,
        "rows of a table",
    ),
    "A38": Hostile(llama(rope_theta=0.0), 0),
    "A39": Hostile(llama(rope_scaling={"rope_type": "yarn", "factor": 1e300}), 0),
    "A40": Hostile(llama(head_dim=10**12), 10, "at most 16,777,216 elements of a row"),
    # Siblings: the same numbers in parts and lists, under names that say nothing of layers, and in loops of buffers.
    "layers in a part": Hostile(bert(text_config={"num_hidden_layers": 10**9}), 10, "text_config.num_hidden_layers"),
    "layers in lists": Hostile(
        {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 10**9]]},
        10,
        "attention_types[0][1] is 1,000,000,000",
    ),
    "a part by its id": Hostile({"model_type": "dpt", "backbone": "evil/x"}, 10, "is never fetched"),
    "a part by its name": Hostile(
        {"model_type": "dpt", "architectures": ["DPTForDepthEstimation"], "backbone": "evil"},
        11,
        "which is never fetched",
    ),
    "a table of sines": Hostile(
        {
            "model_type": "marian",
            "architectures": ["MarianMTModel"],
            "max_position_embeddings": 1 << 24,
            "d_model": 1024,
        },
        11,
        "table of sines",
    ),
    "quantised in a part": Hostile(bert(text_config={"quantization_config": {"bits": 4}}), 10, "quantised"),
}


def written(folder: Path, content: dict[str, Any] | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "config.json").write_bytes(data)
    return folder


def checked(nxpipe: InProcess, folder: Path) -> Answer:
    return nxpipe("check", "--model-id", str(folder), "--target", "inf2.xlarge", "--buckets", "16")


def is_a_sentence(answer: Answer) -> None:
    assert "Traceback" not in answer.err + answer.out
    assert "internal error" not in answer.err + answer.out


@pytest.fixture(autouse=True)
def no_kernel_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise AssertionError(f"a kernel was asked for: {arguments}")

    monkeypatch.setattr(hub_kernels, "get_kernel", refused)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.attempt(name)) for name in CONFIGS if name.startswith("A")]
)
def test_a_hostile_configuration_is_checked_or_refused_in_a_sentence(
    name: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    holds(CONFIGS[name], nxpipe, tmp_path)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("A")])
def test_so_are_its_siblings(name: str, nxpipe: InProcess, tmp_path: Path) -> None:
    holds(CONFIGS[name], nxpipe, tmp_path)


def holds(hostile: Hostile, nxpipe: InProcess, tmp_path: Path) -> None:
    folder = written(tmp_path / "m", hostile.content)
    with watched() as seen:
        answer = checked(nxpipe, folder)
    is_a_sentence(answer)
    assert answer.code == hostile.code, answer.out + answer.err
    words = hostile.says.split("|")
    assert any(word in answer.out for word in words), answer.out
    assert [name for event, name in seen.forbidden if event not in LOADING] == []


# Libraries that are imported for the first time load what they are written in.
LOADING: Final = {"ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "subprocess.Popen", "os.posix_spawn"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda path: os.mkfifo(path), "config.json", marks=pytest.mark.attempt("A30")),
        pytest.param(lambda path: path.symlink_to("/etc/passwd"), "not valid JSON", marks=pytest.mark.attempt("A31")),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "config.json", marks=pytest.mark.attempt("A32")),
    ],
)
def test_only_a_regular_file_is_a_configuration(
    make: Callable[[Path], None], says: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    make(tmp_path / "m" / "config.json")
    answer = checked(nxpipe, tmp_path / "m")
    is_a_sentence(answer)
    assert answer.code == 10
    assert says in answer.out
    assert "root:" not in answer.out + answer.err


CHOOSING: Final = {
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "_attn_implementation_internal": "evil/kernel",
    "experts_implementation": "evil/kernel",
    "use_kernels": True,
    "kernel_config": {"x": "evil/kernel"},
    "auto_map": {"AutoModel": "evil--x.Evil"},
    "trust_remote_code": True,
    "name_or_path": "evil/x",
    "tokenizer_class": "Evil",
    "attribute_map": {"hidden_size": "vocab_size"},
    "dtype": "load",
}


@pytest.mark.attempt("A20", "A21")
def test_what_chooses_code_is_neither_read_nor_part_of_a_key_at_any_depth() -> None:
    plain = {"model_type": "clip", "text_config": {"vocab_size": 97, "hidden_size": 32}}
    noted = {**plain, **CHOOSING, "text_config": {**CHOOSING, **plain["text_config"], "x": [CHOOSING]}}  # type: ignore[dict-item]
    left = relevant(noted)
    assert left.pop("dtype") == "load"  # that of the whole is a request's own, which has three of them
    assert left == {**plain, "text_config": {**plain["text_config"], "x": [{}]}}  # type: ignore[dict-item]
    keys = [PretrainedModel("m", None, config, "fill-mask", None).relevant_config() for config in (plain, noted)]
    keys[1].pop("dtype")
    keys[1]["text_config"].pop("x")  # type: ignore[attr-defined]
    assert keys[0] == keys[1]


@pytest.mark.attempt("A20", "A21")
def test_the_graph_is_that_of_the_plain_configuration() -> None:
    graphs = [
        capture(CaptureRequest(config, "fill-mask", "forward", 1, 8, "float32"))
        for config in (BERT, {**BERT, **CHOOSING})
    ]
    assert graphs[0].key == graphs[1].key


@pytest.mark.slow
@pytest.mark.parametrize("value", ["evil/kernel", "kernels-community/x@0123abcd:f"])
def test_an_installed_package_of_kernels_is_asked_for_nothing(value: str, tmp_path: Path) -> None:
    stub, folder = tmp_path / "stub", written(tmp_path / "m", bert(attn_implementation=value))
    (stub / "kernels").mkdir(parents=True)
    (stub / "kernels-0.18.2.dist-info").mkdir()
    (stub / "kernels-0.18.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )
    marker = tmp_path / "asked"
    (stub / "kernels" / "__init__.py").write_text(
        f"def __getattr__(name):\n    def asked(*a, **k):\n        open({str(marker)!r}, 'a').write(name)\n"
        "        return lambda x: x\n    return asked if not name.startswith('__') else None\n"
    )
    words = ("check", "--model-id", str(folder), "--target", "inf2.xlarge", "--buckets", "16")
    answer = process(*words, cwd=tmp_path, PYTHONPATH=str(stub))
    assert answer.code == 0, answer.out + answer.err
    assert "get_kernel" not in (marker.read_text() if marker.exists() else "")


def test_no_model_that_is_known_is_beyond_the_limits() -> None:
    known = json.loads((Path(models.__file__).parent / "known_models.json").read_text())
    assert len(known) > 50
    assert {name: [str(entry) for entry in oversized(model["config"])] for name, model in known.items()} == {
        name: [] for name in known
    }


def test_the_largest_models_that_were_published_are_within_the_limits() -> None:
    published = (
        {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256},
        {"num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8, "vocab_size": 163840},
        {"max_position_embeddings": 10_485_760, "attention_chunk_size": 8192, "num_local_experts": 128},
        {"vocab_size": 262_144, "head_dim": 256, "sliding_window": 4096, "rope_theta": 1_000_000.0},
        {"num_labels": 21_843, "depths": [2, 2, 27, 2], "image_size": 1024, "num_queries": 900},
        {"query_pre_attn_scalar": 256, "pad_token_id": -1, "eos_token_id": [1, 106], "seed": 2**40},
    )
    assert [str(entry) for config in published for entry in oversized({"model_type": "x", "text_config": config})] == []


def test_the_default_of_every_model_type_is_within_the_limits() -> None:
    def defaults() -> Iterator[tuple[str, dict[str, Any]]]:
        for name in ("bert", "llama", "gpt2", "t5", "whisper", "mixtral", "deepseek_v3", "swin", "clip", "gemma2"):
            yield name, transformers.CONFIG_MAPPING[name]().to_dict()

    assert {
        name: [str(entry) for entry in oversized(config)] for name, config in defaults() if list(oversized(config))
    } == {}


def test_modules_are_counted_whatever_the_settings_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "_MOST_MODULES", 50)
    with pytest.raises(CaptureError, match="more than 50 modules and parameters"):
        capture(CaptureRequest(BERT, "fill-mask", "forward", 1, 8, "float32"))


def test_buffers_are_added_up_before_they_have_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "_MOST_BUFFER_BYTES", 100)
    with pytest.raises(CaptureError, match=r"buffers of BertForMaskedLM take [0-9,]+ bytes, .* at most 100"):
        capture(CaptureRequest(BERT, "fill-mask", "forward", 1, 8, "float32"))


@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        (ImportError("needs timm"), False),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (ValueError("heads do not divide the width"), True),
    ],
)
@pytest.mark.attempt("A20")
def test_an_answer_that_hangs_on_this_machine_is_not_kept(
    fault: Exception, kept: bool, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nxpipe.emulator.capture import model

    def failing(*arguments: object) -> None:
        raise fault

    folder = written(tmp_path / "m", BERT)
    with monkeypatch.context() as patched:
        patched.setattr(model, "_own_configuration", failing)
        patched.setattr(
            "nxpipe.emulator.capture.dispatch.active_limits", lambda: None
        )  # in this process, where that is seen
        assert checked(nxpipe, folder).code == 11
    assert checked(nxpipe, folder).code == (11 if kept else 0)


# nxpipe.toml

PROJECT: Final = '[project]\nname = "search"\n'


@pytest.mark.attempt("C52")
@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 100_000) + " = 1\n",
        "[" + ".".join(["a"] * 100_000) + "]\n",
        "x = { " + " . ".join(['"a"'] * 100_000) + " = 1 }\n",
        "x = " + "[" * 5000 + "]" * 5000,
    ],
)
def test_a_toml_bomb_is_refused_before_it_is_read(text: str, nxpipe: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "nxpipe.toml"
    path.write_text(PROJECT + text)
    answer = nxpipe("config", "check", "--config", str(path))
    is_a_sentence(answer)
    assert answer.code == 3
    assert "dotted key of more than 32 parts" in answer.err or "nested deeper than the limit" in answer.err


@pytest.mark.attempt("C61")
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_no_configuration(
    kind: str, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "fifo"
    if kind == "fifo":
        os.mkfifo(path)
    monkeypatch.setenv("NXPIPE_CONFIG", str(path))
    answer = nxpipe("config", "check")
    is_a_sentence(answer)
    assert answer.code == 3
    assert "Not a regular file" in answer.err


SECRETS: Final = {
    "shadow": "root:$6$s3cret:20228:0:99999:7:::\n",
    "environment": "AWS_SECRET_ACCESS_KEY=s3cret/abc\n",
    "credentials": "[default]\naws_secret_access_key = s3cret\n",
    "netrc": "machine example.com login me password s3cret\n",
    "key": "-----BEGIN PRIVATE KEY-----\ns3cret\n",
    "json": '{"token": "s3cret"}\n',
}


@pytest.mark.attempt("C62")
@pytest.mark.parametrize("name", SECRETS)
def test_no_line_of_a_file_that_is_no_configuration_is_told(name: str, nxpipe: InProcess, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SECRETS[name])
    link = tmp_path / "nxpipe.toml"
    link.symlink_to(tmp_path / name)
    answer = nxpipe("config", "check", "--config", str(link))
    assert answer.code == 3
    assert "s3cret" not in answer.out + answer.err


def test_the_line_at_fault_of_a_configuration_is_told(nxpipe: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "nxpipe.toml"
    path.write_text("[project]\nname = search\n")
    answer = nxpipe("config", "check", "--config", str(path))
    assert answer.code == 3
    assert "name = search" in answer.err
