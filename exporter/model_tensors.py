"""Which tensors a model has, by canonical name, and whether the files of a checkpoint hold just those.

Canonical names are the fused ones with the prefix `model.` (`model.layers.3.mlp.experts.gate_up_proj`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clover.exporter.config import ModelConfig
from clover.exporter.prequantized import INSTEAD, PACKED, PackedMatrix
from clover.exporter.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from clover.exporter.stored_tensor import StoredTensor

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
IGNORED_PREFIXES = ("mtp.", "visual.", "model.mtp.", "model.visual.")

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name → shape of every tensor of the model; without `lm_head.weight` when the head is tied."""
    c = config
    hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    gdn: dict[str, Shape] = {
        "in_proj_qkv.weight": (c.conv_channels, hidden),
        "in_proj_z.weight": (c.value_width, hidden),
        "in_proj_b.weight": (c.linear_num_value_heads, hidden),
        "in_proj_a.weight": (c.linear_num_value_heads, hidden),
        "conv1d.weight": (c.conv_channels, 1, c.linear_conv_kernel_dim),
        "conv_right_weight": (c.conv_channels, c.conv_history),
        "A_log": (c.linear_num_value_heads,),
        "dt_bias": (c.linear_num_value_heads,),
        "bd_softmax_logit_scale": (c.linear_num_value_heads,),
        "bd_softmax_history_bias": (c.linear_num_value_heads,),
        "bd_softmax_history_c": (c.linear_num_value_heads,),
        "norm.weight": (c.linear_value_head_dim,),
        "out_proj.weight": (hidden, c.value_width),
    }
    attention: dict[str, Shape] = {
        "q_proj.weight": (2 * heads * c.head_dim, hidden),  # per head: query, then output gate
        "k_proj.weight": (kv_heads * c.head_dim, hidden),
        "v_proj.weight": (kv_heads * c.head_dim, hidden),
        "o_proj.weight": (hidden, heads * c.head_dim),
        "q_norm.weight": (c.head_dim,),
        "k_norm.weight": (c.head_dim,),
    }
    mlp: dict[str, Shape] = {
        "gate.weight": (c.num_experts, hidden),
        "experts.gate_up_proj": (c.num_experts, 2 * c.moe_intermediate_size, hidden),
        "experts.down_proj": (c.num_experts, hidden, c.moe_intermediate_size),
        "shared_expert.gate_proj.weight": (c.shared_expert_intermediate_size, hidden),
        "shared_expert.up_proj.weight": (c.shared_expert_intermediate_size, hidden),
        "shared_expert.down_proj.weight": (hidden, c.shared_expert_intermediate_size),
        "shared_expert_gate.weight": (1, hidden),
    }
    out: dict[str, Shape] = {EMBEDDING: (c.vocab_size, hidden)}
    for i, kind in enumerate(c.layer_types):
        layer = f"model.layers.{i}."
        room, mixer = ("linear_attn.", gdn) if kind == "linear_attention" else ("self_attn.", attention)
        out[layer + "input_layernorm.weight"] = (hidden,)
        out |= {f"{layer}{room}{name}": shape for name, shape in mixer.items()}
        out[layer + "post_attention_layernorm.weight"] = (hidden,)
        out |= {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
    out["model.norm.weight"] = (hidden,)
    if not c.tie_word_embeddings:
        out[HEAD] = (c.vocab_size, hidden)
    return out


def canonical(files: Sequence[SafetensorsFile]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors by prefix-free name, and a problem for each name that occurs twice."""
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        for name in file.tensors:
            short = re.sub(r"^model\.language_model\.", "model.", name)
            if short.startswith(IGNORED_PREFIXES):
                continue
            if short in stored:
                problems.append(f"{short} is stored twice ({stored[short].file.path.name}, {file.path.name})")
            stored[short] = StoredTensor(file, name)
    return stored, problems


def mismatches(config: ModelConfig, stored: Mapping[str, StoredTensor | PackedMatrix]) -> list[str]:
    """One line per tensor that is missing, extra, misshapen or of a dtype we do not read."""
    expected = _in_stored_layout(config, expected_tensors(config), stored)
    problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in stored]
    if config.tie_word_embeddings:
        expected[HEAD] = expected[EMBEDDING]  # allowed, checked to be equal
    elif HEAD not in stored:
        problems.append("(without lm_head.weight, tie_word_embeddings would have to be true)")
    for name, tensor in stored.items():
        info, shape = tensor.info, expected.get(name)
        if shape is None:
            problems.append(f"{name} {list(info.shape)} is not a tensor of this model")
            continue
        accepted = [shape]
        if name.endswith(".conv_right_weight"):
            accepted.append((shape[0], 1, shape[1]))
        if info.shape not in accepted:
            problems.append(f"{name} has shape {list(info.shape)}, not {list(shape)}")
        if info.dtype not in (*FLOAT_DTYPES, PACKED):
            instead = f"; {INSTEAD}" if info.dtype.startswith("F") else ""  # FP8 and FP4 releases
            problems.append(f"{name} has dtype {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}{instead}")
    return problems


def _in_stored_layout(
    config: ModelConfig, expected: dict[str, Shape], stored: Mapping[str, StoredTensor | PackedMatrix]
) -> dict[str, Shape]:
    """`expected` with a layer's fused experts split one by one, for the layers that are stored so."""
    matches = (re.match(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.", name) for name in stored)
    apart = {match[1] for match in matches if match}
    hidden, width = config.hidden_size, config.moe_intermediate_size
    out: dict[str, Shape] = {}
    for name, shape in expected.items():
        base, part = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        if base not in apart or name in stored:
            out[name] = shape
            continue
        rows = {"gate": (width, hidden), "up": (width, hidden)} if part == "gate_up_proj" else {"down": (hidden, width)}
        for expert in range(config.num_experts):
            out |= {f"{base}{expert}.{p}_proj.weight": s for p, s in rows.items()}
    return out
