"""INT4 engines against the same model with the dequantised weights in float32: what the arithmetic alone costs.

The accuracy of the quantised weights themselves is another question (tests of exporter/quantize.py).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_support import NANO, logits_of, relative_error, rows, session
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file

from clover.exporter.quantize import dequantize_int4, quantize_int4
from clover.runtime.session import StepSession
from clover.runtime.text.tokenizer import Tokenizer

# what the allow-list means in the checkpoint's own names
QUANTISABLE = re.compile(
    r"(embed_tokens\.weight|lm_head\.weight|self_attn\.[qkvo]_proj\.weight|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"\.weight|shared_expert\.(gate|up|down)_proj\.weight|mlp\.experts\..*)$"
)
EXACT = 1e-5
FAST_ON_TEXT = 0.02  # first quartile: a router's near-tie that falls the other way costs a block up to a sixth
FAST_ON_NOISE = 0.06  # random weights, sharp block softmax: the GDN projections' 8-bit rows cost most of it
ORDERS = [
    ("Send UAV7 to Cedar, priority high.", '[{"op": "dispatch", "uav": 7, "site": "Cedar", "priority": "high"}]'),
    ("UAV3 search radius 450 metres.", '[{"op": "set_radius", "uav": 3, "metres": 450}]'),
    ("From 07:15 the Oak no-fly zone is cleared.", '[{"op": "lift_nofly", "zone": "Oak", "at": "07:15"}]'),
    ("Assign relay at Thorn to UAV12.", '[{"op": "assign", "uav": 12, "task": "relay", "site": "Thorn"}]'),
    ("Waypoint 4 of UAV9 is now 31,782.", '[{"op": "set_waypoint", "uav": 9, "index": 4, "x": 31, "y": 782}]'),
]

Row = npt.NDArray[np.int64]
Sample = tuple[Row, Row]  # a prompt and a block after it, partly masked


@lru_cache(maxsize=16)
def dequantised(checkpoint: Path, group: int) -> Path:
    """The checkpoint with its quantisable tensors rounded to what INT4 can hold."""
    target = Path(tempfile.mkdtemp(prefix="clover-dequantised-")) / "checkpoint"
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.py", ".*", "__*"))
    for shard in target.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if QUANTISABLE.search(name):
                rounded = quantize_int4(tensor.astype(np.float32), group, signed_scales=".experts." in name)
                tensors[name] = dequantize_int4(*rounded)
        save_file(tensors, shard)
    return target


def errors(checkpoint: Path, group: int, samples: list[Sample], **options: Any) -> tuple[list[float], float]:
    """Relative errors of preview logits, one a sample, and the share of rows whose best token is the same."""
    engine = session(checkpoint, precision="int4", group_size=group, **options)
    exact = session(dequantised(checkpoint, group))
    found, same = [], []
    for prompt, block in samples:
        got, want = preview(engine, prompt, block), preview(exact, prompt, block)
        found.append(relative_error(got, want))
        same.append((got.argmax(-1) == want.argmax(-1)).mean())
    return found, float(np.mean(same))


def preview(engine: StepSession, prompt: Row, block: Row) -> npt.NDArray[np.float32]:
    engine.reset(0)
    engine.step([rows(prompt, len(prompt))])
    return logits_of(engine.step([rows(block, 0)])[0])


def noise() -> list[Sample]:
    rng = np.random.default_rng(0)
    out = []
    for length in (1, 20, 90):
        for masked in (1.0, 0.5):
            block = np.where(rng.random(32) < masked, 319, rng.integers(0, 318, 32))
            out.append((rng.integers(0, 318, length), block))
    return out


def orders() -> list[Sample]:
    """What nano was trained on: an order, and its answer all masked, half masked or nearly done."""
    tokenizer, rng, out = Tokenizer.load(NANO), np.random.default_rng(0), []
    for order, answer in ORDERS:
        prompt = tokenizer.encode(f"<|im_start|>user\nParse the dispatch: {order}<|im_end|>\n<|im_start|>assistant\n")
        ids = [*tokenizer.encode(answer), *[2] * 32][:32]
        for masked in (1.0, 0.5, 0.1):
            out.append((np.array(prompt), np.where(rng.random(32) < masked, 3, ids)))
    return out


def undecided(seed: int) -> Path:
    """A tiny model whose router has nothing to choose, so that rounding can't flip a decision."""
    return tiny_checkpoint(seed, num_experts=4, num_experts_per_tok=4)


def test_with_exact_activations_only_the_weights_are_rounded() -> None:
    """Every class of weights, in the engine's own layouts, means what the quantiser said."""
    for seed in range(2):
        found, same = errors(tiny_checkpoint(seed), 32, noise(), exact_activations=True)
        assert max(found) < EXACT and same == 1.0
    found, same = errors(NANO, 64, orders())
    assert max(found) < EXACT and same == 1.0, "a narrow model's default"


def test_8_bit_activations_stay_close() -> None:
    found, same = errors(NANO, 64, orders(), exact_activations=False)
    assert float(np.quantile(found, 0.25)) < FAST_ON_TEXT and same > 0.97
    for seed in range(2):
        found, _ = errors(undecided(seed), 32, noise(), exact_activations=False)
        assert float(np.sqrt(np.mean(np.square(found)))) < FAST_ON_NOISE
    assert min(found) > EXACT, "8-bit activations are in use"
