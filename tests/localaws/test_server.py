"""The local AWS as a server, where work and the request for it are two things."""

import json
from threading import Event

import pytest

from tests.localaws import server
from tests.localaws.formation.provider import PROVIDERS, Made, Properties, Provider, Site, client_of
from tests.localaws.server import local_aws


class Held(Provider):
    """Is not there before it is let go."""

    type = "Test::Held"

    def __init__(self) -> None:
        self.begun, self.let_go = Event(), Event()

    def create(self, wanted: Properties, at: Site) -> Made:
        self.begun.set()
        assert self.let_go.wait(60)
        return Made("held")


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
        found = cloudformation.describe_stacks(StackName="s")["Stacks"]
        held.let_go.set()
        assert [one["StackStatus"] for one in found] == ["CREATE_IN_PROGRESS"]
        cloudformation.get_waiter("stack_create_complete").wait(
            StackName="s", WaiterConfig={"Delay": 0, "MaxAttempts": 10_000}
        )
