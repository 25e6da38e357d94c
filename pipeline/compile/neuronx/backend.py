"""Back end of neuronx-cc: the emulator's program, and from the same graph a NEFF for Neuron devices.

docs/reference/device-programs.md is its contract.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.builds import record_observation, step_result
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.compile import findings as rules
from nxpipe.pipeline.compile.artifact_files import device_program
from nxpipe.pipeline.compile.backend import BackendOutput
from nxpipe.pipeline.compile.findings import Finding
from nxpipe.pipeline.compile.frontend import EmulatorBackend
from nxpipe.pipeline.compile.neuronx.compiler import (
    CompilerFailed,
    ProcessLimits,
    compile_module,
    read_compiled,
    refusal,
    rule_of,
)
from nxpipe.pipeline.compile.neuronx.toolchain import Compilation, compiler_flags
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.builds import StepResult
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.executable.interface import Interface
    from nxpipe.emulator.executable.neff import NeffVariable
    from nxpipe.emulator.hlo.constraints import HloViolation
    from nxpipe.emulator.run.devices.protocol import TensorInfo
    from nxpipe.pipeline.compile.spec import BuildSpec


LONGEST: Final = 2 * 3600.0  # seconds for one program
_NEFF: Final = "neff"  # the file of its step result
_CODE: Final = re.compile(r"NCC_[A-Z]{4}[0-9]{3}")


class NeuronxBackend:
    """The emulator's back end with one more code generator: step results of the emulator are shared.

    `hold` holds the lease on a cache key: cells of different keys may have the same module."""

    def __init__(self, hold: Callable[[str], AbstractContextManager[None]]) -> None:
        self._emulator = EmulatorBackend()
        self._hold = hold

    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> "CompiledGraph":
        return self._emulator.frontend(spec, shape, step)

    def program(
        self,
        spec: "BuildSpec",
        shape: Shape,
        frontend_output: "CompiledGraph",
        store: "Store",
        step: Step,
        *,
        force: bool,
    ) -> BackendOutput:
        emulated = self._emulator.program(spec, shape, frontend_output, store, step, force=force)
        compilation, name = Compilation.of(spec, shape.phase), f"{spec.source.id} {shape.name}"
        with step(f"write HLO of {shape.name}"):
            interface, module = written(name, frontend_output, compilation.target)
        with step(f"compile {shape.name} with neuronx-cc"):
            neff = self.neff(name, interface, module, compilation, store, force=force)
        parts = {"neff": neff, "module": store.put_blob(module), "interface": store.put_blob(interface.to_bytes())}
        device = {path: parts[field] for field, path in device_program(shape.name).items()}
        return BackendOutput({**emulated.files, **device}, emulated.facts)

    def neff(
        self,
        name: str,
        interface: "Interface",
        module: bytes,
        compilation: Compilation,
        store: "Store",
        *,
        force: bool,
    ) -> "Blob":
        """The NEFF of a module, compiled unless the store has one of the same module, flags and release.

        NEFFs differ from one compilation to the next, in a UUID at least, so the first one that is stored is kept: with
        `force` the compiler runs again, and its result is only checked.
        """
        flags = compiler_flags(compilation)
        key = digest_of(
            {
                "format": "nxpipe.neff/1",
                "module": sha256_hex(module),
                "flags": list(flags),
                "compiler": compilation.release,
            }
        )

        def compiled() -> "StepResult":
            neff = compile_module(name, module, flags, ProcessLimits(LONGEST, available_memory()))
            require_interface(name, neff, interface, compilation.logical_cores)
            return record_observation(store, key, {_NEFF: store.put_blob(neff)}, {})

        if force:
            return compiled().blob(_NEFF)
        result = step_result(store, key)
        if result is None:
            with self._hold(key):
                result = step_result(store, key) or compiled()
        return result.blob(_NEFF)


def written(name: str, program: "CompiledGraph", target: str) -> tuple["Interface", bytes]:
    """The interface and the canonical module of a graph; BuildRefused if it breaks a constraint of the compiler."""
    from nxpipe.emulator.hlo.canonical import canonical
    from nxpipe.emulator.hlo.module import module_of
    from nxpipe.emulator.hlo.xla import proto_of

    module = module_of(program.graph, program.degree)
    data = canonical(proto_of(module.text), output_names=[result.name for result in module.interface.results])
    require_accepted(name, data, target)
    return module.interface, data


def require_accepted(name: str, module: bytes, target: str) -> None:
    """Raise BuildRefused for a module that breaks a documented constraint: the compiler would run for long and then
    say less."""
    from nxpipe.emulator.hlo.constraints import violations

    found = violations(module, target)
    if found:
        raise refusal(_finding(name, found), "would refuse")


def _finding(name: str, found: "Sequence[HloViolation]") -> Finding:
    """The first violation, with the rule of its error code; those without one are of the module's form or size."""
    first, *others = found
    code = _CODE.fullmatch(first.source)
    rule = (rule_of(first.source) if code else None) or _BY_VIOLATION.get(first.rule, rules.OPERATOR)
    more = f" (and {len(others)} more)" if others else ""
    return Finding(rule, f"{first.subject}: {first.detail} [{first.source}]{more}", first.remedy, programs=(name,))


_BY_VIOLATION: Final = {
    "module-size": rules.DOES_NOT_FIT,
    "element-type": rules.OPERAND_TYPE,
    "empty-input": rules.EMPTY_TENSOR,
    "empty-output": rules.EMPTY_TENSOR,
}


def require_interface(name: str, neff: bytes, interface: "Interface", logical_cores: int) -> None:
    """Raise CompilerFailed unless the NEFF has the tensors of the interface, by name and size, and the cores."""
    from nxpipe.emulator.run.devices.protocol import match
    from nxpipe.emulator.run.status import InvalidLoad

    found = read_compiled(name, neff)
    if found.physical_cores != logical_cores:
        raise CompilerFailed(
            f"{name}: the NEFF is for {found.physical_cores} physical cores of a logical one, and {logical_cores} were "
            "requested; run the same command again, and report it if it stays"
        )
    try:
        match({each.name: each.type.on_device.nbytes for each in interface.arguments}, _reported(found.inputs), "input")
        match({each.name: each.type.on_device.nbytes for each in interface.results}, _reported(found.outputs), "output")
    except InvalidLoad as error:
        raise CompilerFailed(f"{name}: {error}") from error


def _reported(variables: "Sequence[NeffVariable]") -> "dict[str, TensorInfo]":
    from nxpipe.emulator.run.devices.protocol import TensorInfo

    return {each.name: TensorInfo(each.name, each.nbytes) for each in variables}
