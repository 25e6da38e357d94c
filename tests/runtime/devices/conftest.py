"""Fixtures: a machine with the stand-in library and the stand-in nrtpy, and runtimes of each kind on it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from nxpipe.emulator.run.devices import open_runtime
from nxpipe.emulator.run.devices.libnrt import Library
from nxpipe.emulator.run.devices.protocol import DeviceRuntime
from tests.runtime.devices.library import built, copied

NRTPY = Path(__file__).with_name("nrtpy.py")

Machine = Callable[..., str]
Opener = Callable[..., DeviceRuntime]


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in library."""
    base = tmp_path_factory.getbasetemp()
    is_worker = base.name.startswith("popen-")
    return built((base.parent if is_worker else base) / "libnrt")


@pytest.fixture
def machine(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A function that sets variables of the stand-in (`hbm=...`) or of the runtime (`NEURON_RT_...=...`), and returns
    the path of a library that no one has opened. The family is trn1 unless given; an empty one is no device."""
    numbers = count()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "nrtpy.py").symlink_to(NRTPY)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nrtpy", raising=False)
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"):  # nrtpy.configure sets the first
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def settings(family: str = "trn1", **changes: object) -> str:
        library = copied(stand_in, tmp_path / f"library-{next(numbers)}")
        own = {"family": family, "library": library, **changes}
        for name, value in own.items():
            monkeypatch.setenv(f"STANDIN_{name.upper()}" if name.islower() else name, str(value))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        return str(library)

    yield settings
    sys.modules.pop("nrtpy", None)


@pytest.fixture
def opened(machine: Machine) -> Iterator[Opener]:
    """A function that opens a runtime of a kind on such a machine. At the end all are closed, and no rule of the
    library was violated."""
    libraries: list[str] = []
    with ExitStack() as stack:

        def open_kind(kind: str, **settings: object) -> DeviceRuntime:
            if kind == "emulated":
                return stack.enter_context(open_runtime("emulated", name="trn1.2xlarge", limit=10.0))
            libraries.append(machine(**settings))
            sys.modules.pop("nrtpy", None)
            return stack.enter_context(open_runtime(kind, library=libraries[-1]))  # type: ignore[arg-type]

        yield open_kind
    assert [Library(path)._library.standin_violations() for path in libraries] == [0] * len(libraries)
