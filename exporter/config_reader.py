"""Reads a checkpoint directory's JSON files into a ModelConfig, naming every wrong field at once.

A field we do not know is refused rather than dropped: a newer release may have used it to change
the mathematics. A user who knows better names it in `ignore`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from clover.exporter.config import DEFAULT_BLOCK_SIZE, MODEL_TYPES, LayerType, ModelConfig, read_json
from clover.exporter.prequantized import quantization_problem
from clover.runtime.errors import CheckpointError

MASK_TOKEN = "<|mask|>"
LAYER_TYPES = ("linear_attention", "full_attention")
TEXT_MODEL_TYPES = (*MODEL_TYPES, "clover_moe_text", "qwen3_5_moe", "qwen3_5_moe_text")
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
DEFAULT_FULL_ATTENTION_INTERVAL = 4
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "max_position_embeddings",
)  # fmt: skip

# Fields whose other values would change the mathematics: only these values are implemented.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mamba_ssm_dtype": ("float32",),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

USED = {
    *SIZES, "model_type", "layer_types", "full_attention_interval", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "partial_rotary_factor", "tie_word_embeddings", "block_size", "mask_token_id", "eos_token_id",
    "moe_block_coreset", "history_readout_scale", "align_blocks", "quantization_config",
}  # fmt: skip

# Known and without effect on the forward pass: training, book-keeping, vision, and generation defaults that
# old releases wrote into config.json (generation_config.json is where they count).
IRRELEVANT = {
    "text_config", "vision_config", "audio_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_commit_hash", "dtype",
    "torch_dtype", "initializer_range", "use_cache", "router_aux_loss_coef", "output_router_logits",
    "attention_dropout", "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "intermediate_size",
    "use_mtp", "num_nextn_predict_layers", "language_model_only", "return_dict", "output_hidden_states",
    "output_attentions", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "tie_encoder_decoder",
    "chunk_size_feed_forward", "is_decoder", "cross_attention_hidden_size", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "presence_penalty", "length_penalty", "no_repeat_ngram_size", "threshold",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "finetuning_task", "id2label",
    "label2id", "tokenizer_class", "prefix", "task_specific_params", "problem_type",
}  # fmt: skip
IRRELEVANT_PREFIXES = ("mtp_",)
KNOWN = USED | IRRELEVANT | set(FIXED)
ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
}  # fmt: skip
CORESET_FIELDS = {"enabled", "top_p", "min_experts"}

_MISSING = object()


class _Fields:
    """The fields of config.json, root and `text_config` together, with the problems found so far."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        text = root.get("text_config")
        if text is not None and not isinstance(text, dict):
            self.problems.append(f"text_config is {_show(text)}, not an object")
            text = None
        self.root: Mapping[str, Any] = root
        self.text: Mapping[str, Any] = text or {}
        self.names = dict.fromkeys([*self.root, *self.text])

    def get(self, name: str) -> Any:
        """The field's value, `_MISSING` when absent or null; reports two places that disagree."""
        found = [place[name] for place in (self.text, self.root) if place.get(name) is not None]
        if not found:
            return _MISSING
        if len(found) == 2 and found[0] != found[1] and name not in ("model_type", "eos_token_id"):
            self.problems.append(f"{name} is {_show(found[1])} at the root but {_show(found[0])} under text_config")
        return found[0]

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        return self.check_integer(name, self.get(name), default, low, high)

    def check_integer(self, name: str, value: Any, default: int | None, low: int, high: int = MAX_SIZE) -> int:
        if value is _MISSING:
            if default is None:
                self.problems.append(f"{name} is missing")
            return low if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            limits = f"an integer of at least {low}" if high == MAX_SIZE else f"an integer from {low} to {high}"
            self.problems.append(f"{name} is {_show(value)}, not {limits}")
            return low
        return value

    def number(self, name: str, value: Any, default: float | None, high: float = math.inf) -> float:
        """A finite number in (0, high]."""
        if value is _MISSING:
            if default is None:
                self.problems.append(f"{name} is missing")
            return 1.0 if default is None else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= min(high, 1e300):
            limits = "a positive number" if high == math.inf else f"a number above 0 and at most {high:g}"
            self.problems.append(f"{name} is {_show(value)}, not {limits}")
            return 1.0
        return float(value)

    def boolean(self, name: str, value: Any, default: bool) -> bool:
        if value is _MISSING:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {_show(value)}, not true or false")
            return default
        return value

    def table(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """A nested object with only `known` fields; null fields are dropped."""
        value = self.get(name)
        if value is _MISSING:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name} is {_show(value)}, not an object")
            return {}
        for key in value:
            if key not in known:
                self.problems.append(f"{name}.{key} is not a known field (known: {', '.join(sorted(known))})")
        return {k: v for k, v in value.items() if v is not None}


def read_config(directory: Path, ignore: Collection[str] = ()) -> ModelConfig:
    """Reads config.json, generation_config.json and, for the mask token, the tokenizer's files.

    `ignore` names unknown fields of config.json to pass over (`--ignore-config-field`).

    Raises CheckpointError naming every missing, wrong-typed, inconsistent and unknown field at once.
    """
    fields = _Fields(read_json(directory / "config.json"))
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}

    unknown = _check_unknown(fields, ignore)
    _check_fixed(fields)
    sizes = {name: fields.integer(name) for name in SIZES}
    rope_theta, partial_rotary_factor = _rope(fields)
    coreset = fields.table("moe_block_coreset", CORESET_FIELDS)
    # A reply ends at any of these; the generation defaults list the usual one first.
    eos = _token_ids(fields, "eos_token_id of generation_config.json", generation.get("eos_token_id"))
    for place, where in ((fields.root, ""), (fields.text, "text_config.")):
        eos += _token_ids(fields, f"{where}eos_token_id", place.get("eos_token_id"))
    if not eos:
        fields.problems.append("eos_token_id is missing (from config.json and generation_config.json)")
    block_size = fields.get("block_size")
    if block_size is _MISSING and generation.get("block_size") is not None:
        block_size = generation["block_size"]

    config = ModelConfig(
        **sizes,
        layer_types=_layer_types(fields, sizes["num_hidden_layers"]),
        rms_norm_eps=fields.number("rms_norm_eps", fields.get("rms_norm_eps"), None, high=1.0),
        rope_theta=rope_theta,
        partial_rotary_factor=partial_rotary_factor,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", fields.get("tie_word_embeddings"), False),
        block_size=fields.check_integer("block_size", block_size, DEFAULT_BLOCK_SIZE, 1),
        mask_token_id=_mask_token_id(fields, generation, directory),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        coreset_enabled=fields.boolean("moe_block_coreset.enabled", coreset.get("enabled", _MISSING), True),
        coreset_top_p=fields.number("moe_block_coreset.top_p", coreset.get("top_p", _MISSING), 0.9, high=1.0),
        coreset_min_experts=fields.check_integer(
            "moe_block_coreset.min_experts", coreset.get("min_experts", _MISSING), sizes["num_experts_per_tok"], 1
        ),
        history_readout_scale=fields.number(
            "history_readout_scale", fields.get("history_readout_scale"), sizes["linear_key_head_dim"] ** -0.5
        ),
        align_blocks=fields.boolean("align_blocks", fields.get("align_blocks"), False),
        model_type=MODEL_TYPES[0],
        unknown_fields=unknown,
    )
    if not fields.problems:  # sizes stand in for wrong ones until here, so comparing them would mislead
        fields.problems += _inconsistencies(config)
    if fields.problems:
        raise CheckpointError(f"{directory / 'config.json'}: {'; '.join(dict.fromkeys(fields.problems))}.")
    return config


def require_mask_token(config: ModelConfig) -> int:
    """The mask token's id; CheckpointError when no file of the checkpoint names one."""
    if config.mask_token_id is None:
        raise CheckpointError(
            "mask_token_id is in none of config.json, generation_config.json and the tokenizer's files, and is never "
            'guessed; add "mask_token_id": ID to config.json with the id the model was trained with.'
        )
    return config.mask_token_id


def _check_unknown(fields: _Fields, ignore: Collection[str]) -> tuple[str, ...]:
    unknown = [n for n in fields.names if n not in KNOWN and not n.startswith(IRRELEVANT_PREFIXES)]
    refused = [n for n in unknown if n not in ignore]
    if refused:
        fields.problems.append(
            f"unknown field{'s' * (len(refused) > 1)} {', '.join(refused)}, which may change the model's mathematics "
            f"(pass {' '.join('--ignore-config-field ' + n for n in refused)} if you are sure that it does not)"
        )
    for name in ignore:
        if name not in unknown:
            fields.problems.append(f"--ignore-config-field {name} names no unknown field of config.json")
    return tuple(n for n in unknown if n in ignore)


def _check_fixed(fields: _Fields) -> None:
    model_type = fields.root.get("model_type")
    if model_type not in MODEL_TYPES:
        shown = "missing" if model_type is None else _show(model_type)
        fields.problems.append(f"model_type is {shown}, not {' or '.join(map(repr, MODEL_TYPES))}: not a Clover model")
    inner = fields.text.get("model_type")
    if inner is not None and inner not in TEXT_MODEL_TYPES:
        fields.problems.append(f"text_config.model_type is {_show(inner)}, not one of {', '.join(TEXT_MODEL_TYPES)}")
    for name, allowed in FIXED.items():
        value = fields.get(name)
        # `1 == True`, so the types are compared too
        if value is not _MISSING and not any(type(value) is type(a) and value == a for a in allowed):
            shown = "absent" if allowed == (None,) else " or ".join(map(_show, allowed))
            fields.problems.append(f"{name} is {_show(value)}, and only {shown} is implemented")
    quantization = fields.get("quantization_config")
    if quantization is not _MISSING and (problem := quantization_problem(quantization)):
        fields.problems.append(problem)


def _layer_types(fields: _Fields, layers: int) -> tuple[LayerType, ...]:
    value = fields.get("layer_types")
    interval = fields.integer("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
    if layers > MAX_LAYERS:
        fields.problems.append(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
        return ()
    if value is _MISSING:
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    if not isinstance(value, list):
        fields.problems.append(f"layer_types is {_show(value)}, not a list")
        return ()
    if wrong := [v for v in value if v not in LAYER_TYPES]:
        fields.problems.append(f"layer_types holds {_show(wrong[0])}, not one of {', '.join(LAYER_TYPES)}")
        return ()
    return cast("tuple[LayerType, ...]", tuple(value))


def _rope(fields: _Fields) -> tuple[float, float]:
    """(theta, partial rotary factor). mrope fields need no care: on text all three axes hold the same position."""
    tables = {name: fields.table(name, ROPE_FIELDS) for name in ("rope_parameters", "rope_scaling")}
    found: dict[str, Any] = {}
    for name, table in tables.items():
        for key in ("rope_type", "type"):
            if table.get(key, "default") != "default":
                fields.problems.append(f"{name}.{key} is {_show(table[key])}, and only 'default' is implemented")
    for key in ("rope_theta", "partial_rotary_factor"):
        places = {f"{name}.{key}": table[key] for name, table in tables.items() if key in table}
        if (top := fields.get(key)) is not _MISSING:
            places[key] = top
        values = list(places.values())
        if any(v != values[0] for v in values):
            fields.problems.append(" but ".join(f"{place} is {_show(v)}" for place, v in places.items()))
        found[key] = values[0] if values else _MISSING
    return (
        fields.number("rope_theta", found["rope_theta"], DEFAULT_ROPE_THETA),
        fields.number("partial_rotary_factor", found["partial_rotary_factor"], DEFAULT_PARTIAL_ROTARY_FACTOR, high=1.0),
    )


def _token_ids(fields: _Fields, name: str, value: Any) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        fields.problems.append(f"{name} is {_show(value)}, not a token id or a list of them")
        return []
    return values


def _mask_token_id(fields: _Fields, generation: Mapping[str, Any], directory: Path) -> int | None:
    """config.json, then generation_config.json, then the tokenizer's own mask token; None when nowhere."""
    value = fields.get("mask_token_id")
    name = "mask_token_id"
    if value is _MISSING and generation.get("mask_token_id") is not None:
        value, name = generation["mask_token_id"], "mask_token_id of generation_config.json"
    if value is _MISSING:
        return _tokenizer_mask_id(directory)
    return fields.check_integer(name, value, None, 0)


def _tokenizer_mask_id(directory: Path) -> int | None:
    paths = [directory / name for name in ("tokenizer_config.json", "tokenizer.json")]
    settings, tokenizer = (read_json(path) if path.exists() else {} for path in paths)
    token = settings.get("mask_token")
    if isinstance(token, dict):
        token = token.get("content")
    ids: dict[str, int] = {}
    decoder = settings.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdecimal():
            ids[entry["content"]] = int(key)
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int):
            ids[entry["content"]] = entry["id"]
    return ids.get(token if isinstance(token, str) else MASK_TOKEN)


def _inconsistencies(c: ModelConfig) -> list[str]:
    """Fields that are each fine and do not fit together."""
    out: list[str] = []

    def divides(part: str, whole: str) -> None:
        if getattr(c, whole) % getattr(c, part):
            out.append(f"{whole} {getattr(c, whole)} is not a multiple of {part} {getattr(c, part)}")

    divides("num_key_value_heads", "num_attention_heads")
    divides("linear_num_key_heads", "linear_num_value_heads")
    if len(c.layer_types) != c.num_hidden_layers:
        out.append(f"layer_types has {len(c.layer_types)} entries for num_hidden_layers {c.num_hidden_layers}")
    if c.rotary_dim % 2 or not c.rotary_dim:
        out.append(
            f"head_dim {c.head_dim} with partial_rotary_factor {c.partial_rotary_factor:g} rotates {c.rotary_dim} "
            "dimensions, not a positive even number"
        )
    if c.linear_conv_kernel_dim < 2:
        out.append(f"linear_conv_kernel_dim is {c.linear_conv_kernel_dim}, too short for a right convolution")
    if c.num_experts_per_tok > c.num_experts:
        out.append(f"num_experts_per_tok {c.num_experts_per_tok} is more than num_experts {c.num_experts}")
    elif not c.num_experts_per_tok <= c.coreset_min_experts <= c.num_experts:
        out.append(
            f"moe_block_coreset.min_experts {c.coreset_min_experts} is not between num_experts_per_tok "
            f"{c.num_experts_per_tok} and num_experts {c.num_experts}"
        )
    for name, ids in (("mask_token_id", (c.mask_token_id,)), ("eos_token_id", c.eos_token_ids)):
        out += [
            f"{name} {i} is not below vocab_size {c.vocab_size}" for i in ids if i is not None and i >= c.vocab_size
        ]
    if c.mask_token_id in c.eos_token_ids:
        out.append(f"mask_token_id {c.mask_token_id} is also an eos_token_id")
    return out


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
