"""Options of a build: how it runs, not what it builds. A command makes the record; None leaves the choice to
`[build]` of nxpipe.toml."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BuildOptions:
    """`timeout`: seconds of one job. `memory_limit`: bytes of one job. `address` is that of a Ray cluster."""

    force: bool = False
    keep_going: bool = False
    retries: int = 2
    executor: str | None = None
    address: str | None = None
    jobs: int | None = None
    timeout: float | None = None
    memory_limit: int | None = None
