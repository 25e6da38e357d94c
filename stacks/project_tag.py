"""The tag by which a project's resources are known, and its costs counted."""

from aws_cdk import Stack, Tags

from nxpipe.stacks.names import PROJECT_TAG

__all__ = ["PROJECT_TAG", "tag_project"]


def tag_project(stack: Stack, project: str) -> None:
    Tags.of(stack).add(PROJECT_TAG, project)
