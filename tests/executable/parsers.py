"""Parsers of executables for fuzzers, each with an example. Only `ExecutableInvalid` is permitted."""

from collections.abc import Mapping

from nxpipe.emulator.executable.executable import from_bytes
from tests.executable.damage import sealed
from tests.executable.samples import samples
from tests.faults.parsers import Parser


def parsers() -> Mapping[str, Parser]:
    """The parsers by name. Fuzzers cannot guess digests, so the input is the content behind them."""
    example = samples()[0]
    return {
        "executable": Parser(lambda data: from_bytes(sealed(data)), example),
        "executable file": Parser(from_bytes, example),
    }
