from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.exporter import quantize, weighted_quantize
from clover.runtime.errors import CloverError

Floats = npt.NDArray[np.float32]
GROUP = st.sampled_from([32, 64, 128])


@st.composite
def weights(draw: st.DrawFn) -> tuple[Floats, int]:
    """Rows of ordinary, heavy-tailed, tiny, subnormal, constant and zero values."""
    group = draw(GROUP)
    shape = (draw(st.integers(1, 5)), group * draw(st.integers(1, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_t(2, shape) if draw(st.booleans()) else rng.standard_normal(shape)
    values *= 10.0 ** draw(st.sampled_from([-44, -40, -38, -30, -6, -1, 0, 3, 20]))
    values[rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0.0
    values[draw(st.integers(0, shape[0] - 1))] = draw(st.sampled_from([0.0, 1.0, -1.0, -1e-3, 1e-45]))
    return values.astype(np.float32), group


def group_errors(weight: Floats, restored: Floats, group: int) -> npt.NDArray[np.float64]:
    difference = (weight.astype(np.float64) - restored).reshape(-1, group)
    return np.asarray((difference**2).sum(-1))


@settings(max_examples=150, deadline=None)
@given(weights(), st.booleans())
def test_int4_search_keeps_its_promises(case: tuple[Floats, int], signed: bool) -> None:
    weight, group = case
    weight = quantize.round_to_bfloat16(weight)
    packed, scales = quantize.quantize_int4(weight, group, signed_scales=signed)
    again = quantize.quantize_int4(weight.astype(ml_dtypes.bfloat16), group, signed_scales=signed)
    np.testing.assert_array_equal(packed, again[0])
    np.testing.assert_array_equal(scales, again[1])
    assert packed.shape == (weight.shape[0], weight.shape[1] // 2)
    assert scales.shape == (weight.shape[0], weight.shape[1] // group)
    np.testing.assert_array_equal(quantize.round_to_bfloat16(scales), scales)
    assert np.all(np.abs(scales) >= np.finfo(np.float32).tiny)
    assert signed or np.all(scales > 0)

    restored = quantize.dequantize_int4(packed, scales)
    plain = quantize.dequantize_int4(*quantize.quantize_int4(weight, group, search=False))
    zero = ~weight.reshape(-1, group).any(-1)
    assert not restored.reshape(-1, group)[zero].any()
    assert np.all(scales.ravel()[zero] == 1)
    best, worst = group_errors(weight, restored, group), group_errors(weight, plain, group)
    assert np.all(best <= worst * (1 + 1e-5) + 1e-75)


@settings(max_examples=100, deadline=None)
@given(weights())
def test_abs_max_rounds_to_within_half_a_step(case: tuple[Floats, int]) -> None:
    weight, group = case
    for quantise, restore in (
        (quantize.quantize_int4, quantize.dequantize_int4),
        (quantize.quantize_int8, quantize.dequantize_int8),
    ):
        stored, scales = quantise(weight, group, search=False)
        error = np.abs(weight.astype(np.float64) - restore(stored, scales))
        # rounding the scale down to bfloat16 may leave the largest INT8 weight beyond 127 steps, by under half a step
        assert np.all(error.reshape(-1, group).max(-1) <= np.abs(scales.ravel()) * 0.5 * (1 + 1e-5))


@settings(max_examples=50, deadline=None)
@given(weights())
def test_int8_is_never_worse_than_abs_max_and_stays_in_range(case: tuple[Floats, int]) -> None:
    weight, group = case
    values, scales = quantize.quantize_int8(weight, group)
    assert values.min() >= 1
    np.testing.assert_array_equal(quantize.round_to_bfloat16(scales), scales)
    plain = quantize.dequantize_int8(*quantize.quantize_int8(weight, group, search=False))
    best = group_errors(weight, quantize.dequantize_int8(values, scales), group)
    assert np.all(best <= group_errors(weight, plain, group) * (1 + 1e-5) + 1e-75)


@given(st.binary(min_size=1, max_size=40))
def test_packing_puts_the_even_element_in_the_low_nibble(data: bytes) -> None:
    packed = np.frombuffer(data, np.uint8)
    values = quantize.unpack_int4(packed)
    assert list(values[:2]) == [data[0] & 15, data[0] >> 4]
    np.testing.assert_array_equal(quantize.pack_int4(values), packed)


def test_search_lowers_the_error_of_ordinary_weights_markedly() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    errors: dict[str, float] = {}
    quantise = partial(quantize.quantize_int4, weight, 128)
    stored = {"abs-max": quantise(search=False), "search": quantise(), "signed": quantise(signed_scales=True)}
    for name, (packed, scales) in stored.items():
        restored = quantize.dequantize_int4(packed, scales)
        errors[name] = float(((weight - restored) ** 2).sum())
    assert errors["search"] < 0.8 * errors["abs-max"]
    assert errors["signed"] < 0.95 * errors["search"]


def test_where_float32_sums_can_not_tell_scales_apart_abs_max_never_loses() -> None:
    """Groups of one magnitude: several scales are right but for their rounding to bfloat16."""
    rng = np.random.default_rng(3)
    magnitudes = np.repeat(rng.standard_normal((64, 256)), 32, axis=1)
    weight = (magnitudes * (rng.random(magnitudes.shape) < 0.3)).astype(np.float32)
    found, plain = (
        group_errors(weight, quantize.dequantize_int4(*quantize.quantize_int4(weight, 32, search=search)), 32)
        for search in (True, False)
    )
    assert np.all(found <= plain * (1 + 1e-5))


def test_leading_axes_and_chunks_do_not_matter() -> None:
    weight = np.random.default_rng(1).standard_normal((3, 40, 1024)).astype(np.float32)  # more than one chunk
    packed, scales = quantize.quantize_int4(weight, 64)
    one, one_scale = quantize.quantize_int4(np.asfortranarray(weight[2]), 64)
    np.testing.assert_array_equal(packed[2], one)
    np.testing.assert_array_equal(scales[2], one_scale)


def test_onnxruntime_reads_the_same_values() -> None:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(2)
    weight = rng.standard_normal((48, 256)).astype(np.float32)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    for bits, (stored, scales), restore in (
        (4, quantize.quantize_int4(weight, 64, signed_scales=True), quantize.dequantize_int4),
        (8, quantize.quantize_int8(weight, 64), quantize.dequantize_int8),
    ):
        node = helper.make_node(
            "MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=256, N=48, bits=bits, block_size=64
        )
        graph = helper.make_graph(
            [node], "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 256])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 48])],
            [numpy_helper.from_array(stored.reshape(48, 4, -1), "b"), numpy_helper.from_array(scales, "s")],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ restore(stored, scales).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "group", "says"),
    [
        (np.zeros((4, 96), np.float32), 64, r"layers.0.w of shape \[4, 96\] can't be quantised in groups of 64"),
        (np.zeros((4, 96), np.float32), 48, "group size 48 of layers.0.w is not supported"),
        (np.full((4, 64), np.nan, np.float32), 64, "layers.0.w holds NaN"),
        (np.array([[0.0] * 63 + [-np.inf]], np.float32), 64, "layers.0.w holds NaN, infinite"),
    ],
)
def test_what_can_not_be_quantised_is_named(weight: Floats, group: int, says: str) -> None:
    for quantise in (quantize.quantize_int4, quantize.quantize_int8):
        with pytest.raises(CloverError, match=says):
            quantise(weight, group, name="layers.0.w")


# -- scales that weigh errors by what a matrix is fed with -------------------------------------------


@st.composite
def importances(draw: st.DrawFn, columns: int) -> Floats:
    """Mean squares from even to very uneven, with silent channels, huge and tiny."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = np.exp(draw(st.sampled_from([0.0, 0.5, 2.0, 6.0])) * rng.standard_normal(columns))
    values[rng.random(columns) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    return (values * 10.0 ** draw(st.sampled_from([-30, 0, 30]))).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(weights(), st.booleans(), st.data())
def test_weighted_search_keeps_its_promises(case: tuple[Floats, int], signed: bool, data: st.DataObject) -> None:
    weight, group = case
    importance = data.draw(importances(weight.shape[1]))
    quantise = partial(weighted_quantize.quantize_int4_weighted, signed_scales=signed)
    packed, scales = quantise(weight, importance, group)
    again = quantise(weight.copy(), importance.copy(), group)
    np.testing.assert_array_equal(packed, again[0])
    np.testing.assert_array_equal(scales, again[1])
    assert packed.shape == (weight.shape[0], weight.shape[1] // 2)
    assert scales.shape == (weight.shape[0], weight.shape[1] // group)
    np.testing.assert_array_equal(quantize.round_to_bfloat16(scales), scales)
    assert np.all(np.abs(scales) >= np.finfo(np.float32).tiny) and (signed or np.all(scales > 0))
    restored = quantize.dequantize_int4(packed, scales)
    zero = ~weight.reshape(-1, group).any(-1)
    assert not restored.reshape(-1, group)[zero].any() and np.all(scales.ravel()[zero] == 1)

    # what it minimises: the damped importance, never above abs-max / 7's
    plain = quantize.dequantize_int4(*quantize.quantize_int4(weight, group, search=False))
    h = np.tile(weighted_quantize.damped_importance(importance, group), (len(weight), 1)).astype(np.float64)
    unit = np.maximum(np.abs(weight.astype(np.float64)).reshape(-1, group).max(1, keepdims=True), 1e-300)
    found, bound = (
        (h * ((weight.astype(np.float64) - r).reshape(-1, group) / unit) ** 2).sum(1) for r in (restored, plain)
    )
    normal = unit[:, 0] > 1e-36  # below, scales are held at the smallest normal number
    assert np.all(found[normal] <= bound[normal] * (1 + 1e-3) + 1e-6 * h.sum(1)[normal])


@pytest.mark.parametrize("signed", [False, True])
def test_weighing_errors_by_the_inputs_lowers_the_error_of_the_output(signed: bool) -> None:
    """On rows never seen while measuring, with outlier channels: against the search that knows the weights alone."""
    rng = np.random.default_rng(5)
    weight = rng.standard_t(4, (256, 512)).astype(np.float32)
    size = np.exp(1.2 * rng.standard_normal(512))
    seen, unseen = (rng.standard_normal((n, 512)) * size for n in (400, 400))
    importance = (seen**2).mean(0).astype(np.float32)
    errors = []
    for stored in (
        quantize.quantize_int4(weight, 128, signed_scales=signed),
        weighted_quantize.quantize_int4_weighted(weight, importance, 128, signed_scales=signed),
    ):
        difference = weight - quantize.dequantize_int4(*stored).astype(np.float64)
        errors.append(float(((unseen @ difference.T) ** 2).sum()))
        found = weighted_quantize.weighted_error(weight, weight - difference, importance)
        assert found == pytest.approx((importance * difference**2).sum())
    assert errors[1] < 0.9 * errors[0]


def test_even_importance_is_the_search_of_plain_errors_and_rows_are_by_themselves() -> None:
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((3, 700, 512)).astype(np.float32)  # more than one chunk
    even = np.full(512, 3.0, np.float32)
    packed, scales = weighted_quantize.quantize_int4_weighted(weight, even, 128)
    plain = quantize.dequantize_int4(*quantize.quantize_int4(weight, 128))
    own = quantize.dequantize_int4(packed, scales)
    assert ((weight - own) ** 2).sum() <= ((weight - plain) ** 2).sum() * 1.001
    one, one_scale = weighted_quantize.quantize_int4_weighted(weight[2, 650:], even, 128)
    np.testing.assert_array_equal(packed[2, 650:], one)
    np.testing.assert_array_equal(scales[2, 650:], one_scale)
    with pytest.raises(CloverError, match=r"layers\.0\.w holds NaN"):
        weighted_quantize.quantize_int4_weighted(
            np.full((1, 128), np.nan, np.float32), even[:128], 128, name="layers.0.w"
        )
    with pytest.raises(CloverError, match="can't be quantised in groups of 64"):
        weighted_quantize.quantize_int4_weighted(np.ones((1, 96), np.float32), even[:96], 64)


@pytest.mark.parametrize("package", ["llmcompressor", "auto_round", "torchao"])
def test_a_public_quantiser_that_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import public_quantizers

    monkeypatch.setitem(sys.modules, package, None)
    name = package.replace("_", "-")
    (case, *_) = (case for case, (needed, _) in public_quantizers.PUBLIC.items() if needed == name)
    with pytest.raises(
        CloverError, match=f"{name} is not installed .*pip install {name}. in an environment of its own"
    ):
        public_quantizers.restore(case, np.ones((2, 32), np.float32), 32)
