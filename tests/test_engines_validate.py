"""`clover validate`: a sound engine passes; a small fault anywhere is found and its layer named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_support import NANO, bundle
from oracle_support import load_oracle, tiny_checkpoint

from clover.engines.bundle import Bundle, file_entry
from clover.engines.manifest import MANIFEST
from clover.engines.validate import Validation, validate
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.engines.validate.engine import run_engine
from clover.engines.validate.gates import EXACT, FAST
from clover.engines.validate.metrics import Agreement, ExpertSets
from clover.engines.validate.runs import make_runs, random_prompt
from clover.engines.validate.trace import _adjust
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.weight_index import read_weight_index
from clover.runtime.errors import CheckpointError, RequestError
from clover.runtime.session import Adjustment, SequenceRows

TINY: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
Fault = Callable[[onnx.ModelProto], None]


def run(built: Bundle, checkpoint: Path | None = None, **options: Any) -> Validation:
    return validate(built, checkpoint, threads=1, **{"trace": False, **options})


def failures(found: Validation, reference: int = 0) -> list[str]:
    return found.comparisons[reference].failures


def republished(source: Bundle, directory: Path, *changed: str) -> Bundle:
    """The bundle in `directory`, a copy of `source`, with the hashes of changed files brought up to date."""
    files = {**source.manifest.files, **{name: file_entry(directory / name) for name in changed}}
    manifest = source.manifest.model_copy(update={"files": files})
    (directory / MANIFEST).write_text(manifest.dump(), encoding="utf-8")
    return Bundle.open(directory)


def with_graph(source: Bundle, directory: Path, fault: Fault) -> Bundle:
    """A copy of a bundle whose step graph has a fault, while its weights are right."""
    shutil.copytree(source.directory, directory)
    name = source.manifest.graph.file
    model = onnx.load_model_from_string(source.graph_bytes)
    fault(model)
    (directory / name).write_bytes(model.SerializeToString())
    return republished(source, directory, name)


def with_weights(
    source: Bundle, directory: Path, tensor: str, change: Callable[[np.ndarray[Any, Any]], None]
) -> Bundle:
    """A copy of a bundle in which `change` edited one stored tensor in place."""
    shutil.copytree(source.directory, directory)
    stored = read_weight_index(directory, ("weights/dense.safetensors", "weights/experts.safetensors"))[tensor]
    dtype = {"F32": np.float32, "U8": np.uint8}[stored.dtype]
    array = np.memmap(directory / stored.file, dtype, "r+", stored.offset, stored.shape)
    change(array)
    array.flush()
    return republished(source, directory, stored.file)


# -- sound engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "int8", "exact_activations": False},
        {"precision": "int4", "group_size": 32, "exact_activations": False},
        {"precision": "int4", "exact_activations": True},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_sound_engine_passes_against_its_weights_and_its_checkpoint(options: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(5, **TINY)
    found = run(bundle(checkpoint, **options), checkpoint, trace=True)
    assert found.passed, [failures(found, i) for i in range(2)]
    own = found.comparisons[0]
    assert all(layer.routing.different == 0 and layer.preview_kept_state for layer in own.layers)
    assert own.trace is not None and len(own.trace.steps) >= 1
    filled = [p for step in own.trace.steps for p in step.engine]
    assert sorted(filled) == list(range(32)), "the block is traced to its end"
    if options["precision"] in ("fp32", "bf16") or options.get("exact_activations"):
        assert own.trace.agreeing == len(own.trace.steps)
        assert own.head.same_best == own.head.rows
        assert min(layer.hidden.cosine for layer in own.layers) > 1 - 1e-7


def test_the_trained_example_passes_and_its_int4_follows_the_same_path() -> None:
    found = run(bundle(NANO, precision="int4", exact_activations=False), NANO, trace=True)
    assert found.passed, failures(found)
    trace = found.comparisons[0].trace
    assert trace is not None and trace.agreeing >= len(trace.steps) / 2
    assert min(layer.mixer.cosine for layer in found.comparisons[0].layers) > FAST.cosine


def test_a_tied_head_is_compared_as_the_bundle_stores_it() -> None:
    checkpoint = tiny_checkpoint(6, config={"tie_word_embeddings": True}, tie_word_embeddings=True)
    found = run(bundle(checkpoint, precision="fp32"), checkpoint, trace=True)
    assert found.passed, failures(found)


def test_engine_values_are_those_of_the_independent_oracle() -> None:
    """The reference that engines are held to is itself held to the oracle elsewhere; here the engine's own values are."""
    checkpoint = tiny_checkpoint(5, **TINY)
    built = bundle(checkpoint, precision="fp32")
    prompt = random_prompt(built.manifest, 0)
    steps = run_engine(built, make_runs(built.manifest, prompt, 32, 0), 0.9, 1)
    oracle = load_oracle(checkpoint)
    logits, _ = oracle.commit(prompt, oracle.initial_state())
    first = (len(prompt) + 1) // 2
    order = steps[1].ids[0, : len(prompt) - first]  # the second chunk of the prompt
    expected = np.take_along_axis(logits[first:], order, axis=1)
    got = steps[1].logprobs[0, : len(prompt) - first]
    allowed = got > -1e29  # the mask token is excluded
    shift = (got - expected)[:, :1]
    np.testing.assert_allclose((got - expected - shift)[allowed], 0, atol=2e-4)


# -- faults -----------------------------------------------------------------------------------------


def node(model: onnx.ModelProto, reads: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if reads in n.input)


def scale_output(reads: str, factor: float) -> Fault:
    """Multiplies what the node that reads a weight gives."""

    def fault(model: onnx.ModelProto) -> None:
        target = node(model, reads)
        index = list(model.graph.node).index(target)
        out, target.output[0] = target.output[0], target.output[0] + ".right"
        constant = onnx.numpy_helper.from_array(np.float32(factor), "fault")
        model.graph.initializer.append(constant)
        model.graph.node.insert(index + 1, onnx.helper.make_node("Mul", [target.output[0], "fault"], [out]))

    return fault


def fewer_experts(layer: int) -> Fault:
    """The router keeps one expert less."""

    def fault(model: onnx.ModelProto) -> None:
        makers = {o: n for n in model.graph.node for o in n.output}
        top = makers[makers[f"layers.{layer}.routing"].input[1]]
        assert top.op_type == "TopK"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3], np.int64), "three"))
        top.input[1] = "three"

    return fault


def worst_experts(layer: int) -> Fault:
    """The router keeps the experts it likes least."""

    def fault(model: onnx.ModelProto) -> None:
        makers = {o: n for n in model.graph.node for o in n.output}
        top = makers[makers[f"layers.{layer}.routing"].input[1]]
        top.attribute.append(onnx.helper.make_attribute("largest", 0))

    return fault


def other_experts(layer: int, part: str) -> Fault:
    """An expert's values are read one expert further on in the file."""

    def fault(model: onnx.ModelProto) -> None:
        name = f"layers.{layer}.experts.{part}"
        weight = next(t for t in model.graph.initializer if t.name == name)
        entry = {e.key: e for e in weight.external_data}
        step = int(entry["length"].value) // weight.dims[0]
        entry["offset"].value = str(int(entry["offset"].value) + step)

    return fault


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (scale_output("layers.2.gdn.out_proj.qweight", 1.01), "layer 2: the GDN mixer"),
        (scale_output("layers.3.attention.q_norm.weight", 1.2), "layer 3: the attention mixer"),
        (scale_output("layers.0.moe.shared_down.qweight", 1.1), "layer 0: the experts"),
        (scale_output("layers.1.moe.router.weight", 1.001), "layer 1: the router"),
        (scale_output("lm_head.qweight", 1.01), "the head"),
        (fewer_experts(2), "layer 2: "),
        (worst_experts(1), "layer 1: "),
        (other_experts(2, "gate_up.qweight"), "layer 2: the experts"),
    ],
    ids=["out_proj", "q_norm", "shared_expert", "router", "head", "top_k", "worst_experts", "permuted_experts"],
)
def test_a_fault_of_the_engine_is_found_and_its_layer_named(tmp_path: Path, fault: Fault, named: str) -> None:
    """INT4 with 8-bit activations: the noisiest engine has the hardest time to show a fault."""
    source = bundle(tiny_checkpoint(5, **TINY), precision="int4", group_size=64, exact_activations=False)
    found = run(with_graph(source, tmp_path / "faulty", fault))
    assert not found.passed
    assert failures(found)[0].startswith(named), failures(found)
    sound = [x for x in failures(found) if x.startswith("layer") and not x.startswith(named[:7])]
    assert not sound, "other layers are judged on their own input"


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_weight_that_is_not_the_checkpoints_is_found(tmp_path: Path, precision: str) -> None:
    checkpoint = tiny_checkpoint(5, **TINY)
    source = bundle(checkpoint, precision=precision)
    tensor = "layers.3.attention.o_proj." + ("weight" if precision == "fp32" else "scales")

    def one_percent(array: np.ndarray[Any, Any]) -> None:
        array *= np.float32(1.01)

    found = run(with_weights(source, tmp_path / "scaled", tensor, one_percent), checkpoint)
    assert not failures(found, 0), "the engine is right about the weights it has"
    assert failures(found, 1)[0].startswith("layer 3: the stored layers.3.attention.o_proj"), failures(found, 1)


def test_a_permuted_expert_is_not_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(5, **TINY)

    def swap(array: np.ndarray[Any, Any]) -> None:
        array[[0, 1]] = array[[1, 0]]

    found = run(
        with_weights(bundle(checkpoint, precision="int4"), tmp_path / "b", "layers.2.experts.down.qweight", swap),
        checkpoint,
    )
    assert failures(found, 1)[0].startswith("layer 2: the stored layers.2.experts.down is"), failures(found, 1)


def test_a_preview_that_writes_state_is_found(tmp_path: Path) -> None:
    def fault(model: onnx.ModelProto) -> None:
        maker = next(n for n in model.graph.node if "next.conv.0" in n.output)
        i = list(maker.output).index("next.conv.0")
        maker.output[i] = "conv.right"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1e-5), "tiny"))
        model.graph.node.append(onnx.helper.make_node("Add", ["conv.right", "tiny"], ["next.conv.0"]))

    found = run(with_graph(bundle(tiny_checkpoint(5, **TINY), precision="int4"), tmp_path / "b", fault))
    assert "layer 0: a preview changed the committed state" in failures(found)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_fails(tmp_path: Path) -> None:
    fault = scale_output("layers.0.moe.shared_down.weight", float("nan"))
    found = run(with_graph(bundle(tiny_checkpoint(5, **TINY)), tmp_path / "b", fault))
    assert failures(found)[0].startswith("layer 0: the experts")


# -- pieces -----------------------------------------------------------------------------------------


def test_a_bundles_tensors_are_the_checkpoints_under_the_same_names() -> None:
    checkpoint = tiny_checkpoint(5, "per_expert", "language_model", **TINY)
    expected = Checkpoint.open(checkpoint).tensors()
    found = BundleTensors(WeightStore(bundle(checkpoint, precision="fp32")))
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_agreement_needs_direction_and_scale() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(8, 64))
    scaled, turned, one_row = Agreement(), Agreement(), Agreement()
    scaled.add(reference * 1.01, reference)
    assert scaled.cosine > 1 - 1e-12 and not scaled.within(FAST), "a cosine is blind to scale"
    turned.add(reference[::-1], reference)
    assert abs(turned.norm_ratio - 1) < 1e-12 and not turned.within(FAST), "a norm is blind to direction"
    wrong = reference.copy()
    wrong[3] = -wrong[3]
    one_row.add(wrong, reference)
    assert not one_row.within(FAST) and one_row.row_cosine < -0.999
    same = Agreement()
    same.add(reference, reference)
    same.add(np.zeros((1, 4)), np.zeros((1, 4)))
    assert same.within(EXACT)


def test_expert_sets_tell_a_tie_from_a_fault() -> None:
    logits = np.array([[1.0, 2.0, 2.00001, 3.0]])
    engine, reference = np.array([[False, True, False, True]]), np.array([[False, False, True, True]])
    sets = ExpertSets()
    sets.add(engine, reference, logits)
    assert (sets.different, sets.chosen) == (1, 2) and 0 < sets.margin < 1e-4
    sets.add(np.array([[True, False, False, True]]), reference, logits)
    assert sets.different == 2 and sets.margin > 1
    sets.add(np.array([[False, False, False, True]]), reference, logits)
    assert sets.margin == np.inf, "an expert too few is no tie"


def test_the_trace_adjusts_logits_as_the_step_graph_does() -> None:
    ids = np.array([0, 1])
    adjustment = Adjustment(ids, np.array([2, 2], np.float32), np.array([0, -0.5], np.float32))
    rows = SequenceRows(0, np.zeros(1, np.int64), 0, np.zeros(1, np.int64), adjustment)
    raw, adjusted = _adjust(np.array([[4.0, -1.0, 3.0, 9.0]]), rows, [3])
    np.testing.assert_allclose(adjusted[0, :3], [2.0, -2.5, 3.0])
    assert adjusted[0].argmax() == 2 and np.exp(raw[0, 3]) == 0, "what is excluded is never chosen and has no share"
    np.testing.assert_allclose(np.exp(raw).sum(), 1)
    assert raw[0].argmax() == 0, "confidence comes before penalties"


# -- what can't be validated ------------------------------------------------------------------------


def test_another_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"is not the checkpoint that .* was made from"):
        run(bundle(tiny_checkpoint(5, **TINY)), tiny_checkpoint(7, **TINY))


@pytest.mark.parametrize(("prompt", "message"), [([], "1 to"), ([319], "mask token"), ([320], "ids go from 0 to 319")])
def test_a_prompt_that_can_not_be_run_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(bundle(tiny_checkpoint(5, **TINY)), prompt=prompt)


def test_a_given_prompt_is_run_and_the_report_is_json() -> None:
    found = run(bundle(tiny_checkpoint(5, **TINY)), prompt=[7], trace=True)
    assert found.passed, failures(found)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["passed"] and data["prompt"] == [7]
    assert [x["layer"] for x in data["comparisons"][0]["layers"]] == [0, 1, 2, 3]
