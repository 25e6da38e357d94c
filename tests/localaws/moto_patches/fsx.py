"""FSx: descriptions have the version of a file system, and the mount name of Lustre."""

from typing import Any

from moto.fsx.models import FileSystem, FSxBackend

from tests.localaws.moto_patches._around import around


def apply() -> None:
    around(FSxBackend, "create_file_system", _create)
    around(FileSystem, "to_dict", _describe)


def _create(stock: Any, backend: FSxBackend, *, file_system_type_version: str | None, **settings: Any) -> FileSystem:
    file_system: FileSystem = stock(backend, file_system_type_version=file_system_type_version, **settings)
    vars(file_system)["version"] = file_system_type_version
    return file_system


def _describe(stock: Any, file_system: FileSystem) -> dict[str, Any]:
    version, result = vars(file_system).get("version"), stock(file_system)
    if file_system.file_system_type == "LUSTRE":
        mounted = {"MountName": file_system.file_system_id.removeprefix("fs-")[:8]}
        result = {**result, "LustreConfiguration": {**(result.get("LustreConfiguration") or {}), **mounted}}
    return {**result, **({"FileSystemTypeVersion": version} if version else {})}
