"""`nxpipe diff`: programs, graphs and weights of two artifacts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.weights import Elements
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Origin
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Cast, Unary
from nxpipe.pipeline.util.exit_codes import NOT_FOUND, OK
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish

__all__ = ["nxpipe"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "search"\n[store]\nurl = "file://store"\n')
    return tmp_path


@pytest.fixture
def store(here: Path) -> Store:
    return open_store(str(here / "store"))


def told(nxpipe: InProcess, *words: str) -> dict[str, Any]:
    answer = nxpipe("diff", *words, "--json")
    assert answer.code == OK.number, answer.err
    found = json.loads(answer.out)
    assert isinstance(found, dict)
    return found


def weights(**arrays: Array) -> dict[str, Elements]:
    return {
        name: Elements(name, str(array.dtype), array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, array in arrays.items()
    }


def layers(count: int, *, cast: bool) -> Graph:
    """A repeat of so many equal layers, each with a cast there and back if `cast`."""
    builder = GraphBuilder()
    first = value = builder.input("x", TensorType((4, 8), DType.FLOAT32))
    where = Origin("layers.0.mlp")
    if cast:
        narrow = builder.add(Cast(DType.BFLOAT16), value, origin=where)
        value = builder.add(Cast(DType.FLOAT32), narrow, origin=where)
    value = builder.add(Unary("exp"), value, origin=where)
    builder.repeat((0, 3 if cast else 1, count), {first: value}, {}, ())
    builder.output("y", value)
    return builder.build()


def test_an_artifact_does_not_differ_from_itself(nxpipe: InProcess, store: Store) -> None:
    name = name_of(publish(store, "one", {16: 1.0}, graph=layers(3, cast=False)))
    assert nxpipe("diff", name, name).out == "no difference\n"


def test_size_and_speed_are_those_of_the_same_program(nxpipe: InProcess, store: Store) -> None:
    one, other = publish(store, "one", {16: 1.0, 32: 2.0}), publish(store, "other", {32: 3.0, 64: 4.0})
    (program,) = told(nxpipe, name_of(one), name_of(other))["programs"]
    assert program == {
        "program": "forward-b1-s32",
        "tensor_parallel": 1,
        "predicted_ns": {"a": 2e6, "b": 3e6},
        "instructions": {"a": 103, "b": 105},
        "carried_out": {"a": 1000, "b": 1000},
        "code_bytes": {"a": 4096, "b": 4096},
        "same_graph": True,
        "graph": None,
    }
    page = nxpipe("diff", name_of(one), name_of(other)).out.splitlines()
    assert any(
        line.split() == ["forward-b1-s32", "this", "program", "2.000", "ms", "3.000", "ms", "+50.0%"] for line in page
    )
    assert not any("code" in line for line in page)


def test_nodes_of_a_repeat_count_as_often_as_they_run(nxpipe: InProcess, store: Store) -> None:
    plain, cast = (
        publish(store, note, {16: 1.0}, graph=graph)
        for note, graph in (("plain", layers(3, cast=False)), ("cast", layers(4, cast=True)))
    )
    (program,) = told(nxpipe, name_of(plain), name_of(cast))["programs"]
    assert not program["same_graph"]
    assert program["graph"] == {
        "nodes": {"a": 3, "b": 12},
        "constants": {"a": 0, "b": 0},
        "operators": {"cast": {"a": 0, "b": 8}, "exp": {"a": 3, "b": 4}},
        "added": {
            "cast bf16[4,8] at layers.0.mlp": 4,
            "cast f32[4,8] at layers.0.mlp": 4,
            "exp f32[4,8] at layers.0.mlp": 1,
        },
        "removed": {},
    }
    (back,) = told(nxpipe, name_of(cast), name_of(plain))["programs"]
    assert (back["graph"]["added"], back["graph"]["removed"]) == ({}, program["graph"]["added"])
    assert "+ 4 x cast bf16[4,8] at layers.0.mlp" in nxpipe("diff", name_of(plain), name_of(cast)).out.splitlines()


def test_by_how_much_each_tensor_changed_is_read_from_both(nxpipe: InProcess, store: Store) -> None:
    def values(*numbers: float) -> Array:
        return np.array(numbers, np.float32)

    large = np.arange(2_000_000, dtype=np.float32)
    same = values(1, 2)
    before = {"same": same, "moved": values(1, -4), "zero": values(0, 0), "wider": values(1), "wild": values(1, 2)}
    after = {"same": same, "moved": values(1.5, -3), "zero": values(0, 1), "wider": values(1, 2)}
    after |= {"wild": values(1, np.inf), "new": values(1), "large": large + (np.arange(len(large)) == len(large) - 1)}
    one = publish(store, "one", {16: 1.0}, weights=weights(**before, large=large, gone=same))
    other = publish(store, "other", {16: 1.0}, weights=weights(**after))
    names = (name_of(one), name_of(other))
    found = told(nxpipe, *names, "--tensors")
    assert {tensor["name"]: tensor["largest"] or tensor["why"] for tensor in found["tensors"]} == {
        "moved": 0.25,
        "zero": "all elements were 0",
        "wider": "float32[1] became float32[2]",
        "wild": "some elements are not finite",
        "large": 1 / (len(large) - 1),
    }
    assert [part["name"] for part in found["weights"]["added"]] == ["new"]
    assert [part["name"] for part in found["weights"]["removed"]] == ["gone"]
    assert found["weights"]["same"] == 1
    assert "tensors" not in told(nxpipe, *names)
    assert ["moved", "0.25"] in [line.split() for line in nxpipe("diff", *names, "--tensors").out.splitlines()]


def test_a_channel_stands_for_what_it_serves_of_the_same_model_and_target(nxpipe: InProcess, store: Store) -> None:
    served = [
        publish(store, "bert", {16: 1.0}),
        publish(store, "llama", {16: 1.0}, model="acme/llama"),
        publish(store, "bert", {16: 1.0}, target="trn2"),
    ]
    assert nxpipe("promote", *map(name_of, served), "--channel", "production").code == OK.number
    assert nxpipe("promote", name_of(served[1]), "--channel", "staging").code == OK.number
    new = publish(store, "new", {16: 2.0})
    (program,) = told(nxpipe, "production", name_of(new))["programs"]
    assert program["predicted_ns"] == {"a": 1e6, "b": 2e6}
    assert nxpipe("diff", "production", "staging").out == "no difference\n"
    ambiguous = nxpipe("diff", "production", "production")
    assert ambiguous.code == NOT_FOUND.number
    assert "acme/llama for inf2, acme/tiny-bert for inf2, acme/tiny-bert for trn2; name an artifact" in ambiguous.err
    apart = nxpipe("diff", "staging", name_of(new))
    assert apart.code == NOT_FOUND.number
    assert "nothing of one model and target" in apart.err


def test_the_old_name_is_the_same_command(nxpipe: InProcess, store: Store) -> None:
    names = [name_of(publish(store, note, {16: 1.0})) for note in ("one", "other")]
    assert nxpipe("store", "diff", *names, "--json").out == nxpipe("diff", *names, "--json").out
