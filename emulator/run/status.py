"""Errors of the runtime with the status numbers of the Neuron runtime; docs/reference/runtime.md lists their causes.

`emulator.run.devices.faults` adds those that only devices have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar

from nxpipe.emulator.errors import CompileError, ExecutionError, IndexOutOfRange, MissingTensor, WrongTensor


class Status(IntEnum):
    """The names and numbers of the public header `nrt_status.h`."""

    NRT_SUCCESS = 0
    NRT_FAILURE = 1
    NRT_INVALID = 2
    NRT_INVALID_HANDLE = 3
    NRT_RESOURCE = 4
    NRT_TIMEOUT = 5
    NRT_HW_ERROR = 6
    NRT_QUEUE_FULL = 7
    NRT_LOAD_NOT_ENOUGH_NC = 9
    NRT_UNSUPPORTED_NEFF_VERSION = 10
    NRT_FAIL_HOST_MEM_ALLOC = 11
    NRT_UNINITIALIZED = 13
    NRT_CLOSED = 14
    NRT_QUEUE_EMPTY = 15
    NRT_EXEC_UNIT_UNRECOVERABLE = 101
    NRT_EXEC_BAD_INPUT = 1002
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003
    NRT_EXEC_COMPLETED_WITH_ERR = 1004
    NRT_EXEC_NC_BUSY = 1005
    NRT_EXEC_OOB = 1006
    NRT_COLL_PENDING = 1100
    NRT_EXEC_HW_ERR_COLLECTIVES = 1200
    NRT_EXEC_HW_ERR_HBM_UE = 1201
    NRT_EXEC_HW_ERR_NC_UE = 1202
    NRT_EXEC_HW_ERR_DMA_ABORT = 1203
    NRT_EXEC_SW_NQ_OVERFLOW = 1204
    NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NRT_NETWORK_PROXY_FAILURE = 1206


class RuntimeFault(CompileError):
    """The base class of runtime errors."""

    status: ClassVar[Status]


class InvalidLoad(RuntimeFault):
    """Programs or weights that cannot be loaded on any core."""

    status = Status.NRT_INVALID


class Unloaded(RuntimeFault):
    """A model or states that were unloaded, or states of another model."""

    status = Status.NRT_INVALID_HANDLE


class DeviceMemoryExhausted(RuntimeFault):
    """The HBM behind a core is too small."""

    status = Status.NRT_RESOURCE


class CoresUnavailable(RuntimeFault):
    """The requested cores are allocated, or do not exist."""

    status = Status.NRT_LOAD_NOT_ENOUGH_NC
    deterministic = False


class WrongGeneration(RuntimeFault):
    """A program for another NeuronCore generation."""

    status = Status.NRT_UNSUPPORTED_NEFF_VERSION


class RuntimeClosed(RuntimeFault):
    """The runtime was closed."""

    status = Status.NRT_CLOSED


class BadInput(RuntimeFault):
    """A request whose inputs match no program."""

    status = Status.NRT_EXEC_BAD_INPUT


class RequestTooLong(BadInput):
    """A request that is longer than the longest bucket."""


class ExecutionFailed(RuntimeFault):
    """A program failed, for example by a race or a read of unwritten memory."""

    status = Status.NRT_EXEC_COMPLETED_WITH_ERR


class CoreBusy(RuntimeFault):
    """The cores are executing another request."""

    status = Status.NRT_EXEC_NC_BUSY
    deterministic = False


class LookupOutOfBounds(RuntimeFault):
    """An index beyond the end of a lookup table."""

    status = Status.NRT_EXEC_OOB


@contextmanager
def translated_faults() -> Iterator[None]:
    """Translate faults of a running program into runtime errors with a status."""
    try:
        yield
    except IndexOutOfRange as fault:
        raise LookupOutOfBounds(str(fault)) from fault
    except (MissingTensor, WrongTensor) as fault:
        raise BadInput(str(fault)) from fault
    except ExecutionError as fault:
        raise ExecutionFailed(str(fault)) from fault
