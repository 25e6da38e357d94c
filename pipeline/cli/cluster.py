"""`nxpipe infra lock` and `nxpipe infra manifests`: what a cluster is made of, and what runs in it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.config.locks import ClusterLock


@click.command(cls=Command)
@config_option
@click.pass_obj
def lock(console: Console, config_path: Path) -> None:
    """Find what the cluster is made of, and write its lock file.

    The releases of nodes and the versions of add-ons are those that EKS recommends today; the digests are those of the
    images that [cluster.images] lists, in their registry. Synthesis and `nxpipe infra manifests` read the file and ask
    AWS for nothing. Commit it.

    \b
    Example:
      nxpipe infra lock
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.locks import cluster_of
    from nxpipe.pipeline.fleet.locking import find_cluster
    from nxpipe.pipeline.util.aws import client
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ)
    cluster, region = cluster_of(config, str(config_path))
    images = cluster.images.all if cluster.images else ()
    with console.step(f"Kubernetes {cluster.kubernetes} in {region}"):
        found = find_cluster(region, cluster.kubernetes, images, client)
    path = config_path.parent / cluster.lock
    write_whole(path, found.text().encode())
    _tell(console, path, found)


def _tell(console: Console, path: Path, found: "ClusterLock") -> None:
    if console.json:
        console.data({"file": str(path), **found.model_dump(mode="json")})
        return
    rows = [("nodes", "neuron", found.neuron.release), ("nodes", "system", found.system.release)]
    rows += [("add-on", name, version) for name, version in sorted(found.addons.items())]
    rows += [("image", name, digest) for name, digest in sorted(found.images.items())]
    console.page(table(("KIND", "NAME", "VERSION"), rows))
    console.say(f"Wrote {path}.")


@click.command(cls=Command)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder for the files; what this command has written there before is replaced.",
)
@config_option
@click.pass_obj
def manifests(console: Console, out: Path, config_path: Path) -> None:
    """Write the Kubernetes objects of the cluster as files.

    The device plugins of Neuron and of the Elastic Fabric Adapter, the Neuron scheduler, the account that may read
    artifacts, and what Karpenter starts nodes from, one file each. Images are named by the digests of the lock file.
    Asks nobody: applying the files is left to you.

    \b
    Example:
      nxpipe infra manifests --out manifests && kubectl apply -f manifests/neuron-device-plugin.yaml
    """
    from nxpipe.pipeline.config import ConfigInvalid, Fault, load_config
    from nxpipe.pipeline.config.locks import cluster_of, read_cluster_lock
    from nxpipe.pipeline.fleet.kubernetes.manifests import HEAD
    from nxpipe.pipeline.fleet.kubernetes.manifests import manifests as made_of
    from nxpipe.pipeline.fleet.writing import write_all

    config = load_config(config_path, os.environ)
    cluster, _ = cluster_of(config, str(config_path))
    if cluster.images is None:
        wanted = "the images of the manifests, in a registry of ECR"
        raise ConfigInvalid([Fault(str(config_path), None, "cluster.images", "no such table", wanted)])
    files = made_of(config, cluster, cluster.images, read_cluster_lock(config, config_path.parent / cluster.lock))
    write_all(out, files, HEAD)
    if console.json:
        console.data({"folder": str(out), "files": list(files)})
    else:
        console.result(*(str(out / name) for name in files))
    console.say(f"{len(files)} files.")
