"""What a backend must be able to do, as named experiments. `nxpipe store doctor` makes them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class NotApplicable(Exception):
    """This kind of backend has no such property, and needs none."""


class Violated(Exception):
    """The experiment came out wrong; says what was seen."""


@dataclass(frozen=True)
class Probe:
    """A property by name, and why it matters. `run` raises, or tells what is worth telling.

    A store on a backend without a vital property may lose or mix up artifacts; without another one it is worse to
    live with.
    """

    name: str
    why: str
    run: Callable[[], str | None]
    vital: bool = True


@runtime_checkable
class Probed(Protocol):
    """A backend with properties of its own beyond those that all of them share."""

    def probes(self, folder: str) -> Iterable[Probe]:
        """Experiments below `folder`, which ends in `/`; whoever makes them cleans up."""


def insist(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violated(otherwise)
