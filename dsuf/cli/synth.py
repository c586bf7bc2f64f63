"""`dsuf synth`: write a synthetic checkpoint of any size from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def synth(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="tiny, noise, h200x1, h200x2, v41-flash, or a path to a config.json or its folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, absent or empty.")],
    seed: Annotated[int, typer.Option(help="Weights are a function of tensor name, position and seed.")] = 0,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Headers and index over holes: no weights, no disk.")
    ] = False,
) -> None:
    """Write a checkpoint with random weights.

    With the released vocabulary it has V4.1's tokenizer, else none: then it takes token ids. A GPU that loads a sparse
    one makes the weights itself. The folder appears whole or, when interrupted, not at all.
    """
    from dsuf.cli.live import progress
    from dsuf.model.checkpoint import Checkpoint
    from dsuf.model.synthetic import load_config, write_checkpoint

    parsed = load_config(config)
    with progress(f"writing {out}", unit="B") as show:
        write_checkpoint(parsed, out, seed=seed, sparse=sparse, progress=show, **_text_files(parsed))
    with Checkpoint.open(out) as checkpoint:
        tensors, gigabytes = len(checkpoint.names()), checkpoint.total_bytes / 1e9
    print(f"{out}: {tensors:,} tensors, {gigabytes:.3f} GB{' of holes' if sparse else ''}")


def _text_files(config: dict[str, Any]) -> dict[str, Any]:
    """Tokenizer and Engram classes for a checkpoint with the released vocabulary."""
    from dsuf.model.checkpoint import TOKENIZER
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec
    from dsuf.text.tokenizer import class_map, read_tokenizer, v41_tokenizer_json

    spec = Spec.from_config(config)
    if spec.vocab_size != Spec.from_config(load_config("v41-flash")).vocab_size:
        return {}
    tokenizer = v41_tokenizer_json()
    return {
        "class_map": class_map(read_tokenizer(tokenizer.decode(), spec), spec),
        "extra_files": {TOKENIZER: tokenizer},
    }
