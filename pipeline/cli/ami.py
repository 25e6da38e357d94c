"""`nxpipe ami lock`: pins the AMIs of instances."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Group
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.config.locks import AmiLock, LockedImage


@click.group(cls=Group)
def ami() -> None:
    """Pin the AMIs of instances.

    \b
    Example:
      nxpipe ami lock
    """


@ami.command()
@click.option(
    "--region",
    "regions",
    multiple=True,
    metavar="REGION",
    help="A region to resolve AMIs in; repeatable.  [default: the project's]",
)
@config_option
@click.pass_obj
def lock(console: Console, regions: tuple[str, ...], config_path: Path) -> None:
    """Resolve the AMIs of the Neuron SDK and write the lock file.

    One AMI per region and SDK version in [amis], and one for the hosts of training fleets. `cdk synth` reads the lock
    file and makes no calls to AWS, so all instances of a fleet start from the same AMI until the file changes. Commit
    it.

    \b
    Example:
      nxpipe ami lock --region us-east-2 --region us-west-2
    """
    from nxpipe.pipeline.config import TrainingFleet, load_config
    from nxpipe.pipeline.config.locks import read_lock
    from nxpipe.pipeline.fleet.infrastructure import find_image, find_training_host
    from nxpipe.pipeline.util.aws import client
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ)
    before = read_lock(config_path.parent / config.amis.lock)
    wanted = regions or _of_the_project(config.project.region, before)
    trains = any(isinstance(fleet, TrainingFleet) for fleet in config.fleets)
    found = []
    for region in dict.fromkeys(wanted):
        with console.step(f"images of {region}"):
            found += [find_image(region, sdk, client) for sdk in config.amis.sdk]
            if trains:
                found.append(find_training_host(region, client))
    after = before.with_images(found, config.amis.sdk)
    write_whole(after.path, after.text().encode())
    _tell(console, after, found)


def _of_the_project(region: str | None, before: "AmiLock") -> tuple[str, ...]:
    if region is not None:
        return (region,)
    locked = tuple(dict.fromkeys(each.region for each in before.images))
    if not locked:
        raise click.UsageError("nxpipe.toml names no region; pass --region")
    return locked


def _tell(console: Console, after: "AmiLock", found: "list[LockedImage]") -> None:
    if console.json:
        console.data({"file": str(after.path), "images": [each.model_dump(mode="json") for each in found]})
        return
    rows = [(each.region, each.sdk or "training", each.id, each.name, str(each.expires)) for each in found]
    console.page(table(("REGION", "SDK", "IMAGE", "NAME", "EXPIRES"), rows))
    console.say(f"Wrote {after.path}.")
