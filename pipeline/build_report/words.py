"""Words that every view of a build shares: lengths of time, counts, and texts that strangers wrote."""

from typing import Final

_COMMAND: Final = "::"  # a line that begins so, and `##[` anywhere, is a command to the runner of GitHub Actions
_OLD_COMMAND: Final = "##["


def plain(text: str) -> str:
    """A stranger's text in one line that moves no cursor and commands nobody who reads our output."""
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in " ".join(text.split()))
    line = line.replace(_OLD_COMMAND, "## [")
    return f": {line[1:]}" if line.startswith(_COMMAND) else line


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
