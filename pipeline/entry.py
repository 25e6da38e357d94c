"""The console script's first steps: Ctrl-C is answered in peace even while the command is still being imported."""

import gc
import sys
from types import ModuleType
from typing import Any, Final, NoReturn

_GARBAGE_AFTER: Final = 200_000  # objects more: a start-up makes half as many, and none of them is garbage


def main() -> NoReturn:
    gc.set_threshold(_GARBAGE_AFTER)
    without_plugins()
    try:
        from pipeline.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # the table of exit codes is not imported yet
    try:
        run()
    finally:
        gc.freeze()  # all that is left goes with the process; after a capture, looking through it takes a second


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
