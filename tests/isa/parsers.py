"""The parser of program text for fuzzers, and an example. Only `TextInvalid` is permitted."""

from collections.abc import Mapping

from tests.faults.parsers import Parser
from tests.isa.assembler import program
from tests.isa.page import EXAMPLE


def parsers() -> Mapping[str, Parser]:
    return {"program text": Parser(lambda data: program(data.decode("utf-8", "replace")), EXAMPLE.encode())}
