"""Every tensor that goes into and comes out of a step, with its type and shape: what the session binds to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from clover.exporter.config import ModelConfig
from clover.runtime.errors import BundleError
from clover.runtime.gpu.buffers import Field
from clover.runtime.gpu.shapes import StepShape

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
ON_HOST = "candidates"  # the one input that decides a shape: the engine reads it in host memory
TENSORRT_TYPES = {"bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32", "int64": "INT64"}


def step_inputs(shape: StepShape) -> dict[str, Field]:
    """What every step uploads."""
    s, t, r, p = shape.sequences, shape.rows, shape.logit_rows, shape.adjusted
    return {
        "token_ids": Field(I64, (s, t)), "commit_length": Field(I64, (s,)), "row_length": Field(I64, (s,)),
        "position": Field(I64, (s,)), "coreset_top_p": Field(F32, (s,)), "logit_rows": Field(I64, (s, r)),
        "adjust_ids": Field(I64, (s, p)), "adjust_scale": Field(F32, (s, p)), "adjust_bias": Field(F32, (s, p)),
    }  # fmt: skip


def step_outputs(config: ModelConfig, shape: StepShape, with_logits: bool) -> dict[str, Field]:
    """What every step downloads."""
    s, r, k = shape.sequences, shape.logit_rows, shape.candidates
    outputs = {
        "candidate_ids": Field(I64, (s, r, k)),
        "candidate_logprobs": Field(F32, (s, r, k)),
        "candidate_scores": Field(F32, (s, r, k)),
        "expert_rows": Field(I32, (config.num_hidden_layers, config.num_experts)),
    }
    return outputs | ({"logits": Field(F32, (s, r, config.vocab_size))} if with_logits else {})


def state_tensors(config: ModelConfig, sequences: int, capacity: int) -> dict[str, Field]:
    """State of all slots: input NAME, and output next.NAME in the same memory."""
    c, fields = config, {}
    for layer in c.gdn_layers:
        heads = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        fields[f"recurrent.{layer}"] = Field(F32, (sequences, *heads))
        fields[f"conv.{layer}"] = Field(BFLOAT16, (sequences, c.conv_history, c.conv_channels))
    for layer in c.attention_layers:
        cache = sequences, c.num_key_value_heads, capacity, c.head_dim
        fields[f"keys.{layer}"] = fields[f"values.{layer}"] = Field(BFLOAT16, cache)
    return fields


def bound_tensors(config: ModelConfig, shape: StepShape, capacity: int, with_logits: bool) -> dict[str, Field]:
    """Name -> field of everything that is bound for steps of one shape."""
    state = state_tensors(config, shape.sequences, capacity)
    tables = {f"expert_table.{n}": Field(I64, (4, config.num_experts)) for n in range(config.num_hidden_layers)}
    return {
        **step_inputs(shape), ON_HOST: Field(I64, (1,)), **step_outputs(config, shape, with_logits), **tables,
        **state, **{f"next.{name}": field for name, field in state.items()},
    }  # fmt: skip


def check_tensors(bound: Mapping[str, Field], found: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Raises BundleError unless an engine's tensors are those that are bound to it.

    found: name -> (TensorRT's name of the type, dimensions; -1 for one that each step chooses).
    """
    lacking, unknown = sorted(bound.keys() - found.keys()), sorted(found.keys() - bound.keys())
    if lacking or unknown:
        which = f"lacks {', '.join(lacking[:3])}" if lacking else f"has {', '.join(unknown[:3])} besides"
        raise BundleError(f"the engine {which}, other tensors than this clover binds; build the bundle again.")
    for name, field in bound.items():
        kind, dims = found[name]
        wanted = TENSORRT_TYPES[field.dtype.name]
        fits = len(dims) == len(field.shape) and all(d in (-1, n) for d, n in zip(dims, field.shape, strict=True))
        if kind != wanted or not fits:
            raise BundleError(
                f"the engine's {name} is {kind} {list(dims)}, and this clover binds {wanted} {list(field.shape)}; build "
                "the bundle again."
            )
