"""The published model's shapes, so that a plan needs no download."""

from __future__ import annotations

from clover.exporter.config import ModelConfig

LAYERS = 40

# Clover-35B-A3B-Preview. The mask and end-of-sequence ids come with the checkpoint and play no part in a plan.
FULL_SIZE = ModelConfig(
    vocab_size=248_320,
    hidden_size=2048,
    num_hidden_layers=LAYERS,
    layer_types=tuple("full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(LAYERS)),
    rms_norm_eps=1e-6,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    block_size=32,
    mask_token_id=None,
    eos_token_ids=(),
)
