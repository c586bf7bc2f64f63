"""`dsuf build`: compile the kernel catalogue for a chip; no machine needs a GPU for it."""

from __future__ import annotations

from typing import Annotated

import typer

from dsuf.errors import EnvironmentProblem


def build(
    sm: Annotated[str, typer.Option("--sm", help="Chip to compile for: sm_90a, sm_100a or sm_103a.")] = "sm_103a",
) -> None:
    """Compile the GPU kernels. This version has none yet."""
    raise EnvironmentProblem(
        f"Nothing can be compiled for {sm}: this version has no GPU kernels (dsuf/kernels holds no catalogue). "
        "The NumPy reference needs no build: use run, serve, repro and bench with --gpus 0."
    )
