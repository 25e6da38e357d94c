"""The local AWS as a server, where operations outlast their requests."""

import json
from threading import Event

import pytest

from tests.localaws import server
from tests.localaws.formation.provider import PROVIDERS, PhysicalResource, Properties, Provider, Site, client_of
from tests.localaws.server import local_aws


class Held(Provider):
    """A resource whose creation waits for an event."""

    type = "Test::Held"

    def __init__(self) -> None:
        self.begun, self.let_go = Event(), Event()

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        self.begun.set()
        assert self.let_go.wait(60)
        return PhysicalResource("held")


def test_work_that_takes_long_goes_on_behind_its_answer(
    sealed_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setitem(PROVIDERS, Held.type, held)
    monkeypatch.setattr(server, "_LONG", 0.01)
    with local_aws():
        cloudformation = client_of("cloudformation", "us-east-2")
        cloudformation.create_stack(StackName="s", TemplateBody=json.dumps({"Resources": {"One": {"Type": Held.type}}}))
        assert held.begun.wait(60)
        stacks = cloudformation.describe_stacks(StackName="s")["Stacks"]
        held.let_go.set()
        assert [entry["StackStatus"] for entry in stacks] == ["CREATE_IN_PROGRESS"]
        cloudformation.get_waiter("stack_create_complete").wait(
            StackName="s", WaiterConfig={"Delay": 0, "MaxAttempts": 10_000}
        )
