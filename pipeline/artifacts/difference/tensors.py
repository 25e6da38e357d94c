"""How far the tensors of two artifacts are from each other, read one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.weights import read_weights

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest, Tensor

_AT_ONCE: Final = 1 << 20  # elements that are compared together


@dataclass(frozen=True)
class TensorChange:
    """`largest` is the largest difference of two elements by the largest element before; `why` there is none."""

    name: str
    largest: float | None
    why: str = ""

    def document(self) -> dict[str, object]:
        return asdict(self)


def tensor_changes(
    before: "Manifest", after: "Manifest", names: Sequence[str], store: "Store"
) -> Iterator[TensorChange]:
    """Of tensors that both have; one of each side is in memory at a time, and the packs of small ones."""
    known = [{tensor.name: tensor for tensor in side.weights} for side in (before, after)]
    reading = (read_weights(store.blobs, [tensors[name] for name in names]) for tensors in known)
    for (old, old_bytes), (new, new_bytes) in zip(*reading, strict=True):
        if old.shape != new.shape or not {old.dtype, new.dtype} <= _known_types():
            yield TensorChange(new.name, None, f"{_type(old)} became {_type(new)}")
        else:
            yield _change(new.name, _elements(old, old_bytes), _elements(new, new_bytes))


def _change(name: str, old: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]") -> TensorChange:
    import numpy as np

    size = distance = 0.0
    for start in range(0, len(old), _AT_ONCE):
        one, other = (side[start : start + _AT_ONCE].astype(np.float64) for side in (old, new))
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return TensorChange(name, None, "some elements are not finite")
        size, distance = max(size, float(abs(one).max())), max(distance, float(abs(other - one).max()))
    if not size:
        return TensorChange(name, None, "all elements were 0")
    return TensorChange(name, distance / size)


def _elements(tensor: "Tensor", data: bytes | memoryview) -> "np.ndarray[Any, Any]":
    import numpy as np

    from nxpipe.emulator.ir.types import DType

    return np.frombuffer(data, DType(tensor.dtype).stored)


def _known_types() -> set[str]:
    from nxpipe.emulator.ir.types import DType

    return {str(dtype) for dtype in DType}


def _type(tensor: "Tensor") -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
