"""The engine's side of a validation: the bundle's own graph, with its intermediate values given out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.engines.observed_session import give_out
from clover.engines.validate.runs import Run
from clover.exporter.config import ModelConfig
from clover.exporter.reference import ReferenceState
from clover.runtime.errors import BundleError

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LayerValues:
    """What one layer took and gave in one step, all float32."""

    entered: Floats  # [S, T, H] residual stream before the layer
    mixed: Floats  # [S, T, H] the token mixer's output
    after_mixer: Floats  # [S, T, H] residual stream after the mixer, what the router and the experts read
    router_logits: Floats  # [S, T, E]
    routing: Floats  # [S, T, E]: logits of the experts each row uses, -1e30 elsewhere
    hidden: Floats  # [S, T, H] residual stream after the layer


@dataclass(frozen=True)
class EngineStep:
    """One run on the engine: the state before it, its layers, and the state after it."""

    run: Run
    before: ReferenceState
    after: ReferenceState
    layers: tuple[LayerValues, ...]
    ids: npt.NDArray[np.int64]  # [S, T, V]: all tokens of every row, best first
    logprobs: Floats  # [S, T, V], in the order of ids


def run_engine(
    bundle: Bundle, runs: Sequence[Run], coreset_top_p: float, threads: int | None = None
) -> list[EngineStep]:
    """Runs `runs` one after another on the bundle's graph. Raises BundleError when its graph can't be opened up."""
    import onnx

    from clover.runtime.ort_session import create_session

    config = bundle.manifest.config
    model = onnx.load_model_from_string(bundle.graph_bytes)
    names = [give_out_layer(model, layer, bundle.directory) for layer in range(config.num_hidden_layers)]
    session = create_session(
        model.SerializeToString(), bundle.directory, threads=threads, providers=["CPUExecutionProvider"]
    )
    state = _empty_state(config, len(runs[0].rows), sum(r.token_ids.shape[1] for r in runs))
    position = np.zeros(len(runs[0].rows), np.int64)
    wanted = ["candidate_ids", "candidate_logprobs", *(n for layer in names for n in layer), *map(_next, state)]
    steps = []
    for run in runs:
        before = _reference_state(config, state, position)
        given = dict(zip(wanted, session.run(wanted, _feeds(config, run, position, state, coreset_top_p)), strict=True))
        state = {name: given[_next(name)] for name in state}
        position = position + run.commit
        shape = (*run.token_ids.shape, -1)
        layers = tuple(LayerValues(*(given[n].reshape(shape) for n in layer)) for layer in names)
        after = _reference_state(config, state, position)
        steps.append(EngineStep(run, before, after, layers, given["candidate_ids"], given["candidate_logprobs"]))
    return steps


def give_out_layer(model: Any, layer: int, where: Path) -> tuple[str, ...]:
    """Makes a layer's values graph outputs of an onnx.ModelProto; returns their names in LayerValues' order.

    `layers.N.router_logits`, `.routing` and `.hidden` are stable names. The others are found by what reads them: the
    norms before the mixer and before the experts. Raises BundleError for a graph that isn't built that way.
    """
    readers = {i: node for node in model.graph.node for i in node.input}
    makers = {o: node for node in model.graph.node for o in node.output}
    try:
        entered = readers[f"layers.{layer}.input_norm.weight"].input[0]
        after_mixer = readers[f"layers.{layer}.post_attention_norm.weight"].input[0]
        residual = list(makers[after_mixer].input)
        mixed = residual[1 - residual.index(entered)]
        stable = tuple(f"layers.{layer}.{name}" for name in ("router_logits", "routing", "hidden"))
        if makers[after_mixer].op_type != "Add" or not all(name in makers for name in stable):
            raise ValueError
    except (KeyError, ValueError, IndexError):
        raise BundleError(
            f"the step graph of {where} does not show layer {layer}'s values; build the bundle again with this clover."
        ) from None
    names = (entered, mixed, after_mixer, *stable)
    give_out(model, names)
    return names


def _next(name: str) -> str:
    return f"next.{name}"


def _empty_state(c: ModelConfig, sequences: int, capacity: int) -> dict[str, Floats]:
    shapes: dict[str, tuple[int, ...]] = {}
    for n in c.gdn_layers:
        shapes[f"recurrent.{n}"] = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        shapes[f"conv.{n}"] = (c.conv_history, c.conv_channels)
    for n in c.attention_layers:
        shapes[f"keys.{n}"] = shapes[f"values.{n}"] = (c.num_key_value_heads, capacity, c.head_dim)
    return {name: np.zeros((sequences, *shape), np.float32) for name, shape in shapes.items()}


def _feeds(
    c: ModelConfig, run: Run, position: npt.NDArray[np.int64], state: dict[str, Floats], top_p: float
) -> dict[str, npt.NDArray[Any]]:
    sequences, rows = run.token_ids.shape
    return {
        **state,
        "token_ids": run.token_ids,
        "commit_length": run.commit,
        "row_length": run.rows,
        "position": position,
        "live_length": np.array([position.max() + rows], np.int64),
        "coreset_top_p": np.full(sequences, top_p, np.float32),
        "logit_rows": np.tile(np.arange(rows), (sequences, 1)),
        "candidates": np.array([c.vocab_size], np.int64),
        "adjust_ids": np.zeros((sequences, 0), np.int64),
        "adjust_scale": np.zeros((sequences, 0), np.float32),
        "adjust_bias": np.zeros((sequences, 0), np.float32),
    }


def _reference_state(c: ModelConfig, state: dict[str, Floats], position: npt.NDArray[np.int64]) -> ReferenceState:
    """The engine's state in the reference's layout: caches [S, L, kv_heads, D], cut to what is committed."""
    longest = int(position.max())
    committed = (np.arange(longest) < position[:, None])[..., None, None]

    def cache(name: str) -> Floats:
        return np.where(committed, state[name].transpose(0, 2, 1, 3)[:, :longest], 0)

    return ReferenceState(
        position=position,
        recurrent={n: state[f"recurrent.{n}"] for n in c.gdn_layers},
        conv={n: state[f"conv.{n}"] for n in c.gdn_layers},
        keys={n: cache(f"keys.{n}") for n in c.attention_layers},
        values={n: cache(f"values.{n}") for n in c.attention_layers},
    )
