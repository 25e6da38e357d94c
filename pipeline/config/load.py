"""From the file and the environment to a `Config`, or to every fault that they have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nxpipe.pipeline.config import environment
from nxpipe.pipeline.config.crosschecks import Tables, cross_check
from nxpipe.pipeline.config.faults import ConfigInvalid, Fault, Finding, KeyPath
from nxpipe.pipeline.config.reading import read_document
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.salvage import salvage
from nxpipe.pipeline.config.translate import findings
from nxpipe.pipeline.config.wording import key_text

# Commands that need no file (a store can be listed without one) still need a project to speak of.
_WITHOUT_A_FILE: dict[str, Any] = {"project": {"name": "unnamed"}}


def load_config(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Config:
    """Read the file; `ConfigInvalid` names all of its faults. `missing_ok`: no file means the defaults."""
    return load(read_source(path, environ, missing_ok=missing_ok))


@dataclass(frozen=True)
class Source:
    """A document with the environment laid over it, and where each of its values came from."""

    file: str
    text: str
    document: dict[str, Any]
    environ: Mapping[str, str]

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        from nxpipe.pipeline.config.locate import locate  # nobody asks for the line of what is right

        return locate(self.text)

    @cached_property
    def variables(self) -> dict[KeyPath, str]:
        return environment.variables(self.environ)

    def fault(self, finding: Finding) -> Fault:
        """Say where a finding stands."""
        variable = self.variables.get(finding.path)
        if variable is not None:
            return Fault(environment.FILE, None, variable, finding.found, finding.allowed, finding.nearest)
        return Fault(
            self.file, self._line(finding.path), key_text(finding.path), finding.found, finding.allowed, finding.nearest
        )

    def _line(self, path: KeyPath) -> int | None:
        """The line of a key, or of the innermost table around it when the file does not have the key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_source(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Source:
    absent = missing_ok and not path.exists()
    text, document = ("", _WITHOUT_A_FILE) if absent else read_document(path)
    return Source(str(path), text, environment.overlaid(document, environ), environ)


def load(source: Source) -> Config:
    """Every table by itself, then the rules between them; what is wrong is told all at once."""
    faults = list(environment.unknown_variables(source.environ))
    try:
        config = Config.model_validate(source.document)
    except ValidationError as error:
        faults += map(source.fault, findings(error, Config))
        faults += map(source.fault, cross_check(salvage(source.document)))
        raise ConfigInvalid(faults) from None
    faults += map(source.fault, cross_check(Tables.of(config)))
    if faults:
        raise ConfigInvalid(faults)
    return config
