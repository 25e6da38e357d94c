"""Executables for fuzzers: what reads them, and an example. Only `ExecutableInvalid` may come out."""

from collections.abc import Mapping

from nxpipe.emulator.executable.executable import from_bytes
from tests.executable.damage import sealed
from tests.executable.samples import samples
from tests.faults.parsers import Parser


def parsers() -> Mapping[str, Parser]:
    """By name. No fuzzer guesses a digest: behind the right ones the reading begins."""
    example = samples()[0]
    return {
        "executable": Parser(lambda data: from_bytes(sealed(data)), example),
        "executable file": Parser(from_bytes, example),
    }
