"""The words of a build that has begun and not ended well, for `nxpipe build --resume` to say again."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.errors import BuildRefused


class Unfinished:
    def __init__(self, state: Path) -> None:
        self._path = state / "unfinished-build.json"

    def begin(self, words: Sequence[str]) -> None:
        """Best effort: without it the same words have to be typed again."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(list(words)))
            temporary.replace(self._path)

    def end(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def words(self) -> list[str]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, list):
            raise BuildRefused(
                f"there is no build to resume: {self._path} is not there, as after a build that published all; "
                "say what to build"
            )
        return [str(word) for word in found]
