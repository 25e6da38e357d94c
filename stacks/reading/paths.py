"""Where resources stand in the tree of constructs, as people speak of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_TEMPLATE: Final = ".template.json"


def construct_paths(template: Path) -> Mapping[str, str]:
    """By logical id, from what CDK writes beside a template; empty for a template that CDK did not write."""
    metadata = template.with_name(f"{template.name.removesuffix(_TEMPLATE)}.metadata.json")
    if not template.name.endswith(_TEMPLATE) or not metadata.is_file():
        return {}
    return {
        entry["data"]: path.removeprefix("/")
        for path, entries in json.loads(metadata.read_text()).items()
        for entry in entries
        if entry["type"] == "aws:cdk:logicalId"
    }
