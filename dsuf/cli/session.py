"""A checkpoint opened in this process, for `run` and `bench`: engine, text and the defaults that the folder names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsuf.cli.live import progress, say
from dsuf.cli.machine import choose_gpus
from dsuf.config import parse_switch, parse_verify, read_environment
from dsuf.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from dsuf.engine.engine import Engine, TierFactory
    from dsuf.engine.options import EngineOptions
    from dsuf.model.checkpoint import Checkpoint
    from dsuf.spec import Spec
    from dsuf.text.prompt import ChatText


GPU_BUDGET_S = 0.12  # of a chunk between two decode steps on a GPU: a short prompt as a whole, or 2,200 rows on an H200
GPU_CHUNK = 4096  # prompt rows of one pass on a GPU: enough that products, not weights, take the time
GPU_NUMERICS = "bf16"  # how its results are to be compared: float32 sums of exact operands, rounded where that rounds


@dataclass(frozen=True)
class Session:
    """What a command needs to answer prompts in this process."""

    name: str  # --ckpt as given
    checkpoint: Checkpoint
    engine: Engine

    def text(self) -> ChatText:
        """Prompt text for this checkpoint. Raises CheckpointError where it has no tokenizer, or a wrong one."""
        from dsuf.text.prompt import ChatText

        checkpoint, limit = self.checkpoint, self.engine.limits.max_context
        return ChatText.open(
            checkpoint.tokenizer_path, checkpoint.spec, context_limit=limit, generation=checkpoint.generation
        )

    def tokenizer(self) -> Tokenizer:
        """The bare tokenizer, for plain text; CheckpointError where there is none."""
        from dsuf.text.tokenizer import load_tokenizer

        return load_tokenizer(self.checkpoint.tokenizer_path, self.checkpoint.spec)

    def model(self) -> dict[str, str | int]:
        """The `model` of a bench object; the revision is a digest of config.json."""
        config = (self.checkpoint.folder / "config.json").read_bytes()
        return {
            "name": self.name,
            "path": str(self.checkpoint.folder),
            "revision": hashlib.sha256(config).hexdigest()[:12],
            "quant": "fp8 with fp4 experts",
            "bytes": self.checkpoint.total_bytes,
        }


def engine_options(
    gpus: str | None,
    numerics: str | None,
    prefill: str,
    draft: str,
    verify: str,
    max_context: int | None,
    max_sequences: int = 8,
    prefill_budget_ms: float | None = None,
) -> EngineOptions:
    """Check the engine's flags before anything is loaded; `ckpt` is filled in by `prepare`."""
    from dsuf.engine.options import EngineOptions

    environment = read_environment()
    of_gpus = numerics is None or numerics == GPU_NUMERICS  # only the CPU has a choice of numerics
    chosen = choose_gpus(gpus) if of_gpus or gpus is not None else ()
    if chosen and not of_gpus:
        raise ConfigError(
            f"--numerics {numerics} is one of the CPU backend; a GPU rounds where the official code rounds "
            f"({GPU_NUMERICS}). Use --gpus 0, or leave it out."
        )
    budget_s = GPU_BUDGET_S if chosen else EngineOptions.prefill_budget_s
    return EngineOptions(
        ckpt=Path(),
        numerics=GPU_NUMERICS if chosen else numerics or EngineOptions.numerics,
        prefill=prefill,
        draft=parse_switch("--draft", draft),
        verify=parse_verify(verify),
        max_context=max_context,
        max_sequences=max_sequences,
        prefill_chunk=GPU_CHUNK if chosen else EngineOptions.prefill_chunk,
        prefill_budget_s=budget_s if prefill_budget_ms is None else prefill_budget_ms / 1000,
        gpus=chosen,
        gpus_named=gpus is not None,
        kernels=environment.kernels,
        cache=environment.cache_dir,
    )


def prepare(ckpt: str, options: EngineOptions) -> EngineOptions:
    """Options with the folder of `ckpt`; a built-in checkpoint is made on first use. Says what answers to expect."""
    from dsuf.text.builtin import NOISE, TOY, resolve

    expectations = {
        NOISE: "The built-in checkpoint `noise` has random weights: its answers are noise.",
        TOY: "The built-in checkpoint `toy` was trained to repeat a small corpus.",
    }
    with progress(f"making the built-in checkpoint {ckpt}", "B") as update:
        folder = resolve(ckpt, cache_dir=read_environment().cache_dir, progress=update)
    if ckpt in expectations:
        say(expectations[ckpt])
    options = replace(options, ckpt=folder)
    if not options.gpus or options.gpus_named:
        return options
    from dsuf.spec import Spec

    try:
        return shared_out(options, Spec.load(folder / "config.json"))
    except ConfigError:
        say("The GPU is not used: no kernels are made for the dimensions of this checkpoint.")
    plain, budget_s = type(options), options.prefill_budget_s
    return replace(
        options,
        gpus=(),
        numerics=plain.numerics,
        prefill_chunk=plain.prefill_chunk,
        prefill_budget_s=plain.prefill_budget_s if budget_s == GPU_BUDGET_S else budget_s,
    )


def shared_out(options: EngineOptions, spec: Spec) -> EngineOptions:
    """Of GPUs that nobody named as many as can share a checkpoint; says so where some stay idle. Raises ConfigError
    where no kernels are made for it.
    """
    from dsuf.engine.gpu.open import most_sharing

    if not options.gpus or options.gpus_named:
        return options
    count = most_sharing(spec, len(options.gpus))
    if count < len(options.gpus):
        say(f"{count} of {len(options.gpus)} GPUs are used: the parts of this checkpoint must be equal.")
    return replace(options, gpus=options.gpus[:count])


def open_session(ckpt: str, options: EngineOptions, tier: TierFactory | None = None) -> Session:
    """Open the checkpoint and load the engine, with a cache tier if given. Raises CheckpointError or ConfigError."""
    from dsuf.engine.engine import open_engine
    from dsuf.model.checkpoint import Checkpoint

    options = prepare(ckpt, options)
    checkpoint = Checkpoint.open(options.ckpt)
    say_defaults(checkpoint)
    with progress(f"loading {ckpt}", "%") as update:
        engine = open_engine(options, lambda what, share: update(round(share * 100), 100), class_map_of, tier=tier)
    return Session(ckpt, checkpoint, engine)


def class_map_of(checkpoint: Checkpoint) -> np.ndarray:
    """Engram classes of the token ids [vocab], for the engine; they come from the tokenizer where no file has them."""
    from dsuf.text.tokenizer import checkpoint_class_map

    return checkpoint_class_map(checkpoint)


def say_defaults(checkpoint: Checkpoint) -> None:
    """Name the sampling defaults that the checkpoint's generation_config.json sets."""
    names = ("temperature", "top_p", "max_new_tokens")
    found = [f"{name} {checkpoint.generation[name]}" for name in names if name in checkpoint.generation]
    if found:
        say(f"Defaults of this checkpoint where a request is silent: {', '.join(found)}.")
