"""Names that count: `layers.0.weight`, `layers.1.weight`, ... are one series, and `layers.` is its scope."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Series:
    """Names that differ in one number, which grows by `step` from each to the next."""

    prefix: str
    first: int
    step: int
    suffix: str

    def name(self, position: int) -> str:
        return f"{self.prefix}{self.first + position * self.step}{self.suffix}"

    def text(self, count: int) -> str:
        """The whole series in one expression: `layers.{0..31}.weight`, or `layers.{0,2..30}.weight`."""
        second = f",{self.first + self.step}" if self.step > 1 and count > 2 else ""
        return f"{self.prefix}{{{self.first}{second}..{self.first + (count - 1) * self.step}}}{self.suffix}"


def series_of(names: Sequence[str]) -> Series | None:
    """The series that these names are, in this order; nothing if they are not one."""
    parts = [_NUMBER.split(name) for name in names[:2]]
    if len(parts) < 2 or len(parts[0]) != len(parts[1]):
        return None
    differing = [place for place, (a, b) in enumerate(zip(*parts, strict=True)) if a != b]
    if len(differing) != 1 or not differing[0] % 2:
        return None
    (place,) = differing
    first, second = (int(part[place]) for part in parts)
    series = Series("".join(parts[0][:place]), first, second - first, "".join(parts[0][place + 1 :]))
    exact = series.step > 0 and all(series.name(position) == name for position, name in enumerate(names))
    return series if exact else None


@dataclass(frozen=True)
class Shift:
    """Numbers from `start` on move by `distance`."""

    distance: int
    start: int = 0


def renamed(name: str, shifts: Mapping[str, Shift]) -> str:
    """A name with the number after its scope shifted, if one of these scopes is its own."""
    for scope, shift in shifts.items():
        number = _NUMBER.match(name, len(scope)) if name.startswith(scope) else None
        if number and int(number[0]) >= shift.start:
            return f"{scope}{int(number[0]) + shift.distance}{name[number.end() :]}"
    return name
