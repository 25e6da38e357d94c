"""Parameter types that click lacks: lists, targets, durations, sizes, percentages, expectations, axes, sources."""

import re
from typing import Any, Final, get_args

import click

from nxpipe.emulator.hardware import INSTANCES, UnknownInstance, instance
from nxpipe.pipeline.config.models import Phase
from nxpipe.pipeline.models.spec import ALL
from nxpipe.pipeline.release.options import ExpectedGeneration

_LARGEST_AXIS: Final = 2**31 - 1  # the hardware counts elements in 32 bits


class Numbers(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of integers, sorted, without repeats."""

    name = "N,N,..."

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            numbers = ()
        if not numbers or numbers[0] < 1 or numbers[-1] > self._maximum:
            self.fail(f"{value!r} is not a list of integers from 1 to {self._maximum}, as in 1,2", param, ctx)
        return numbers


class Expectation(click.ParamType[ExpectedGeneration]):
    """A generation of a channel with its whole digest; an abbreviation would be ambiguous."""

    name = "GENERATION@DIGEST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ExpectedGeneration:
        if isinstance(value, ExpectedGeneration):
            return value
        match = re.fullmatch(r"([1-9][0-9]{0,14})@([0-9a-f]{64})", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not GENERATION@DIGEST: a number, @ and 64 hexadecimal digits", param, ctx)
        return ExpectedGeneration(int(match[1]), match[2])


class Phases(click.ParamType[tuple[str, ...]]):
    name = "PHASE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        phases = tuple(str(value).split(","))
        for phase in phases:
            if phase not in get_args(Phase):
                self.fail(f"{phase!r} is not one of {', '.join(get_args(Phase))}", param, ctx)
        return phases


class Target(click.ParamType[str]):
    name = "INSTANCE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return instance(str(value)).name
        except UnknownInstance as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in INSTANCES if name.startswith(incomplete)]


class Targets(Target):
    """An instance type, or `all` for the whole catalogue."""

    name = "INSTANCE|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return ALL if value == ALL else super().convert(value, param, ctx)


class TargetList(Target):
    """A comma-separated list of instance types, in the given order, without repeats."""

    name = "INSTANCE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        single = super().convert
        return tuple(dict.fromkeys(single(part, param, ctx) for part in str(value).split(",")))


class Seconds(click.ParamType[float]):
    """A duration in the notation of nxpipe.toml."""

    name = "90s|30m|2h"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from nxpipe.pipeline.config.kinds import parse_duration

        try:
            seconds = parse_duration(str(value)).total_seconds()
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is not a duration, as in 90s, 30m or 2h", param, ctx)
        return seconds


class Bytes(click.ParamType[int]):
    """A size in the notation of nxpipe.toml."""

    name = "500MiB|8GiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from nxpipe.pipeline.config.kinds import parse_size

        try:
            return parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a size, as in 500MiB or 8GiB", param, ctx)


class Percentage(click.ParamType[float]):
    """A percentage, converted to a fraction."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            percent = float(str(value).removesuffix("%"))
        except ValueError:
            percent = -1.0
        if not 0 <= percent < float("inf"):
            self.fail(f"{value!r} is not a percentage of at least 0, as in 5%", param, ctx)
        return percent / 100


class Axis(click.ParamType[tuple[str, int]]):
    """A dynamic axis of an ONNX file and its size."""

    name = "NAME=SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        name, _, size = str(value).rpartition("=")
        is_number = size.isascii() and size.isdecimal() and len(size) <= len(str(_LARGEST_AXIS))
        if not name or not is_number or not 1 <= int(size) <= _LARGEST_AXIS:
            self.fail(f"{value!r} is not NAME=SIZE with a size from 1 to {_LARGEST_AXIS:,}, as in batch=1", param, ctx)
        return name, int(size)


class PinnedSource(click.ParamType[str]):
    """A source of nxpipe that cannot be replaced later: a commit, a wheel with its hash, one version of an index."""

    name = "SOURCE"
    _COMMIT: Final = re.compile(r"git\+https://[\w.-]+(/[\w.~-]+)+@[0-9a-f]{40}", re.ASCII)
    _WHEEL: Final = re.compile(
        r"https://[\w.-]+(:\d+)?(/[\w.~%+-]+)*/nxpipe-[\w.+%]+-[\w.]+-[\w.]+-[\w.]+\.whl#sha256=[0-9a-f]{64}", re.ASCII
    )
    _VERSION: Final = re.compile(r"nxpipe==\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?(\+[a-z0-9.]+)?", re.ASCII)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        source = str(value)
        if not any(form.fullmatch(source) for form in (self._COMMIT, self._WHEEL, self._VERSION)):
            self.fail(f"{source!r} does not pin nxpipe: expected {self._expected(source)}", param, ctx)
        return source

    def _expected(self, source: str) -> str:
        if source.startswith("git+"):
            return "git+https://HOST/OWNER/nxpipe@COMMIT with the 40 digits of a commit; a branch or a tag can move"
        if ".whl" in source:
            return "https://HOST/nxpipe-VERSION-py3-none-any.whl#sha256=DIGEST; sha256sum prints the digest"
        return "a commit (git+https://...@COMMIT), a wheel (https://....whl#sha256=DIGEST) or nxpipe==VERSION"
