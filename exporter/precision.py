"""Which tensors may be quantised, and how: an explicit allow-list of tensor classes.

Anything not in a class below is never quantised: routers, the shared expert's gate, norms, convolution
weights, A_log, dt_bias, in_proj_a/b and the block-diffusion tensors stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from clover.exporter.config import ModelConfig
from clover.runtime.errors import CloverError

TensorClass = Literal["embed", "lm_head", "attention", "gdn", "shared_expert", "experts"]
Precision = Literal["fp32", "bf16", "int8", "int4"]

TENSOR_CLASSES: tuple[TensorClass, ...] = get_args(TensorClass)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GROUP_SIZES = (128, 64, 32)
BITS: Mapping[Precision, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class PrecisionPlan:
    """Precision of every tensor class; `group_size` weights share one scale where it is int4 or int8.

    `zero_points`: int4 classes with a stored zero point per group, as an INT4 checkpoint had them; 8 for the others.
    """

    classes: Mapping[TensorClass, Precision]
    group_size: int
    overrides: Mapping[TensorClass, Precision] = field(default_factory=dict)
    zero_points: tuple[TensorClass, ...] = ()

    def __getitem__(self, tensor_class: TensorClass) -> Precision:
        return self.classes[tensor_class]

    @property
    def name(self) -> str:
        """What the user asked for, in one word: the precision of the experts, `+` when a class differs."""
        return self.classes["experts"] + ("+" if self.overrides else "")

    def to_json(self) -> dict[str, object]:
        plan = {"classes": dict(self.classes), "group_size": self.group_size, "overrides": dict(self.overrides)}
        return {**plan, "zero_points": list(self.zero_points)} if self.zero_points else plan

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> PrecisionPlan:
        classes = cast("Mapping[TensorClass, Precision]", value["classes"])
        overrides = cast("Mapping[TensorClass, Precision]", value.get("overrides", {}))
        zero_points = cast("Sequence[TensorClass]", value.get("zero_points", ()))
        return cls(dict(classes), cast("int", value["group_size"]), dict(overrides), tuple(zero_points))


def parse_precision(text: str) -> tuple[Precision, dict[TensorClass, Precision]]:
    """Parses `int4` or `int4,lm_head=int8,embed=bf16` into the base precision and the overrides.

    A list of overrides alone (`experts=int4`) keeps fp32 for the rest.
    Raises CloverError naming the part that is wrong.
    """
    base: Precision | None = None
    overrides: dict[TensorClass, Precision] = {}
    for part in (p.strip() for p in text.split(",")):
        key, equals, value = part.partition("=")
        precision = value if equals else key
        if precision not in PRECISIONS:
            raise CloverError(f"--precision: {part!r} names no precision; choose from {', '.join(PRECISIONS)}.")
        if not equals:
            if base is not None:
                raise CloverError(f"--precision: {text!r} names two base precisions; keep one.")
            base = precision
        elif key not in TENSOR_CLASSES:
            raise CloverError(f"--precision: {key!r} is no tensor class; choose from {', '.join(TENSOR_CLASSES)}.")
        elif key in overrides:
            raise CloverError(f"--precision: {text!r} names {key} twice; keep one.")
        else:
            overrides[key] = precision
    return base or "fp32", overrides


def chosen_precision(
    precision: str | None, *, int4: bool, bf16: bool
) -> tuple[Precision, dict[TensorClass, Precision]]:
    """What --precision, or --int4 or --bf16 in its place, ask for; INT4 when none is given. Raises CloverError for two."""
    named = [*(["int4"] if int4 else []), *(["bf16"] if bf16 else []), *([] if precision is None else [precision])]
    if len(named) > 1:
        raise CloverError("--precision, --int4 and --bf16 exclude each other; give one.")
    return parse_precision(named[0] if named else "int4")


def check_integer_options(base: Precision, overrides: Mapping[TensorClass, Precision], **given: object) -> None:
    """Refuses an option (None: not given) that acts on integer weights only where no class has any. Raises CloverError."""
    if {base, *overrides.values()} & {"int4", "int8"}:
        return
    for name, value in given.items():
        if value is not None:
            flag = name.replace("_", "-")
            raise CloverError(
                f"--{flag} acts on integer weights, and {base} has none; leave it out or choose int4 or int8."
            )


def largest_group_size(config: ModelConfig) -> int | None:
    """The largest supported group size that divides the input width of every quantisable matrix."""
    widths = {
        config.hidden_size,
        config.value_width,
        config.num_attention_heads * config.head_dim,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
    }
    return next((g for g in GROUP_SIZES if all(w % g == 0 for w in widths)), None)


def plan_precision(
    config: ModelConfig,
    base: Precision,
    overrides: Mapping[TensorClass, Precision] | None = None,
    group_size: int | None = None,
) -> PrecisionPlan:
    """Precision of every class of `config`. Raises CloverError when the group size doesn't divide the shapes."""
    overrides = {k: v for k, v in (overrides or {}).items() if v != base}
    classes: dict[TensorClass, Precision] = {c: overrides.get(c, base) for c in TENSOR_CLASSES}
    largest = largest_group_size(config)
    if any(p in ("int4", "int8") for p in classes.values()):
        if largest is None:
            raise CloverError(
                f"integer precision needs widths that are multiples of {GROUP_SIZES[-1]}, and this model has "
                f"hidden size {config.hidden_size} and expert size {config.moe_intermediate_size}; use --precision fp32."
            )
        if group_size is not None and (group_size not in GROUP_SIZES or largest % group_size):
            fitting = ", ".join(str(g) for g in GROUP_SIZES if largest % g == 0)
            raise CloverError(f"--group-size {group_size} does not divide this model's widths; choose from {fitting}.")
    return PrecisionPlan(classes, group_size or largest or GROUP_SIZES[-1], overrides)
