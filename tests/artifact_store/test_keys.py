"""A cache key is a function of its inputs: on every Python, in every process, for every path of the checkout."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.errors import InvalidDocument
from tests.conftest import ROOT

# In the order in which Python reads them; the key must not know it.
INPUTS: Final = {
    "zeta": [1, 2.5, -0.0, 1e-06, 1e16, 5e-324, 1.7976931348623157e308, 2**53 - 1, True, None],
    "alpha": {"b": 'caf\u00e9 \u0007 \U0001f600 "\\ /', "a": {}, "": [], "\ue000": 1, "\U00010000": 2},
    "options": {"autocast": "matmult", "tensor_parallel": 2, "shapes": [["forward", 1, 32], ["forward", 1, 64]]},
}
# canonical.py, digest.py and errors.py are the standard library's: any Python that parses them runs them.
PROGRAM: Final = """
import importlib.util, json, sys, types
for name, folders in (("nxpipe", []), ("nxpipe.artifact_store", [sys.argv[1]])):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = folders
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.canonical import sha256_hex
print(sha256_hex(canonical_json(json.loads(sys.stdin.read()))))
"""
OLDEST: Final = (3, 10)  # the first that has `match`


@cache
def pythons() -> tuple[str, ...]:
    """Every Python on the PATH and of pyenv that can run nxpipe's formats. Each is started once to ask its version."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 20)]
    found = [path for name in names if (path := shutil.which(name))]
    versions = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser()) / "versions"
    found += [str(path) for path in sorted(versions.glob("*/bin/python3"))]
    return tuple(dict.fromkeys([sys.executable, *filter(_is_new_enough, found)]))


def _is_new_enough(python: str) -> bool:
    code = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def key_in(python: str, text: str, **environment: str) -> str:
    ran = subprocess.run(
        [python, "-I" if not environment else "-B", "-c", PROGRAM, str(ROOT / "artifact_store")],
        input=text,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return ran.stdout.strip()


def backwards(value: object) -> object:
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(item) for item in value] if isinstance(value, list) else value


def test_every_python_of_this_machine_gives_the_same_key() -> None:
    keys = {python: key_in(python, json.dumps(INPUTS)) for python in pythons()}
    assert keys == dict.fromkeys(pythons(), sha256_hex(canonical_json(INPUTS)))


def test_the_order_of_a_dictionary_never_flips_the_key() -> None:
    assert key_in(sys.executable, json.dumps(backwards(INPUTS))) == sha256_hex(canonical_json(INPUTS))


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "4294967295"},
        {"TZ": "Asia/Kathmandu"},
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        {"USER": "somebody", "LOGNAME": "somebody", "HOSTNAME": "elsewhere", "HOME": "/nonexistent"},
        {"PYTHONOPTIMIZE": "2"},
    ],
    ids=lambda environment: " ".join(environment),
)
def test_an_environment_never_flips_the_key(environment: dict[str, str]) -> None:
    assert key_in(sys.executable, json.dumps(INPUTS), **environment) == sha256_hex(canonical_json(INPUTS))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def spelled(value: object) -> str:
    """A representation that distinguishes 1, 1.0 and true, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{spelled(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return f"{type(value).__name__} {value!r}"


def canonical(value: object) -> bytes | None:
    """None for values without a key, such as a lone surrogate or an infinity."""
    try:
        return canonical_json(value)
    except InvalidDocument:
        return None


@given(one=JSON, other=JSON)
def test_different_inputs_have_different_keys_and_equal_ones_the_same(one: object, other: object) -> None:
    first, second = canonical(one), canonical(other)
    if first is not None and second is not None:
        assert (first == second) == (spelled(one) == spelled(other))


@given(value=JSON)
def test_a_key_survives_being_written_and_read(value: object) -> None:
    data = canonical(value)
    if data is not None:
        assert canonical_json(json.loads(data)) == data
        assert canonical_json(backwards(json.loads(data))) == data
