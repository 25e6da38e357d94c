"""The stand-in library, built from C once for all workers, and copies of it: a copy is a library of its own."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("libnrt.c")
SONAME: Final = "libnrt.so.1"
_FLAGS: Final = ("-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def built(folder: Path) -> Path:
    """The library, compiled in `folder` unless another worker has done so."""
    folder.mkdir(exist_ok=True, parents=True)
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / digest / SONAME
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            _compile(library, folder / "zig")
    return library


def copied(library: Path, folder: Path) -> Path:
    """A copy, which the loader does not take for the original: it has its own state and reads its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(library, folder / SONAME))


def _compile(library: Path, cache: Path) -> None:
    unfinished = library.with_suffix(".new")
    files = ("-o", str(unfinished), str(SOURCE))
    command = [sys.executable, "-m", "ziglang", "cc", *_FLAGS, f"-Wl,-soname,{SONAME}", *files]
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "global"), "ZIG_LOCAL_CACHE_DIR": str(cache / "local")}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unfinished.rename(library)
