"""Host functions of ranks: the same code for the emulator and for devices, named in jobs as `module:function`."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.run.devices.ranks import Rank
from nxpipe.emulator.run.devices.session import RankProgram, RankSession

FOUR, IDS = TensorType((4,), DType.FLOAT32), TensorType((2,), DType.INT64)


def addition(rank: Rank, argument: Any) -> Any:
    """y = x + w over all ranks, where w is the rank's number plus one."""
    program = RankProgram(Path(argument["program"]), {"x": FOUR, "w": FOUR}, {"y": FOUR})
    session = RankSession(rank, {"addition": program})
    session.write("w", np.full(4, rank.number + 1, np.float32))
    outputs = [session.run("addition", {"x": np.full(4, x, np.float32)})["y"].tolist() for x in argument["inputs"]]
    timing = session.time("addition", runs=2) if argument.get("time") else None
    return {
        "outputs": outputs,
        "p50_ms": timing and timing.p50_ms,
        "used": rank.runtime.counters(rank.core).memory_used,
    }


def model(rank: Rank, argument: Any) -> Any:
    """Two programs with a shared state: prefill adds to the total twice, decode once."""
    types = {"x": FOUR, "total": FOUR}
    files = {name: Path(path) for name, path in argument.items()}
    session = RankSession(
        rank, {name: RankProgram(path, types, {"y": FOUR, "total": FOUR}) for name, path in files.items()}
    )
    values = []
    for name in ("prefill", "decode", "decode"):
        values.append(session.run(name, {"x": np.arange(4, dtype=np.float32)})["y"].tolist())
    session.write("total", np.ones(4, np.float32))
    values.append(session.run("decode", {"x": np.zeros(4, np.float32)})["y"].tolist())
    return {"values": values, "total": session.read("total").tolist()}


def lookup(rank: Rank, argument: Any) -> Any:
    types = {"table": TensorType((6, 4), DType.FLOAT32), "ids": IDS}
    program = RankProgram(Path(argument["program"]), types, {"y": TensorType((2, 4), DType.FLOAT32)})
    session = RankSession(rank, {"lookup": program})
    session.write("table", np.arange(24, dtype=np.float32).reshape(6, 4))
    return session.run("lookup", {"ids": np.array(argument["ids"], np.int64)})["y"].tolist()


def environment(rank: Rank, argument: Any) -> Any:
    return {name: value for name, value in os.environ.items() if name.startswith("NEURON_")} | {
        "cores": rank.runtime.description.cores
    }


def killed(rank: Rank, argument: Any) -> Any:
    """The rank in the argument ends by SIGKILL; the others wait for it in a load."""
    if rank.number == argument["rank"]:
        rank.step("last words")
        os.write(2, b"NRT something went wrong\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return addition(rank, argument)


def absent(rank: Rank, argument: Any) -> Any:
    """The rank in the argument never loads, and has a child process that would outlive it."""
    if rank.number == argument["rank"]:
        child = subprocess.Popen(["sleep", "600"])
        Path(argument["pids"]).write_text(f"{os.getpid()} {child.pid}")
        rank.step("wait for ever")
        time.sleep(600)
    while not Path(argument["pids"]).exists():
        rank.step("wait for the other rank")
        time.sleep(0.05)
    return addition(rank, argument)


def silent(rank: Rank, argument: Any) -> Any:
    """The rank in the argument reports nothing, and the others report without end."""
    rank.step("begin")
    while True:
        time.sleep(0.02)
        rank.runtime.counters(rank.core)  # ends a thread once the runtime is closed
        if rank.number != argument["rank"]:
            rank.step("go on")


def faulty(rank: Rank, argument: Any) -> Any:
    if rank.number == argument["rank"]:
        raise ValueError("not today")
    return addition(rank, argument)


def reversed_order(rank: Rank, argument: Any) -> Any:
    """Each rank loads the same two programs by hand, one of them in the other order."""
    programs = [Path(path) for path in argument["programs"]]
    for path in reversed(programs) if rank.number else programs:
        rank.step(f"load {path.stem}")
        rank.runtime.load(path, core=rank.core, rank=rank.number, world=rank.world)


def opened(rank: Rank, argument: Any) -> Any:
    """Hold the core until the file in the argument appears."""
    Path(argument["ready"]).touch()
    while not Path(argument["done"]).exists():
        time.sleep(0.01)
