"""A tensor that goes into a program or comes out of it, as its caller sees it."""

from dataclasses import dataclass

from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.program import Role


@dataclass(frozen=True, slots=True)
class Port:
    """`type` is the caller's: of a state that ranks share, the whole; 64-bit integers although they lie narrower.

    `sizes` is empty, or names each axis along which a request may be shorter ("batch", "sequence"; "" where it may
    not): equally shorter wherever that name stands. The host pads such inputs behind, and cuts outputs back.
    """

    name: str
    role: Role
    type: TensorType
    sizes: tuple[str, ...] = ()
