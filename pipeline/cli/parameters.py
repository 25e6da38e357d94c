"""Values on the command line that click has no type for; each says in one sentence what it takes."""

import re
from typing import Any, get_args

import click

from nxpipe.emulator.hardware import INSTANCES, UnknownInstance, instance
from nxpipe.pipeline.config.models import Phase
from nxpipe.pipeline.models.spec import ALL
from nxpipe.pipeline.release.words import Expected


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers, separated by commas: each once, in ascending order."""

    name = "N,N,..."

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            numbers = ()
        if not numbers or numbers[0] < 1 or numbers[-1] > self._most:
            self.fail(f"{value!r} is not a list of whole numbers from 1 to {self._most}, as in 128,512", param, ctx)
        return numbers


class Expectation(click.ParamType[Expected]):
    """One generation of a channel: an abbreviation of its digest would name others, too."""

    name = "GENERATION@DIGEST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Expected:
        if isinstance(value, Expected):
            return value
        found = re.fullmatch(r"([1-9][0-9]{0,14})@([0-9a-f]{64})", str(value), re.ASCII)
        if found is None:
            self.fail(f"{value!r} is not a generation and its digest, as in 3@ and 64 hexadecimal digits", param, ctx)
        return Expected(int(found[1]), found[2])


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
    """An instance, or all of the catalogue."""

    name = "INSTANCE|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return ALL if value == ALL else super().convert(value, param, ctx)


class TargetList(Target):
    """Several instances; each once, in the order in which they are written."""

    name = "INSTANCE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        single = super().convert
        return tuple(dict.fromkeys(single(part, param, ctx) for part in str(value).split(",")))


class Seconds(click.ParamType[float]):
    """A length of time, as nxpipe.toml spells it."""

    name = "90s|30m|2h"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from nxpipe.pipeline.config.kinds import parse_duration

        try:
            seconds = parse_duration(str(value)).total_seconds()
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is not a length of time, as in 90s, 30m or 2h", param, ctx)
        return seconds


class Bytes(click.ParamType[int]):
    """A size, as nxpipe.toml spells it."""

    name = "500MiB|8GiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from nxpipe.pipeline.config.kinds import parse_size

        try:
            return parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a size, as in 500MiB or 8GiB", param, ctx)


class Percentage(click.ParamType[float]):
    """As a fraction."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            percent = float(str(value).removesuffix("%"))
        except ValueError:
            percent = -1.0
        if not 0 <= percent < float("inf"):
            self.fail(f"{value!r} is not a percentage from 0 on, as in 5%", param, ctx)
        return percent / 100
