"""The `nxpipe` command: configuration, model sources, build, verification."""

from typing import Final

VERSION: Final = "0.1.0"
