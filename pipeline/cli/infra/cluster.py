"""`nxpipe infra lock` and `nxpipe infra manifests`: versions and Kubernetes manifests of the EKS cluster."""

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
    """Resolve the versions of the EKS cluster and write its lock file.

    Locks the node releases and add-on versions that EKS recommends today, and the digests of the images in
    [cluster.images]. `cdk synth` and `nxpipe infra manifests` read the lock file and make no calls to AWS. Commit it.

    \b
    Example:
      nxpipe infra lock
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.locks import cluster_of
    from nxpipe.pipeline.fleet.infrastructure import find_cluster
    from nxpipe.pipeline.util.aws import client
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ)
    cluster, region = cluster_of(config, str(config_path))
    images = cluster.images.all if cluster.images else ()
    with console.step(f"Kubernetes {cluster.kubernetes} in {region}"):
        resolved = find_cluster(region, cluster.kubernetes, images, client)
    path = config_path.parent / cluster.lock
    write_whole(path, resolved.text().encode())
    _show_lock(console, path, resolved)


def _show_lock(console: Console, path: Path, cluster_lock: "ClusterLock") -> None:
    if console.json:
        console.data({"file": str(path), **cluster_lock.model_dump(mode="json")})
        return
    rows = [("nodes", "neuron", cluster_lock.neuron.release), ("nodes", "system", cluster_lock.system.release)]
    rows += [("add-on", name, version) for name, version in sorted(cluster_lock.addons.items())]
    rows += [("image", name, digest) for name, digest in sorted(cluster_lock.images.items())]
    console.page(table(("KIND", "NAME", "VERSION"), rows))
    console.say(f"Wrote {path}.")


@click.command(cls=Command)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The output folder; files that this command wrote before are replaced.",
)
@config_option
@click.pass_obj
def manifests(console: Console, out: Path, config_path: Path) -> None:
    """Write the Kubernetes manifests of the cluster.

    One file each for the device plugins of Neuron and EFA, the Neuron scheduler, the service account for artifacts,
    and Karpenter's node pools. Images are pinned by the digests in the lock file. Nothing is applied.

    \b
    Example:
      nxpipe infra manifests --out manifests && kubectl apply -f manifests/neuron-device-plugin.yaml
    """
    from nxpipe.pipeline.config import ConfigInvalid, Fault, load_config
    from nxpipe.pipeline.config.locks import cluster_of, read_cluster_lock
    from nxpipe.pipeline.fleet.kubernetes.manifests import HEAD, write_manifests
    from nxpipe.pipeline.fleet.kubernetes.manifests import manifests as render

    config = load_config(config_path, os.environ)
    cluster, _ = cluster_of(config, str(config_path))
    if cluster.images is None:
        expected = "the images of the manifests, in a registry of ECR"
        raise ConfigInvalid([Fault(str(config_path), None, "cluster.images", "no such table", expected)])
    files = render(config, cluster, cluster.images, read_cluster_lock(config, config_path.parent / cluster.lock))
    write_manifests(out, files, HEAD)
    if console.json:
        console.data({"folder": str(out), "files": list(files)})
    else:
        console.result(*(str(out / name) for name in files))
    console.say(f"{len(files)} files.")
