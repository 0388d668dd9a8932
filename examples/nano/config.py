"""The nano's shape, and its config.json in the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizer import END_IDS, MASK

BLOCK = 32  # trained block size
ROPE_FIELDS = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Config:
    """The fields of config.json that shape the network."""

    vocab_size: int = 768
    hidden_size: int = 128
    layer_types: tuple[str, ...] = ("linear_attention", "full_attention") * 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.5
    coreset_top_p: float = 0.9

    @property
    def conv_channels(self) -> int:
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def load(cls, directory: Path) -> Config:
        fields = json.loads((directory / "config.json").read_text())
        rope = fields["rope_parameters"]
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        known |= {name: rope[name] for name in ROPE_FIELDS}
        known |= {"layer_types": tuple(fields["layer_types"]), "coreset_top_p": fields["moe_block_coreset"]["top_p"]}
        return cls(**known)

    def save(self, directory: Path, dtype: str) -> None:
        fields = asdict(self)
        rope = {name: fields.pop(name) for name in ROPE_FIELDS}
        coreset = {"enabled": True, "top_p": fields.pop("coreset_top_p")}
        fields |= {
            "model_type": "clover_moe",
            "architectures": ["CloverMoeModelLM"],
            "num_hidden_layers": len(self.layer_types),
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "eos_token_id": list(END_IDS),
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "moe_block_coreset": coreset,
            "rope_parameters": {"rope_type": "default", **rope},
            "dtype": dtype,
        }
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
