"""Server side: the zygote, and the kernel restrictions of each forked child: rlimits, no_new_privs, Landlock.

The zygote starts without the caller's environment, imports libraries before any untrusted byte is opened, and forks.
Children execute calls; the zygote opens only its socket. Neither a restricted process nor its children can lift a
restriction.
"""

import ctypes
import gc
import importlib
import os
import resource
import shutil
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
from nxpipe.emulator.parent_process import die_with_parent

_OPEN_FILES: Final = 512
_SET_NO_NEW_PRIVS: Final = 38  # an option of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system call numbers of Landlock on all architectures
_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14  # and truncate; the other rights apply to folders
# Number of access rights of each Landlock ABI version: 13, then refer (2), truncate (3) and ioctl on devices (5).
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_RIGHTS: Final = 16
_CONNECT_AND_BIND_TCP: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3
# System files that libraries read: processors, memory, randomness, shared libraries.
_SYSTEM_FILES: Final = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache"),
    *("/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system"),
    *("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"),
)


def set_rlimits(limits: Limits) -> None:
    """Lower this process's rlimits; hard limits that are already lower are kept."""

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
    """The folders of Python, its packages and this program."""
    return [sys.prefix, sys.base_prefix, *(path for path in sys.path if path), str(home)]


def confine(readable: Iterable[str], scratch: str) -> bool:
    """Restrict this process with Landlock: it may read `readable`, write only in `scratch`, and neither execute
    programs nor bind or connect TCP sockets.

    False if the kernel has no Landlock; no_new_privs applies then too.
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
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset failed")
    for path in {*readable, *_SYSTEM_FILES}:
        _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
    _allow(libc, ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(libc, ruleset, scratch, rights & ~_EXECUTE)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    os.close(ruleset)
    return True


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a missing path needs no rule
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, _BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), "landlock_add_rule failed", path)
    finally:
        os.close(descriptor)


_REQUEST_BYTES: Final = 2**16
_GC_THRESHOLD: Final = 200_000  # objects: most objects of imports and tracing stay alive
_HOME: Final = Path(__file__).parents[3]


def serve(control: socket.socket) -> None:
    """Serve fork requests, each of which passes the socket of its model, until the control socket is closed.

    Deletes the zygote's folder at the end, however the client ended.
    """
    gc.set_threshold(_GC_THRESHOLD)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the client ended during an import
            _handle_requests(control)
    finally:
        shutil.rmtree(os.environ["HOME"], ignore_errors=True)


def _handle_requests(control: socket.socket) -> None:
    while True:
        request, passed, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 1)
        if not request:
            return
        document = wire.loads(request)
        if "ended" in document:
            control.sendall(wire.dumps({"status": _status(document["ended"])}))
            continue
        _prepare(document["before"], document["kind"])
        zygote = os.getpid()
        child = os.fork()
        if child == 0:
            control.close()
            _run_child(socket.socket(fileno=passed[0]), document, zygote)
        for descriptor in passed:
            os.close(descriptor)
        control.sendall(wire.dumps({"pid": child}))


def _prepare(modules: list[str], kind: str) -> None:
    """Import the modules that the child needs; the child reports a missing one."""
    for name in modules:
        if name not in sys.modules and any(name in call.preload for call in CALLS.values()):
            try:
                importlib.import_module(name)
            except ImportError:
                return
    if WARM in modules:
        sys.modules[WARM].warm(kind)
    gc.freeze()


def _status(pid: int) -> int:
    """Wait for a child that was killed or closed its socket; its exit code."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _run_child(connection: socket.socket, document: Any, parent: int) -> None:
    """Execute calls in the forked child. Never returns, so that the child does not continue the zygote's loop."""
    try:
        die_with_parent(parent)
        limits = Limits(**document["limits"])
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.chdir(document["scratch"])
        os.environ["TMPDIR"] = os.environ["HOME"] = document["scratch"]
        server.set_rlimits(limits)
        server.confine([*server.library_folders(_HOME), *document["reads"]], document["scratch"])
        while True:
            connection.settimeout(None)
            name, arguments = wire.receive(connection, sys.maxsize)
            wire.send(connection, _reply(name, arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        os._exit(1)


def _reply(name: str, arguments: Any) -> dict[str, Any]:
    try:
        return {"answer": run_call(name, arguments), "memory": _peak()}
    except Exception as fault:
        fault.__traceback__ = fault.__traceback__ and fault.__traceback__.tb_next
        return {"fault": serialize_error(fault), "memory": _peak()}


def _peak() -> int:
    """Peak memory of this process, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
