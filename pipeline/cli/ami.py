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

    One AMI per region and SDK version in [amis], and one for the hosts of training fleets and of [prove]. `cdk synth`
    reads the lock file and makes no calls to AWS, so all instances of a fleet start from the same AMI until the file
    changes. Commit it. An `image` in [amis] takes the place of the Neuron SDK's AMIs; it is refused unless serving
    instances can start from it.

    \b
    Example:
      nxpipe ami lock --region us-east-2 --region us-west-2
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.locks import has_job_hosts, read_lock
    from nxpipe.pipeline.fleet.infrastructure import find_serving_images, find_training_host
    from nxpipe.pipeline.util.aws import client
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ)
    before = read_lock(config_path.parent / config.amis.lock)
    selected = regions or _default_regions(config.project.region, before)
    images = []
    for region in dict.fromkeys(selected):
        with console.step(f"images of {region}"):
            images += find_serving_images(region, config.amis, client)
            if has_job_hosts(config):
                images.append(find_training_host(region, client))
    after = before.with_images(images, config.amis.sdk)
    write_whole(after.path, after.text().encode())
    _print_images(console, after, images)


def _default_regions(region: str | None, before: "AmiLock") -> tuple[str, ...]:
    if region is not None:
        return (region,)
    locked = tuple(dict.fromkeys(image.region for image in before.images))
    if not locked:
        raise click.UsageError("nxpipe.toml names no region; pass --region")
    return locked


def _print_images(console: Console, after: "AmiLock", images: "list[LockedImage]") -> None:
    if console.json:
        console.data({"file": str(after.path), "images": [image.model_dump(mode="json") for image in images]})
        return
    rows = [
        (image.region, image.sdk or "training", image.id, image.name, str(image.expires or "never")) for image in images
    ]
    console.page(table(("REGION", "SDK", "IMAGE", "NAME", "EXPIRES"), rows))
    console.say(f"Wrote {after.path}.")
