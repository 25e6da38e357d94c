"""The machine that looks at one step: wait, ask AWS how both versions do, ask the judge, keep the evidence, again.

It moves no traffic and may not. It ends with the judge's word: `advance`, `roll_back`, `ask` (a person), or `watch`,
which is to be continued in a new execution, so that the history of none exceeds what AWS keeps.
"""

from typing import Any, Final

from nxpipe.stacks.rollout.fleet import Fleet
from nxpipe.stacks.rollout.record import Record
from nxpipe.stacks.rollout.release import Means, see_alarms
from nxpipe.stacks.rollout.states import ask, call, choose, wait

LONGEST: Final = 3 * 86_400  # seconds: as many looks as the judge has in one execution, ten minutes apart


def watch(fleet: Fleet, record: Record, means: Means) -> dict[str, Any]:
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
        "SeeAlarms": see_alarms(fleet, then="Judge"),
        "Judge": ask(means.judge, {"looks": seen}, into="$.told", then="Keep"),
        "Keep": means.keep("$.told.is", then="Verdict"),
        "Verdict": choose((again, "Wait"), otherwise="Told"),
        "Told": {"Type": "Succeed", "OutputPath": "$.told.is"},
    }
    return {"StartAt": "Wait", "TimeoutSeconds": LONGEST, "States": states}
