"""Parameter types that click lacks: choices with suggestions, counts, shares, durations and sizes as people type them,
lists, targets, expectations, axes, sources.

Imports neither pydantic nor the catalogue of instances: completion and commands of the store use these types.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.util.text import did_you_mean, nearest

if TYPE_CHECKING:
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


class Expectation(click.ParamType["ExpectedGeneration"]):
    """A generation of a channel with its whole digest; an abbreviation would be ambiguous."""

    name = "GENERATION@DIGEST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "ExpectedGeneration":
        from nxpipe.pipeline.release.options import ExpectedGeneration

        if isinstance(value, ExpectedGeneration):
            return value
        match = re.fullmatch(r"([1-9][0-9]{0,14})@([0-9a-f]{64})", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not GENERATION@DIGEST: a number, @ and 64 hexadecimal digits", param, ctx)
        return ExpectedGeneration(int(match[1]), match[2])


class Phases(click.ParamType[tuple[str, ...]]):
    name = "PHASE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        known, phases = phase_names(), tuple(part.strip() for part in str(value).split(","))
        for phase in phases:
            if phase not in known:
                self.fail(f"{phase!r} is not one of {', '.join(known)}{did_you_mean(phase, known)}", param, ctx)
        return phases

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        done, _, last = incomplete.rpartition(",")
        chosen = done.split(",")
        begin = f"{done}," if done else ""
        names = [name for name in phase_names() if name.startswith(last) and name not in chosen]
        return [CompletionItem(begin + name) for name in names]


def phase_names() -> tuple[str, ...]:
    from typing import get_args

    from nxpipe.pipeline.config.models import Phase

    return get_args(Phase)


class Target(click.ParamType[str]):
    name = "INSTANCE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from nxpipe.emulator.hardware import UnknownInstance, instance

        try:
            return instance(str(value)).name
        except UnknownInstance as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from nxpipe.emulator.hardware import INSTANCES

        return [CompletionItem(name) for name in INSTANCES if name.startswith(incomplete)]


class Targets(Target):
    """An instance type, or `all` for the whole catalogue."""

    name = "INSTANCE|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "all" if value == "all" else super().convert(value, param, ctx)  # models.spec.ALL


class TargetList(Target):
    """A comma-separated list of instance types, in the given order, without repeats."""

    name = "INSTANCE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        single = super().convert
        return tuple(dict.fromkeys(single(part, param, ctx) for part in str(value).split(",")))


_UNITS: Final = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "B": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_DIGITS: Final = r"[0-9]{1,3}(?:[,_][0-9]{3})+(?:\.[0-9]+)?|[0-9]{1,18}(?:\.[0-9]{1,12})?(?:e[+-]?[0-9]{1,2})?"
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def _decimal(digits: str) -> float:
    return float(re.sub("[,_]", "", digits))


class Amount(click.ParamType[float]):
    """A number with a unit of thousands: 20, 20k, 1.5M, 7B, 20,000."""

    name = "NUMBER"
    forms = "20, 2.5, 20k or 1M"

    def __init__(self, least: float = 0.0, most: float = float("inf"), *, above: bool = False) -> None:
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(rf"({_DIGITS}) ?([A-Za-z]{{0,2}})", str(value).strip(), re.ASCII)
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is not a number, as in {self.forms}", param, ctx)
        number = round(_decimal(match[1]) * _UNITS[match[2]], 9)
        if not self._least <= number <= self._most or (self._above and number == self._least):
            self.fail(f"{value!r} is not {_range(self._least, self._most, self._above)}", param, ctx)
        return number


_SHOWN: Final = 99_999  # the largest limit that help states


class Count(Amount):
    """A whole number with a unit of thousands."""

    name = "N"
    forms = "20, 20k or 1M"

    def __init__(self, least: int = 1, most: float = float("inf")) -> None:
        super().__init__(least, most)
        if most <= _SHOWN:
            self.name = f"{least}-{most:g}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not number.is_integer():
            self.fail(f"{value!r} is not a whole number, as in {self.forms}", param, ctx)
        return int(number)


def _range(least: float, most: float, above: bool) -> str:
    limits = f"a number above {least:,g}" if above else f"a number of at least {least:,g}"
    return limits if most == float("inf") else f"{limits} and at most {most:,g}"


class Share(click.ParamType[float]):
    """A share as a percentage or a fraction: 5% or 0.05. `most` is above 1 for a change, as in 150%."""

    name = "SHARE"

    def __init__(self, most: float = 1.0, *, open_ended: bool = False, zero: bool = True) -> None:
        self._most, self._open, self._zero = most, open_ended, zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(rf"({_DIGITS}) ?(%?)", str(value).strip(), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not a share, as in 5% or 0.05", param, ctx)
        number = _decimal(match[1])
        # Where more than 100% is possible, 1 may mean 1% or 100%; elsewhere a number above 1 is a percentage.
        if not match[2] and self._most == 1 and number > 1:
            self.fail(f"{value!r} is above 100%; write {number:g}% or {number / 100:g}", param, ctx)
        if not match[2] and (number > 1 or (number == 1 and self._most > 1)):
            self.fail(
                f"{value!r} could be {number:g}% or {100 * number:g}%; write {number:g}%, or a fraction", param, ctx
            )
        share = number / 100 if match[2] else number
        if share == 0 and not self._zero:
            self.fail(f"{value!r} is not above 0, as in 5% or 0.05", param, ctx)
        if share > self._most or (self._open and share == self._most):
            limit = f"below {self._most:.0%}" if self._open else f"at most {self._most:.0%}"
            self.fail(f"{value!r} is not {limit}, as in 5% or 0.05", param, ctx)
        return share


class DurationType(click.ParamType[float]):
    """A duration in seconds: 500ms, 2s, 5m, 1h30m, 30d. A number without a unit only where `unit` names one; the value
    is then a number of these units."""

    name = "DURATION"
    forms = "500ms, 2s, 5m, 1h or 30d"

    def __init__(
        self, least: float = 0.0, most: float = float("inf"), *, zero: bool = False, unit: str | None = None
    ) -> None:
        self._least, self._most, self._zero, self._unit = least, most, zero, unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        seconds = self._seconds(str(value).strip())
        if seconds is None or seconds < 0 or (seconds == 0 and not self._zero):
            bare = f", or a number of {_PLURAL[self._unit]}" if self._unit else ""
            self.fail(f"{value!r} is not a duration, as in {self.forms}{bare}", param, ctx)
        if not self._least <= seconds <= self._most:
            most = "" if self._most == float("inf") else f" and at most {_spoken(self._most)}"
            self.fail(f"{value!r} is not a duration of at least {_spoken(self._least)}{most}", param, ctx)
        return seconds / _SECONDS[self._unit or "s"]

    def _seconds(self, text: str) -> float | None:
        if re.fullmatch(_DIGITS, text, re.ASCII):
            return _decimal(text) * _SECONDS[self._unit] if self._unit else 0.0 if _decimal(text) == 0 else None
        part = rf"({_DIGITS}) ?(ms|min|[smhdw])"
        if not re.fullmatch(rf"{part}(?: ?{part})*", text, re.ASCII):
            return None
        return sum(_decimal(digits) * _SECONDS[unit] for digits, unit in re.findall(part, text, re.ASCII))


_PLURAL: Final = {"s": "seconds", "d": "days"}


def _spoken(seconds: float) -> str:
    unit = next((unit for unit in ("d", "h", "m", "s") if seconds >= _SECONDS[unit]), "ms")
    return f"{seconds / _SECONDS[unit]:g}{unit}"


class Bytes(click.ParamType[int]):
    """A size in bytes: 500MiB, 16GiB, 16GB; as in Kubernetes, 16Gi is 16GiB and 16G is 16GB."""

    name = "SIZE"
    _FORM: Final = re.compile(rf"({_DIGITS}) ?([KMGT]i?)B?", re.ASCII | re.IGNORECASE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = self._FORM.fullmatch(str(value).strip())
        size = int(_decimal(match[1]) * _UNITS[match[2].capitalize()]) if match else 0
        if not 0 < size < 1 << 63:
            self.fail(f"{value!r} is not a size, as in 500MiB, 16GiB or 16GB", param, ctx)
        return size


class Choice(click.Choice[str]):
    """One of a closed set of words. `others` are words that people use for them, such as those of another tool."""

    def __init__(self, choices: Iterable[str], others: Mapping[str, str] | None = None) -> None:
        super().__init__(tuple(choices))
        self._others = others or {}

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        word = str(value)
        known = [*self.choices, *self._others]
        guess = nearest(word, known)
        if guess is None:
            return f"{word!r} is not one of {', '.join(self.choices)}"
        return (
            f"{word!r} is not one of the {len(self.choices)} choices; did you mean {self._others.get(guess, guess)!r}?"
        )


class PriceRegion(click.ParamType[str]):
    """An AWS region, for its prices. A region may have no price yet; a misspelt one would have none either."""

    name = "REGION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = self._known()
        from nxpipe.pipeline.util.aws import regions_of_sdk

        if value not in known and value not in (regions := regions_of_sdk()):
            hint = did_you_mean(str(value), known) or did_you_mean(str(value), regions)
            remedy = hint or f"; prices are known of {', '.join(known)}"
            self.fail(f"{value!r} is no AWS region{remedy}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]

    def _known(self) -> list[str]:
        from nxpipe.pipeline.config.prices import load_prices

        return sorted({region for region, _, _ in load_prices().known if region})


TASKS: Final = {  # names of tasks in pipelines of transformers and in talk
    "sentiment-analysis": "text-classification",
    "classification": "text-classification",
    "sequence-classification": "text-classification",
    "embedding": "feature-extraction",
    "embeddings": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "generation": "text-generation",
    "chat": "text-generation",
    "llm": "text-generation",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "seq2seq-lm": "text2text-generation",
    "image": "image-classification",
    "asr": "automatic-speech-recognition",
    "speech-recognition": "automatic-speech-recognition",
    "transcription": "automatic-speech-recognition",
}


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
