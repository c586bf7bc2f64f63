"""Which parameter of the PyTorch model is which tensor of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from recipes.toy import quantise
from recipes.toy.layers import Weight

KINDS = {quantise.fp8_blocks: "fp8", quantise.fp4_rows: "fp4", quantise.fp8_rows: "rows", quantise.bf16: "bf16"}
_RENAMED = (
    (r"\.hc_(attn|ffn)\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.ffn\.bias$", ".ffn.gate.bias"),
    (r"\.shared_(w\d)\.", r".shared_experts.\1."),
    (r"\.(q_weight|k_weight)\.weight$", r".\1"),
    (r"\.markov_embed\.", ".markov_head.embed."),
    (r"\.markov_head\.weight$", ".markov_head.head.weight"),
    (r"\.confidence_head\.", ".confidence_head.proj."),
)


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(tensor name, kind, float32 view) of everything the model owns.

    Kinds: fp8 (32 x 32 blocks), fp4, rows, bf16, f32. Quantised names end in `.weight`; their `.scale` is not listed.
    """
    kinds = {f"{path}.weight": KINDS[part.grid] for path, part in model.named_modules() if isinstance(part, Weight)}
    for path, value in [*model.named_parameters(), *model.named_buffers()]:
        if path.endswith(".load"):
            continue
        kind, value = kinds.get(path, "f32"), value.detach()
        expert = re.fullmatch(r"(.*\.ffn)\.(w\d)\.weight", path)
        if expert:
            for number, part in enumerate(value):
                yield f"{expert[1]}.experts.{number}.{expert[2]}.weight", kind, part
            continue
        name = path
        for pattern, new in _RENAMED:
            name = re.sub(pattern, new, name)
        yield name, kind, value
        if name.endswith(".gate.bias"):
            yield name + "_vl", kind, value
