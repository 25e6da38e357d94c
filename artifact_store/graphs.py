"""Equal graphs are never compiled twice: from the key of a graph to the executable that was made of it."""

import secrets
from typing import Literal

from artifact_store.documents import Blob, Digest, Sealed, WriteId
from artifact_store.errors import Conflict
from artifact_store.layout import graph_path
from artifact_store.store import Store


class GraphRecord(Sealed):
    format: Literal["nxpipe.graph/1"] = "nxpipe.graph/1"
    graph_key: Digest
    executable: Blob
    write_id: WriteId

    @property
    def path(self) -> str:
        return graph_path(self.graph_key)


def executable_of(store: Store, graph_key: str) -> Blob | None:
    """What was compiled of this graph, if the store still holds it intact."""
    record = store.records.read(GraphRecord, graph_path(graph_key))
    return record.executable if record and store.blobs.is_intact(record.executable) else None


def remember_executable(store: Store, graph_key: str, executable: Blob) -> None:
    """After the executable is stored; another one for the same graph is a conflict, as it is for an artifact."""
    record = GraphRecord(graph_key=graph_key, executable=executable, write_id=secrets.token_hex(16))
    winner = store.records.create_or_read(record)
    if winner.executable != executable:
        raise Conflict(f"graph key {graph_key}", winner.executable.sha256, executable.sha256, store.url)
