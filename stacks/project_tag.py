"""The tag by which a project's resources are known, and its costs counted."""

from typing import Final

from aws_cdk import Stack, Tags

PROJECT_TAG: Final = "nxpipe:project"


def tag_project(stack: Stack, project: str) -> None:
    Tags.of(stack).add(PROJECT_TAG, project)
