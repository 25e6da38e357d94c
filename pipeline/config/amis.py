"""The lock file of machine images: which AMI the instances of a region start from, for each version of the Neuron SDK.

AWS names only the newest image of a kind, and nodes of one fleet that start on different days would differ. So one is
chosen by `nxpipe ami lock`, written down, and committed; whoever reads the file looks nothing up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from nxpipe.pipeline.config.faults import ConfigInvalid, Fault
from nxpipe.pipeline.config.forms import text
from nxpipe.pipeline.config.kinds import Region
from nxpipe.pipeline.config.table import Table
from nxpipe.pipeline.util.documents import MiB, read_file, toml_of

# Public parameters that name the newest image of a region: with all frameworks and the driver, and with ECS and the
# driver.
FLEETS_PARAMETER: Final = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
TRAINING_PARAMETER: Final = "/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id"

_HEAD: Final = "# Written by `nxpipe ami lock`: the machine images that instances start from. Commit it.\n"
_AMI = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]


class LockedImage(Table):
    """One image, and how it was found."""

    region: Region = Field(description="Where it is.")
    sdk: str | None = Field(
        default=None,
        description="The version of the Neuron SDK that is in it. Hosts of training have the driver only: what trains "
        "is a container, which brings its own.",
    )
    id: _AMI = Field(description="The image.")
    name: str = Field(description="What AWS calls it.")
    created: date = Field(description="When AWS made it.")
    expires: date = Field(description="From when on AWS does not keep it up.")
    source: str = Field(description="The public parameter, or the search, that named it.")


@dataclass(frozen=True)
class AmiLock:
    """What the file holds."""

    path: Path
    images: tuple[LockedImage, ...] = ()

    def image(self, region: str, sdk: str | None) -> LockedImage | None:
        """Of a version of the SDK, or, without one, for hosts of training; None: not locked yet."""
        return next((each for each in self.images if (each.region, each.sdk) == (region, sdk)), None)

    def with_images(self, found: Iterable[LockedImage], sdks: Iterable[str]) -> "AmiLock":
        """The images of some regions in the place of those regions' old ones, and none of a version out of use."""
        new, kept = tuple(found), frozenset((None, *sdks))
        regions = {each.region for each in new}
        old = [each for each in self.images if each.region not in regions and each.sdk in kept]
        return AmiLock(self.path, tuple(sorted([*new, *old], key=lambda each: (each.region, each.sdk or ""))))

    def text(self) -> str:
        """The file: always in the same order, so that a difference is a difference."""
        return _HEAD + "".join(map(_written, self.images))


def read_lock(path: Path) -> AmiLock:
    """A missing file holds no image."""
    try:
        document = toml_of(read_file(path, limit=4 * MiB).decode())
        images = tuple(LockedImage.model_validate(each) for each in document.pop("image", ()))
    except FileNotFoundError:
        return AmiLock(path)
    except (ValueError, ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise _invalid(path, f"what cannot be read ({first})", "what `nxpipe ami lock` writes; run it again") from error
    if document:
        raise _invalid(path, f"the key {next(iter(document))}", "what `nxpipe ami lock` writes; run it again")
    return AmiLock(path, images)


def _written(image: LockedImage) -> str:
    values: dict[str, Any] = image.model_dump(exclude_none=True)
    rows = (f"{key} = {_value(value)}\n" for key, value in values.items())
    return "\n[[image]]\n" + "".join(rows)


def _value(value: str | date) -> str:
    if isinstance(value, date):
        return value.isoformat()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _invalid(path: Path, found: str, allowed: str) -> ConfigInvalid:
    return ConfigInvalid([Fault(str(path), None, "", found, allowed)])
