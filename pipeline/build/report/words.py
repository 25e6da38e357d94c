"""Words that every view of a build shares: lengths of time, counts, and texts that strangers wrote."""

from nxpipe.pipeline.util.escape import for_log


def plain(text: str) -> str:
    """A foreign text of several lines as one, harmless in a log and on a terminal."""
    return for_log(" ".join(text.split()))


def duration(seconds: float) -> str:
    """As people read it: 0.4 s, 41 s, 3:07 min, 1:02:09 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} h"


def clock(seconds: float) -> str:
    """The same in a column: 0:41, 1:02:09."""
    whole = int(seconds)
    hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else str(whole // 60)
    return f"{hours}:{whole % 60:02}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
