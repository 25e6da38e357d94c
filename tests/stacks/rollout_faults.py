"""What may happen to one state of a machine: its call fails, once or always, or its answer is lost; or the execution is
stopped when it comes there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest
from botocore.exceptions import ClientError
from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_aws_sdk import (
    StateTaskServiceAwsSdk,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_lambda import (
    StateTaskServiceLambda,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_sfn import (
    StateTaskServiceSfn,
)
from moto.stepfunctions.parser.asl.component.state.state import CommonStateField

from nxpipe.stacks.rollout.fleet_record import Fleet, Record, TargetGroup
from nxpipe.stacks.rollout.state_machine import MachineResources, release, watch, watchdog
from nxpipe.stacks.rollout.states import States
from tests.localaws.formation.provider import client_of
from tests.stacks.local import REGION

Kind = Literal["fails once", "stays broken", "answer is lost", "is stopped"]
Machine = Literal["rollout", "watch", "watchdog"]

_RECORD: Final = Record("table", "f")
_MEANS: Final = MachineResources("judge", "watch", "clock", "topic", "bucket", "folder/")


def machines_of(*, scaling: bool) -> dict[Machine, States]:
    """The states of each machine, of a fleet whose groups and target groups have the names of their colours."""
    colours = {name: TargetGroup(name, name, name) for name in ("blue", "green")}
    fleet = Fleet("f", "rule", "balancer", colours, 1, (), 60, 60, scaling)
    return {
        "rollout": release(fleet, _RECORD, _MEANS)["States"],
        "watch": watch(fleet, _RECORD, _MEANS)["States"],
        "watchdog": watchdog(fleet, _RECORD, _MEANS)["States"],
    }


MACHINES: Final = machines_of(scaling=False)
_FAILURE: Final = {
    "Error": {"Code": "TooManyRequestsException", "Message": "a test says so"},
    "ResponseMetadata": {"HTTPStatusCode": 429, "RequestId": "r"},
}


@dataclass(frozen=True)
class Fault:
    machine: Machine
    state: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.machine}.{self.state} {self.kind}"


def faults() -> Iterator[Fault]:
    """All possible faults: of calls all kinds, of other states a stopped execution."""
    for machine, states in MACHINES.items():
        for name, state in states.items():
            if state["Type"] == "Task":
                yield from (Fault(machine, name, kind) for kind in ("fails once", "stays broken", "answer is lost"))
            if state["Type"] not in ("Fail", "Succeed"):
                yield Fault(machine, name, "is stopped")


@contextmanager
def injected(fault: Fault) -> Iterator[threading.Event]:
    """Inject the fault into the first execution that reaches the state; set the event then. Retries do not wait."""
    met, execution = threading.Event(), ""

    def concerned(state: Any, env: Any) -> bool:
        nonlocal execution
        found = _execution(env)
        here = state.name == fault.state and _runs(fault.machine, found)
        if here and not met.is_set():
            met.set()
            execution = found
            return True
        return here and fault.kind == "stays broken" and execution == found

    def stopping(stock: Callable[..., None], state: Any, env: Any) -> None:
        if fault.kind == "is stopped" and concerned(state, env):
            client_of("stepfunctions", REGION).stop_execution(executionArn=_execution(env))
        stock(state, env=env)

    def failing(stock: Callable[..., None], state: Any, **given: Any) -> None:
        broken = fault.kind != "is stopped" and concerned(state, given["env"])
        if not broken or fault.kind == "answer is lost":
            stock(state, **given)
        if broken:
            raise ClientError(_FAILURE, "call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrier_decl, "time", SimpleNamespace(sleep=lambda seconds: None))
        _around(patch, CommonStateField, "_eval_body", stopping)
        for kind in (StateTaskServiceAwsSdk, StateTaskServiceLambda, StateTaskServiceSfn):
            _around(patch, kind, "_eval_service_task", failing)
        yield met


@contextmanager
def meanwhile(machine: Machine, name: str, do: Callable[[], None]) -> Iterator[None]:
    """Run `do` when an execution first reaches this state."""
    done = threading.Event()

    def coming(stock: Callable[..., None], state: Any, env: Any) -> None:
        if state.name == name and _runs(machine, _execution(env)) and not done.is_set():
            done.set()
            do()
        stock(state, env=env)

    with pytest.MonkeyPatch.context() as patch:
        _around(patch, CommonStateField, "_eval_body", coming)
        yield


def _execution(env: Any) -> str:
    return str(env.states.context_object.context_object_data["Execution"]["Id"])


def _runs(machine: Machine, execution: str) -> bool:
    return f":demo-search-{machine}:" in execution


def _around(patch: pytest.MonkeyPatch, kind: type, name: str, new: Callable[..., None]) -> None:
    stock = getattr(kind, name)

    def call(self: Any, *args: Any, **given: Any) -> None:
        new(stock, self, *args, **given)

    patch.setattr(kind, name, call)
