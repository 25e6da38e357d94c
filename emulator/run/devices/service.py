"""Programs that stay loaded on the ranks of a device, and run whenever their owner sends inputs.

`serve` is the host function of a rank: it loads the programs, connects to its owner and executes what it is sent. Only
one program runs at a time, on all ranks with the same inputs. `RankService` is the owner's end. A message is a length,
a JSON header with the names, types and shapes of its arrays, and their bytes; nothing is pickled.
"""

import json
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.executable.interface import interface_from
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.faults import DeviceFailure
from nxpipe.emulator.run.devices.ranks import Document, Rank, document_of
from nxpipe.emulator.run.devices.session import WeightsFile, load_model
from nxpipe.emulator.run.status import RuntimeFault

_LENGTH: Final = struct.Struct("<I")
_IDLE: Final = 10.0  # seconds after which a rank without work reports to its watchdog
_LONGEST_HEADER: Final = 1 << 20


def serve(rank: Rank, argument: Document) -> None:
    """Run programs until the owner closes the connection.

    The argument has `weights`, a file; `programs`, by name the files `neff` and `interface`; and `address`, a socket.
    """
    files = argument["programs"]
    programs = {
        name: (Path(own["neff"]), interface_from(Path(own["interface"]).read_bytes())) for name, own in files.items()
    }
    session = load_model(rank, programs, WeightsFile(Path(argument["weights"])))
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(argument["address"])
        _send(owner, {"rank": rank.number}, {})
        owner.settimeout(_IDLE)
        while (message := _next(owner, rank)) is not None:
            header, inputs = message
            try:
                outputs = session.run(header["program"], inputs)
            except RuntimeFault as fault:
                _send(owner, document_of(fault), {})
                raise
            _send(owner, {}, outputs if rank.number == 0 else {})


def _next(owner: socket.socket, rank: Rank) -> "tuple[Document, dict[str, Array]] | None":
    """The next message; None once the owner has closed the connection. A rank that waits says so."""
    while True:
        try:
            first = owner.recv(1)
        except TimeoutError:
            rank.step("wait for a request")
            continue
        except ConnectionError:
            return None
        owner.settimeout(None)
        try:
            return _receive(owner, first) if first else None
        finally:
            owner.settimeout(_IDLE)


class RankService:
    """The owner's end. `start` runs `serve` on all ranks with an argument that it completes, and blocks until they end;
    it is called on a thread of its own."""

    def __init__(self, world: int, start: Callable[[Document], Any], argument: Document) -> None:
        self._fault: BaseException | None = None
        self._busy = threading.Lock()
        self._ranks: dict[int, socket.socket] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="nxpipe-ranks-")
        with socket.socket(socket.AF_UNIX) as listening:
            address = str(Path(self._folder.name) / "owner")
            listening.bind(address)
            listening.listen(world)
            listening.settimeout(0.2)
            self._thread = threading.Thread(
                target=self._watch, args=(start, {**argument, "address": address}), name="ranks", daemon=True
            )
            self._thread.start()
            while len(self._ranks) < world:
                self._accept(listening)

    def run(self, program: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a program on all ranks; the outputs of the first, other than states."""
        with self._busy:
            try:
                for own in self._ranks.values():
                    _send(own, {"program": program}, inputs)
                answers = {rank: _receive(own) for rank, own in sorted(self._ranks.items())}
            except OSError as broken:
                self._thread.join(60)  # the watchdog names the rank and the reason
                raise self._reason() from broken
            if any(header for header, _ in answers.values()):
                self._thread.join(60)
                raise self._reason()
            return answers[0][1]

    def close(self) -> None:
        """End all ranks."""
        for own in self._ranks.values():
            with suppress(OSError):
                own.close()
        self._thread.join(60)
        self._folder.cleanup()

    def _watch(self, start: Callable[[Document], Any], argument: Document) -> None:
        try:
            start(argument)
        except BaseException as fault:
            self._fault = fault

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            if not self._thread.is_alive():
                self.close()
                raise self._reason() from None
            return
        connection.setblocking(True)
        header, _ = _receive(connection)
        self._ranks[header["rank"]] = connection

    def _reason(self) -> BaseException:
        return self._fault or DeviceFailure("a rank ended without a reason; see the log of its process")


def _send(to: socket.socket, header: Document, arrays: Mapping[str, Array]) -> None:
    held = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    described = [[name, array.dtype.name, list(array.shape)] for name, array in held.items()]
    head = json.dumps({"header": header, "arrays": described}).encode()
    to.sendall(_LENGTH.pack(len(head)) + head + b"".join(array.tobytes() for array in held.values()))


def _receive(source: socket.socket, begun: bytes = b"") -> tuple[Document, dict[str, Array]]:
    (length,) = _LENGTH.unpack(begun + _exactly(source, _LENGTH.size - len(begun)))
    if length > _LONGEST_HEADER:
        raise ConnectionError(f"a header of {length:,} bytes")
    document = json.loads(_exactly(source, length))
    arrays: dict[str, Array] = {}
    for name, kind, shape in document["arrays"]:
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        arrays[name] = np.frombuffer(_exactly(source, dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)
    return document["header"], arrays


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = source.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return bytes(data)
