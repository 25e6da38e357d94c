"""All files of a project's cluster. The same configuration and the same lock file are the same bytes."""

from typing import Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.cluster import Cluster, Mirror
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.pipeline.fleet.kubernetes import karpenter, neuron
from nxpipe.pipeline.fleet.kubernetes.document import Object, written
from nxpipe.pipeline.fleet.kubernetes.objects import account, device_plugin
from nxpipe.stacks.names import NAMESPACE, SERVICE_ACCOUNT

HEAD: Final = "# Written by `nxpipe infra manifests`: change nxpipe.toml or the lock file, not this.\n"
_EFA_PLUGIN: Final = "aws-efa-k8s-device-plugin"


def manifests(config: Config, cluster: Cluster, images: Mirror, lock: ClusterLock) -> dict[str, str]:
    """By the name of the file."""
    made = {
        "artifacts": _artifacts(),
        **_plugins(cluster, images, lock),
        "neuron-scheduler-extension": neuron.extension(_pinned(images.scheduler_extension, lock)),
        "neuron-scheduler": neuron.scheduler(_pinned(images.scheduler, lock)),
    }
    for pool in karpenter.pools(cluster.groups):
        made[f"karpenter-{pool.name}"] = karpenter.objects(config, pool, lock.neuron.image)
    return {f"{name}.yaml": HEAD + written(objects) for name, objects in sorted(made.items())}


def _artifacts() -> list[Object]:
    """Where pods that run artifacts are, and as whom."""
    space: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return [space, account(SERVICE_ACCOUNT, NAMESPACE)]


def _plugins(cluster: Cluster, images: Mirror, lock: ClusterLock) -> dict[str, list[Object]]:
    types = sorted({each.instance_type for each in cluster.groups})
    made = {"neuron-device-plugin": neuron.plugin(_pinned(images.device_plugin, lock), types)}
    fast = [each for each in types if INSTANCES[each].efa_interfaces]
    if fast and images.efa_plugin:
        image = _pinned(images.efa_plugin, lock)
        folders = {"infiniband": "/dev/infiniband"}
        made["efa-device-plugin"] = [device_plugin(_EFA_PLUGIN, image, fast, host_network=True, folders=folders)]
    return made


def _pinned(image: str, lock: ClusterLock) -> str:
    """By its digest alone: a tag beside it would say what nobody checks."""
    return f"{image.rpartition(':')[0]}@{lock.images[image]}"
