"""What instances install the agent from: packages in one tar file, which is named by its digest and always the same."""

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.canonical import sha256_hex

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

_OURS: Final = "nxpipe-*.whl"
_PACKAGES: Final = (".deb", ".whl")  # of Python, and of the system what its image lacks


@dataclass(frozen=True)
class Bundle:
    packages: tuple[str, ...]
    data: bytes

    @classmethod
    def of(cls, folder: Path) -> "Bundle":
        """Nothing of the folder but the packages, and nothing of their dates and owners."""
        paths = sorted(path for path in folder.iterdir() if path.suffix in _PACKAGES)
        if len(list(folder.glob(_OURS))) != 1:
            raise NoAgent(folder)
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in paths:
                entry = tarfile.TarInfo(path.name)
                data = path.read_bytes()
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        return cls(tuple(path.name for path in paths), written.getvalue())

    @property
    def sha256(self) -> str:
        return sha256_hex(self.data)

    @property
    def path(self) -> str:
        """In a store, of which it is no part: no collection takes it away."""
        return f"agents/{self.sha256}.tar"

    def put(self, store: "Store") -> bool:
        """False: it is there already."""
        return store.backend.create(self.path, store.backend.hashed(self.data), durable=True)

    def lock(self) -> str:
        """What the stacks read: which agent instances install, for people with what is in it."""
        return json.dumps({"sha256": self.sha256, "packages": self.packages}, indent=2) + "\n"


class NoAgent(Exception):
    """A folder without the one wheel that matters."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} has no wheel of nxpipe, or several; make it with: pip wheel --no-deps --wheel-dir {folder} "
            "nxpipe, and put the wheels of requirements/base.txt beside it"
        )
