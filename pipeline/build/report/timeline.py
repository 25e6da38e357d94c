"""Who worked on what, and when: a row for each worker, a bar for each attempt, as SVG that needs no style of its own.

Places and widths are shares of the whole, so the picture is as wide as its page and its words keep their size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.markup import Markup, tag
from nxpipe.pipeline.build.report.words import clock, counted, duration

_ROW: Final = 24  # pixels from one worker to the next
_BAR: Final = 18
_AXIS: Final = 22
_WORKERS: Final = 48  # that are drawn; of many more a picture says nothing
_BARS: Final = 3000
_TICKS: Final = 8
_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)  # seconds

Attempt = Mapping[str, Any]


def timeline(attempts: Sequence[Attempt], seconds: float) -> Markup:
    drawn = _drawn(attempts)
    end = max([seconds, *(each["over"] for each in drawn if each["over"] is not None), 0.001])
    workers = sorted({each["worker"] for each in drawn})
    rows = {worker: number for number, worker in enumerate(workers)}
    height = _ROW * len(workers) + _AXIS
    names = [tag("text", f"worker {worker}", x=0, y=rows[worker] * _ROW + 14) for worker in workers]
    bars = [_bar(each, rows[each["worker"]], end) for each in drawn]
    return tag(
        "figure",
        tag("svg", names, class_="names", width=84, height=height, aria_hidden="true"),
        tag("svg", list(_axis(end, height)), bars, class_="bars", height=height, role="img", aria_label="timeline"),
        _left_out(len(attempts) - len(drawn)),
        class_="timeline",
    )


def _drawn(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The longest, where there are too many."""
    near = [each for each in attempts if each["worker"] <= _WORKERS]
    longest = sorted(near, key=lambda each: _over(each, float("inf")) - each["began"], reverse=True)
    return sorted(longest[:_BARS], key=lambda each: (each["began"], each["worker"]))


def _bar(attempt: Attempt, row: int, end: float) -> Markup:
    """A picture in the picture, so that a name never reaches out of its bar."""
    took = _over(attempt, end) - attempt["began"]
    title = f"{attempt['program']} of {attempt['title']}\n"
    title += f"{attempt['outcome']} on worker {attempt['worker']}, {duration(took)}"
    steps = "".join(f"\n{clock(at)} {said}" for at, said in attempt["steps"])
    return tag(
        "svg",
        tag("title", title + steps),
        tag("rect", width="100%", height=_BAR, rx=2),
        tag("text", attempt["program"], x=5, y=13),
        class_=f"bar {attempt['outcome'].replace(' ', '-')}",
        x=_share(attempt["began"], end),
        y=row * _ROW,
        width=_share(max(took, end / 1000), end),
        height=_BAR,
    )


def _over(attempt: Attempt, end: float) -> float:
    """One that was cut short lasted to the end."""
    over: float | None = attempt["over"]
    return end if over is None else over


def _axis(end: float, height: int) -> Iterator[Markup]:
    step = next((step for step in _STEPS if end / step <= _TICKS), _STEPS[-1])
    for number in range(int(end // step) + 1):
        x = _share(number * step, end)
        yield tag("line", x1=x, x2=x, y1=0, y2=height - _AXIS + 4)
        at_the_edge = number * step > 0.95 * end
        yield tag("text", clock(number * step), x=x, y=height - 4, text_anchor="end" if at_the_edge else None)


def _share(seconds: float, end: float) -> str:
    return f"{100 * seconds / end:.3f}%"


def _left_out(number: int) -> Markup | None:
    return tag("figcaption", f"{counted(number, 'attempt')} not drawn") if number else None
