"""What a validation lets pass. Each gate is a cosine AND a norm ratio; the numbers they come from are in docs/validate.md.

Measured over the trained example model and random ones, groups of 32 and 64, six prompts each. A part is one layer's
mixer, state or experts on the engine's own input, so the gates do not grow with depth.
"""

from __future__ import annotations

from dataclasses import dataclass

from clover.engines.validate.metrics import Gate
from clover.exporter.graph.dense import EXACT_ACCURACY
from clover.exporter.precision import Precision, PrecisionPlan

# float32 against float64: at most 1e-12 from a cosine of 1 and 4e-7 from a norm ratio of 1 were seen. A cosine of
# 1 - 1e-8 is a relative error of 1.4e-4.
EXACT = Gate(cosine=1 - 1e-8, norm=1e-4)
# Integer weights times 8-bit activations: at most 1e-3 (mixer) and 3e-3 (experts) were seen. A layer whose output is
# 1 % too large still fails.
FAST = Gate(cosine=0.998, norm=5e-3)
# After all layers float32 noise has passed every norm and router: at most 1e-9 and 1e-6 were seen.
EXACT_ADDED_UP = Gate(cosine=1 - 1e-6, norm=1e-4)

# Against the checkpoint a part also differs by its rounded weights: at most 5.8e-6 and 6e-4 (bf16), 2.2e-3 and 2.5e-3
# (int8), 0.13 and 0.073 (int4, the mixer of a random model) were seen.
ROUNDED: dict[Precision, Gate] = {
    "fp32": EXACT,
    "bf16": Gate(cosine=0.9999, norm=3e-3),
    "int8": Gate(cosine=0.99, norm=1e-2),
    "int4": Gate(cosine=0.8, norm=0.15),
}

# Near-ties. Routing is checked on the engine's own float32 router logits, so only sums in another order can differ.
ROUTING_TIE = 1e-4
ADDED_UP_TIE = 1e-3  # router logits after several layers of float32 noise
TRACE_TIE = 1e-3  # of a probability


@dataclass(frozen=True)
class Gates:
    """The gates of one comparison. None: reported, not gated.

    Quantised activations and rounded weights move router near-ties, and what follows another expert is another
    computation; so what adds up over layers is gated for exact engines only.
    """

    part: Gate  # mixer, state, experts
    router: Gate  # the router is float32 in every precision, and so is its input here
    embedding: Gate
    head: Gate
    added_up: Gate | None
    trace_tie: float | None


def own_gates(precision: PrecisionPlan, accuracy_level: int) -> Gates:
    """For an engine against the weights it holds: is the engine right?"""
    integers = any(p in ("int4", "int8") for p in precision.classes.values())
    # QMoE multiplies 8-bit weights by 8-bit activations at every accuracy level
    if not integers or (accuracy_level == EXACT_ACCURACY and precision["experts"] != "int8"):
        return Gates(EXACT, EXACT, EXACT, EXACT, EXACT_ADDED_UP, TRACE_TIE)
    return Gates(FAST, EXACT, EXACT, FAST, None, None)


def checkpoint_gates(precision: PrecisionPlan) -> Gates:
    """For an engine against the checkpoint: are its weights the checkpoint's, as far as its precision goes?"""
    order: tuple[Precision, ...] = ("int4", "int8", "bf16", "fp32")
    classes = precision.classes
    coarsest = min((classes[c] for c in ("attention", "gdn", "shared_expert", "experts")), key=order.index)
    head, embed = ROUNDED[classes["lm_head"]], ROUNDED[classes["embed"]]
    if {coarsest, classes["lm_head"], classes["embed"]} == {"fp32"}:
        return Gates(EXACT, EXACT, EXACT, EXACT, EXACT_ADDED_UP, TRACE_TIE)
    return Gates(ROUNDED[coarsest], EXACT, embed, head, None, None)
