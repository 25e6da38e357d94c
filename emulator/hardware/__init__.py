"""Hardware specifications as data: NeuronCores and EC2 instance types.

Standard library only, so that the CDK app, the cost tables and the compiler can import it quickly.
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
