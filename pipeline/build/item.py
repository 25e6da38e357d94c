"""What an executor carries out, as one JSON document: a cell, or the publishing of an artifact."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds


@dataclass(frozen=True)
class Item:
    """`key` names what it makes; `shape` is none of an artifact. `work` is its size beside others: the largest goes
    first. `memory` is what it may take, in bytes."""

    key: str
    title: str
    asked: ModelSpec
    shape: Shape | None
    store: str
    thresholds: Thresholds
    force: bool
    work: float
    memory: int
    kms_key: str | None = None  # what the store encrypts with

    @property
    def kind(self) -> Literal["cell", "artifact"]:
        return "cell" if self.shape else "artifact"

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"asked": self.asked.document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Item":
        shape = document["shape"]
        return cls(
            **dict(document)
            | {
                "asked": ModelSpec.from_document(document["asked"]),
                "shape": None if shape is None else Shape(**shape),
                "thresholds": Thresholds(**document["thresholds"]),
            }
        )
