"""The emulated NeuronCore: carries a program out, instruction by instruction, and assumes the worst.

`Machine` is the door. `memory` and `places` are where elements lie, `dma`, `tensor`, `scalar`, `vector`, `folds`,
`search` and `gpsimd` what instructions mean, `schedule` who goes next, and `race` the proof that it did not matter.
"""

from nxpipe.emulator.core.faults import Deadlock, MachineFault, OutOfBounds, Race, SumNotBegun, Unwritten
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.core.statistics import Statistics

__all__ = ["Deadlock", "Machine", "MachineFault", "OutOfBounds", "Race", "Statistics", "SumNotBegun", "Unwritten"]
