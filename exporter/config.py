"""The model's configuration, read from a checkpoint directory's JSON files.

Text fields may stand at the root of config.json or under `text_config`. Everything Clover-specific
that is not public has one named option with a default here, recorded in the bundle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from clover.runtime.errors import CheckpointError

LayerType = Literal["linear_attention", "full_attention"]
MODEL_TYPES = ("clover_moe",)
BLOCK_SIZES = (8, 16, 32, 64)
DEFAULT_BLOCK_SIZE = 32


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one Clover model. Sizes are in elements, not bytes."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float
    # full attention
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    # gated delta net
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    # mixture of experts
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    # whole model
    max_position_embeddings: int
    tie_word_embeddings: bool
    block_size: int  # the block size the model was trained with; ln(n / block_size) calibrates others
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # options that are not public (defaults as agreed; recorded in the bundle)
    coreset_enabled: bool = True
    coreset_top_p: float = 0.9
    coreset_min_experts: int = 8
    history_readout_scale: float = 0.0  # 0 means linear_key_head_dim ** -0.5, resolved on construction
    align_blocks: bool = False
    model_type: str = "clover_moe"
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.history_readout_scale == 0.0:
            object.__setattr__(self, "history_readout_scale", self.linear_key_head_dim**-0.5)

    # -- derived shapes ------------------------------------------------------------------------

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated (the first ones)."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_width(self) -> int:
        """Columns of q (and of k) in a GDN layer's projection."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Columns of v (and of z) in a GDN layer's projection."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a GDN layer's convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def conv_history(self) -> int:
        """Pre-convolution rows kept in the conv ring."""
        return self.linear_conv_kernel_dim - 1

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    # -- (de)serialisation ---------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` rebuilds an equal config."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unknown_fields"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelConfig:
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Reads config.json, generation_config.json and tokenizer.json of `directory`.

        Raises CheckpointError naming every missing or wrong field at once.
        """
        from clover.exporter.config_reader import read_config

        return read_config(Path(directory))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); is this a checkpoint directory?") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the file again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object; download the file again.")
    return cast("dict[str, Any]", value)
