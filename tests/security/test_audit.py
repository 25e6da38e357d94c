"""The audit itself sees what it is to see: a fuzzer that finds nothing must not be one that looks at nothing."""

import ctypes
import importlib
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

from tests.security.audit import watched


def test_an_import_is_seen() -> None:
    sys.modules.pop("colorsys", None)
    with watched() as seen:
        importlib.import_module("colorsys")
    assert seen.imports_beyond("encodings") == {"colorsys"}


def test_a_program_is_seen() -> None:
    with watched() as seen:
        subprocess.run(["true"], check=True)
    assert any(event == "subprocess.Popen" for event, _ in seen.forbidden)


def test_native_code_is_seen() -> None:
    with watched() as seen:
        ctypes.CDLL(None)
    assert any(event == "ctypes.dlopen" for event, _ in seen.forbidden)


def test_a_class_that_a_pickle_names_is_seen() -> None:
    data = pickle.dumps(OrderedDict)
    with watched() as seen:
        pickle.loads(data)
    assert any(event == "pickle.find_class" for event, _ in seen.forbidden)


def test_a_file_elsewhere_is_seen(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_text("x")
    (inside / "file").write_text("x")
    with watched() as seen:
        outside.read_text()
        (inside / "file").read_text()
    assert seen.files_outside(inside) == {outside}
