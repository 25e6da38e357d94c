"""The console script's first steps: Ctrl-C is answered in peace even while the command is still being imported."""

import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from pipeline.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # the table of exit codes is not imported yet
    try:
        run()
    finally:
        gc.freeze()  # all that is left goes with the process; after a capture, looking through it takes a second
