"""A build in the words of a user: the same words in nxpipe.toml and on the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES, Instance, instance
from nxpipe.pipeline.config import Model
from nxpipe.pipeline.models.source import ModelSource, resolve
from nxpipe.pipeline.models.weights import parse_weights
from nxpipe.pipeline.request import BuildRequest, Shape, default_phases, longest_sequence, shapes_of
from nxpipe.pipeline.util.files import expanded

ALL: Final = "all"  # in place of an instance: every one of the catalogue
USUAL_BUCKET: Final = 128


@dataclass(frozen=True)
class Order:
    """What is asked for, before a model was looked up."""

    model_id: str
    revision: str | None
    task: str | None
    target: str
    tp: int | None  # none: a build takes one core, a check finds the smallest that fits
    phases: tuple[str, ...] | None
    batches: tuple[int, ...]
    buckets: tuple[int, ...] | None  # none: the usual length, or as many tokens as the model knows
    autocast: str
    autocast_type: str
    weights: str | None

    @classmethod
    def from_flags(cls, model_id: str, flags: Mapping[str, Any]) -> "Order":
        return cls(model_id, **{word: flags[word] for word in words()})

    @classmethod
    def from_config(cls, model: Model, root: Path) -> "Order":
        """Folders of the file start where the file is."""
        said = {word: getattr(model, word) for word in words()}
        said["buckets"] = model.buckets if "buckets" in model.model_fields_set else None
        if model.weights and model.weights != "hub" and not model.weights.startswith("random:"):
            said["weights"] = str(root / expanded(model.weights))
        return cls(model.id or str(root / expanded(str(model.path))), **said)

    def source(self, *, files: bool) -> ModelSource:
        """Look the model up; `files` asks for its weights too."""
        return resolve(self.model_id, revision=self.revision, task=self.task, files=files)

    def targets(self) -> tuple[Instance, ...]:
        """The instance asked for; a check may ask for all."""
        return tuple(INSTANCES.values()) if self.target == ALL else (instance(self.target),)

    def shapes(self, source: ModelSource, usual_phases: tuple[str, ...]) -> tuple[Shape, ...]:
        """The programs of the model that the words ask for."""
        usual = min(USUAL_BUCKET, longest_sequence(source) or USUAL_BUCKET)
        return shapes_of(self.phases or usual_phases, self.batches, self.buckets or (max(usual, 1),))

    def request(self) -> BuildRequest:
        """Look the model up. Without a word on weights a folder brings its own, and an id those of the hub."""
        source = self.source(files=self.weights in (None, "hub"))
        return BuildRequest(
            source=source,
            weights=parse_weights(self.weights or "hub", source.folder),
            shapes=self.shapes(source, default_phases(source.task)),
            target=instance(self.target),
            autocast=self.autocast,
            autocast_type=self.autocast_type,
            tensor_parallel=self.tp or 1,
        )


def words() -> list[str]:
    """The fields that nxpipe.toml and the command line spell alike: all but the model's name."""
    return [field.name for field in fields(Order) if field.name != "model_id"]
