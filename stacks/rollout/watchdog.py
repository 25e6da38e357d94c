"""The machine that brings traffic home when the one that moved it is gone. It shares no state with that one.

It knows the weights of each colour from its own text, asks no judge, and acts only for an execution that has ended. It
believes the record no further than it can see: whoever starts rollouts may write the owner's name. An owner that Step
Functions does not know is a start at work, or a word that nobody has to heed: while traffic is whole, nothing is
done for it. And no traffic goes to a colour that has nobody to serve it, whatever the record calls stable.
"""

from typing import Any, Final

from nxpipe.stacks.rollout.fleet_record import COLOURS, Fleet, Record
from nxpipe.stacks.rollout.state_machine import HEALTHY, Means
from nxpipe.stacks.rollout.states import ANYTHING, NOT_MET, States, call, caught_by, choose, fail

WATCHDOG_SECONDS: Final = 3_600  # seconds
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
            caught={_GONE: "SeeUnknown"},
        ),
        "SeeUnknown": fleet.look(into="$.weights", then="AllBlue", stubborn=True),
        "AllBlue": fleet.same("$.weights", fleet.whole("blue"), then="Nothing", otherwise="AllGreen"),
        "AllGreen": fleet.same("$.weights", fleet.whole("green"), then="Nothing", otherwise="TakeOver"),
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
                    f"Look-{colour}",
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
        "NotHealthy": fail("Rollout.NotHealthy", "the colour that the record calls stable has no healthy instance"),
        "NotWhole": fail("Rollout.NotWhole", "the rule has other weights than it was just given"),
        "Nothing": {"Type": "Succeed"},
    }
    return {"StartAt": "Look", "TimeoutSeconds": WATCHDOG_SECONDS, "States": states}


def _home(fleet: Fleet, means: Means) -> States:
    """All traffic to the stable colour, if somebody is there; when that is seen, the other one is emptied."""
    states: States = {}
    for colour, other in (COLOURS, COLOURS[::-1]):
        weights = fleet.whole(colour)
        empty = {"AutoScalingGroupName": fleet.colours[other].group, "DesiredCapacity": 0, "HonorCooldown": False}
        said = f"A rollout of fleet {fleet.name} ended before its time. All traffic goes to {colour}."
        words = {"TopicArn": means.topic, "Subject": "A rollout was brought home", "Message": said}
        there = {"Variable": "$.health.healthy[0]", "IsPresent": True}
        states |= {
            f"Look-{colour}": call(
                "elasticloadbalancingv2",
                "describeTargetHealth",
                {"TargetGroupArn": fleet.colours[colour].targets},
                keeping={"healthy.$": HEALTHY},
                into="$.health",
                then=f"There-{colour}",
                stubborn=True,
            ),
            f"There-{colour}": choose((there, f"To-{colour}"), otherwise="NotHealthy"),
            f"To-{colour}": fleet.shift(weights, then=f"See-{colour}", stubborn=True),
            f"See-{colour}": fleet.look(into="$.weights", then=f"At-{colour}", stubborn=True),
            f"At-{colour}": fleet.same("$.weights", weights, then=f"Empty-{other}", otherwise="NotWhole"),
            f"Empty-{other}": call("autoscaling", "setDesiredCapacity", empty, then=f"Tell-{colour}", stubborn=True),
            f"Tell-{colour}": caught_by(
                call("sns", "publish", words, then="Sleep"), {ANYTHING[0]: "Sleep"}, into="$.untold"
            ),
        }
    return states
