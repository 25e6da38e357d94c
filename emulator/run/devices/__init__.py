"""NeuronCores by one protocol: emulated, by AWS's `nrtpy`, or by `libnrt.so.1`; docs/reference/devices.md."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from nxpipe.emulator.run.devices.protocol import DeviceRuntime
from nxpipe.emulator.run.status import InvalidLoad

Implementation: TypeAlias = Literal["auto", "nrtpy", "libnrt", "emulated"]

# Imported when they are opened: one needs numpy and the compiler's packages, the others a library of AWS.
_RUNTIMES: Final = {
    "nrtpy": "nxpipe.emulator.run.devices.nrtpy_runtime:NrtpyRuntime",
    "libnrt": "nxpipe.emulator.run.devices.libnrt_runtime:LibnrtRuntime",
    "emulated": "nxpipe.emulator.run.devices.emulated_runtime:EmulatedRuntime",
}


def open_runtime(implementation: Implementation = "auto", **options: Any) -> DeviceRuntime:
    """The runtime of this process; raises NoDevice if the machine has no device or not its library.

    Options are those of the implementation: the `library`'s path, or the `name` of the emulated instance.
    """
    module, _, kind = _RUNTIMES[resolved(implementation)].partition(":")
    return cast(DeviceRuntime, getattr(import_module(module), kind)(**options))


def resolved(implementation: Implementation) -> str:
    """The implementation that `auto` stands for: nrtpy if it is installed, else libnrt; never the emulator."""
    if implementation not in get_args(Implementation):
        raise InvalidLoad(f"unknown implementation {implementation!r}; use {', '.join(get_args(Implementation))}")
    if implementation != "auto":
        return implementation
    return "nrtpy" if find_spec("nrtpy") else "libnrt"
