"""How a fleet's traffic moves from one colour to the other, and who brings it back when that dies."""

from nxpipe.stacks.rollout.stack import RolloutStack

__all__ = ["RolloutStack"]
