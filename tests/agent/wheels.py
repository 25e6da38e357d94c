"""Wheels with metadata and nothing else, and the Python of the image that the bundle is for."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

AGENT_WHEEL = "nxpipe-0.1.0-py3-none-any.whl"


def write_wheel(folder: Path, name: str, *requires: str, python: str = ">=3.11") -> Path:
    """A wheel of that file name. pip installs it."""
    package, version, *_, pythons, abis, platforms = name.removesuffix(".whl").split("-")
    lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}", f"Requires-Python: {python}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    tags = [
        f"Tag: {one}-{abi}-{place}"
        for one in pythons.split(".")
        for abi in abis.split(".")
        for place in platforms.split(".")
    ]
    inside = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": "\n".join(["Wheel-Version: 1.0", "Generator: a test", "Root-Is-Purelib: true", *tags]) + "\n",
    }
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**inside, "RECORD": ""}.items():
            archive.writestr(zipfile.ZipInfo(f"{package}-{version}.dist-info/{file}"), text)
    return path


def find_python(version: str) -> str | None:
    """A Python of that version which can make a virtual environment."""
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}*/bin/python3")
    for candidate in (shutil.which(f"python{version}"), *managed):
        if candidate is not None:
            done = subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True, check=False)
            if done.returncode == 0:  # a shim of a manager may be there without the Python
                return str(candidate)
    return None
