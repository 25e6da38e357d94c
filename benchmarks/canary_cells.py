"""Results of long sweeps, stored as they arrive, so that an interrupted sweep can continue."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cells:
    folder: Path

    def of(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(make()))
        document: dict[str, Any] = json.loads(path.read_text())
        return document
