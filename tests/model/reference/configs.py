"""The two checkpoints of the property tests: the reference's tiny one, and one with other widths and roles."""

from __future__ import annotations

import copy
from typing import Any

from tests.model.micro import TINY


def other_config() -> dict[str, Any]:
    """Three streams, four ratios, a kv source in layer 0, taps in encoder and decoder, four drafts, two stages.

    Layer 4 is Engram layer, tap and window layer at once; layer 6, the candidate source, is an Engram layer as well.
    """
    config = copy.deepcopy(TINY)
    config["image_token_id"] = 300
    config["text_config"].update(
        vocab_size=320,
        hidden_size=96,
        num_hidden_layers=9,
        num_attention_heads=6,
        head_dim=96,
        qk_rope_head_dim=32,
        q_lora_rank=96,
        o_groups=3,
        o_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=10.0,
        sliding_window=12,
        compress_ratios=[3, 3, 0, 4, 0, 4, 2, 0, 2, 0, 0],
        kv_source_layer_ids=[0, 3, 6],
        index_source_layer_ids=[0, 1, 3, 6, 8],
        index_n_heads=20,
        index_head_dim=64,
        index_topk=5,
        candidate_source_layer_id=6,
        candidate_topk_blocks=2,
        candidate_block_size=3,
        hc_mult=3,
        hc_sinkhorn_iters=5,
        engram_layer_ids=[4, 6],
        engram_num_embeddings=[660, 864],
        engram_max_ngram_size=3,
        engram_n_heads=3,
        engram_vocab_size=100,
        engram_head_dim=64,
        engram_compressed_vocab_size=200,
        num_nextn_predict_layers=2,
        dspark_block_size=4,
        dspark_noise_token_id=310,
        dspark_target_layer_ids=[4, 8],
        dspark_markov_rank=64,
        dspark_n_routed_experts=5,
        dspark_num_experts_per_tok=3,
    )
    return config
