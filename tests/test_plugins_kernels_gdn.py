"""The GPU kernels of BidirectionalGatedDeltaNet in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.plugins.bidirectional_gdn.kernel_launch import kernels, plan
from clover.plugins.bidirectional_gdn.reference import bidirectional_gated_delta_net
from clover.plugins.bidirectional_gdn.spec import SPEC, GatedDeltaNetAttributes
from clover.plugins.kernels.interpreter import Output, shared_interpreter
from clover.plugins.kernels.plan import Dtype
from clover.runtime.errors import CloverError

Array = npt.NDArray[Any]
ROUNDED = {"qkv", "a", "b", "conv_state", "conv_weight", "conv_right"}  # in the activations' type
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-3, "bf16": 8e-3}


def attributes(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> GatedDeltaNetAttributes:
    return GatedDeltaNetAttributes(key_heads, value_heads, key_dim, value_dim, 32, key_dim**-0.5)


def inputs(
    a: GatedDeltaNetAttributes, sequences: int, rows: int, commit: list[int], length: list[int], seed: int = 0
) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    heads, channels = a.num_value_heads, 2 * a.key_width + a.value_width

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    return {
        "qkv": normal(sequences, rows, channels),
        "a": normal(sequences, rows, heads),
        "b": normal(sequences, rows, heads),
        "conv_state": normal(sequences, 3, channels),
        "recurrent_state": normal(sequences, heads, a.key_head_dim, a.value_head_dim),
        "conv_weight": normal(channels, 4, scale=0.5),
        "conv_right": normal(channels, 3, scale=0.3),
        "decay_scale": -np.exp(normal(heads)),
        "dt_bias": normal(heads),
        "logit_scale": normal(heads, scale=5),
        "history_bias": normal(heads),
        "history_c": normal(heads),
        "commit_length": np.array(commit, np.int64),
        "row_length": np.array(length, np.int64),
    }


def rounded(x: Array, activation: Dtype) -> Array:
    import torch

    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return torch.from_numpy(x).to(types[activation]).float().numpy()


def run(
    a: GatedDeltaNetAttributes,
    x: dict[str, Array],
    activation: Dtype = "fp32",
    in_place: bool = False,
    length: Dtype = "i64",
) -> dict[str, Array]:
    sequences, rows, channels = x["qkv"].shape
    state = (sequences, a.num_value_heads, a.key_head_dim, a.value_head_dim)

    def kind(name: str) -> Dtype:
        return activation if name in ROUNDED else length if name.endswith("_length") else "fp32"

    return shared_interpreter().run(
        plan(a, sequences=sequences, rows=rows, activation=activation, length=length),
        {name: (kind(name), values) for name, values in x.items()},
        {
            "o": Output(activation, (sequences, rows, a.value_width)),
            "new_conv_state": Output(activation, (sequences, 3, channels), "conv_state" if in_place else None),
            "new_recurrent_state": Output("fp32", state, "recurrent_state" if in_place else None),
        },
    )


def check(
    a: GatedDeltaNetAttributes, x: dict[str, Array], activation: Dtype = "fp32", **options: Any
) -> dict[str, Array]:
    x = {name: rounded(values, activation) if name in ROUNDED else values for name, values in x.items()}
    got = run(a, x, activation, **options)
    wide: dict[str, Array] = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in x.items()}
    wanted = bidirectional_gated_delta_net(**wide, attributes=a)
    for spec, want in zip(SPEC.outputs, wanted, strict=True):
        assert np.isfinite(got[spec.name]).all(), spec.name
        error = np.linalg.norm(got[spec.name] - want) / max(float(np.linalg.norm(want)), 1e-6)
        assert error <= TOLERANCE[activation], (spec.name, error)
    return got


@st.composite
def cases(draw: st.DrawFn) -> tuple[GatedDeltaNetAttributes, dict[str, Array], Dtype, bool]:
    key_heads, repeat = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))
    a = attributes(key_heads, key_heads * repeat, draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32])))
    rows, sequences = draw(st.integers(1, 70)), draw(st.integers(1, 2))
    length = [draw(st.integers(0, rows)) for _ in range(sequences)]
    commit = [draw(st.integers(max(0, n - 64), n)) for n in length]
    x = inputs(a, sequences, rows, commit, length, draw(st.integers(0, 99)))
    return a, x, draw(st.sampled_from(["fp32", "fp16"])), draw(st.booleans())


@settings(max_examples=12, deadline=None)
@given(cases())
def test_matches_the_reference(case: tuple[GatedDeltaNetAttributes, dict[str, Array], Dtype, bool]) -> None:
    a, x, activation, in_place = case
    check(a, x, activation, in_place=in_place)


@pytest.mark.parametrize("key_heads", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_full_head_dimensions_with_commit_preview_and_padding_rows(key_heads: int) -> None:
    a = attributes(key_heads, 2 * key_heads, 128, 128)
    check(a, inputs(a, 1, 9, [3], [8]))


@pytest.mark.parametrize("activation", ["fp16", "bf16"])
def test_a_commit_and_a_preview_of_a_whole_block(activation: Dtype) -> None:
    a = attributes(1, 2, 128, 32)
    check(a, inputs(a, 2, 64, [32, 0], [64, 32]), activation, length="i32")


def test_repeated_keys_without_decay_keep_their_digits() -> None:
    """The hardest triangular system: every key equal, beta 1, no forgetting. A product-form inverse fails here."""
    a = attributes(1, 2, 32, 16)
    x = inputs(a, 1, 64, [64], [64])
    x["qkv"][:] = x["qkv"][:, :1]
    x["a"][:], x["b"][:] = -20.0, 9.0
    check(a, x)


def test_chunking_does_not_matter() -> None:
    a = attributes(1, 2, 32, 32)
    x = inputs(a, 1, 50, [50], [50])
    whole = run(a, x)
    state = {name: x[name] for name in ("conv_state", "recurrent_state")}
    rows, outputs = iter((1, 2, 30, 17)), []
    first = 0
    for n in rows:
        part = {name: x[name][:, first : first + n] for name in ("qkv", "a", "b")}
        step = run(a, {**x, **part, **state, "commit_length": np.array([n]), "row_length": np.array([n])})
        state = {name: step[f"new_{name}"] for name in state}
        outputs.append(step["o"])
        first += n
    np.testing.assert_array_equal(state["conv_state"], whole["new_conv_state"])
    np.testing.assert_allclose(state["recurrent_state"], whole["new_recurrent_state"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole["o"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_preview_leaves_the_states_bit_for_bit_alone(in_place: bool) -> None:
    a = attributes(1, 1, 16, 16)
    x = inputs(a, 2, 8, [0, 0], [8, 5])
    x["recurrent_state"][0, 0, 0, 0] = -0.0
    got = check(a, x, in_place=in_place)
    for name in ("conv_state", "recurrent_state"):
        assert got[f"new_{name}"].tobytes() == x[name].tobytes()


def test_a_head_dimension_without_tiles_is_refused_by_name() -> None:
    with pytest.raises(CloverError, match="key_head_dim is 24"):
        kernels(attributes(1, 1, 24, 16))
