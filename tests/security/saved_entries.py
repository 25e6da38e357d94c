"""A saved `.pt2` program as separate entries, changed and repacked without torch."""

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.pipeline.saved_programs import write_pt2

MODEL: Final = "models/model.json"
WEIGHTS: Final = "data/weights/model_weights_config.json"
CONSTANTS: Final = "data/constants/model_constants_config.json"


@dataclass
class Saved:
    """The entries below the archive's folder, by name."""

    entries: dict[str, bytes]
    folder: str = "m"

    @classmethod
    def of(cls, path: Path) -> "Saved":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            entries = {name.partition("/")[2]: archive.read(name) for name in names}
        return cls(entries, names[0].partition("/")[0])

    def copy(self) -> "Saved":
        return Saved(dict(self.entries), self.folder)

    def json(self, entry: str = MODEL) -> Any:
        return json.loads(self.entries[entry])

    def put(self, entry: str, document: Any) -> None:
        self.entries[entry] = json.dumps(document).encode()

    def change(self, edit: Callable[[Any], object], entry: str = MODEL) -> "Saved":
        """A copy with one document edited in place."""
        changed = self.copy()
        document = changed.json(entry)
        edit(document)
        changed.put(entry, document)
        return changed

    def write(self, path: Path, *, compression: int = zipfile.ZIP_STORED, before: bytes = b"") -> Path:
        with path.open("wb") as file:
            file.write(before)
            with zipfile.ZipFile(file, "w", compression) as archive:
                for name, data in self.entries.items():
                    archive.writestr(f"{self.folder}/{name}", data)
        return path


def saved_program(folder: Path) -> Saved:
    return Saved.of(write_pt2(folder / "m.pt2"))


def strings(document: Any) -> Iterator[tuple[list[str | int], str]]:
    """Each string of a JSON document with its path; keys of objects as well, with a path that ends in None."""
    waiting: list[tuple[list[Any], Any]] = [([], document)]
    while waiting:
        way, part = waiting.pop()
        if isinstance(part, str):
            yield way, part
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
            waiting.append(([*way, key], inner))


def put_at(document: Any, way: list[Any], value: Any) -> None:
    for step in way[:-1]:
        document = document[step]
    document[way[-1]] = value


def at(document: Any, way: list[Any]) -> Any:
    for step in way:
        document = document[step]
    return document
