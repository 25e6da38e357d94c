"""The public parameters with the image ids for Neuron fleets, different in each region.

Other names do not exist, as on AWS. Lists of an account's parameters do not have the public ones; moto's have all that
were ever looked up.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from moto.core.utils import utcnow
from moto.ssm.models import Parameter, ParameterDict

from tests.localaws.moto_patches._around import around

_PUBLIC: Final = "/aws/service/"
_ON_HOSTS: Final = "/aws/service/neuron/dlami/"
_ON_NODES: Final = "/aws/service/eks/optimized-ami/"
_ON_TRAINING_HOSTS: Final = "/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended"
_KINDS: Final = (
    "base/amazon-linux-2023",
    "base/ubuntu-22.04",
    "base/ubuntu-24.04",
    "jax-0.10/amazon-linux-2023",
    "jax-0.10/ubuntu-24.04",
    "multi-framework/ubuntu-22.04",
    "multi-framework/ubuntu-24.04",
    "pytorch-inference-vllm-0.16/ubuntu-24.04",
    "pytorch-2.9/ubuntu-24.04",
)
_KUBERNETES: Final = ("1.31", "1.32", "1.33", "1.34", "1.35")
NAMES: Final = (
    *(f"{_ON_HOSTS}{kind}/latest/image_id" for kind in _KINDS),
    f"{_ON_TRAINING_HOSTS}/image_id",
    *(f"{_ON_NODES}{version}/amazon-linux-2023/x86_64/neuron/recommended/image_id" for version in _KUBERNETES),
)


def apply() -> None:
    around(ParameterDict, "_check_loading_status", _load)
    around(ParameterDict, "get_keys_beginning_with", _below)
    ParameterDict.__iter__ = _own


def image(region: str, name: str) -> str:
    """The id of the image that a parameter names in a region."""
    return f"ami-{hashlib.sha256(f'{region} {name}'.encode()).hexdigest()[:17]}"


def _load(stock: Any, known: ParameterDict, key: str) -> None:
    stock(known, key)
    prefix = str(key or "")
    if prefix.startswith((_ON_HOSTS[:-1], _ON_NODES[:-1], _ON_TRAINING_HOSTS)):  # moto has parameters of the last kind
        for name in NAMES:
            dict.__setitem__(known, name, [_parameter(known, name)])


def _own(known: ParameterDict) -> Iterator[str]:
    return iter([name for name in dict.copy(known) if not name.startswith(_PUBLIC)])


def _below(stock: Any, known: ParameterDict, path: str, recursive: bool) -> list[str]:
    if not path.startswith(_PUBLIC):
        return list(stock(known, path, recursive))
    known._check_loading_status(path)
    names = [name for name in dict.copy(known) if name.startswith(path)]
    return [name for name in names if recursive or "/" not in name[len(path) + 1 :]]


def _parameter(known: ParameterDict, name: str) -> Parameter:
    return Parameter(
        account_id=known.account_id,
        name=name,
        value=image(known.region_name, name),
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=utcnow(),
        version=1,
        data_type="aws:ec2:image",
    )
