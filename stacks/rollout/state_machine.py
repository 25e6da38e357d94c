"""State machine of a rollout: lock, fill the new target group, shift traffic step by step, promote or roll back.

`release` is the machine that moves traffic; `watch` is the machine that evaluates one step.
"""

from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.fleet_record import COLOURS, EXECUTION_ID, Fleet, Record
from nxpipe.stacks.rollout.states import (
    ALL_ERRORS,
    CONDITION_FAILED,
    State,
    States,
    call,
    choose,
    fail,
    invoke,
    put,
    wait,
    with_catch,
    with_catch_all,
)
from nxpipe.stacks.rollout.states import wait as wait_for

ROLLOUT_SECONDS: Final = 35 * 86_400  # seconds: four steps of a week, and people who are asked
_FROM: Final = "$.opened.is.from"
_TO: Final = "$.opened.is.to"
_CARRIED: Final = "$.told.is.carried"
_OWNER: Final = "$.record.Item.owner.S"
HEALTHY: Final = "$.TargetHealthDescriptions[?(@.TargetHealth.State == 'healthy')].Target.Id"  # of a target group
_NOW: Final = "$$.State.EnteredTime"
# What says that the watch of a step did not begin: if it began and failed, there is nothing to try again.
_NOT_BEGUN: Final = ["StepFunctions.SdkClientException", "StepFunctions.ThrottlingException"]


@dataclass(frozen=True)
class MachineResources:
    """What the machines work with, by name or ARN."""

    judge: str
    watch: str  # the machine that looks at one step
    clock: str  # the rule that wakes the watchdog
    topic: str
    bucket: str
    folder: str  # of the bucket, for evidence: "rollouts/search/", say

    def keep(self, answer: str, *, then: str) -> State:
        """What the judge wants to be kept of an answer."""
        parameters = {
            "Bucket": self.bucket,
            "Key.$": f"States.Format('{self.folder}{{}}', {answer}.key)",
            "ContentType": "application/json",
            "Body.$": f"{answer}.record",
        }
        return call("s3", "putObject", parameters, then=then)


def release(fleet: Fleet, record: Record, means: MachineResources) -> dict[str, Any]:
    states = {
        **with_catch_all(_begin(fleet, record, means), "Refuse"),
        **with_catch_all(_fill(record, means), "LeaveEmpty"),
        **with_catch_all(_steps(fleet, record, means), "Back"),
        **with_catch_all(_promote(record), "Unfinished"),
        **with_catch_all(_back(fleet, record), "Unfinished"),
        **with_catch_all(_leave_empty(), "Unfinished"),
        **_end(record, means),
        "Refuse": record.unlock(then="Refused"),
        "Refused": {"Type": "Fail", "ErrorPath": "$.why.Error", "CausePath": "$.why.Cause"},
        "Busy": fail("Rollout.Busy", f"another rollout of fleet {fleet.name} is under way"),
        "Unfinished": {"Type": "Fail", "ErrorPath": "$.why.Error", "CausePath": "$.why.Cause"},
    }
    return {"StartAt": "Lock", "TimeoutSeconds": ROLLOUT_SECONDS, "States": states}


def describe_alarms(fleet: Fleet, *, then: str) -> State:
    """All of them, whatever state they are in: a guard that is not there any more guards nothing."""
    kinds = ("Metric", "Composite")
    return call(
        "cloudwatch",
        "describeAlarms",
        {"AlarmNames": list(fleet.alarms), "AlarmTypes": [f"{kind}Alarm" for kind in kinds]},
        keeping={
            f"{kind.lower()}_{word}.$": f"$.{kind}Alarms[*].{member}"
            for kind in kinds
            for word, member in (("names", "AlarmName"), ("states", "StateValue"))
        },
        into="$.alarms",
        then=then,
    )


def _begin(fleet: Fleet, record: Record, means: MachineResources) -> States:
    """Until traffic is found whole, and what was asked for makes sense, nothing is touched but the lock."""
    found = {"fleet": fleet.told(), "state.$": "$", "name.$": "$$.Execution.Name", "at.$": _NOW}
    first, second = COLOURS
    return {
        "Lock": record.lock(then="SeeWeights", caught={CONDITION_FAILED: "Busy"}),
        "SeeWeights": fleet.look(into="$.weights", then="SeeBlue"),
        "SeeBlue": _see_size(fleet, first, then="SeeGreen"),
        "SeeGreen": _see_size(fleet, second, then="SeeAlarms"),
        "SeeAlarms": describe_alarms(fleet, then="Open"),
        "Open": invoke(means.judge, {"opens": found}, into="$.opened", then="KeepPlan"),
        "KeepPlan": means.keep("$.opened.is", then="Point"),
        "Point": record.point(f"{_FROM}.colour", then="Wake"),
    }


def _see_size(fleet: Fleet, colour: str, *, then: str) -> State:
    group = "$.AutoScalingGroups[0]"
    return call(
        "autoscaling",
        "describeAutoScalingGroups",
        {"AutoScalingGroupNames": [fleet.colours[colour].group]},
        keeping={"desired.$": f"{group}.DesiredCapacity", "most.$": f"{group}.MaxSize"},
        into=f"$.{colour}",
        then=then,
    )


def _fill(record: Record, means: MachineResources) -> States:
    """The new colour gets as many instances as the old one has. If they do not come, nothing has happened yet."""
    pace = "$.opened.is.pace"
    enough = {"Variable": "$.warm.healthy", "NumericGreaterThanEqualsPath": "$.opened.is.size"}
    late = {"Variable": "$.warm.tries", "NumericGreaterThanEqualsPath": f"{pace}.warm_tries"}
    signal = "$.record.Item.signal.S"
    return {
        "Wake": call("eventbridge", "enableRule", {"Name": means.clock}, then="Fill"),
        "Fill": _resize(f"{_TO}.group", "$.opened.is.size", then="Cold"),
        "Cold": put({"tries": 0}, into="$.warm", then="WarmUp"),
        "WarmUp": wait_for(f"{pace}.warm", then="SeeHealth"),
        "SeeHealth": call(
            "elasticloadbalancingv2",
            "describeTargetHealth",
            {"TargetGroupArn.$": f"{_TO}.targets"},
            keeping={"healthy.$": HEALTHY},
            into="$.health",
            then="SeeSignal",
        ),
        "SeeSignal": record.read(into="$.record", then="CountHealthy"),
        "CountHealthy": put(
            {"healthy.$": "States.ArrayLength($.health.healthy)", "tries.$": "States.MathAdd($.warm.tries, 1)"},
            into="$.warm",
            then="Warm",
        ),
        "Warm": choose(
            ({"And": [{"Variable": signal, "IsPresent": True}, {"Variable": signal, "StringEquals": "abort"}]}, "Stop"),
            (enough, "First"),
            (late, "TooFew"),
            otherwise="WarmUp",
        ),
        "Stop": put(
            {"Error": "aborted", "Cause": "a person ended it before any traffic had moved"},
            into="$.why",
            then="LeaveEmpty",
        ),
        "TooFew": put(
            {
                "Error": "capacity_blocked",
                "Cause.$": f"States.Format('{{}} of {{}} instances of {{}} became healthy', $.warm.healthy, "
                f"$.opened.is.size, {_TO}.group)",
            },
            into="$.why",
            then="LeaveEmpty",
        ),
    }


def _steps(fleet: Fleet, record: Record, means: MachineResources) -> States:
    began = {"step.$": "$.turn.number", "carried.$": _CARRIED, "at.$": _NOW}
    verdict = "$.told.is.verdict"
    mine = {"Variable": _OWNER, "StringEqualsPath": "$.me.name"}
    last = {"Variable": "$.turn.number", "NumericGreaterThanEqualsPath": "$.opened.is.count"}
    return {
        "First": put({"is": {"carried.$": "$.opened.is.carried"}}, into="$.told", then="Zero"),
        "Zero": put({"number": 0}, into="$.turn", then="Step"),
        "Step": put(
            {"number.$": "$.turn.number", "weights.$": "States.ArrayGetItem($.opened.is.steps, $.turn.number)"},
            into="$.turn",
            then="Claim",
        ),
        "Claim": record.claim(then="Shift", caught={CONDITION_FAILED: "SeeOwner"}),
        "SeeOwner": record.read(into="$.record", then="Me"),
        "Me": put({"name.$": EXECUTION_ID}, into="$.me", then="Mine"),
        "Mine": choose(({"And": [{"Variable": _OWNER, "IsPresent": True}, mine]}, "Ended"), otherwise="Unfinished"),
        "Ended": put({"Error": "aborted", "Cause": "a person ended it"}, into="$.why", then="Back"),
        "Shift": fleet.shift("$.turn.weights", then="SeeShift"),
        "SeeShift": fleet.look(into="$.weights", then="Shifted"),
        "Shifted": fleet.same("$.weights", "$.turn.weights", then="BeginStep", otherwise="NotShifted"),
        "NotShifted": put(
            {"Error": "moved", "Cause": "the rule has other weights than it was just given: somebody else changes it"},
            into="$.why",
            then="Back",
        ),
        "BeginStep": invoke(means.judge, {"begins": began}, into="$.told", then="Watch"),
        "Watch": _watch(means, then="Verdict"),
        "Verdict": choose(
            ({"Variable": verdict, "StringEquals": "advance"}, "UseUp"),
            ({"Variable": verdict, "StringEquals": "watch"}, "Watch"),
            ({"Variable": verdict, "StringEquals": "ask"}, "AskPeople"),
            otherwise="Because",
        ),
        "UseUp": record.use_up("approve", then="NextStep"),
        "AskPeople": _tell(means, "needs a person", "$.told.is.reason", then="Watch"),
        "Because": put({"Error.$": verdict, "Cause.$": "$.told.is.reason"}, into="$.why", then="Back"),
        "NextStep": put({"number.$": "States.MathAdd($.turn.number, 1)"}, into="$.turn", then="Another"),
        "Another": choose((last, "Promote"), otherwise="Step"),
    }


def _watch(means: MachineResources, *, then: str) -> State:
    """In an execution of its own, so that no history grows with the length of a rollout."""
    return {
        "Type": "Task",
        "Resource": "arn:aws:states:::states:startExecution.sync:2",
        "Parameters": {
            "StateMachineArn": means.watch,
            "Input": {"told.$": "$.told", "AWS_STEP_FUNCTIONS_STARTED_BY_EXECUTION_ID.$": "$$.Execution.Id"},
        },
        "Retry": [{"ErrorEquals": _NOT_BEGUN, "IntervalSeconds": 2, "MaxAttempts": 4, "BackoffRate": 2}],
        "ResultSelector": {"is.$": "$.Output"},
        "ResultPath": "$.told",
        "Next": then,
    }


def _promote(record: Record) -> States:
    """The pointer first: from then on a watchdog would go forward, and the old colour is no longer needed."""
    return {
        "Promote": record.point(f"{_TO}.colour", then="Drain"),
        "Drain": _resize(f"{_FROM}.group", 0, then="Promoted"),
        "Promoted": put(
            {"Error": "promoted", "Cause": "all steps had evidence that the new version is no worse"},
            into="$.why",
            then="KeepOutcome",
        ),
    }


def _back(fleet: Fleet, record: Record) -> States:
    """Two calls, and traffic is where it was. A colour is emptied only once the record names the other one."""
    home = "$.opened.is.home"
    return {
        "Back": fleet.shift(home, then="SeeBack", stubborn=True),
        "SeeBack": fleet.look(into="$.weights", then="IsBack", stubborn=True),
        "IsBack": fleet.same("$.weights", home, then="PointBack", otherwise="Unfinished"),
        "PointBack": record.point(f"{_FROM}.colour", then="EmptyAgain"),
        "EmptyAgain": _resize(f"{_TO}.group", 0, then="KeepOutcome"),
    }


def _leave_empty() -> States:
    return {"LeaveEmpty": _resize(f"{_TO}.group", 0, then="KeepOutcome")}


def _end(record: Record, means: MachineResources) -> States:
    """Evidence, word to people, and the lock last. The first three may fail: they keep nobody's traffic."""
    told = {"why.$": "$.why", "from.$": _FROM, "to.$": _TO, "execution.$": "$$.Execution.Id", "at.$": _NOW}
    key = f"States.Format('{means.folder}{{}}/outcome.json', $$.Execution.Name)"
    kept = {"Bucket": means.bucket, "Key.$": key, "ContentType": "application/json", "Body": told}
    clock = call("eventbridge", "disableRule", {"Name": means.clock}, then="Unlock")
    return {
        "KeepOutcome": with_catch(call("s3", "putObject", kept, then="Tell"), {ALL_ERRORS[0]: "Tell"}, into="$.unkept"),
        "Tell": with_catch(
            _tell(means, "has ended", "States.JsonToString($.why)", then="Sleep"),
            {ALL_ERRORS[0]: "Sleep"},
            into="$.untold",
        ),
        "Sleep": with_catch(clock, {ALL_ERRORS[0]: "Unlock"}, into="$.awake"),
        "Unlock": record.unlock(then="Done"),
        "Done": {
            "Type": "Pass",
            "Parameters": {"outcome.$": "$.why.Error", "reason.$": "$.why.Cause", "from.$": _FROM, "to.$": _TO},
            "End": True,
        },
    }


def _resize(group: str, size: str | int, *, then: str) -> State:
    to = {"DesiredCapacity.$": size} if isinstance(size, str) else {"DesiredCapacity": size}
    parameters = {"AutoScalingGroupName.$": group, **to, "HonorCooldown": False}
    return call("autoscaling", "setDesiredCapacity", parameters, then=then)


def _tell(means: MachineResources, what: str, message: str, *, then: str) -> State:
    parameters = {"TopicArn": means.topic, "Subject": f"A rollout {what}", "Message.$": message}
    return call("sns", "publish", parameters, then=then)


STEP_SECONDS: Final = 3 * 86_400  # seconds: as many looks as the judge has in one execution, ten minutes apart


def watch(fleet: Fleet, record: Record, means: MachineResources) -> dict[str, Any]:
    metrics = {
        "StartTime.$": "$.told.is.ask.from",
        "EndTime.$": "$$.State.EnteredTime",
        "ScanBy": "TimestampAscending",
        "MetricDataQueries.$": "$.told.is.ask.queries",
    }
    seen = {
        "carried.$": "$.told.is.carried",
        "metrics.$": "$.metrics.results",
        "alarms.$": "$.alarms",
        "record.$": "$.record",
        "at.$": "$$.State.EnteredTime",
    }
    again = {"Variable": "$.told.is.verdict", "StringEquals": "continue"}
    states = {
        "Wait": wait("$.told.is.wait", then="SeeSignal"),
        "SeeSignal": record.read(into="$.record", then="SeeMetrics"),
        "SeeMetrics": call(
            "cloudwatch",
            "getMetricData",
            metrics,
            keeping={"results.$": "$.MetricDataResults"},
            into="$.metrics",
            then="SeeAlarms",
        ),
        "SeeAlarms": describe_alarms(fleet, then="Judge"),
        "Judge": invoke(means.judge, {"looks": seen}, into="$.told", then="Keep"),
        "Keep": means.keep("$.told.is", then="Verdict"),
        "Verdict": choose((again, "Wait"), otherwise="Told"),
        "Told": {"Type": "Succeed", "OutputPath": "$.told.is"},
    }
    return {"StartAt": "Wait", "TimeoutSeconds": STEP_SECONDS, "States": states}


WATCHDOG_SECONDS: Final = 3_600  # seconds
_STABLE: Final = "$.record.Item.stable.S"
_GONE: Final = "Sfn.ExecutionDoesNotExistException"


def watchdog(fleet: Fleet, record: Record, means: MachineResources) -> dict[str, Any]:
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
        "TakeOver": record.take_over(_OWNER, then="Whither", caught={CONDITION_FAILED: "Nothing"}),
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
        "Sleep": with_catch(
            call("eventbridge", "disableRule", {"Name": means.clock}, then="Unlock"),
            {ALL_ERRORS[0]: "Unlock"},
            into="$.awake",
        ),
        "Unlock": record.unlock(then="Nothing", caught={ALL_ERRORS[0]: "WakeAgain"}),
        "WakeAgain": call("eventbridge", "enableRule", {"Name": means.clock}, then="StillLocked"),
        "StillLocked": fail("Rollout.StillLocked", "traffic is whole, but the lock could not be released"),
        "NotHealthy": fail("Rollout.NotHealthy", "the colour that the record calls stable has no healthy instance"),
        "NotWhole": fail("Rollout.NotWhole", "the rule has other weights than it was just given"),
        "Nothing": {"Type": "Succeed"},
    }
    return {"StartAt": "Look", "TimeoutSeconds": WATCHDOG_SECONDS, "States": states}


def _home(fleet: Fleet, means: MachineResources) -> States:
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
            f"Tell-{colour}": with_catch(
                call("sns", "publish", words, then="Sleep"), {ALL_ERRORS[0]: "Sleep"}, into="$.untold"
            ),
        }
    return states
