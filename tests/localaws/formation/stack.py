"""A stack: its resources, status, events and change sets."""

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import PhysicalResource, Properties
from tests.localaws.formation.template import NOTHING, Declared, Template


@dataclass(frozen=True)
class Resource:
    """A resource as last deployed, with its evaluated properties."""

    declared: Declared
    properties: Properties
    existing: PhysicalResource
    status: str = "CREATE_COMPLETE"
    since: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def physical(self) -> str:
        return self.existing.id

    def attribute(self, name: str) -> Any:
        if name not in self.existing.attributes:
            raise Refused(f"{self.declared.type} has no attribute {name} here ({self.declared.logical})")
        return self.existing.attributes[name]


@dataclass(frozen=True)
class Output:
    key: str
    value: str
    description: str | None
    export: str | None


@dataclass
class ChangeSet:
    id: str
    name: str
    kind: str  # CREATE or UPDATE
    template: Template
    parameter_values: Mapping[str, str]
    tags: Mapping[str, str]
    description: str | None
    changes: list[dict[str, Any]]
    status: str = "CREATE_COMPLETE"
    reason: str | None = None
    execution: str = "AVAILABLE"
    created: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass
class Stack:
    id: str
    name: str
    status: str = "REVIEW_IN_PROGRESS"
    reason: str | None = None
    template: Template = NOTHING
    parameter_values: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # evaluated parameters
    tags: Mapping[str, str] = field(default_factory=dict)
    resources: dict[str, Resource] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    imports: frozenset[str] = frozenset()
    outputs_read: dict[tuple[str, str, str | None], str] = field(default_factory=dict)  # by Fn::GetStackOutput
    events: list[dict[str, Any]] = field(default_factory=list)
    change_sets: list[ChangeSet] = field(default_factory=list)
    protected: bool = False
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    updated: datetime | None = None
    deleted: datetime | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def exists(self) -> bool:
        return self.status not in ("DELETE_COMPLETE", "REVIEW_IN_PROGRESS")

    def set_status(self, status: str, reason: str | None = None) -> None:
        """Set the status of the stack and record an event."""
        self.status, self.reason = status, reason
        self._event(self.name, self.id, "AWS::CloudFormation::Stack", status, reason)

    def record_event(self, resource: Declared, physical: str, status: str, reason: str | None = None) -> None:
        self._event(resource.logical, physical, resource.type, status, reason)

    def _event(self, logical: str, physical: str, type_: str, status: str, reason: str | None) -> None:
        self.events.append(
            {
                "EventId": str(uuid.uuid4()),
                "LogicalResourceId": logical,
                "PhysicalResourceId": physical,
                "ResourceStatus": status,
                "ResourceStatusReason": reason,
                "ResourceType": type_,
                "StackId": self.id,
                "StackName": self.name,
                "Timestamp": datetime.now(UTC),
            }
        )
