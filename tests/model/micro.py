"""The smallest config with a window layer, an Engram layer, a full layer of each ratio and a drafter stage."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

TINY = json.loads((Path(__file__).parents[2] / "dsuf/configs/tiny.json").read_text())


def micro_config(**changes: Any) -> dict[str, Any]:
    """199 tensors in 225 kB; `changes` go into text_config."""
    config = copy.deepcopy(TINY)
    config["image_token_id"] = 60
    config["text_config"].update(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        compress_ratios=[0, 2, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=2,
        index_n_heads=2,
        engram_layer_ids=[0],
        engram_num_embeddings=[204],
        engram_vocab_size=20,
        engram_compressed_vocab_size=40,
        num_nextn_predict_layers=1,
        dspark_noise_token_id=61,
        dspark_target_layer_ids=[2],
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )
    config["text_config"].update(changes)
    return config
