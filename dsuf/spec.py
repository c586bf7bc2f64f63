"""config.json as typed dimensions and, for each layer, the role it plays.

Keys keep the names of the checkpoint's `text_config`. What the roles mean is model.md 3.5 of the reference:
a layer reads the compressed cache of the latest kv source, and the selection of the latest index source, at or
before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsuf.errors import ConfigError

BLOCK = 32  # one scale covers 32 columns (and, for FP8 weights, 32 rows)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compress_ratio > 0."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LayerRole:
    """What one backbone layer owns and what it reads from earlier layers."""

    index: int
    ratio: int  # tokens per compressed entry; 0: window only
    kv_source: int | None  # layer whose compressed entries and index keys are read
    index_source: int | None  # layer whose selection is used
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool  # publishes the candidate blocks
    uses_candidates: bool  # selects inside the published blocks
    engram: int | None  # ordinal of this layer's Engram tables
    is_tap: bool  # its input streams feed the drafter

    @property
    def kind(self) -> str:
        """window, full (own entries and selection), reindex (own selection), or reuse."""
        if self.ratio == 0:
            return "window"
        if self.is_kv_source:
            return "full"
        return "reindex" if self.is_index_source else "reuse"


@dataclass(frozen=True)
class Spec:
    """Dimensions of the text model and its drafter; `layers` holds one role per backbone layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    rope_scaling: RopeScaling
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    layers: tuple[LayerRole, ...]

    @property
    def decoder_start_layer(self) -> int:
        """First layer that truncated prefill runs on the tail only."""
        return self.candidate_source_layer_id

    @property
    def hc_mix_rows(self) -> int:
        """Rows of a hyper-connection coefficient matrix: pre, post and comb."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def engram_columns(self) -> int:
        """Table rows that one token gathers per Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read a config.json. Raises ConfigError when it is not one of this architecture."""
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} was not found. Give a folder or file that holds config.json.") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is not readable JSON: {error}") from None
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Spec:
        """Build from the parsed config.json. Raises ConfigError listing everything that is wrong."""
        values = _read_fields(config)
        problems = _contradictions(values)
        if problems:
            raise ConfigError("config.json contradicts itself:\n" + "\n".join(f"  {line}" for line in problems))
        return cls(**values, layers=_layer_roles(values))


_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_FIXED = {  # keys of which only one value is implemented
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_MAY_BE_ZERO = {"rms_norm_eps", "hc_eps", *_TOP_LEVEL, "engram_pad_token_id", "dspark_noise_token_id"}


def _read_fields(config: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(config, dict) or not isinstance(config.get("text_config"), dict):
        raise ConfigError('config.json has no "text_config" object; expected a DeepseekV41ForCausalLM config.')
    text, problems, values = config["text_config"], [], {}
    if config.get("model_type") != "deepseek_v41":
        problems.append(f'model_type is {config.get("model_type")!r}, expected "deepseek_v41"')
    for key, only in _FIXED.items():
        if text.get(key, only) != only:
            problems.append(f"text_config.{key} is {text[key]!r}; only {only!r} is supported")
    for field in fields(Spec):
        if field.name in ("layers", "rope_scaling"):
            continue
        source = config if field.name in _TOP_LEVEL else text
        if field.name not in source:
            problems.append(f"{field.name} is missing")
            continue
        try:
            values[field.name] = _typed(field.name, str(field.type), source[field.name])
        except ValueError as error:
            problems.append(str(error))
    try:
        values["rope_scaling"] = _rope_scaling(text.get("rope_scaling"))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("config.json cannot be used:\n" + "\n".join(f"  {line}" for line in problems))
    return values


def _typed(name: str, kind: str, value: Any) -> Any:
    def is_integer(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and item >= 0

    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(is_integer(item) for item in value):
            raise ValueError(f"{name} is {value!r}, expected a list of integers of at least 0")
        return tuple(value)
    lowest = 0 if name in _MAY_BE_ZERO else 1
    if kind == "int":
        if not is_integer(value) or value < lowest:
            raise ValueError(f"{name} is {value!r}, expected an integer of at least {lowest}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} is {value!r}, expected a number of at least 0")
    return float(value)


def _rope_scaling(value: Any) -> RopeScaling:
    if not isinstance(value, dict) or value.get("rope_type") != "yarn":
        raise ValueError(f'rope_scaling is {value!r}, expected an object with rope_type "yarn"')
    missing = [field.name for field in fields(RopeScaling) if not isinstance(value.get(field.name), (int, float))]
    if missing:
        raise ValueError(f"rope_scaling lacks numbers for {', '.join(missing)}")
    return RopeScaling(**{field.name: value[field.name] for field in fields(RopeScaling)})


def _contradictions(v: dict[str, Any]) -> list[str]:
    found: list[str] = []

    def need(condition: bool, line: str) -> None:
        if not condition:
            found.append(line)

    depth, stages = v["num_hidden_layers"], v["num_nextn_predict_layers"]
    ratios, kv, index = v["compress_ratios"], v["kv_source_layer_ids"], v["index_source_layer_ids"]
    need(len(ratios) == depth + stages, f"compress_ratios has {len(ratios)} entries, expected {depth} + {stages}")
    need(not any(ratios[depth:]), "drafter stages must have compress_ratio 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = v[name]
        need(list(ids) == sorted(set(ids)) and all(i < depth for i in ids), f"{name} {ids} must ascend below {depth}")
    need(set(kv) <= set(index), f"every kv source must run an indexer; {sorted(set(kv) - set(index))} do not")
    need(v["candidate_source_layer_id"] in kv, "candidate_source_layer_id must be one of kv_source_layer_ids")
    if not found:
        for layer, ratio in enumerate(ratios[:depth]):
            source = max((s for s in kv if s <= layer), default=None)
            if ratio and source is None:
                found.append(f"layer {layer} has ratio {ratio} but no kv source stands at or before it")
            elif ratio and ratios[source] != ratio:
                found.append(f"layer {layer} has ratio {ratio}, its kv source {source} has {ratios[source]}")
            elif not ratio and layer in index:
                found.append(f"layer {layer} is an index source but has ratio 0")
            elif ratio and v["sliding_window"] % ratio:
                found.append(f"sliding_window {v['sliding_window']} is not a multiple of ratio {ratio}")
    found += _width_problems(v)
    return found


def _width_problems(v: dict[str, Any]) -> list[str]:
    heads_width = v["num_attention_heads"] * v["head_dim"]
    widths = {
        "hidden_size": v["hidden_size"],
        "q_lora_rank": v["q_lora_rank"],
        "head_dim": v["head_dim"],
        "index_head_dim": v["index_head_dim"],
        "moe_intermediate_size": v["moe_intermediate_size"],
        "engram_head_dim": v["engram_head_dim"],
        "heads * head_dim / o_groups": heads_width // v["o_groups"],
        "o_groups * o_lora_rank": v["o_groups"] * v["o_lora_rank"],
    }
    found = [f"{name} is {width}, expected a multiple of {BLOCK}" for name, width in widths.items() if width % BLOCK]
    checks = {
        f"num_attention_heads {v['num_attention_heads']} is not a multiple of o_groups {v['o_groups']}": (
            v["num_attention_heads"] % v["o_groups"] == 0
        ),
        "qk_rope_head_dim must be even and at most head_dim and index_head_dim": (
            v["qk_rope_head_dim"] % 2 == 0 and v["qk_rope_head_dim"] <= min(v["head_dim"], v["index_head_dim"])
        ),
        "num_experts_per_tok exceeds n_routed_experts": v["num_experts_per_tok"] <= v["n_routed_experts"],
        "dspark_num_experts_per_tok exceeds dspark_n_routed_experts": (
            v["dspark_num_experts_per_tok"] <= v["dspark_n_routed_experts"]
        ),
        "engram_num_embeddings needs one entry per engram layer": (
            len(v["engram_num_embeddings"]) == len(v["engram_layer_ids"])
        ),
        "engram_max_ngram_size must be at least 2": v["engram_max_ngram_size"] >= 2,
    }
    for key in (*_TOP_LEVEL, "dspark_noise_token_id", "engram_pad_token_id"):
        checks[f"{key} {v[key]} is not below vocab_size {v['vocab_size']}"] = v[key] < v["vocab_size"]
    return found + [line for line, holds in checks.items() if not holds]


def _layer_roles(v: dict[str, Any]) -> tuple[LayerRole, ...]:
    kv, index, candidate = v["kv_source_layer_ids"], v["index_source_layer_ids"], v["candidate_source_layer_id"]
    roles = []
    for layer in range(v["num_hidden_layers"]):
        ratio = v["compress_ratios"][layer]
        kv_source = max((s for s in kv if s <= layer), default=None) if ratio else None
        roles.append(
            LayerRole(
                index=layer,
                ratio=ratio,
                kv_source=kv_source,
                index_source=max((s for s in index if s <= layer), default=None) if ratio else None,
                is_kv_source=layer in kv,
                is_index_source=layer in index,
                is_candidate_source=layer == candidate,
                uses_candidates=layer in index and layer > candidate and kv_source == candidate,
                engram=v["engram_layer_ids"].index(layer) if layer in v["engram_layer_ids"] else None,
                is_tap=layer in v["dspark_target_layer_ids"],
            )
        )
    return tuple(roles)
