"""Reads synthesised templates, ours or anybody's: what rules, estimates and plans are made from. Needs no CDK."""

from collections.abc import Mapping
from typing import Any

from nxpipe.stacks.reading.paths import construct_paths
from nxpipe.stacks.reading.settle import settle
from nxpipe.stacks.reading.template import Resource, Template, Templates

__all__ = ["Resource", "Template", "Templates", "construct_paths", "read"]


def read(
    stack: str, document: Mapping[str, Any], region: str | None = None, paths: Mapping[str, str] | None = None
) -> Template:
    """A template as someone would deploy it who changes no parameter."""
    return Template(stack, settle(document), region, paths or {})
