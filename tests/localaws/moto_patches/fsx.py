"""File systems tell of which version they are, and those of Lustre by which name they are mounted."""

from typing import Any

from moto.fsx.models import FileSystem, FSxBackend

from tests.localaws.moto_patches._around import around


def mend() -> None:
    around(FSxBackend, "create_file_system", _create)
    around(FileSystem, "to_dict", _tell)


def _create(stock: Any, backend: FSxBackend, *, file_system_type_version: str | None, **given: Any) -> FileSystem:
    made: FileSystem = stock(backend, file_system_type_version=file_system_type_version, **given)
    vars(made)["version"] = file_system_type_version
    return made


def _tell(stock: Any, one: FileSystem) -> dict[str, Any]:
    version, told = vars(one).get("version"), stock(one)
    if one.file_system_type == "LUSTRE":
        mounted = {"MountName": one.file_system_id.removeprefix("fs-")[:8]}
        told = {**told, "LustreConfiguration": {**(told.get("LustreConfiguration") or {}), **mounted}}
    return {**told, **({"FileSystemTypeVersion": version} if version else {})}
