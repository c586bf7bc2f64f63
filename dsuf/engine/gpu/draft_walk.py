"""The drafter as launches: a block of five tokens for each drafting sequence, and window rows of the rows just run.

    draft     row table -> embeddings -> stages -> head -> Markov chain, slot by slot -> drafts, confidence logits
    windows   taps -> features -> each stage's window latent, into its ring at the row's position

A block's rows see the window before it and one another, because their latents stand in the ring at the block's
positions; the rows of what is accepted overwrite them later. Window rows are written for every row that ran: those of
rejected rows stand at positions that the next step writes again. Source: reference model.md 7.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.gpu.launches import Launches
from dsuf.engine.gpu.step_walk import Model, Residual, head, moe, output, queries

MARKOV_BLOCKS, MARKOV_SPAN = 132, 96  # blocks of markov.step at most, tokens of one at least
DRAFT_PURPOSE = 0


@dataclass(frozen=True)
class Batch:
    """Who takes part in a step: addresses of the slots' state and of the batch table int32 [count, 4], and how many
    drafting sequences at most (`groups`).
    """

    slots: int
    table: int
    count: int
    groups: int
    sampled: bool  # somebody draws at random


def draft(k: Launches, m: Model, batch: Batch) -> None:
    """Drafts by draft row into work.drafts, confidence logits into work.confidence, logits into work.draft_logits."""
    spec, w = m.spec, m.work
    k.launch(
        "rows.draft", batch.slots, batch.table, batch.count, k.rows.table, k.count, spec.sliding_window,
        spec.dspark_noise_token_id, spec.dspark_block_size, grid=(1, 1),
    )  # fmt: skip
    stages(k, m)
    head(k, m, w.draft_logits)
    chain(k, m, batch)


def stages(k: Launches, m: Model) -> None:
    """All stages over the block; then work.x is the head's input and work.folded the same before its norm."""
    spec, weights, w = m.spec, m.weights, m.work
    residual = Residual(k, w)
    k.embed(weights.embed, residual.streams, weights.class_map, w.nowhere, m.caches.history_slots)
    residual.first(weights.stages[0])
    parts = 0
    for number, stage in enumerate(weights.stages):
        if number:
            residual.after_experts(parts, stage, stage.attn_norm)
        window = spec.num_hidden_layers + number
        queries(k, m, stage, weights.rope_plain, window)
        c = m.caches
        k.attend(
            w.q, c.window(window), c.pitch, c.ring, k.rows.decoder_first, c.pool, None, (0, 0, False),
            weights.rope_plain, stage.attn_sink, w.o,
        )  # fmt: skip
        output(k, m, stage)
        residual.after_attention(stage)
        experts, per_token = spec.dspark_n_routed_experts, spec.dspark_num_experts_per_tok
        parts = moe(k, m, stage, experts, per_token, m.draft_expert_counter)
    last = weights.stages[-1]
    residual.after_experts(parts, last, weights.draft_norm, folded=w.folded)


def chain(k: Launches, m: Model, batch: Batch) -> None:
    """The Markov head, slot by slot: each draft is chosen before the next one's logits are known."""
    spec, weights, w, block = m.spec, m.weights, m.work, m.spec.dspark_block_size
    common = (batch.slots, k.rows.table, w.markov_parts, w.picked, w.drafts)
    for index in range(block):
        k.launch(
            f"markov.step/{k.width}", weights.markov_embed, weights.markov_head, w.draft_logits, *common, batch.groups,
            index, spec.vocab_size, block, grid=(min(MARKOV_BLOCKS, -(-spec.vocab_size // MARKOV_SPAN)), 1),
        )  # fmt: skip
        if batch.sampled:
            k.launch(
                "sample.filter", w.draft_logits, k.rows.table, batch.slots, 0, w.draft_records, w.picked,
                spec.vocab_size, index, block, DRAFT_PURPOSE, grid=(8 * batch.groups, 1),
            )  # fmt: skip
    k.launch(
        f"markov.finish/{k.width}", weights.markov_embed, weights.confidence, w.folded, batch.slots, k.rows.table,
        w.markov_parts, w.picked, w.drafts, w.confidence, block, grid=(block * batch.groups, 1),
    )  # fmt: skip


def windows(k: Launches, m: Model) -> None:
    """The drafter's window rows of the rows of the table, from work.taps."""
    weights, w, c = m.weights, m.work, m.caches
    k.join_taps(w.taps, w.tap_codes, w.tap_scales)
    k.project("main_proj", weights.main_proj, w.tap_codes, w.tap_scales, w.features)
    k.quantise_norm(w.features, weights.main_norm, w.feature_codes, w.feature_scales)
    for number, stage in enumerate(weights.stages):
        k.project("wq_a_wkv", stage.wq_a_wkv, w.feature_codes, w.feature_scales, w.latent)
        k.latents(
            w.latent, (stage.q_norm, stage.kv_norm), weights.rope_plain, 0, 0,
            c.window(m.spec.num_hidden_layers + number), c.pitch, c.ring,
        )  # fmt: skip
