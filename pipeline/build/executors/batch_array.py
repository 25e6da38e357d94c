"""One submitted job, an array or a single one: what Batch says of its children, in few requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.pipeline.util.aws import asking

if TYPE_CHECKING:
    from nxpipe.artifact_store.documents import Blob

Told: TypeAlias = Mapping[str, Any]  # a job, as Batch describes it

_DESCRIBED: Final = 100  # jobs a request
_PAGE: Final = 1000
ENDED: Final = ("SUCCEEDED", "FAILED")


@dataclass
class ArrayJob:
    """`keys` are those of its items; the sets hold places in it: of children that have begun, that have failed, and
    that have not been told the end of. `counts` are those of the last look, by status; times are the driver's.
    """

    id: str
    items: "Blob"
    keys: Sequence[str]
    kept_at: float
    open: set[int] = field(init=False)
    begun: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    counts: Mapping[str, int] = field(default_factory=dict)
    waits_since: float | None = None

    def __post_init__(self) -> None:
        self.open = set(range(len(self.keys)))

    @property
    def single(self) -> bool:
        return len(self.keys) == 1

    def child(self, place: int) -> str:
        """Its job's id."""
        return self.id if self.single else f"{self.id}:{place}"


def describe(batch: Any, ids: Sequence[str]) -> dict[str, Told]:
    """By id; of a job that Batch has forgotten, nothing."""
    told: list[Told] = []
    with asking("describe the jobs of the build"):
        for at in range(0, len(ids), _DESCRIBED):
            told += batch.describe_jobs(jobs=list(ids[at : at + _DESCRIBED]))["jobs"]
    return {one["jobId"]: one for one in told}


def counts_of(array: ArrayJob, told: Told) -> dict[str, int]:
    """How many children are in which status; a single job is its own child. An array may fail before it has any."""
    if array.single:
        return {told["status"]: 1}
    summary = told.get("arrayProperties", {}).get("statusSummary", {})
    return {status: count for status, count in summary.items() if count}


def children(batch: Any, array: ArrayJob, told: Told, status: str) -> Iterator[tuple[int, Told]]:
    """Those in one status by their places, a page at a time: whoever has found enough asks for no more."""
    if array.single:
        if told["status"] == status:
            yield 0, told
        return
    more: dict[str, str] = {}
    while True:
        with asking("list the children of an array job"):
            page = batch.list_jobs(arrayJobId=array.id, jobStatus=status, maxResults=_PAGE, **more)
        for one in page["jobSummaryList"]:
            yield one["arrayProperties"]["index"], one
        if not page.get("nextToken"):
            return
        more = {"nextToken": page["nextToken"]}
