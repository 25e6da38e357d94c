"""The other side: a process that imports what reads models, and then makes of itself a confined one for each model.

It is started without the environment of the process that asks, imports libraries before any byte of a stranger's is
opened, and forks. The copies answer; the original opens nothing but its socket.
"""

import gc
import importlib
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.confinement import Limits, rules, wire
from nxpipe.emulator.confinement.calls import CALLS, WARM, answer
from nxpipe.emulator.confinement.faults import described

_ORDER: Final = 2**16  # bytes
_GARBAGE_AFTER: Final = 200_000  # objects: most of what importing and tracing makes stays
_HOME: Final = Path(__file__).parents[3]


def serve(control: socket.socket) -> None:
    """Orders come one after another, each with the socket of the model that it is about.

    It ends with them, whatever ended the process that gives them, and takes away the folder that it was given.
    """
    gc.set_threshold(_GARBAGE_AFTER)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended while libraries were imported for it
            _take_orders(control)
    finally:
        shutil.rmtree(os.environ["HOME"], ignore_errors=True)


def _take_orders(control: socket.socket) -> None:
    while True:
        order, passed, _, _ = socket.recv_fds(control, _ORDER, 1)
        if not order:
            return
        document = wire.loads(order)
        if "ended" in document:
            control.sendall(wire.dumps({"status": _status(document["ended"])}))
            continue
        _prepare(document["before"], document["kind"])
        me = os.getpid()
        child = os.fork()
        if child == 0:
            control.close()
            _read_models(socket.socket(fileno=passed[0]), document, me)
        for descriptor in passed:
            os.close(descriptor)
        control.sendall(wire.dumps({"pid": child}))


def _prepare(modules: list[str], kind: str) -> None:
    """Import what the copy will need; one that is missing is the copy's to report."""
    for name in modules:
        if name not in sys.modules and any(name in call.before for call in CALLS.values()):
            try:
                importlib.import_module(name)
            except ImportError:
                return
    if WARM in modules:
        sys.modules[WARM].warm(kind)
    gc.freeze()


def _status(pid: int) -> int:
    """How a copy ended; it was killed, or closed its socket, so it does end."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _read_models(asked: socket.socket, document: Any, parent: int) -> None:
    """Never returns: the copy must not go on where the original would."""
    try:
        rules.end_with(parent)
        limits = Limits(**document["limits"])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.chdir(document["scratch"])
        os.environ["TMPDIR"] = os.environ["HOME"] = document["scratch"]
        rules.limit(limits)
        rules.confine([*rules.libraries(_HOME), *document["reads"]], document["scratch"])
        while True:
            asked.settimeout(None)
            name, arguments = wire.receive(asked, sys.maxsize)
            wire.send(asked, _answered(name, arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        os._exit(1)


def _answered(name: str, arguments: Any) -> dict[str, Any]:
    try:
        return {"answer": answer(name, arguments), "memory": _peak()}
    except Exception as fault:
        fault.__traceback__ = fault.__traceback__ and fault.__traceback__.tb_next
        return {"fault": described(fault), "memory": _peak()}


def _peak() -> int:
    """Bytes; the most that this process had so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
