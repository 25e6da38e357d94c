"""What must never be replaced: resources that hold what nobody can make again, by their logical ids.

CloudFormation knows a resource by its logical id. When that changes, as by renaming a construct, the old bucket stays
behind with all artifacts and an empty one takes its place. So the ids are written down here, and a change of one is
refused before anything is deployed.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.stacks.reading import Resource, Template, Templates

KEEP: Final = "NXP-KEEP-1"

# By the name of the stack after the project's. Adding a line is how something new is put under guard.
KEPT: Final[Mapping[str, Mapping[str, str]]] = {
    "storage": {
        "Artifacts82DD59A1": "AWS::S3::Bucket",
        "Images2D38C313": "AWS::ECR::Repository",
        "Key961B73FD": "AWS::KMS::Key",
        "Logs6819BB44": "AWS::S3::Bucket",
    },
    "train-*": {
        "Checkpoints620E2F20": "AWS::S3::Bucket",
    },
}
_SOMETIMES: Final = frozenset({"Checkpoints620E2F20"})  # only a fleet on spot instances has one


def kept_in(stack: str, project: str) -> Mapping[str, str] | None:
    """The ids that a stack must keep; None for a stack that is not the project's."""
    name = stack.removeprefix(f"{project}-")
    if name == stack:
        return None
    return next((ids for pattern, ids in KEPT.items() if fnmatchcase(name, pattern)), {})


def losses(templates: Templates, project: str) -> Iterator[tuple[Resource, str, str]]:
    """A resource, what would become of it, and what to do."""
    for template in templates.all:
        ids = kept_in(template.stack, project)
        if ids is not None:
            yield from _missing(template, ids)
            yield from _loose(template, ids)


def _missing(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for id_, type_ in ids.items():
        found = template.resources.get(id_)
        if found is None and id_ in _SOMETIMES:
            continue
        if found is None or found.type != type_:
            gone = Resource(template.stack, template.region, id_, type_, f"{template.stack}/{id_}", {})
            what = f"{id_} is not in the template any more: what it holds would be left behind, or replaced by nothing"
            yield gone, what, "give the construct its old name and place back"
        elif not found.kept:
            what = "it would be deleted with its stack, or when it is replaced"
            yield found, what, "set its removal policy to RETAIN"


def _loose(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for resource in template.resources.values():
        if resource.kept and resource.id not in ids:
            what = f"{resource.id} is to be kept, and is not among the ids that are guarded"
            yield (
                resource,
                what,
                "add it to KEPT in stacks/keep.py if it is new; else give its construct the old name back",
            )
