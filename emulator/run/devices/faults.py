"""Errors of devices: the meaning of each status of the Neuron runtime, and failures of ranks.

docs/reference/devices.md has the table. `deterministic` is false for a fault that may not occur again.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    CoresUnavailable,
    DeviceMemoryExhausted,
    ExecutionFailed,
    InvalidLoad,
    LookupOutOfBounds,
    RuntimeClosed,
    RuntimeFault,
    Status,
    Unloaded,
    WrongGeneration,
)


class NoDevice(RuntimeFault):
    """This machine has no Neuron device, or not the library that drives it."""

    status = Status.NRT_INVALID


class DeviceFailure(RuntimeFault):
    """A failure for which the runtime gives no reason, or a status that this version does not know."""

    status = Status.NRT_FAILURE


class DeviceTimeout(RuntimeFault):
    """A call that did not end within the runtime's time limit."""

    status = Status.NRT_TIMEOUT
    deterministic = False


class HardwareFault(RuntimeFault):
    """A fault of a device, its memory or its DMA."""

    status = Status.NRT_HW_ERROR
    deterministic = False


class CollectiveFault(RuntimeFault):
    """A collective that did not end, usually because another rank failed first."""

    status = Status.NRT_EXEC_HW_ERR_COLLECTIVES
    deterministic = False


class RankHung(DeviceTimeout):
    """A rank that reported no progress within the watchdog's limit; all ranks were killed."""


class RankCrashed(DeviceFailure):
    """A rank's process that ended without a result; the other ranks were killed."""

    deterministic = False


class RankFailed(DeviceFailure):
    """A host function that raised an error of another kind than the runtime's."""


class Meaning(NamedTuple):
    """The error for a status, with its cause and remedy as one clause."""

    fault: type[RuntimeFault]
    remedy: str


_LOG: Final = "see the runtime's log (NEURON_RT_LOG_LEVEL=INFO)"
_REPLACE: Final = "replace the instance: stop and start it, or terminate it"
_PEER: Final = "look for the rank that failed first, then restart all ranks"

MEANINGS: Final[Mapping[Status, Meaning]] = {
    Status.NRT_FAILURE: Meaning(DeviceFailure, f"the runtime gives no reason; {_LOG}"),
    Status.NRT_INVALID: Meaning(
        InvalidLoad, f"the program is malformed, or a name or size is not one of the program; {_LOG}"
    ),
    Status.NRT_INVALID_HANDLE: Meaning(Unloaded, "the model or a tensor was freed; load or allocate it again"),
    Status.NRT_RESOURCE: Meaning(
        DeviceMemoryExhausted, "HBM of the core is full; free tensors, unload programs, or use more ranks"
    ),
    Status.NRT_TIMEOUT: Meaning(DeviceTimeout, f"a rank is missing or the program does not end; {_PEER}"),
    Status.NRT_HW_ERROR: Meaning(HardwareFault, f"the device failed; {_LOG}, then restart the process"),
    Status.NRT_QUEUE_FULL: Meaning(CoreBusy, "the core has too many requests; wait for their results"),
    Status.NRT_LOAD_NOT_ENOUGH_NC: Meaning(
        CoresUnavailable, "another process has the cores, or the instance has fewer; end it (neuron-ls shows it)"
    ),
    Status.NRT_UNSUPPORTED_NEFF_VERSION: Meaning(
        WrongGeneration, "the program is for another runtime or another generation; build it for this instance"
    ),
    Status.NRT_FAIL_HOST_MEM_ALLOC: Meaning(DeviceFailure, "host memory is exhausted; use a larger instance"),
    Status.NRT_UNINITIALIZED: Meaning(RuntimeClosed, "no runtime is open; open one first"),
    Status.NRT_CLOSED: Meaning(RuntimeClosed, "the runtime was closed; open another one in a new process"),
    Status.NRT_QUEUE_EMPTY: Meaning(DeviceFailure, f"no request was queued; {_LOG}"),
    Status.NRT_EXEC_UNIT_UNRECOVERABLE: Meaning(
        HardwareFault, "the core must be reset; restart the process, which resets its cores"
    ),
    Status.NRT_EXEC_BAD_INPUT: Meaning(BadInput, "an input is missing, unknown or of another size"),
    Status.NRT_EXEC_COMPLETED_WITH_NUM_ERR: Meaning(
        ExecutionFailed, "a result is not a number; check weights and inputs, or unset NEURON_FAIL_ON_NAN"
    ),
    Status.NRT_EXEC_COMPLETED_WITH_ERR: Meaning(ExecutionFailed, f"the program failed on the core; {_LOG}"),
    Status.NRT_EXEC_NC_BUSY: Meaning(CoreBusy, "the core runs another program; wait for its result"),
    Status.NRT_EXEC_OOB: Meaning(
        LookupOutOfBounds, "an index is beyond its table; check the range of the inputs, such as token ids"
    ),
    Status.NRT_COLL_PENDING: Meaning(CollectiveFault, f"a collective has not ended; {_PEER}"),
    Status.NRT_EXEC_HW_ERR_COLLECTIVES: Meaning(CollectiveFault, f"a collective hangs; {_PEER}"),
    Status.NRT_EXEC_HW_ERR_HBM_UE: Meaning(HardwareFault, f"HBM has an uncorrectable error; {_REPLACE}"),
    Status.NRT_EXEC_HW_ERR_NC_UE: Meaning(HardwareFault, f"the core has an uncorrectable error; {_REPLACE}"),
    Status.NRT_EXEC_HW_ERR_DMA_ABORT: Meaning(HardwareFault, f"DMA was aborted; {_REPLACE}"),
    Status.NRT_EXEC_SW_NQ_OVERFLOW: Meaning(ExecutionFailed, f"the program overran a notification queue; {_LOG}"),
    Status.NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE: Meaning(
        HardwareFault, "HBM has a repairable error; reload the driver or reboot the instance"
    ),
    Status.NRT_NETWORK_PROXY_FAILURE: Meaning(CollectiveFault, f"the network of the collectives failed; {_PEER}"),
}
# While a program is loaded, these have another meaning.
_ON_LOAD: Final[Mapping[Status, Meaning]] = {
    Status.NRT_HW_ERROR: MEANINGS[Status.NRT_UNSUPPORTED_NEFF_VERSION],
}
NO_DEVICE_FOUND: Final = (
    "no Neuron device: the runtime found none; run on an Inferentia2 or Trainium instance with aws-neuronx-dkms "
    "installed, and check NEURON_RT_VISIBLE_CORES (neuron-ls lists devices)"
)


def fault_of(number: int, doing: str, *, on_load: bool = False) -> RuntimeFault:
    """The error for a status that a call returned; `doing` is what failed, such as "load of decode.neff"."""
    known = number in MEANINGS
    status = Status(number) if known else Status.NRT_FAILURE
    meaning = _ON_LOAD.get(status, MEANINGS[status]) if on_load else MEANINGS[status]
    name = status.name if known else "unknown status"
    fault = meaning.fault(f"{doing} failed with {name} ({number}): {meaning.remedy}")
    fault.status = status  # type: ignore[misc]  # a class stands for several statuses
    return fault


def fault_named(name: str, message: str, status: int) -> RuntimeFault:
    """The error that a rank's process reported, by the name of its class."""
    kind = next((kind for kind in _kinds(RuntimeFault) if kind.__name__ == name), RankFailed)
    fault = kind(message)
    fault.status = Status(status)  # type: ignore[misc]  # a class stands for several statuses
    return fault


def _kinds(kind: type[RuntimeFault]) -> Iterator[type[RuntimeFault]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds(derived)
