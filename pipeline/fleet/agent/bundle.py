"""The agent's bundle: packages that instances install, in one reproducible tar file named by its digest."""

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
_PACKAGES: Final = (".deb", ".whl")  # Python packages, and system packages that the image lacks


@dataclass(frozen=True)
class Bundle:
    packages: tuple[str, ...]
    data: bytes

    @classmethod
    def of(cls, folder: Path) -> "Bundle":
        """The packages of a folder, without other files, dates and owners."""
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
        """Path in the bucket, outside of the store's layout: garbage collection ignores it."""
        return f"agents/{self.sha256}.tar"

    def put(self, store: "Store") -> bool:
        """Uploads the bundle; False if it exists."""
        return store.backend.create(self.path, store.backend.hashed(self.data), durable=True)

    def lock(self) -> str:
        """The lock file that the stacks read: the bundle's digest, and its packages for people."""
        return json.dumps({"sha256": self.sha256, "packages": self.packages}, indent=2) + "\n"


class NoAgent(Exception):
    """A folder without exactly one wheel of nxpipe."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} has no wheel of nxpipe, or several; build one with: pip wheel --no-deps --wheel-dir {folder} "
            "nxpipe, and add the wheels of requirements/base.txt"
        )
