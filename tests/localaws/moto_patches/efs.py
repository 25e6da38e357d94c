"""EFS: throughput changes, backup policies and deletion of file system policies, which moto does not have."""

import json
from typing import Any

from moto.efs.models import EFSBackend
from moto.efs.responses import EFSResponse

from tests.localaws.moto_patches._around import around

_SETTINGS = {"ThroughputMode": "throughput_mode", "ProvisionedThroughputInMibps": "provisioned_throughput_in_mibps"}


def apply() -> None:
    around(EFSBackend, "describe_backup_policy", _backups)
    for call in (update_file_system, put_backup_policy, delete_file_system_policy):
        setattr(EFSResponse, call.__name__, call)


def _file_system(self: Any) -> Any:
    id_ = self._get_param("FileSystemId")
    self.efs_backend.describe_file_systems(file_system_id=id_)  # raises if it does not exist
    return self.efs_backend.file_systems_by_id[id_]


def update_file_system(self: Any) -> str:
    target = _file_system(self)
    for name, attribute in _SETTINGS.items():
        if (value := self._get_param(name)) is not None:
            setattr(target, attribute, value)
    return json.dumps(target.info_json())


def put_backup_policy(self: Any) -> str:
    target, policy = _file_system(self), self._get_param("BackupPolicy")
    target._backup = policy["Status"] in ("ENABLED", "ENABLING")
    vars(target)["_backup_policy_set"] = True
    return json.dumps({"BackupPolicy": policy})


def delete_file_system_policy(self: Any) -> str:
    _file_system(self).file_system_policy = None
    return "{}"


def _backups(stock: Any, backend: EFSBackend, id_: str) -> dict[str, str]:
    """The backup policy, which exists from the first PutBackupPolicy on, also if that disables backups."""
    file_system = backend.file_systems_by_id[id_]
    if vars(file_system).get("_backup_policy_set") and not file_system._backup:
        return {"Status": "DISABLED"}
    result: dict[str, str] = stock(backend, id_)
    return result
