"""The console script: repairs the standard streams, imports the command, handles Ctrl-C during the imports.

Two start-up measures, each measured over 20 runs: without the search for pydantic plugins, `store ls` takes 20 ms less
processor time; without a last garbage collection at exit, 10 ms (`--help`) to 70 ms (`build`) less.
"""

import gc
import os
import sys
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn


def main() -> NoReturn:
    repair_streams()
    skip_plugins()
    try:
        from nxpipe.pipeline.cli.main import main as run
        from nxpipe.pipeline.util.console import guard_streams
    except KeyboardInterrupt:
        sys.exit(130)  # INTERRUPTED; the table of exit codes may not be imported yet
    guard_streams()
    try:
        run()
    finally:
        gc.freeze()  # skip the collection at exit: the process returns all memory


def repair_streams() -> None:
    """Redirect closed standard streams to /dev/null, and escape characters that the terminal's encoding lacks.

    With a closed stream, the next file opened would get its descriptor, and a subprocess would write to that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


class _NoPlugins(ModuleType):
    """A stand-in for pydantic's plugin loader, which would import importlib.metadata and scan all packages.

    Plugins that happen to be installed must not take part in reading documents either. Only a command
    may change that for its whole process, so the stand-in is here and not in the library.
    """

    def get_plugins(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute, such as one of a later pydantic, from the real loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        from importlib import import_module

        sys.modules.pop(self.__name__, None)
        return getattr(import_module(self.__name__), name)


def skip_plugins() -> None:
    loader = _NoPlugins("pydantic.plugin._loader")
    sys.modules.setdefault(loader.__name__, loader)
