"""What moto's EFS has no calls for: another throughput, backups, and a policy that goes."""

import json
from typing import Any

from moto.efs.models import EFSBackend
from moto.efs.responses import EFSResponse

from tests.localaws.moto_patches._around import around

_SETTINGS = {"ThroughputMode": "throughput_mode", "ProvisionedThroughputInMibps": "provisioned_throughput_in_mibps"}


def mend() -> None:
    around(EFSBackend, "describe_backup_policy", _backups)
    for call in (update_file_system, put_backup_policy, delete_file_system_policy):
        setattr(EFSResponse, call.__name__, call)


def _file_system(self: Any) -> Any:
    id_ = self._get_param("FileSystemId")
    self.efs_backend.describe_file_systems(file_system_id=id_)  # refuses what is not there
    return self.efs_backend.file_systems_by_id[id_]


def update_file_system(self: Any) -> str:
    one = _file_system(self)
    for name, attribute in _SETTINGS.items():
        if (value := self._get_param(name)) is not None:
            setattr(one, attribute, value)
    return json.dumps(one.info_json())


def put_backup_policy(self: Any) -> str:
    one, policy = _file_system(self), self._get_param("BackupPolicy")
    one._backup = policy["Status"] in ("ENABLED", "ENABLING")
    vars(one)["_said"] = True
    return json.dumps({"BackupPolicy": policy})


def delete_file_system_policy(self: Any) -> str:
    _file_system(self).file_system_policy = None
    return "{}"


def _backups(stock: Any, backend: EFSBackend, id_: str) -> dict[str, str]:
    """Once there was a word on backups, there is a policy, if only to have none."""
    one = backend.file_systems_by_id[id_]
    if vars(one).get("_said") and not one._backup:
        return {"Status": "DISABLED"}
    told: dict[str, str] = stock(backend, id_)
    return told
