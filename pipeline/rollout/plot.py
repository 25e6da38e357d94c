"""When simulated rollouts ended, as bars for a terminal."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.canary.judge import Decision
from nxpipe.pipeline.rollout.simulate import Outcome
from nxpipe.pipeline.util.escape import style

_BARS: Final = 12
_WIDTH: Final = 60


@dataclass(frozen=True)
class End:
    name: str
    mark: str  # different without colour, too
    colour: str


ENDS: Final = {
    Decision.ADVANCE: End("promoted", "█", "green"),
    Decision.ROLL_BACK: End("rolled back", "▒", "red"),
    Decision.UNDECIDED: End("undecided", "░", "yellow"),
}


def when_they_ended(outcomes: Sequence[Outcome]) -> str:
    """One bar for each span of minutes; its marks are rollouts, by how they ended."""
    longest = max(each.minutes for each in outcomes)
    span = -(-(longest + 1) // _BARS)
    ended = Counter((each.minutes // span, each.decision) for each in outcomes)
    bars = [{decision: ended[bar, decision] for decision in ENDS} for bar in range(longest // span + 1)]
    highest = max(sum(bar.values()) for bar in bars)
    return "\n".join(_line(at * span, span, bar, highest) for at, bar in enumerate(bars))


def _line(first: int, span: int, bar: dict[Decision, int], highest: int) -> str:
    minutes = f"{first}" if span == 1 else f"{first}-{first + span - 1}"
    marks = "".join(style(end.mark * _length(bar[decision], highest), fg=end.colour) for decision, end in ENDS.items())
    return f"{minutes:>9} min  {marks} {sum(bar.values()) or ''}".rstrip()


def _length(count: int, highest: int) -> int:
    """A single rollout is seen, too: it may be the one that matters."""
    return max(1, round(count * _WIDTH / highest)) if count else 0
