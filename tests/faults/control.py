"""Control of the proxy from another process: JSON over HTTP at `/__faults__`.

    GET                                   the recorded requests and their outcomes
    POST {"plan": {"rules": [...], "latency": 0, "clock_ahead": 0}}   start over under this plan
    POST {"wait": "held"}, {"wait": "settled"}      responds when the state is reached
    POST {"release": {"drop": true}}      continue held requests, or drop their connections

A rule is one of

    {"at": 7, "fault": F}
    {"operation": "PutObject", "nth": 2, "fault": F}            without nth: all of them
    {"seed": 1, "probability": 0.1, "faults": [F, ...]}

and F names a fault of plan.py with its fields: {"kind": "Hold", "when": "after"}.
"""

import json
from dataclasses import asdict
from typing import Any, Final, Protocol

from tests.faults import plan
from tests.faults.exchange import Exchange
from tests.faults.plan import Fault, Plan, Rule

PATH: Final = "/__faults__"
_KINDS: Final[dict[str, type[Fault]]] = {
    kind.__name__: kind
    for kind in (plan.Refuse, plan.CutBefore, plan.CutAfter, plan.CutUpload, plan.Truncate, plan.Delay, plan.Hold)
}


class Steered(Protocol):
    @property
    def exchanges(self) -> list[Exchange]: ...

    async def begin(self, plan: Plan) -> None: ...

    async def until_held(self) -> Exchange: ...

    async def until_settled(self) -> None: ...

    async def let_go(self, *, drop: bool) -> None: ...


async def steer(proxy: Steered, data: bytes) -> bytes:
    """Execute a command, and return the requests since the start of the plan."""
    order: dict[str, Any] = json.loads(data or b"{}")
    if "plan" in order:
        await proxy.begin(_plan(order["plan"]))
    if "release" in order:
        await proxy.let_go(drop=order["release"].get("drop", False))
    if order.get("wait") == "held":
        await proxy.until_held()
    if order.get("wait") == "settled":
        await proxy.until_settled()
    return json.dumps([_shown(exchange) for exchange in proxy.exchanges]).encode()


def _shown(exchange: Exchange) -> dict[str, object]:
    what = {name: getattr(exchange, name) for name in ("received", "status", "outcome", "held")}
    return {**asdict(exchange.request), **what, "fault": exchange.fault and type(exchange.fault).__name__}


def _plan(order: dict[str, Any]) -> Plan:
    settings = {name: order[name] for name in ("latency", "clock_ahead") if name in order}
    return Plan(*(_rule(rule) for rule in order.get("rules", ())), **settings)


def _rule(order: dict[str, Any]) -> Rule:
    if "at" in order:
        return plan.at(order["at"], _fault(order["fault"]))
    if "operation" in order:
        return plan.on(order["operation"], _fault(order["fault"]), nth=order.get("nth"))
    return plan.by_chance(order["seed"], order["probability"], [_fault(fault) for fault in order["faults"]])


def _fault(order: dict[str, Any]) -> Fault:
    return _KINDS[order["kind"]](**{name: value for name, value in order.items() if name != "kind"})
