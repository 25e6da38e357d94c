"""Images of the public parameters. Their description names the Neuron SDK version that they contain.

Their ids are invented, and nothing boots from them.
"""

from datetime import UTC, datetime
from typing import Any, Final

from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami

from tests.localaws.moto_patches._around import around
from tests.localaws.moto_patches.ssm import NAMES, image

_SDK: Final = "2.32.0"
_MADE: Final = datetime(2026, 10, 12, tzinfo=UTC)


def apply() -> None:
    around(EC2Backend, "describe_images", _describe)


def _describe(stock: Any, ec2: Any, *args: Any, **kwargs: Any) -> Any:
    for name in NAMES:
        id_ = image(ec2.region_name, name)
        if id_ not in ec2.amis:
            ec2.amis[id_] = _ami(ec2, id_, name)
    return stock(ec2, *args, **kwargs)


def _ami(ec2: Any, id_: str, parameter: str) -> Ami:
    system = "Amazon Linux 2023" if "amazon-linux" in parameter else f"Ubuntu {parameter.split('ubuntu-')[-1][:5]}"
    kind = "" if "multi-framework" in parameter else f" for {parameter.split('/')[3]}"
    ami = Ami(
        ec2,
        id_,
        name=f"Deep Learning AMI Neuron{kind} ({system}) {_MADE:%Y%m%d}",
        description=f"Neuron SDK {_SDK}, for tests only: {parameter}",
        owner_alias="amazon",
        public=True,
        architecture="x86_64",
        creation_date=_MADE,
        region_name=f"{ec2.region_name}a",
    )
    ec2.snapshots.pop(ami.ebs_snapshot.id)  # the account does not own it
    return ami
