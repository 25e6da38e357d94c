"""journald and journalctl of an instance without systemd."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from nxpipe.pipeline.fleet.agent.logs import AGENT

# Line i of the file is the entry with the cursor i. journalctl's matches are not evaluated: a test reads them.
_JOURNALCTL: Final = """#!/bin/sh
after=0 follow=
for word; do
    case $word in
    --after-cursor=*) after=${word##*i=}; after=${after%%;*} ;;
    --follow) follow=--follow ;;
    esac
done
echo "$*" >> "$JOURNAL.calls"
[ -z "$JOURNAL_ENDS" ] || exit 4
exec tail --lines=+$((after + 1)) $follow "$JOURNAL"
"""


@dataclass
class Journal:
    path: Path
    entries: int = 0

    @classmethod
    def installed(cls, folder: Path, patch: pytest.MonkeyPatch) -> "Journal":
        """An empty journal, whose journalctl is the first one on PATH."""
        program = folder / "bin/journalctl"
        program.parent.mkdir()
        program.write_text(_JOURNALCTL)
        program.chmod(0o755)
        path = folder / "journal"
        path.touch()
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        patch.setenv("JOURNAL", str(path))
        return cls(path)

    def write(self, text: object, unit: str = AGENT, **fields: str) -> None:
        self.entries += 1
        named = {"_SYSTEMD_UNIT": unit} | fields
        at = {"__CURSOR": f"s=0;i={self.entries};b=0", "__REALTIME_TIMESTAMP": str(time.time_ns() // 1000)}
        with self.path.open("a") as file:
            file.write(json.dumps({**at, **named, "MESSAGE": text}) + "\n")

    @property
    def calls(self) -> list[str]:
        return Path(f"{self.path}.calls").read_text().splitlines()
