"""The console script's first steps: Ctrl-C is answered in peace even while the command is still being imported."""

import gc
import os
import sys
from io import TextIOWrapper
from types import ModuleType
from typing import Any, Final, NoReturn

_GARBAGE_AFTER: Final = 200_000  # objects more: a start-up makes half as many, and none of them is garbage


def main() -> NoReturn:
    gc.set_threshold(_GARBAGE_AFTER)
    mend_streams()
    without_plugins()
    try:
        from nxpipe.pipeline.cli.main import main as run
        from nxpipe.pipeline.util.console import guard_streams
    except KeyboardInterrupt:
        sys.exit(130)  # the table of exit codes is not imported yet
    guard_streams()
    try:
        run()
    finally:
        gc.freeze()  # all that is left goes with the process; after a capture, looking through it takes a second


def mend_streams() -> None:
    """What the caller has closed leads nowhere: else the next file that is opened would take its number, and a program
    that is started would write into it. A character that the terminal's encoding lacks is an escape."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


class _NoPlugins(ModuleType):
    """In place of pydantic's search for plugins, which takes a tenth of a short command's time to find none.

    Nor may what happens to be installed take part in reading a document. Only this process is ours to decide for, so
    this is done here and not where the documents are.
    """

    def get_plugins(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        """Whatever else another version of pydantic looks for here is its own."""
        if name.startswith("__"):
            raise AttributeError(name)
        from importlib import import_module

        sys.modules.pop(self.__name__, None)
        return getattr(import_module(self.__name__), name)


def without_plugins() -> None:
    loader = _NoPlugins("pydantic.plugin._loader")
    sys.modules.setdefault(loader.__name__, loader)
