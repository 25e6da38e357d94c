"""Hardware as data: the capacities of a NeuronCore and of an EC2 instance.

Standard library only, so that the CDK app, the cost tables and the compiler can all read it at no cost.
"""

from nxpipe.emulator.hardware.core import CORES, DMA_TRANSFER, CoreSpec, DmaTransfer
from nxpipe.emulator.hardware.instance import INSTANCES, Instance, UnknownInstance, instance

__all__ = [
    "CORES",
    "DMA_TRANSFER",
    "INSTANCES",
    "CoreSpec",
    "DmaTransfer",
    "Instance",
    "UnknownInstance",
    "instance",
]
