"""All `nxpipe` command lines of a shell script, as arguments for click."""

import re
import shlex
from collections.abc import Iterator, Mapping

import click

_HERE_DOCUMENT = re.compile(r"<<'(\w+)'.*?^\1$", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{([^}]+)\}|(\w+))")
_OPERATORS = frozenset("();<>|&{}")


def command_lines(script: str, values: Mapping[str, str]) -> Iterator[list[str]]:
    """The command lines; `values` are example values of the shell's variables; a missing one is an error."""
    for line in _HERE_DOCUMENT.sub("", script).replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="();<>|&{}")
        words.wordchars += "$@%[]:,"
        words.whitespace_split = True
        for command in _commands(list(words)):
            yield [_VARIABLE.sub(lambda found: values[found[1] or found[2]], word) for word in command]


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] | None = None
    for word in [*words, ";"]:
        if set(word) <= _OPERATORS:
            if command is not None:
                yield command
            command = None
        elif command is not None:
            command.append(word)
        elif word == "nxpipe":
            command = []


def parse(command: click.Command, words: list[str]) -> None:
    """Let click parse a command line with all its options, without running it."""
    with command.make_context(words[0] if words else "nxpipe", words[1:]) as context:
        if isinstance(command, click.Group):
            name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            assert name is not None
            assert below is not None
            parse(below, [name, *rest])
