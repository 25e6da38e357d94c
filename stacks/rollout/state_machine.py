"""State machine of a rollout: lock, fill the new target group, shift traffic step by step, promote or roll back.

`release` is the machine that moves traffic; `watch` is the machine that evaluates one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.fleet_record import COLOURS, EXECUTION_ID, Fleet, Record, empty
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

MIRROR: Final = "mirror.json"  # as pipeline/fleet/agent/shadow.py reads it
ROLLOUT_SECONDS: Final = 35 * 86_400  # four steps of a week, and a week of waiting for people
_FROM: Final = "$.opened.is.from"
_TO: Final = "$.opened.is.to"
_TO_GROUP: Final = {"AutoScalingGroupName.$": f"{_TO}.group"}
_CARRIED: Final = "$.told.is.carried"  # `told` is the judge's last response
_OWNER: Final = "$.record.Item.owner.S"
HEALTHY: Final = "$.TargetHealthDescriptions[?(@.TargetHealth.State == 'healthy')].Target.Id"  # of a target group
_NO_MIRROR: Final = {"mirror": {"percent": 0}, "hosts": []}
_NOW: Final = "$$.State.EnteredTime"
# Errors by which the `watch` execution did not start. One that started and failed is not retried.
_NOT_STARTED: Final = ["StepFunctions.SdkClientException", "StepFunctions.ThrottlingException"]


@dataclass(frozen=True)
class MachineResources:
    """Resources that the state machines use, by name or ARN."""

    judge: str
    watch: str  # the state machine that evaluates one step
    clock: str  # the rule that wakes the watchdog
    topic: str
    bucket: str
    folder: str  # of the bucket, for evidence: "rollouts/search/", say

    def store_evidence(self, answer: str, *, then: str) -> State:
        """State that stores the evaluation record of a judge's response in the bucket."""
        parameters = {
            "Bucket": self.bucket,
            "Key.$": f"States.Format('{self.folder}{{}}', {answer}.key)",
            "ContentType": "application/json",
            "Body.$": f"{answer}.record",
        }
        return call("s3", "putObject", parameters, then=then)

    @property
    def mirror(self) -> str:
        """Key of the document by which the stable instances know which requests they mirror, and to which addresses."""
        return f"{self.folder}{MIRROR}"

    def set_mirror(self, document: Mapping[str, Any], *, then: str) -> State:
        """State that sets the whole document, as weights are set: repeating it is harmless."""
        parameters = {"Bucket": self.bucket, "Key": self.mirror, "ContentType": "application/json", "Body": document}
        return call("s3", "putObject", parameters, then=then, rollback=True)


def release(fleet: Fleet, record: Record, resources: MachineResources) -> dict[str, Any]:
    states = {
        **with_catch_all(_begin(fleet, record, resources), "Refuse"),
        **with_catch_all(_fill(fleet, record), "LeaveEmpty"),
        **with_catch_all(_steps(fleet, record, resources), "Back"),
        **with_catch_all(_promote(record), "Unfinished"),
        **with_catch_all(_back(fleet, record, resources), "Unfinished"),
        **with_catch_all(_leave_empty(), "Unfinished"),
        **_end(fleet, record, resources),
        "Refuse": record.unlock(then="Refused"),
        "Refused": {"Type": "Fail", "ErrorPath": "$.why.Error", "CausePath": "$.why.Cause"},
        "Busy": fail("Rollout.Busy", f"another rollout of fleet {fleet.name} is running"),
        "Unfinished": {"Type": "Fail", "ErrorPath": "$.why.Error", "CausePath": "$.why.Cause"},
    }
    return {"StartAt": "Lock", "TimeoutSeconds": ROLLOUT_SECONDS, "States": states}


def describe_alarms(fleet: Fleet, *, then: str) -> State:
    """State that reads all alarms in any state: an alarm that was deleted must not pass as OK."""
    kinds = ("Metric", "Composite")
    return call(
        "cloudwatch",
        "describeAlarms",
        {"AlarmNames": list(fleet.alarms), "AlarmTypes": [f"{kind}Alarm" for kind in kinds]},
        select={
            f"{kind.lower()}_{word}.$": f"$.{kind}Alarms[*].{member}"
            for kind in kinds
            for word, member in (("names", "AlarmName"), ("states", "StateValue"))
        },
        into="$.alarms",
        then=then,
    )


def _begin(fleet: Fleet, record: Record, resources: MachineResources) -> States:
    """Acquire the lock, switch the watchdog's clock on, pause scaling and run the preflight check. Before it passes,
    neither weights nor sizes are changed. If it does not, the watchdog resumes scaling and switches the clock off.
    """
    payload = {"fleet": fleet.description(), "state.$": "$", "name.$": "$$.Execution.Name", "at.$": _NOW}
    first, second = COLOURS
    return {
        "Lock": record.lock(then="Wake", catch={CONDITION_FAILED: "Busy"}),
        "Wake": call(
            "eventbridge",
            "enableRule",
            {"Name": resources.clock},
            then=f"Pause-{first}" if fleet.scaling else "SeeWeights",
        ),
        **(fleet.pause_scaling(then="SeeWeights") if fleet.scaling else {}),
        "SeeWeights": fleet.read_weights(into="$.weights", then="SeeBlue"),
        "SeeBlue": _see_size(fleet, first, then="SeeGreen"),
        "SeeGreen": _see_size(fleet, second, then="SeeAlarms"),
        "SeeAlarms": describe_alarms(fleet, then="Open"),
        "Open": invoke(resources.judge, {"opens": payload}, into="$.opened", then="KeepPlan"),
        "KeepPlan": resources.store_evidence("$.opened.is", then="Point"),
        "Point": record.point(f"{_FROM}.colour", then="Fill"),
    }


def _see_size(fleet: Fleet, colour: str, *, then: str) -> State:
    group = "$.AutoScalingGroups[0]"
    return call(
        "autoscaling",
        "describeAutoScalingGroups",
        {"AutoScalingGroupNames": [fleet.colours[colour].group]},
        select={"desired.$": f"{group}.DesiredCapacity", "most.$": f"{group}.MaxSize"},
        into=f"$.{colour}",
        then=then,
    )


def _fill(fleet: Fleet, record: Record) -> States:
    """Scale the candidate's environment to the baseline's size. If that fails, no traffic has moved."""
    pace = "$.opened.is.pace"
    enough = {"Variable": "$.warm.healthy", "NumericGreaterThanEqualsPath": "$.opened.is.size"}
    late = {"Variable": "$.warm.tries", "NumericGreaterThanEqualsPath": f"{pace}.warm_tries"}
    signal = "$.record.Item.signal.S"
    return {
        "Fill": call(
            "autoscaling",
            "setDesiredCapacity",
            {**_TO_GROUP, "DesiredCapacity.$": "$.opened.is.size", "HonorCooldown": False},
            then="Cold",
        ),
        "Cold": put({"tries": 0}, into="$.warm", then="WarmUp"),
        "WarmUp": wait_for(f"{pace}.warm", then="SeeHealth"),
        "SeeHealth": call(
            "elasticloadbalancingv2",
            "describeTargetHealth",
            {"TargetGroupArn.$": f"{_TO}.targets"},
            select={"healthy.$": HEALTHY},
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
            (enough, "SeeHosts" if fleet.shadow else "First"),
            (late, "TooFew"),
            otherwise="WarmUp",
        ),
        "Stop": put(
            {"Error": "aborted", "Cause": "Aborted by an operator before any traffic had moved."},
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
        **(_see_hosts() if fleet.shadow else {}),
    }


def _see_hosts() -> States:
    """The addresses of the candidate's instances. The stable ones may not look them up: EC2 has no permission for the
    instances of one group.
    """
    return {
        "SeeHosts": call(
            "ec2",
            "describeInstances",
            {"InstanceIds.$": "$.health.healthy"},
            select={"addresses.$": "$.Reservations[*].Instances[*].PrivateIpAddress"},
            into="$.hosts",
            then="First",
        )
    }


def _steps(fleet: Fleet, record: Record, resources: MachineResources) -> States:
    began = {"step.$": "$.turn.number", "carried.$": _CARRIED, "at.$": _NOW}
    verdict = "$.told.is.verdict"
    is_owner = {"Variable": _OWNER, "StringEqualsPath": "$.me.name"}
    last = {"Variable": "$.turn.number", "NumericGreaterThanEqualsPath": "$.opened.is.count"}
    mirrored = {"mirror.$": "States.ArrayGetItem($.opened.is.mirrors, $.turn.number)"} if fleet.shadow else {}
    in_force = "Mirror" if fleet.shadow else "BeginStep"
    mirror = {"mirror.$": "$.turn.mirror", "hosts.$": "$.hosts.addresses"}
    return {
        "First": put({"is": {"carried.$": "$.opened.is.carried"}}, into="$.told", then="Zero"),
        "Zero": put({"number": 0}, into="$.turn", then="Step"),
        "Step": put(
            {
                "number.$": "$.turn.number",
                "weights.$": "States.ArrayGetItem($.opened.is.steps, $.turn.number)",
                **mirrored,
            },
            into="$.turn",
            then="Claim",
        ),
        "Claim": record.claim(then="Shift", catch={CONDITION_FAILED: "SeeOwner"}),
        "SeeOwner": record.read(into="$.record", then="Me"),
        "Me": put({"name.$": EXECUTION_ID}, into="$.me", then="Mine"),
        "Mine": choose(({"And": [{"Variable": _OWNER, "IsPresent": True}, is_owner]}, "Ended"), otherwise="Unfinished"),
        "Ended": put({"Error": "aborted", "Cause": "Aborted by an operator."}, into="$.why", then="Back"),
        "Shift": fleet.shift("$.turn.weights", then="SeeShift"),
        "SeeShift": fleet.read_weights(into="$.weights", then="Shifted"),
        "Shifted": fleet.compare("$.weights", "$.turn.weights", then=in_force, otherwise="NotShifted"),
        **({"Mirror": resources.set_mirror(mirror, then="BeginStep")} if fleet.shadow else {}),
        "NotShifted": put(
            {
                "Error": "moved",
                "Cause": "the listener rule does not have the weights that were just set: another process changes it",
            },
            into="$.why",
            then="Back",
        ),
        "BeginStep": invoke(resources.judge, {"begins": began}, into="$.told", then="Watch"),
        "Watch": _watch(resources, then="Verdict"),
        "Verdict": choose(
            ({"Variable": verdict, "StringEquals": "advance"}, "UseUp"),
            ({"Variable": verdict, "StringEquals": "watch"}, "Watch"),
            ({"Variable": verdict, "StringEquals": "ask"}, "AskPeople"),
            otherwise="Because",
        ),
        "UseUp": record.consume("approve", then="NextStep"),
        "AskPeople": _notify(resources, "needs a person", "$.told.is.reason", then="Watch"),
        "Because": put({"Error.$": verdict, "Cause.$": "$.told.is.reason"}, into="$.why", then="Back"),
        "NextStep": put({"number.$": "States.MathAdd($.turn.number, 1)"}, into="$.turn", then="Another"),
        "Another": choose((last, "Promote"), otherwise="Step"),
    }


def _watch(resources: MachineResources, *, then: str) -> State:
    """State that evaluates a step in an execution of its own, so that the history stays within its limit."""
    return {
        "Type": "Task",
        "Resource": "arn:aws:states:::states:startExecution.sync:2",
        "Parameters": {
            "StateMachineArn": resources.watch,
            "Input": {"told.$": "$.told", "AWS_STEP_FUNCTIONS_STARTED_BY_EXECUTION_ID.$": "$$.Execution.Id"},
        },
        "Retry": [{"ErrorEquals": _NOT_STARTED, "IntervalSeconds": 2, "MaxAttempts": 4, "BackoffRate": 2}],
        "ResultSelector": {"is.$": "$.Output"},
        "ResultPath": "$.told",
        "Next": then,
    }


def _promote(record: Record) -> States:
    """Record the candidate as stable first: from then on the watchdog restores traffic to the candidate."""
    return {
        "Promote": record.point(f"{_TO}.colour", then="Drain"),
        "Drain": empty({"AutoScalingGroupName.$": f"{_FROM}.group"}, then="Promoted"),
        "Promoted": put(
            {"Error": "promoted", "Cause": "all steps had evidence that the new version is no worse"},
            into="$.why",
            then="KeepOutcome",
        ),
    }


def _back(fleet: Fleet, record: Record, resources: MachineResources) -> States:
    """Restore all traffic to the baseline. An environment is scaled to zero after the record names the other one."""
    home = "$.opened.is.home"
    restored = "StopMirror" if fleet.shadow else "PointBack"
    return {
        "Back": fleet.shift(home, then="SeeBack", rollback=True),
        "SeeBack": fleet.read_weights(into="$.weights", then="IsBack", rollback=True),
        "IsBack": fleet.compare("$.weights", home, then=restored, otherwise="Unfinished"),
        **({"StopMirror": resources.set_mirror(_NO_MIRROR, then="PointBack")} if fleet.shadow else {}),
        "PointBack": record.point(f"{_FROM}.colour", then="EmptyAgain"),
        "EmptyAgain": empty(_TO_GROUP, then="KeepOutcome"),
    }


def _leave_empty() -> States:
    return {"LeaveEmpty": empty(_TO_GROUP, then="KeepOutcome")}


def _end(fleet: Fleet, record: Record, resources: MachineResources) -> States:
    """Store the outcome, notify, resume scaling, disable the schedule, release the lock.

    All but the last may fail without effect. While scaling is not resumed, the schedule stays on: the watchdog resumes
    it.
    """
    outcome = {"why.$": "$.why", "from.$": _FROM, "to.$": _TO, "execution.$": "$$.Execution.Id", "at.$": _NOW}
    key = f"States.Format('{resources.folder}{{}}/outcome.json', $$.Execution.Name)"
    stored = {"Bucket": resources.bucket, "Key.$": key, "ContentType": "application/json", "Body": outcome}
    clock = call("eventbridge", "disableRule", {"Name": resources.clock}, then="Unlock")
    told = "SeeServing" if fleet.scaling else "Sleep"
    return {
        "KeepOutcome": with_catch(
            call("s3", "putObject", stored, then="Tell"), {ALL_ERRORS[0]: "Tell"}, into="$.unkept"
        ),
        "Tell": with_catch(
            _notify(resources, "has ended", "States.Format('{}: {}', $.why.Error, $.why.Cause)", then=told),
            {ALL_ERRORS[0]: told},
            into="$.untold",
        ),
        **(fleet.settle_scaling(then="Sleep", failed="Unlock") if fleet.scaling else {}),
        "Sleep": with_catch(clock, {ALL_ERRORS[0]: "Unlock"}, into="$.awake"),
        "Unlock": record.unlock(then="Done"),
        "Done": {
            "Type": "Pass",
            "Parameters": {"outcome.$": "$.why.Error", "reason.$": "$.why.Cause", "from.$": _FROM, "to.$": _TO},
            "End": True,
        },
    }


def _notify(resources: MachineResources, event: str, message: str, *, then: str) -> State:
    parameters = {"TopicArn": resources.topic, "Subject": f"A rollout {event}", "Message.$": message}
    return call("sns", "publish", parameters, then=then)


STEP_SECONDS: Final = 3 * 86_400  # enough for the judge's evaluations in one execution, ten minutes apart


def watch(fleet: Fleet, record: Record, resources: MachineResources) -> dict[str, Any]:
    """The state machine that evaluates one step until the judge decides."""
    metrics = {
        "StartTime.$": "$.told.is.ask.from",
        "EndTime.$": "$$.State.EnteredTime",
        "ScanBy": "TimestampAscending",
        "MetricDataQueries.$": "$.told.is.ask.queries",
    }
    payload = {
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
            select={"results.$": "$.MetricDataResults"},
            into="$.metrics",
            then="SeeAlarms",
        ),
        "SeeAlarms": describe_alarms(fleet, then="Judge"),
        "Judge": invoke(resources.judge, {"looks": payload}, into="$.told", then="Keep"),
        "Keep": resources.store_evidence("$.told.is", then="Verdict"),
        "Verdict": choose((again, "Wait"), otherwise="Told"),
        "Told": {"Type": "Succeed", "OutputPath": "$.told.is"},
    }
    return {"StartAt": "Wait", "TimeoutSeconds": STEP_SECONDS, "States": states}


WATCHDOG_SECONDS: Final = 3_600  # seconds
_STABLE: Final = "$.record.Item.stable.S"
_LOCKED: Final = {"Variable": _OWNER, "IsPresent": True}
_GONE: Final = "Sfn.ExecutionDoesNotExistException"


def watchdog(fleet: Fleet, record: Record, resources: MachineResources) -> dict[str, Any]:
    """The state machine that restores traffic after a rollout execution has failed.

    Without a rollout it switches its clock off, and before that, it settles which environment scales. The template has
    the clock on, so a deployment in the middle of a rollout can only switch it on.
    """
    settled = "SeeServing" if fleet.scaling else "Sleep"
    restored = "StopMirror" if fleet.shadow else settled
    states: States = {
        "Look": record.read(into="$.record", then="Locked"),
        "Locked": choose((_LOCKED, "Ask"), otherwise="Hold" if fleet.scaling else "Idle"),
        **(_settle(fleet, record) if fleet.scaling else _sleep(resources)),
        **_go_idle(record, resources),
        "Ask": call(
            "sfn",
            "describeExecution",
            {"ExecutionArn.$": _OWNER},
            select={"status.$": "$.Status"},
            into="$.owner",
            then="Alive",
            catch={_GONE: "SeeUnknown"},
        ),
        "SeeUnknown": fleet.read_weights(into="$.weights", then="AllBlue", rollback=True),
        "AllBlue": fleet.compare("$.weights", fleet.whole("blue"), then="Nothing", otherwise="AllGreen"),
        "AllGreen": fleet.compare("$.weights", fleet.whole("green"), then="Nothing", otherwise="TakeOver"),
        "Alive": choose(({"Variable": "$.owner.status", "StringEquals": "RUNNING"}, "Nothing"), otherwise="TakeOver"),
        "TakeOver": record.take_over(_OWNER, then="Whither", catch={CONDITION_FAILED: "Nothing"}),
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
            otherwise=restored,  # the rollout failed before it had moved any traffic
        ),
        **_restore(fleet, resources, then=restored),
        # Without a catcher: if it fails, so does the watchdog, and the next one takes its lock over and repeats it.
        **({"StopMirror": resources.set_mirror(_NO_MIRROR, then=settled)} if fleet.shadow else {}),
        "Unlock": record.unlock(then="Idle" if fleet.scaling else "Nothing", catch={ALL_ERRORS[0]: "WakeAgain"}),
        "WakeAgain": call("eventbridge", "enableRule", {"Name": resources.clock}, then="StillLocked"),
        "StillLocked": fail("Rollout.StillLocked", "traffic is restored, but the lock could not be released"),
        "NotHealthy": fail("Rollout.NotHealthy", "the stable environment of the record has no healthy instance"),
        "NotWhole": fail("Rollout.NotWhole", "the listener rule does not have the weights that were just set"),
        "Nothing": {"Type": "Succeed"},
    }
    return {"StartAt": "Look", "TimeoutSeconds": WATCHDOG_SECONDS, "States": states}


def _go_idle(record: Record, resources: MachineResources) -> States:
    """Switch the clock off. A rollout acquires the lock before it switches the clock on, so the lock is read once more
    after the clock is off: a rollout that has started meanwhile gets its clock back.
    """
    return {
        "Idle": with_catch(
            call("eventbridge", "disableRule", {"Name": resources.clock}, then="LookAgain"),
            {ALL_ERRORS[0]: "Nothing"},  # the clock strikes again
            into="$.awake",
        ),
        "LookAgain": with_catch(
            record.read(into="$.record", then="LockedMeanwhile"), {ALL_ERRORS[0]: "Restart"}, into="$.unread"
        ),
        "LockedMeanwhile": choose((_LOCKED, "Restart"), otherwise="Nothing"),
        "Restart": call("eventbridge", "enableRule", {"Name": resources.clock}, then="Nothing"),
    }


def _settle(fleet: Fleet, record: Record) -> States:
    """Settle which environment scales, with the lock: a rollout that began meanwhile would scale. The clock stays on
    until that is done.
    """
    return {
        "Hold": record.lock(then="SeeServing", catch={CONDITION_FAILED: "Nothing"}),
        **fleet.settle_scaling(then="Unlock", failed="StayAwake"),
        "StayAwake": record.unlock(then="Nothing"),
    }


def _sleep(resources: MachineResources) -> States:
    return {
        "Sleep": with_catch(
            call("eventbridge", "disableRule", {"Name": resources.clock}, then="Unlock"),
            {ALL_ERRORS[0]: "Unlock"},
            into="$.awake",
        )
    }


def _restore(fleet: Fleet, resources: MachineResources, *, then: str) -> States:
    """Send all traffic to the stable environment if it has a healthy instance; then scale the other one to zero."""
    states: States = {}
    for colour, other in (COLOURS, COLOURS[::-1]):
        weights = fleet.whole(colour)
        emptied = {"AutoScalingGroupName": fleet.colours[other].group}
        message = f"A rollout of fleet {fleet.name} failed. All traffic goes to {colour}."
        notification = {"TopicArn": resources.topic, "Subject": "A failed rollout was rolled back", "Message": message}
        healthy = {"Variable": "$.health.healthy[0]", "IsPresent": True}
        states |= {
            f"Look-{colour}": call(
                "elasticloadbalancingv2",
                "describeTargetHealth",
                {"TargetGroupArn": fleet.colours[colour].targets},
                select={"healthy.$": HEALTHY},
                into="$.health",
                then=f"There-{colour}",
                rollback=True,
            ),
            f"There-{colour}": choose((healthy, f"To-{colour}"), otherwise="NotHealthy"),
            f"To-{colour}": fleet.shift(weights, then=f"See-{colour}", rollback=True),
            f"See-{colour}": fleet.read_weights(into="$.weights", then=f"At-{colour}", rollback=True),
            f"At-{colour}": fleet.compare("$.weights", weights, then=f"Empty-{other}", otherwise="NotWhole"),
            f"Empty-{other}": empty(emptied, then=f"Tell-{colour}", rollback=True),
            f"Tell-{colour}": with_catch(
                call("sns", "publish", notification, then=then), {ALL_ERRORS[0]: then}, into="$.untold"
            ),
        }
    return states
