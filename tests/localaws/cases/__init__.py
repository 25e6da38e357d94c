"""A stack for each type of resource."""

from typing import Final

from tests.localaws.cases import batch, clusters, endpoints, files, watching, working
from tests.localaws.cases.case import Case

CASES: Final[tuple[Case, ...]] = tuple(
    case for entry in (files, watching, working, batch, clusters, endpoints) for case in entry.CASES
)
