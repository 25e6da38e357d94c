"""What can stand in the way of a rollout."""

from nxpipe.pipeline.util.errors import PipelineError


class RolloutRefused(PipelineError):
    """A rollout that must not begin, or a word for one that is not under way; no traffic was moved."""
