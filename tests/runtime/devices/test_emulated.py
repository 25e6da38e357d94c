"""Compiled models give the same outputs through the device layer as through the emulator's own runtime."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.compile import emit
from nxpipe.emulator.executable.executable import Executable, from_bytes, to_bytes
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.program import Buffer, Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.emulated_runtime import EmulatedRuntime
from nxpipe.emulator.run.devices.faults import CollectiveFault
from nxpipe.emulator.run.devices.ranks import Rank, run_ranks
from nxpipe.emulator.run.devices.session import RankProgram, RankSession
from nxpipe.emulator.run.isa import Isa
from nxpipe.emulator.run.model import Fast
from nxpipe.emulator.run.runtime import Runtime
from nxpipe.emulator.run.status import CoreBusy
from tests.runtime.devices.programs import addition
from tests.runtime.models import divided_product, llama
from tests.runtime.test_isa import perceptron

PROMPT, MASK = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 1], [1, 1, 0]])


def interface(executable: Executable, path: Path) -> RankProgram:
    """The interface on one rank, as a manifest would have it."""

    def types(*roles: Role) -> dict[str, TensorType]:
        buffers = [buffer for buffer in executable.program.buffers if buffer.role in roles]
        return {name: TensorType(_host_shape(buffer), buffer.dtype) for buffer in buffers for name in buffer.names}

    return RankProgram(path, types(Role.INPUT, Role.STATE, Role.PARAMETER), types(Role.OUTPUT, Role.STATE))


def _host_shape(buffer: Buffer) -> tuple[int, ...]:
    shape = dict(zip(buffer.order or range(len(buffer.shape)), buffer.shape, strict=True))
    return tuple(shape[axis] for axis in range(len(shape)))


def shares(executable: Executable, weights: dict[str, Array], rank: int) -> dict[str, Array]:
    """What each rank writes: a part of each divided weight, others whole."""
    pieces = executable.pieces(Role.PARAMETER)
    ranks = executable.program.ranks
    return {
        name: pieces[name].split(array, ranks)[rank] if name in pieces else array for name, array in weights.items()
    }


def host(rank: Rank, argument: Any) -> Any:
    """Run a stored program once on the tensors of a file."""
    path = Path(argument["program"])
    executable, tensors = from_bytes(path.read_bytes()), dict(np.load(argument["tensors"]))
    session = RankSession(rank, {"program": interface(executable, path)})
    inputs = executable.of_role(Role.INPUT)
    for name, array in shares(executable, tensors, rank.number).items():
        if name not in inputs:
            session.write(name, array)
    outputs = session.run("program", {name: tensors[name] for name in inputs})
    return {name: array.tolist() for name, array in outputs.items()}


def through_devices(code: Fast, tensors: dict[str, Array], folder: Path) -> list[dict[str, Any]]:
    executable = emit(code.program, "v2")
    (folder / "program.nxe").write_bytes(to_bytes(executable))
    np.savez(folder / "tensors.npz", **tensors)  # type: ignore[arg-type]
    argument = {"program": str(folder / "program.nxe"), "tensors": str(folder / "tensors.npz")}
    options = {"name": "trn1.2xlarge"}
    world = executable.program.ranks
    return run_ranks(f"{__name__}:host", argument, world=world, implementation="emulated", options=options)


def directly(code: Fast, weights: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    return Isa(emit(code.program, "v2")).load(weights).run(inputs)[0]


@pytest.mark.parametrize("code", [perceptron(3), divided_product()], ids=["one rank", "two ranks"])
def test_a_compiled_program_gives_the_outputs_of_the_emulator_on_every_rank(code: Fast, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    graph = code.program.whole
    weights, inputs = (
        {name: draw.standard_normal(value.type.shape, np.float32) for name, value in values.items()}
        for values in (graph.parameters, graph.inputs)
    )
    expected = {name: array.tolist() for name, array in directly(code, weights, inputs).items()}
    assert through_devices(code, weights | inputs, tmp_path) == [expected] * code.ranks


def decoder(rank: Rank, argument: Any) -> Any:
    """A prefill and three decodes on one cache; the logits of each."""
    paths = {name: Path(argument["folder"]) / f"{name}.nxe" for name in ("prefill", "decode")}
    executables = {name: from_bytes(path.read_bytes()) for name, path in paths.items()}
    session = RankSession(rank, {name: interface(executables[name], path) for name, path in paths.items()})
    weights = dict(np.load(argument["weights"]))
    for name, array in shares(executables["decode"], weights, rank.number).items():
        session.write(name, array)
    return [logits.tolist() for logits in conversation(lambda name, request: session.run(name, request)["logits"])]


def conversation(run: Callable[[str, dict[str, Array]], Array]) -> list[Array]:
    padded = {"input_ids": PROMPT, "attention_mask": MASK}
    answers = [run("prefill", {name: np.pad(array, ((0, 0), (0, 7))) for name, array in padded.items()})]
    for step in range(3):
        tokens = answers[-1].argmax(-1)
        answers.append(run("decode", {"input_ids": tokens, "position": np.array([3, 2]) + step}))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_a_decoder_keeps_its_cache_on_the_device_between_programs(degree: int, tmp_path: Path) -> None:
    codes, weights = llama(degree)
    executables = {name: emit(code.program, "v2") for name, code in zip(("prefill", "decode"), codes[1:], strict=True)}
    with Runtime(instance("trn1.2xlarge")) as runtime:
        model = runtime.load([Isa(executable) for executable in executables.values()], weights)
        states = model.allocate()
        expected = conversation(lambda name, request: model.execute(request, states)["logits"])
    for name, executable in executables.items():
        (tmp_path / f"{name}.nxe").write_bytes(to_bytes(executable))
    np.savez(tmp_path / "weights.npz", **weights)  # type: ignore[arg-type]
    argument = {"folder": str(tmp_path), "weights": str(tmp_path / "weights.npz")}
    options = {"name": "trn1.2xlarge"}
    results = run_ranks(f"{__name__}:decoder", argument, world=degree, implementation="emulated", options=options)
    assert results == [[logits.tolist() for logits in expected]] * degree


def test_a_core_that_runs_is_busy_and_a_failed_rank_releases_its_peers(tmp_path: Path) -> None:
    program = addition("emulated", tmp_path, 2)
    with EmulatedRuntime("trn1.2xlarge") as runtime:
        models: list[Any] = [None, None]

        def load(rank: int) -> None:
            models[rank] = runtime.load(program, core=rank, rank=rank, world=2)

        threads = [threading.Thread(target=load, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tensors = {name: runtime.allocate(16, name=name) for name in "xwy"}
        for tensor in tensors.values():
            tensor.write(np.zeros(4, np.float32))
        inputs = {name: tensors[name] for name in "xw"}
        runtime.cores[0].busy.acquire()
        with pytest.raises(CoreBusy, match="core 0 runs another program"):
            models[0].execute(inputs, {"y": tensors["y"]})
        runtime.cores[0].busy.release()
        runtime.limit = 0.2
        for _ in range(2):  # the other rank never executes; afterwards the group is broken
            with pytest.raises(CollectiveFault, match=r"rank 0 waited for another rank, which failed or did"):
                models[0].execute(inputs, {"y": tensors["y"]})
