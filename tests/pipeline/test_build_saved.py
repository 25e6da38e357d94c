"""Saved programs are captured, emulated, verified, published and found again like models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from nxpipe.artifact_store import open_store
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.saved_programs import write_onnx, write_pt2

__all__ = ["nxpipe"]


def built(nxpipe: InProcess, file: Path, *more: str, code: int = 0) -> dict[str, Any]:
    answer = nxpipe(
        "build", "--model-id", str(file), "--store", str(file.parent / "store"), "--json", "-q", "--tp", "1", *more
    )
    assert answer.code == code, answer.err
    (only,) = json.loads(answer.out)
    assert isinstance(only, dict)
    return only


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("write", "name", "more", "yardstick"),
    [
        (write_pt2, "m.pt2", (), "PyTorch, as saved"),
        (write_onnx, "m.onnx", ("--axis", "batch=2"), "ONNX's reference evaluator"),
    ],
    ids=["pt2", "onnx"],
)
def test_a_saved_program_is_built_against_its_own_yardstick_and_found_again(
    write: Any, name: str, more: tuple[str, ...], yardstick: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    file = write(tmp_path / name)
    first = built(nxpipe, file, *more)
    assert (first["cache"], first["model"], first["programs"]) == ("miss", name, ["program"])
    assert [row["yardstick"] for row in first["verification"]["program"]] == [yardstick]
    cells = first.pop("cells")
    assert [(cell["program"], cell["fate"]) for cell in cells] == [("program", "built")]
    assert built(nxpipe, file, *more).items() >= (first | {"cache": "hit"}).items()
    store = str(tmp_path / "store")
    (evidence,) = open_store(store).evidence(open_store(store).resolve(name).manifest_digest)
    (answer,) = load(open_store(store).read_blob(evidence.programs[0].answers)).values()
    assert np.isfinite(answer).all()
    assert answer.any()
    again = nxpipe("verify", name, "--store", store, "--json", "-q")
    assert again.code == 0, again.err
    (replayed,) = json.loads(again.out)
    assert replayed["yardstick"] == "the stored outputs"


@pytest.mark.sample(2)
def test_what_is_in_the_file_and_beside_it_is_the_key_and_its_name_is_not(nxpipe: InProcess, tmp_path: Path) -> None:
    file, axis = write_onnx(tmp_path / "m.onnx", data="m.bin"), ("--axis", "batch=2")
    first = built(nxpipe, file, *axis)
    renamed = file.rename(tmp_path / "n.onnx")
    assert built(nxpipe, renamed, *axis)["request_key"] == first["request_key"]
    assert built(nxpipe, renamed, "--axis", "batch=3")["request_key"] != first["request_key"]
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.bin").write_bytes(data)
    assert built(nxpipe, renamed, *axis)["request_key"] != first["request_key"]


@pytest.mark.sample(2)
def test_a_saved_program_for_several_ranks_keeps_its_weights_whole(nxpipe: InProcess, tmp_path: Path) -> None:
    file, axis = write_onnx(tmp_path / "m.onnx"), ("--axis", "batch=2")
    keys = [str(built(nxpipe, file, *axis, "--tp", degree)["request_key"]) for degree in ("1", "2")]
    one, two = (open_store(str(tmp_path / "store")).resolve(key).manifest for key in keys)
    assert one.weights == two.weights
    assert [program.tensor_parallel for program in two.executables] == [2]


def _missing(folder: Path) -> None:
    (folder / "m.bin").unlink()


def _cut(folder: Path) -> None:
    (folder / "m.bin").write_bytes((folder / "m.bin").read_bytes()[:-1])


def _elsewhere(folder: Path) -> None:
    (folder / "m.bin").rename(folder.parent / "m.bin")
    (folder / "m.bin").symlink_to(folder.parent / "m.bin")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_missing, "weights in m.bin cannot be read (No such file or directory)"),
        (_cut, "weights in m.bin end at byte 12,287, but the model needs 12,288"),
        (_elsewhere, "is behind a symlink, which is never followed"),
    ],
)
@pytest.mark.parametrize("command", ["build", "verify", "check"])
def test_weights_beside_an_onnx_file_that_are_not_whole_are_said_before_any_work(
    command: str, spoil: Any, sentence: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    file = write_onnx(tmp_path / "models" / "m.onnx", data="m.bin")
    spoil(file.parent)
    store = ("--store", str(tmp_path / "store")) if command == "build" else ()
    answer = nxpipe(command, "--model-id", str(file), "--axis", "batch=2", *store)
    assert answer.code == 10, answer.err
    assert sentence in answer.out + answer.err


def test_words_that_say_nothing_about_a_file_are_refused(nxpipe: InProcess, tmp_path: Path) -> None:
    file = write_pt2(tmp_path / "m.pt2")
    answer = nxpipe("build", "--model-id", str(file), "--weights", "random:0")
    assert (answer.code, answer.out) == (2, "")
    assert "--weights does not apply to m.pt2" in answer.err
    missing = nxpipe("build", "--model-id", str(tmp_path / "x.pt2"), "--store", str(tmp_path / "store"))
    assert missing.code == 10
    assert "No such file" in missing.err
