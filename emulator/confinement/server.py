"""Server side: the zygote, and the kernel restrictions of each forked child: rlimits, no_new_privs, Landlock.

The zygote starts without the caller's environment, imports libraries before any untrusted byte is opened, and forks;
children answer calls, the zygote opens nothing but its socket. A restriction cannot be undone by the process it
applies to, nor by its children.
"""

import ctypes
import gc
import importlib
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.confinement import Limits, server, wire
from nxpipe.emulator.confinement.calls import CALLS, WARM, run_call
from nxpipe.emulator.confinement.faults import serialize_error

_OPEN_FILES: Final = 512
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, equal on all architectures
_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14  # and truncation; all else is about folders
# The rights that each version of Landlock knows: 13 at first, then moving between folders, truncation, and ioctl.
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_RIGHTS: Final = 16
_CONNECT_AND_BIND_TCP: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3
# What libraries ask of a machine: its processors, its memory, randomness, the loader's list.
_SYSTEM: Final = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache"),
    *("/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system"),
    *("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"),
)


def die_with_parent(parent: int) -> None:
    """End at once when the process that started this one does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def set_rlimits(limits: Limits) -> None:
    def set_to(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    set_to(resource.RLIMIT_CORE, 0)
    set_to(resource.RLIMIT_FSIZE, limits.written)
    set_to(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if limits.memory is not None:
        set_to(resource.RLIMIT_DATA, limits.memory)


def library_folders(home: Path) -> list[str]:
    """The folders that Python, its packages and this program lie in."""
    return [sys.prefix, sys.base_prefix, *(path for path in sys.path if path), str(home)]


def confine(readable: Iterable[str], scratch: str) -> bool:
    """From now on read nothing but these, write nothing but the folder `scratch`, start no program, open no port.

    False where the kernel has no Landlock; privileges can then still not be gained.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << _RIGHTS.get(version, _LATEST_RIGHTS)) - 1
    fields = [rights]
    fields += [_CONNECT_AND_BIND_TCP] if version >= 4 else []
    fields += [_ABSTRACT_SOCKETS_AND_SIGNALS] if version >= 6 else []
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses a set of rules")
    for path in {*readable, *_SYSTEM}:
        _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
    _allow(libc, ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(libc, ruleset, scratch, rights & ~_EXECUTE)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock cannot be entered")
    os.close(ruleset)
    return True


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there need not be allowed
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, _BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), "Landlock refuses a rule", path)
    finally:
        os.close(descriptor)


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
        server.die_with_parent(parent)
        limits = Limits(**document["limits"])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.chdir(document["scratch"])
        os.environ["TMPDIR"] = os.environ["HOME"] = document["scratch"]
        server.set_rlimits(limits)
        server.confine([*server.library_folders(_HOME), *document["reads"]], document["scratch"])
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
        return {"answer": run_call(name, arguments), "memory": _peak()}
    except Exception as fault:
        fault.__traceback__ = fault.__traceback__ and fault.__traceback__.tb_next
        return {"fault": serialize_error(fault), "memory": _peak()}


def _peak() -> int:
    """Bytes; the most that this process had so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
