"""Files that appear whole: a reader sees what was there before, or all that was written."""

import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Its folder is made if need be. Several may write at once, and the last one stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
