"""The words of a build that has begun and not ended well, for `nxpipe build --resume` to say again."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nxpipe.pipeline.util.errors import BuildRefused
from nxpipe.pipeline.util.files import MiB, json_of, read_file, write_whole


class Unfinished:
    def __init__(self, state: Path) -> None:
        self._path = state / "unfinished-build.json"

    def begin(self, words: Sequence[str]) -> None:
        """Best effort: without it the same words have to be typed again."""
        with suppress(OSError):
            write_whole(self._path, json.dumps(list(words)).encode())

    def end(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def words(self) -> list[str]:
        try:
            found = json_of(read_file(self._path, limit=MiB))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, list):
            raise BuildRefused(
                f"there is no build to resume: {self._path} is not there, as after a build that published all; "
                "say what to build"
            )
        return [str(word) for word in found]
