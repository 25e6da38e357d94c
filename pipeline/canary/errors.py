"""What can go wrong before there is anything to judge. Bad counts are no error: they are put aside and counted."""


class CanaryError(Exception):
    """Root of the judge's errors; the message is one sentence that ends in the way out."""


class PlanInvalid(CanaryError):
    """A plan that no rollout can follow."""


class EvidenceInvalid(CanaryError):
    """Evidence that is none, or that belongs to another plan or moment."""


class RecordInvalid(CanaryError):
    """A record that is not what a rollout has written, or that says what the judge would not have said."""
