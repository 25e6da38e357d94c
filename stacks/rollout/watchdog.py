"""The machine that brings traffic home when the one that moved it is gone. It shares no state with that one.

It knows the weights of each colour from its own text, asks no judge, and acts only for an execution that has ended.
"""

from typing import Any, Final

from stacks.rollout.fleet import COLOURS, Fleet
from stacks.rollout.record import Record
from stacks.rollout.release import Means
from stacks.rollout.states import ANYTHING, NOT_MET, States, call, caught_by, choose, fail

LONGEST: Final = 3_600  # seconds
_OWNER: Final = "$.record.Item.owner.S"
_STABLE: Final = "$.record.Item.stable.S"
_GONE: Final = "Sfn.ExecutionDoesNotExistException"


def watchdog(fleet: Fleet, record: Record, means: Means) -> dict[str, Any]:
    states: States = {
        "Look": record.read(into="$.record", then="Locked"),
        "Locked": choose(({"Variable": _OWNER, "IsPresent": True}, "Ask"), otherwise="Nothing"),
        "Ask": call(
            "sfn",
            "describeExecution",
            {"ExecutionArn.$": _OWNER},
            keeping={"status.$": "$.Status"},
            into="$.owner",
            then="Alive",
            caught={_GONE: "TakeOver"},
        ),
        "Alive": choose(({"Variable": "$.owner.status", "StringEquals": "RUNNING"}, "Nothing"), otherwise="TakeOver"),
        "TakeOver": record.take_over(_OWNER, then="Whither", caught={NOT_MET: "Nothing"}),
        "Whither": choose(
            *(
                (
                    {
                        "And": [
                            {"Variable": _STABLE, "IsPresent": True},
                            {"Variable": _STABLE, "StringEquals": colour},
                        ]
                    },
                    f"To-{colour}",
                )
                for colour in COLOURS
            ),
            otherwise="Sleep",  # it died before it had moved anything
        ),
        **_home(fleet, means),
        "Sleep": caught_by(
            call("eventbridge", "disableRule", {"Name": means.clock}, then="Unlock"),
            {ANYTHING[0]: "Unlock"},
            into="$.awake",
        ),
        "Unlock": record.unlock(then="Nothing", caught={ANYTHING[0]: "WakeAgain"}),
        "WakeAgain": call("eventbridge", "enableRule", {"Name": means.clock}, then="StillLocked"),
        "StillLocked": fail("Rollout.StillLocked", "traffic is whole, but the lock could not be released"),
        "NotWhole": fail("Rollout.NotWhole", "the rule has other weights than it was just given"),
        "Nothing": {"Type": "Succeed"},
    }
    return {"StartAt": "Look", "TimeoutSeconds": LONGEST, "States": states}


def _home(fleet: Fleet, means: Means) -> States:
    """All traffic to the stable colour; when that is seen, the other one is emptied."""
    states: States = {}
    for colour, other in (COLOURS, COLOURS[::-1]):
        weights = fleet.whole(colour)
        empty = {"AutoScalingGroupName": fleet.colours[other].group, "DesiredCapacity": 0, "HonorCooldown": False}
        said = f"A rollout of fleet {fleet.name} ended before its time. All traffic goes to {colour}."
        words = {"TopicArn": means.topic, "Subject": "A rollout was brought home", "Message": said}
        states |= {
            f"To-{colour}": fleet.shift(weights, then=f"See-{colour}", stubborn=True),
            f"See-{colour}": fleet.look(into="$.weights", then=f"At-{colour}", stubborn=True),
            f"At-{colour}": fleet.same("$.weights", weights, then=f"Empty-{other}", otherwise="NotWhole"),
            f"Empty-{other}": call("autoscaling", "setDesiredCapacity", empty, then=f"Tell-{colour}", stubborn=True),
            f"Tell-{colour}": caught_by(
                call("sns", "publish", words, then="Sleep"), {ANYTHING[0]: "Sleep"}, into="$.untold"
            ),
        }
    return states
