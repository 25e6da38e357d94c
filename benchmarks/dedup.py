"""The size of a model's variants in a store, compared with whole files and content-defined chunks.

    python benchmarks/dedup.py [--mib N]

Synthetic weights in the shapes of a transformer: 30 variants (five buckets, three tensor-parallel degrees, two
versions) that share them, then a version in which 1 % of the tensors changed. FastCDC needs `pip install fastcdc`.
"""

import argparse
import hashlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.weights import Elements, put_weights

BUCKETS = (128, 256, 512, 1024, 2048)
DEGREES = (1, 2, 8)
VERSIONS = 2
CHUNK = 64 * 1024  # bytes of an average chunk
MIB = 1024**2
MOST_FOR_VARIANTS = 1.05  # relative to one set of weights
MOST_FOR_A_CHANGE = 0.05  # share of the bytes


@dataclass
class Ours:
    """Tensors as blobs and packs."""

    blobs: Blobs
    name: str = "per tensor (ours)"
    seen: set[str] = field(default_factory=set)

    def add(self, tensors: Sequence[Elements]) -> int:
        """The number of bytes that a store with all former variants lacks."""
        new = {tensor.stored for tensor in put_weights(self.blobs, tensors)}
        return take(self.seen, ((blob.sha256, blob.size) for blob in new))


@dataclass
class WholeFile:
    """One file per variant, as most stores keep it."""

    name: str = "whole file"
    seen: set[str] = field(default_factory=set)

    def add(self, tensors: Sequence[Elements]) -> int:
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.data)
        return take(self.seen, [(digest.hexdigest(), sum(tensor.data.nbytes for tensor in tensors))])


@dataclass
class Chunks:
    """One file per variant, cut into content-defined chunks."""

    name: str = f"FastCDC, {CHUNK // 1024} KiB"
    seen: set[str] = field(default_factory=set)

    def add(self, tensors: Sequence[Elements]) -> int:
        fastcdc = import_module("fastcdc").fastcdc
        data = b"".join(tensor.data for tensor in tensors)
        cuts = fastcdc(data, CHUNK // 4, CHUNK, CHUNK * 4, hf=hashlib.sha256)
        return take(self.seen, ((cut.hash, cut.length) for cut in cuts))


def take(seen: set[str], pieces: Iterator[tuple[str, int]] | Sequence[tuple[str, int]]) -> int:
    new = 0
    for digest, size in pieces:
        new += 0 if digest in seen else size
        seen.add(digest)
    return new


def weights(total: int, seed: int = 0) -> list[Elements]:
    """An embedding, and transformer blocks of four square matrices, two wide ones and eight small vectors each."""
    chance, width = random.Random(seed), 512
    block = {"q": width, "k": width, "v": width, "o": width, "up": 4 * width, "down": 4 * width}
    sizes = {name: 2 * width * columns for name, columns in block.items()} | {f"bias.{n}": 2 * width for n in range(8)}
    result = [_tensor(chance, "embedding", 2 * width * 8192)]
    number = 0
    while sum(entry.data.nbytes for entry in result) < total:
        result += [_tensor(chance, f"layer.{number}.{name}", size) for name, size in sizes.items()]
        number += 1
    return result


def _tensor(chance: random.Random, name: str, size: int) -> Elements:
    return Elements(name, "bfloat16", (size // 2,), memoryview(chance.randbytes(size)))


def changed(tensors: Sequence[Elements], share: float, seed: int = 1) -> list[Elements]:
    """The tensors with other bytes in a share of them, at random places."""
    chance = random.Random(seed)
    chosen = set(chance.sample(range(len(tensors)), max(1, round(share * len(tensors)))))
    return [
        replace(tensor, data=memoryview(chance.randbytes(tensor.data.nbytes))) if number in chosen else tensor
        for number, tensor in enumerate(tensors)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=200, help="of weights")
    tensors = weights(parser.parse_args().mib * MIB)
    size = sum(tensor.data.nbytes for tensor in tensors)
    variants = len(BUCKETS) * len(DEGREES) * VERSIONS
    print(
        f"{len(tensors)} tensors, {size / MIB:.1f} MiB; {variants} variants of them, then 1 % of the tensors changed\n"
    )
    print("| | variants, in sets of weights | sent for 1 % changed |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Blobs(LocalFolder(Path(folder))))
        kinds: list[Ours | WholeFile | Chunks] = [ours, WholeFile()]
        kinds += [Chunks()] if find_spec("fastcdc") else []
        costs = {kind.name: measured(kind, tensors, variants, size) for kind in kinds}
    if not find_spec("fastcdc"):
        print("\nFastCDC is not shown: pip install fastcdc")
    stored, sent = costs[ours.name]
    return int(stored > MOST_FOR_VARIANTS or sent > MOST_FOR_A_CHANGE)


def measured(
    kind: Ours | WholeFile | Chunks, tensors: Sequence[Elements], variants: int, size: int
) -> tuple[float, float]:
    """The sizes of all variants. With a file per variant, programs are part of the file, so no two files are equal."""
    stored = 0
    for number in range(variants):
        program = _tensor(random.Random(f"program {number}"), f"program.{number}", 2 * 64 * 1024)
        stored += kind.add([*tensors, program])
    sent = kind.add(changed(tensors, 0.01))
    print(f"| {kind.name} | {stored / size:.3f} | {sent / size:.2%} |", flush=True)
    return stored / size, sent / size


if __name__ == "__main__":
    sys.exit(main())
