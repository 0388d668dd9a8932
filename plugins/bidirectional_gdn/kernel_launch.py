"""Which kernels BidirectionalGatedDeltaNet launches, with which grids, arguments and workspace. No Triton here."""

from __future__ import annotations

from clover.plugins.bidirectional_gdn.spec import L2_EPSILON, GatedDeltaNetAttributes
from clover.plugins.kernels.plan import (
    Dtype,
    Kernel,
    Launch,
    Plan,
    cdiv,
    is_power_of_two,
    lay_out,
    next_power_of_two,
)
from clover.runtime.errors import CloverError

_MODULE = "clover.plugins.bidirectional_gdn.kernel"
CONVOLUTION_ROWS = 16  # rows of one `convolve` program
MIX_ROWS = 32  # rows of one tile in `mix`: commit rows solved together, or preview rows
COLUMNS = 32  # value columns of one `mix` program
KEY_SLAB = 16  # rows of the state in one step of its products


def kernels(
    attributes: GatedDeltaNetAttributes, *, taps: int = 4, activation: Dtype = "bf16", length: Dtype = "i64"
) -> tuple[Kernel, Kernel]:
    """The op's two kernels, in launch order.

    `activation` types qkv, a, b, the ring, the convolution weights and o; `length` types the two length vectors.
    Raises CloverError when a head dimension is not a power of two of at least 16, which tensor-core tiles need.
    """
    for field in ("key_head_dim", "value_head_dim"):
        size = getattr(attributes, field)
        if size < 16 or not is_power_of_two(size):
            raise CloverError(f"{field} is {size}; the GPU kernels need a power of two of at least 16")
    heads = (
        ("KEY_HEADS", attributes.num_key_heads),
        ("VALUE_HEADS", attributes.num_value_heads),
        ("KEY_DIM", attributes.key_head_dim),
        ("VALUE_DIM", attributes.value_head_dim),
    )
    x, n = f"*{activation}", f"*{length}"
    convolve = Kernel(
        _MODULE,
        "convolve",
        (
            *((name, x) for name in ("qkv", "conv_state", "conv_weight", "conv_right")),
            *(("commit_length", n), ("row_length", n), ("new_conv_state", x), ("mixed", "*fp32"), ("rows", "i32")),
        ),
        (
            *heads,
            ("TAPS", taps),
            ("NORM_EPS", L2_EPSILON),
            ("BLOCK_ROWS", CONVOLUTION_ROWS),
            ("BLOCK_DIM", next_power_of_two(max(attributes.key_head_dim, attributes.value_head_dim))),
        ),
        num_warps=4,
        num_stages=1,
    )
    per_head = ("decay_scale", "dt_bias", "logit_scale", "history_bias", "history_c")
    mix = Kernel(
        _MODULE,
        "mix",
        (
            *(("mixed", "*fp32"), ("a", x), ("b", x)),
            *((name, "*fp32") for name in (*per_head, "recurrent_state")),
            *(("commit_length", n), ("row_length", n), ("new_recurrent_state", "*fp32"), ("o", x), ("rows", "i32")),
        ),
        (
            *heads,
            ("READOUT_SCALE", attributes.history_readout_scale),
            ("TRAINED_BLOCK", attributes.block_size),
            ("BLOCK_ROWS", MIX_ROWS),
            ("BLOCK_K", min(KEY_SLAB, attributes.key_head_dim)),
            ("BLOCK_V", min(COLUMNS, attributes.value_head_dim)),
            ("PRECISION", "tf32x3"),
        ),
        num_warps=4,
        num_stages=1,
    )
    return convolve, mix


def plan(
    attributes: GatedDeltaNetAttributes,
    *,
    sequences: int,
    rows: int,
    taps: int = 4,
    activation: Dtype = "bf16",
    length: Dtype = "i64",
) -> Plan:
    """Launches for qkv [sequences, rows, C]. Tensors are named as in the op's spec; workspace: mixed, float32, as qkv.

    The states may be updated in place (new_conv_state = conv_state, new_recurrent_state = recurrent_state).
    """
    convolve, mix = kernels(attributes, taps=taps, activation=activation, length=length)
    heads = 2 * attributes.num_key_heads + attributes.num_value_heads
    columns = min(COLUMNS, attributes.value_head_dim)
    channels = 2 * attributes.key_width + attributes.value_width
    return Plan(
        (
            Launch(
                convolve,
                # at least one row tile: it writes the ring
                (max(cdiv(rows, CONVOLUTION_ROWS), 1), heads, sequences),
                (*(name for name, _ in convolve.signature[:-1]), rows),
            ),
            Launch(
                mix,
                (attributes.value_head_dim // columns, attributes.num_value_heads, sequences),
                (*(name for name, _ in mix.signature[:-1]), rows),
            ),
        ),
        lay_out([("mixed", "fp32", (sequences, rows, channels))]),
    )
