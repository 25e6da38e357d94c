"""Constants of the judge, each with its reason. They belong to the method: none is tuned to a service.

The error rates and durations of a plan (alpha, beta, margin, max_error_rate, bake times) are set by [rollout] of
nxpipe.toml; their defaults are in `config/sections.py` and nowhere else.

A stake is the part of one unit of capital that a bet gets. An e-value is the capital that a set of bets has grown to;
it remains valid for every fixed split, because a weighted mean of e-values is an e-value. The splits below decide how
soon a regression is found, never how often a healthy version is rolled back.
"""

import math
from typing import Final

from nxpipe.pipeline.canary.metrics import LATENCIES

# Percent of traffic that stays with the baseline until the last step has ended. Without a concurrent baseline there is
# no comparison: an incident of the whole service could not be told from a regression of the candidate.
BASELINE_SHARE: Final = 5

# The rise of all traffic's errors, in percent, that a step has to rule out. A candidate with share s and an odds ratio
# r raises them by about s (r - 1), so the tolerated ratio falls as the share grows.
TOLERATED_RISE: Final = 50

# odds ratio: (stake of "worse than a given ratio", stake of "better than a given ratio"); the grid of all evidence.
# Most of the stakes against a candidate are on ratios of 2 to 12, where a minute is worth most: a smaller one needs
# hours for any stake, and a larger one shows at once. Most of the stakes in favour of a candidate are on a ratio of 1,
# which is that of a healthy version.
RATIO_STAKES: Final = {
    0.25: (1.0, 0.5),
    0.5: (1.0, 1.0),
    0.75: (1.0, 2.0),
    1.0: (1.0, 16.0),
    1.25: (0.5, 0.5),
    1.5: (1.0, 0.5),
    2.0: (3.0, 0.5),
    3.0: (3.0, 0.5),
    5.0: (3.0, 0.5),
    8.0: (3.0, 0.5),
    12.0: (2.0, 0.5),
    20.0: (1.0, 0.5),
    50.0: (0.5, 0.5),
    100.0: (0.5, 0.5),
}

# Half is staked on errors and half on the latencies together: quantiles of one distribution move together.
METRIC_STAKES: Final = (0.5, *[0.5 / len(LATENCIES)] * len(LATENCIES))

# Three quarters are staked from the first minute on, which finds a regression of every share. The rest is divided over
# the later steps and staked when each begins: good minutes at a small share do not delay the detection of a regression
# that only load causes.
FIRST_STEP_STAKE: Final = 0.75

# For "the candidate meets the objective": fractions of the objective that its error rate is bet to be, and the stakes.
OBJECTIVE_STAKES: Final = ((0.0, 0.1), (0.125, 0.15), (0.25, 0.2), (0.5, 0.55))

# At full traffic there is no baseline, so the test is absolute and has an e-value of its own: multiples of the
# objective that the error rate is bet to be, with equal stakes. It must reach ten times 1/alpha: a candidate that meets
# its objective is rolled back from there in at most a tenth of `alpha` of all rollouts.
FULL_TRAFFIC_ODDS: Final = (1.5, 2.0, 4.0, 10.0)
FULL_TRAFFIC_FACTOR: Final = 10

# A step does not advance while the evidence against the candidate is beyond this fraction of the rollback threshold, in
# nats: an advance would multiply the number of users of a version that is about to be rolled back.
SUSPICION: Final = 0.5

# Fraction of the candidate's good responses without a latency. Beyond it latencies prove little: slow requests may be
# those that are missing.
MAX_UNTIMED: Final = 0.2

# Evidence, in nats, that the baseline itself is beyond its objective. A baseline that meets it has such a minute in at
# most one of 100 (Chernoff's bound). These minutes freeze the step.
INCIDENT: Final = math.log(100)

# Minutes at the start of a step that are not counted: caches of the candidate are cold.
WARMUP_MINUTES: Final = 1

# Evaluations in one execution of the state machine: each takes some 35 history events with one retry, of the 25,000
# events that Step Functions allows.
EVALUATIONS_PER_EXECUTION: Final = 250
