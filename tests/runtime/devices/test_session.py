"""The loader of devices: weights from a file, prepared for a rank and written once for each type; the rank's number."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.fetch.file_layout import weights_file
from nxpipe.artifact_store.manifest import Tensor
from nxpipe.emulator.executable.interface import RANK, Argument, Interface, Result
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array, round_to
from nxpipe.emulator.ops import Cast, RankSlice
from nxpipe.emulator.run.devices.protocol import TensorInfo
from nxpipe.emulator.run.devices.ranks import Rank
from nxpipe.emulator.run.devices.session import WeightsFile, load_model
from nxpipe.emulator.run.status import InvalidLoad

_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_WHOLE, _OWN = TensorType((7, 3), DType.FLOAT32), TensorType((4, 3), DType.BFLOAT16)
_NUMBER = TensorType((1,), DType.INT32)
_SLICE = RankSlice(0, 1, (7,), (1,), 2, (1,), (4,))
WEIGHT = Argument("w", Role.PARAMETER, _WHOLE, _OWN, (_SLICE, Cast(DType.BFLOAT16)))
EXACT = Argument("w", Role.PARAMETER, _WHOLE, TensorType((4, 3), DType.FLOAT32), (_SLICE,))


def program(*parameters: Argument, degree: int = 2) -> Interface:
    rank = Argument(RANK, Role.INPUT, _NUMBER, _NUMBER)
    return Interface(degree, (*parameters, rank), (Result("y", TensorType((2,), DType.FLOAT32)),))


@dataclass
class MemoryTensor:
    """A tensor in this process."""

    name: str
    core: int
    nbytes: int
    bytes: Array | None = None

    def write(self, array: Array) -> None:
        assert array.nbytes == self.nbytes
        self.bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

    def read(self) -> Array:
        assert self.bytes is not None, f"{self.name} was never written"
        return self.bytes


@dataclass
class LoadedInterface:
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]


@dataclass
class MemoryRuntime:
    """A device that loads programs and runs none; a program is its interface, by the stem of its file."""

    interfaces: Mapping[str, Interface]
    tensors: list[MemoryTensor] = field(default_factory=list)

    def load(self, path: Path, *, core: int, rank: int, world: int) -> Any:
        interface = self.interfaces[path.stem]
        return LoadedInterface(_infos(interface.arguments), _infos(interface.results))

    def allocate(self, nbytes: int, *, core: int = 0, name: str = "") -> MemoryTensor:
        self.tensors.append(MemoryTensor(name, core, nbytes))
        return self.tensors[-1]


def _infos(tensors: tuple[Any, ...]) -> dict[str, TensorInfo]:
    return {each.name: TensorInfo(each.name, each.type.nbytes) for each in tensors}


def loaded(interfaces: Mapping[str, Interface], weights: Mapping[str, Array], rank: int = 0) -> MemoryRuntime:
    runtime = MemoryRuntime(interfaces)
    files = {name: (Path(f"{name}.neff"), interface) for name, interface in interfaces.items()}
    load_model(Rank(rank, 2, 0, runtime, lambda _: None), files, weights)  # type: ignore[arg-type]
    return runtime


def written(runtime: MemoryRuntime, name: str) -> list[Array]:
    return [tensor.read() for tensor in runtime.tensors if tensor.name == name]


@given(st.data())
def test_tensors_of_a_file_are_those_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    saved = {
        name: np.frombuffer(data.draw(st.binary(min_size=8 * 64, max_size=8 * 64)), np.uint8)
        .view(data.draw(st.sampled_from(_DTYPES)) if data.draw(st.booleans()) else np.uint8)[: int(np.prod(shape))]
        .reshape(shape)
        for name, shape in data.draw(st.dictionaries(st.text("abc.", min_size=1), shapes, max_size=4)).items()
    }
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    path.write_bytes(save(saved))
    found = WeightsFile(path)
    assert found.keys() == saved.keys()
    for name, array in saved.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_types_that_the_format_lacks_are_read_from_its_metadata(tmp_path: Path) -> None:
    values = np.array([[240, 0.5, -2]], ml_dtypes.float8_e4m3)
    tensor = Tensor(name="w", dtype="float8_e4m3", shape=(1, 3), blob=Blob.of(values.tobytes()), pack=None)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(weights_file([tensor]).head + values.tobytes())
    found = WeightsFile(path)["w"]
    assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())


@pytest.mark.parametrize("cut", [0, 7, 40, -1])
def test_a_truncated_file_is_one_sentence(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"w": np.zeros((4, 4), np.float32)})[:cut])
    with pytest.raises(InvalidLoad, match=r"is no file of weights .*; fetch the artifact again"):
        WeightsFile(path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_piece_of_a_weight_and_its_number(rank: int) -> None:
    whole = np.arange(21, dtype=np.float32).reshape(7, 3)
    runtime = loaded({"forward": program(WEIGHT)}, {"w": whole}, rank)
    piece = np.pad(whole, ((0, 1), (0, 0)))[4 * rank : 4 * rank + 4]
    assert [own.tobytes() for own in written(runtime, "w")] == [piece.astype(ml_dtypes.bfloat16).tobytes()]
    assert [own.view(np.int32).tolist() for own in written(runtime, RANK)] == [[rank]]


def test_programs_share_a_weight_of_one_type_and_lose_no_digits_of_another() -> None:
    whole = np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3)
    interfaces = {"decode": program(EXACT), "prefill": program(WEIGHT), "verify": program(WEIGHT)}
    narrow, exact = sorted(written(loaded(interfaces, {"w": whole}), "w"), key=len)
    np.testing.assert_array_equal(exact.view(np.float32).reshape(4, 3), whole[:4])
    np.testing.assert_array_equal(
        narrow.view(ml_dtypes.bfloat16).reshape(4, 3).astype(np.float32), round_to(whole[:4], DType.BFLOAT16)
    )


@pytest.mark.parametrize(
    ("interfaces", "weights", "sentence"),
    [
        ({"forward": program(WEIGHT)}, {}, "the file of weights has no 'w'"),
        ({"forward": program(degree=1)}, {}, "forward is a program of 1 ranks, and 2 load it"),
        (
            {"a": program(EXACT), "b": program(replace(EXACT, whole=TensorType((7, 3), DType.TFLOAT32)))},
            {"w": np.zeros((7, 3), np.float32)},
            "two programs prepare 'w' differently",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    interfaces: Mapping[str, Interface], weights: Mapping[str, Array], sentence: str
) -> None:
    with pytest.raises(InvalidLoad, match=sentence):
        loaded(interfaces, weights)
