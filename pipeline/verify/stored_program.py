"""A stored program of instructions: read by the strict reader, and held against what its artifact says of it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.util.errors import BuildRefused, ProgramInvalid

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable as Stored
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.executable.executable import Executable
    from nxpipe.emulator.executable.tables import Port
    from nxpipe.emulator.isa.program import Buffer

_AGAIN = "build the model again"


def core_of(manifest: "Manifest") -> str:
    """The generation of cores that it was built for."""
    from nxpipe.emulator.hardware import INSTANCES

    cores = {one.compiler_target: one.core for one in INSTANCES.values()}
    if manifest.target not in cores:
        raise ProgramInvalid(f"{manifest.model.id}: nothing is known of target {manifest.target!r}; {_AGAIN}")
    return cores[manifest.target]


def require_instructions(manifest: "Manifest") -> None:
    if manifest.backend != "emulator":
        raise BuildRefused(
            f"{manifest.model.id}: its programs are of backend {manifest.backend}, which the emulator cannot run; "
            "name an artifact of --backend emulator"
        )


def read_instructions(manifest: "Manifest", stored: "Stored", store: "Store") -> "Executable":
    """With all of its tables, for the cores and ranks that the manifest names."""
    from nxpipe.emulator.errors import ExecutableInvalid
    from nxpipe.emulator.executable.executable import from_bytes

    require_instructions(manifest)
    where = f"{manifest.model.id} {stored.name}"
    if not any(file.path == artifact_files.graph(stored.name) for file in manifest.files):
        raise ProgramInvalid(f"{where}: built by an older nxpipe, which stored no program of instructions; {_AGAIN}")
    try:
        found = from_bytes(store.read_blob(stored.blob))
    except ExecutableInvalid as error:
        raise ProgramInvalid(f"{where}: {error}; {_AGAIN}") from error
    made_for, asked = (found.program.core, found.program.ranks), (core_of(manifest), stored.tensor_parallel)
    if made_for != asked:
        raise ProgramInvalid(
            f"{where}: its program is for {_cores(*made_for)}, its manifest for {_cores(*asked)}; {_AGAIN}"
        )
    return found.with_constants(_tables(found, manifest, where, store))


def require_made_of(program: "Program", instructions: "Executable", where: str) -> None:
    """Whether they have the interface and the weights of that graph."""
    from nxpipe.emulator.emit import ports_of
    from nxpipe.emulator.isa.program import Role

    def on_a_rank(port: "Port") -> "Port":
        piece = program.states.get(port.name) if port.role is Role.STATE else None
        return replace(port, type=piece.local(port.type) if piece else port.type, sizes=())

    found, buffers = [on_a_rank(port) for port in instructions.ports], instructions.program.buffers
    ends = ({f"{port.role} {port.name} {port.type}" for port in ports} for ports in (ports_of(program), found))
    reads = ({f"parameter {name}" for name in names} for names in (program.graph.parameters, _parameters(buffers)))
    for ours, theirs in (ends, reads):
        if ours != theirs:
            only = f"its graph has {sorted(ours - theirs)[:1]}, the program {sorted(theirs - ours)[:1]}"
            raise ProgramInvalid(f"{where}: its program was not made of its graph: {only}; {_AGAIN}")


def _parameters(buffers: "Iterable[Buffer]") -> Iterator[str]:
    from nxpipe.emulator.isa.program import Role

    return (name for buffer in buffers if buffer.role is Role.PARAMETER for name in buffer.names)


def _cores(core: str, ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'} of NeuronCore-{core}"


def _tables(found: "Executable", manifest: "Manifest", where: str, store: "Store") -> dict[str, bytes]:
    """Those that are stored beside the program, and shared with others."""
    from nxpipe.emulator.executable.tables import constant_sizes

    files, tables = {file.path: file.blob for file in manifest.files}, dict[str, bytes]()
    sizes = constant_sizes(found.program.buffers)
    for digest in found.absent_constants:
        blob = files.get(artifact_files.constant(digest))
        if blob is None or (blob.sha256, {blob.size}) != (digest, sizes[digest]):
            raise ProgramInvalid(f"{where}: the table {digest[:12]} that it reads is not stored with it; {_AGAIN}")
        tables[digest] = store.read_blob(blob)
    return tables
