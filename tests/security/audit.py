"""What a file made this process do, as Python's own audit events tell: imports, programs, files, connections.

The hook sees what any library does through the interpreter, torch and onnx too, but not what native code does by
itself. `importlib.import_module` raises no audit event, so that imports are read off `sys.modules` as well.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_PROGRAMS: Final = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
)
_NATIVE: Final = frozenset({"ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function"})
_NETWORK: Final = frozenset({"socket.connect", "socket.bind", "socket.getaddrinfo", "webbrowser.open"})
_UNPICKLED: Final = frozenset({"pickle.find_class"})


@dataclass
class Seen:
    """The events of one watched call. `imports` are names that were not imported before."""

    imports: set[str] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    forbidden: list[tuple[str, str]] = field(default_factory=list)

    def files_outside(self, *folders: Path) -> set[Path]:
        """Files that were opened below none of these folders, nor among Python's own and the kernel's."""
        homes = [*(folder.resolve() for folder in folders), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
        return {path for path in self.files if not any(path.resolve().is_relative_to(home) for home in homes)}

    def imports_beyond(self, *packages: str) -> set[str]:
        return {name for name in self.imports if not any(f"{name}.".startswith(f"{package}.") for package in packages)}


_watching: list[Seen] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    seen = _watching[-1]
    if event == "import":
        if arguments[0] not in sys.modules:
            seen.imports.add(arguments[0])
    elif event == "open":
        if isinstance(arguments[0], str | bytes):
            path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode(errors="replace")
            seen.files.add(Path(path).absolute())
    elif event in _PROGRAMS or event in _NATIVE or event in _NETWORK or event in _UNPICKLED:
        seen.forbidden.append((event, repr(arguments)[:200]))


@contextmanager
def watched() -> Iterator[Seen]:
    """Record what happens in here; the hook stays in the process, for one cannot be removed."""
    if not getattr(sys, "_nxpipe_audited", False):
        sys.addaudithook(_hook)
        sys._nxpipe_audited = True  # type: ignore[attr-defined]
    seen = Seen()
    before = set(sys.modules)
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
        seen.imports |= set(sys.modules) - before
