"""Interfaces of device programs: what is written is read, and a damaged document is one clear error."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.errors import InterfaceInvalid
from nxpipe.emulator.executable.interface import RANK, Argument, Interface, Result, interface_from
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.ops import Cast, RankSlice

_STATE = TensorType((2, 4), DType.BFLOAT16)
_WHOLE, _OWN = TensorType((7, 3), DType.FLOAT32), TensorType((4, 3), DType.BFLOAT16)
_SLICE = RankSlice(0, 1, (7,), (1,), 2, (1,), (4,))


def sample() -> Interface:
    ids, rank = TensorType((2, 8), DType.INT64), TensorType((1,), DType.INT32)
    weight = Argument("w", Role.PARAMETER, _WHOLE, _OWN, (_SLICE, Cast(DType.BFLOAT16)))
    arguments = (
        Argument("ids", Role.INPUT, ids, ids),
        Argument("cache", Role.STATE, _STATE, _STATE, alias=1),
        weight,
        Argument(RANK, Role.INPUT, rank, rank),
    )
    return Interface(2, arguments, (Result("logits", TensorType((2, 5), DType.FLOAT32)), Result("cache", _STATE)))


def test_an_interface_is_read_as_it_was_written() -> None:
    assert interface_from(sample().to_bytes()) == sample()
    assert interface_from(sample().to_bytes()).to_bytes() == sample().to_bytes()


def test_a_weight_is_prepared_for_each_rank_with_padding() -> None:
    whole = np.arange(21, dtype=np.float32).reshape(7, 3)
    ids, cache, weight, rank = interface_from(sample().to_bytes()).arguments
    first, second = (weight.on_rank({"w": whole}, number).astype(np.float32) for number in range(2))
    np.testing.assert_array_equal(np.concatenate([first, second]), np.pad(whole, ((0, 1), (0, 0))))
    assert [int(rank.on_rank({}, number)[0]) for number in range(2)] == [0, 1]
    assert ids.on_rank({"ids": np.full((2, 8), 2**40)}, 0).max() == 2**31 - 1
    assert cache.alias == 1


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(sample().to_bytes())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="nxpipe.interface/2"),
        lambda d: d.update(degree=0),
        lambda d: d.update(degree="2"),
        lambda d: d.pop("results"),
        lambda d: d["arguments"].append(d["arguments"][0]),
        lambda d: d["arguments"][0].update(name=""),
        lambda d: d["arguments"][0].update(role="output"),
        lambda d: d["arguments"][0].update(alias=0),
        lambda d: d["arguments"][1].update(alias=0),
        lambda d: d["arguments"][1].update(alias=7),
        lambda d: d["arguments"][1].update(alias=None),
        lambda d: d["arguments"][2]["preparation"].pop(),
        lambda d: d["arguments"][2]["preparation"][0].update(cast={"dtype": "float32"}),
        lambda d: d["arguments"][2]["preparation"].append({"transpose": {"order": [1, 0]}}),
        lambda d: d["arguments"][2]["preparation"][0]["rank_slice"].update(axis=5),
        lambda d: d["arguments"][2]["preparation"][0]["rank_slice"].update(sizes=[2**70]),
        lambda d: d["arguments"][2]["type"].update(dtype="float128"),
        lambda d: d["arguments"][2]["type"].update(shape=[-4, 3]),
        lambda d: d["arguments"].insert(0, "ids"),
    ],
)
def test_a_damaged_interface_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(InterfaceInvalid, match=r"^the interface of the program is invalid .*; build it again$"):
        interface_from(_changed(change))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": 1}'])
def test_other_bytes_are_no_interface(data: bytes) -> None:
    with pytest.raises(InterfaceInvalid):
        interface_from(data)
