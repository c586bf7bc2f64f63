"""What the interpreter found wrong with a kernel; each message names the access and the first lane that made it."""

from __future__ import annotations

from dsuf.errors import CheckFailed


class KernelFault(CheckFailed):
    """Root of everything the interpreter reports."""


class OutOfBounds(KernelFault):
    """An access outside every buffer, or outside the block's shared memory."""


class Misaligned(KernelFault):
    """A vector access whose address is not a multiple of its size."""


class Unwritten(KernelFault):
    """A read of memory that nobody wrote."""


class Race(KernelFault):
    """Two threads touched the same memory without a barrier between them, or wrote different values at once."""


class Divergence(KernelFault):
    """A warp-wide or block-wide operation that only some of its threads reached."""


class Deadlock(KernelFault):
    """Every thread waits for something that no other will do."""
