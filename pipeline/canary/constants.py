"""Constants of the judge, each with its reason. They belong to the method: none is tuned to a service.

The error rates and durations of a plan (alpha, beta, margin, max_error_rate, bake times) are in [rollout] of
nxpipe.toml; their defaults are in `config/sections.py` and nowhere else.

The evidence is an e-process, built as a betting martingale: an e-value is the capital that bets of one unit have grown
to, and a stake is the part of that unit on one bet. A weighted mean of e-values is an e-value, so every fixed split of
the stakes keeps the Type I error. The splits below decide only how soon a regression is detected.
"""

import math
from typing import Final

from nxpipe.pipeline.canary.metrics import LATENCIES

# Percent of traffic that stays with the baseline until the last step has ended. Without a concurrent baseline there is
# no comparison: an incident of the whole service could not be distinguished from a regression.
BASELINE_SHARE: Final = 5

# The rise of all traffic's errors, in percent, that a step must rule out. A candidate with share s and an odds ratio
# r raises them by about s (r - 1), so the tolerated ratio falls as the share grows.
TOLERATED_RISE: Final = 50

# odds ratio: (stake of "worse than a given ratio", stake of "better than a given ratio"); the grid of all evidence.
# Most of the stakes against a candidate are on ratios of 2 to 12, where they shorten the detection most: a smaller
# ratio takes hours with any stake, and a larger one is detected at once. Most of the stakes in favour of a candidate
# are on a ratio of 1, that of a healthy version.
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

# Half of the unit is staked on errors and half on all latencies together: quantiles of one distribution are correlated.
METRIC_STAKES: Final = (0.5, *[0.5 / len(LATENCIES)] * len(LATENCIES))

# Three quarters are staked from the first minute on, to detect a regression at any share. The remainder is divided over
# the later steps and staked when each begins: good minutes at a small share then do not delay the detection of a
# regression that only load causes.
FIRST_STEP_STAKE: Final = 0.75

# Bets that the candidate meets the objective: (alternative error rate as a fraction of the objective, stake).
OBJECTIVE_STAKES: Final = ((0.0, 0.1), (0.125, 0.15), (0.25, 0.2), (0.5, 0.55))

# At full traffic there is no baseline, so the test is absolute and has an e-process of its own. Its bets are on these
# multiples of the objective, with equal stakes. Its threshold is ten times 1/alpha: it rolls back a candidate that
# meets its objective in at most a tenth of `alpha` of all rollouts (Type I error alpha / 10).
FULL_TRAFFIC_ODDS: Final = (1.5, 2.0, 4.0, 10.0)
FULL_TRAFFIC_FACTOR: Final = 10

# A step does not advance while the evidence against the candidate is beyond this fraction of the rollback threshold, in
# nats: an advance would expose more users to a version that is about to be rolled back.
SUSPICION: Final = 0.5

# Most good responses of the candidate without a latency, as a fraction of its requests. Beyond it the latencies may
# be biased: the slow requests may be the missing ones.
MAX_UNTIMED: Final = 0.2

# Evidence, in nats, that the baseline itself is beyond its objective. A baseline that meets its objective has such a
# minute in at most one of 100 (Chernoff's bound). These minutes freeze the step.
INCIDENT: Final = math.log(100)

# Minutes at the start of a step that are not counted: caches of the candidate are cold.
WARMUP_MINUTES: Final = 1

# Evaluations in one execution of the state machine: each takes some 35 history events with one retry, of the 25,000
# events that Step Functions allows.
EVALUATIONS_PER_EXECUTION: Final = 250
