"""The instruction set: every record by its name, in the order of docs/reference/isa.md."""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Final

from nxpipe.emulator.isa import collective, dma, gpsimd, scalar, tensor, vector
from nxpipe.emulator.isa.instruction import Instruction


def _records(module: ModuleType) -> Iterator[type[Instruction]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Instruction) and value.__module__ == module.__name__:
            yield value


INSTRUCTIONS: Final[Mapping[str, type[Instruction]]] = {
    record.name: record for module in (dma, tensor, scalar, vector, gpsimd, collective) for record in _records(module)
}
