"""One key, one artifact: the same manifest for a request key, on whichever processor and with however many threads it
is built. What was found out about it may differ, and lies beside it.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.artifact_store import open_store
from tests.pipeline.command import nxpipe
from tests.pipeline.conftest import BERT, LLAMA, write_model

# Rotary frequencies as PyTorch's kernels without AVX2 compute them have another last bit; so have its sines in numpy's.
GEMMA: Final = LLAMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: Final = {"bert": BERT | {"num_hidden_layers": 1}, "gemma": GEMMA}
MODEL: Final = """
[[models]]
name = "{name}"
path = "models/{name}"
task = "{task}"
target = "inf2.xlarge"
buckets = [64]
phases = {phases}
weights = "random:0"
"""

_NO_VECTORS: Final = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"}
SURROUNDINGS: Final[dict[str, dict[str, str]]] = {
    "as it is": {},
    "one thread": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    "two threads": {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
    "BLAS of Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "BLAS of SkylakeX": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "BLAS of Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    "BLAS of Zen": {"OPENBLAS_CORETYPE": "Zen"},
    "numpy without vectors": _NO_VECTORS,
    "PyTorch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "nothing of all that": {
        **_NO_VECTORS,
        "ATEN_CPU_CAPABILITY": "default",
        "OPENBLAS_CORETYPE": "Prescott",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    },
}


def built(folder: Path, *words: str, **surroundings: str) -> tuple[dict[str, str], set[str]]:
    """The manifest of each key, and the names of all evidence."""
    for name, config in MODELS.items():
        write_model(folder / "models" / name, config)
    document = {"bert": ("feature-extraction", '["forward"]'), "gemma": ("text-generation", '["prefill", "decode"]')}
    tables = (MODEL.format(name=name, task=task, phases=phases) for name, (task, phases) in document.items())
    project = '[project]\nname = "demo"\nregion = "us-east-2"\n[store]\nurl = "file://store"\n'
    (folder / "nxpipe.toml").write_text(project + "".join(tables))
    done = nxpipe("build", *words, cwd=folder, **surroundings)
    assert done.code == 0, done.err
    store = open_store(str(folder / "store"))
    published = store.list()
    found = {item.digest for entry in published for item in store.evidence(entry.manifest_digest)}
    return {entry.request_key: entry.manifest_digest for entry in published}, found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], set[str]]:
    return built(tmp_path_factory.mktemp("usual"), "--jobs", "1")


@pytest.mark.slow
def test_no_surroundings_change_an_artifact(usual: tuple[dict[str, str], set[str]], tmp_path: Path) -> None:
    manifests, evidence = built(tmp_path, "--jobs", "2", **SURROUNDINGS["nothing of all that"])
    assert manifests == usual[0]
    assert len(manifests) == len(MODELS) == len(evidence)
    assert evidence.isdisjoint(usual[1])  # the surroundings themselves are in it


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_thirty_builds_in_ten_surroundings_make_one_artifact_a_key(
    usual: tuple[dict[str, str], set[str]], surroundings: str, tmp_path: Path
) -> None:
    """Three builds in each: in an empty store, all anew in the same store, and by two processes."""
    environment: dict[str, Any] = SURROUNDINGS[surroundings]
    assert built(tmp_path / "one", **environment)[0] == usual[0]
    again = nxpipe("build", "--force", "--jobs", "1", cwd=tmp_path / "one", **environment)
    assert again.code == 0, again.err
    assert built(tmp_path / "two", "--jobs", "2", "--no-verify", **environment)[0] == usual[0]
