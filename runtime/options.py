"""What a request may ask of a decode, checked field by field: honoured or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from clover.runtime.errors import RequestError

Mode = Literal["fill", "autoregressive", "self-speculative", "adaptive"]
MODES: tuple[Mode, ...] = get_args(Mode)
INERT: Mapping[str, frozenset[str]] = {  # options that change nothing in a mode (docs/modes.md)
    "autoregressive": frozenset({"threshold", "block_size", "coreset_top_p", "align_blocks"}),
    "self-speculative": frozenset({"threshold", "align_blocks"}),
}
MAX_STOPS = 16
LEAST_FACTOR = 0.01  # logits are divided by these: float32 overflows below
MAX_LOGPROBS = 20
MAX_TOP_K = 1024  # candidates a step can return


@dataclass(frozen=True)
class LengthRamp:
    """Ends very long replies: from `start` response tokens the ending tokens' logits grow linearly,
    by `max_bias` at `stop` tokens. The formula of the published model is not public; this is the agreed default.
    """

    start: int = 8192
    stop: int = 16384
    max_bias: float = 5.0

    def bias(self, tokens: int) -> float:
        """Added to the ending tokens' logits after `tokens` response tokens."""
        return self.max_bias * min(max((tokens - self.start) / (self.stop - self.start), 0.0), 1.0)


@dataclass(frozen=True)
class DecodeOptions:
    """Options of one reply. Raises RequestError naming the field when a value can't be honoured.

    temperature 0 is greedy. top_k 0 and top_p 1 don't restrict. threshold: a position is filled when the raw
    probability of its token exceeds it. Penalties touch response tokens only. logprobs: alternatives kept per token.
    """

    mode: Mode = "fill"
    block_size: int = 32
    threshold: float = 0.95
    coreset_top_p: float = 0.9
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.9
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.05
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: int = 0
    length_ramp: LengthRamp | None = field(default_factory=LengthRamp)
    align_blocks: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError("mode", f"mode {self.mode!r} is unknown; choose from {', '.join(MODES)}.")
        self._integer("block_size", 1, 4096)
        self._number("threshold", 0.0, 1.0, open_low=True)
        self._number("coreset_top_p", 0.0, 1.0, open_low=True)
        self._number("temperature", 0.0, 10.0)
        if 0.0 < self.temperature < LEAST_FACTOR:
            raise RequestError(
                "temperature", f"temperature is {self.temperature!r}; it must be 0 (greedy) or at least {LEAST_FACTOR}."
            )
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", 0, MAX_TOP_K)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", LEAST_FACTOR, 10.0)
        self._integer("logprobs", 0, MAX_LOGPROBS)
        if self.max_new_tokens is not None:
            self._integer("max_new_tokens", 1, 2**31)
        if self.seed is not None:
            self._integer("seed", 0, 2**63)
        if not isinstance(self.align_blocks, bool):
            raise RequestError("align_blocks", f"align_blocks is {self.align_blocks!r}; it must be true or false.")
        if self.align_blocks and self.mode == "adaptive":
            raise RequestError(
                "align_blocks", "align_blocks can't be kept in mode adaptive; leave it false, or choose fill."
            )
        if self.length_ramp is not None and not isinstance(self.length_ramp, LengthRamp):
            raise RequestError("length_ramp", f"length_ramp is {self.length_ramp!r}; it must be a LengthRamp.")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        listed = isinstance(self.stop, Sequence) and not isinstance(self.stop, bytes)
        if not listed or len(self.stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError("stop", f"stop must hold at most {MAX_STOPS} non-empty strings.")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", f"logit_bias is {self.logit_bias!r}; it must map token ids to biases.")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError("logit_bias", f"logit_bias names token {token!r}; token ids are integers.")
            if not _is_number(bias) or abs(bias) > 100:
                raise RequestError(
                    "logit_bias", f"logit_bias of token {token} is {bias!r}; it must be between -100 and 100."
                )

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not (low < value if open_low else low <= value) or value > high:
            bracket = "(" if open_low else "["
            raise RequestError(name, f"{name} is {value!r}; it must be a number in {bracket}{low:g}, {high:g}].")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RequestError(name, f"{name} is {value!r}; it must be an integer from {low} to {high}.")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < math.inf  # false for NaN; isfinite overflows on a huge integer


def check_flags(**flags: bool | None) -> None:
    """Raises RequestError for a flag that is neither true nor false nor absent: "no" would count as true."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise RequestError(name, f"{name} is {value!r}; it must be True or False.")


def make_options(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> DecodeOptions:
    """DecodeOptions from a bundle's defaults and a request's fields; None means not given.

    Raises RequestError for a field that does not exist, and for one that is given and does not act in the mode.
    """
    known = {f.name for f in fields(DecodeOptions)}
    for name in given:
        if name not in known:
            raise RequestError(name, f"option {name!r} is unknown; known options are {', '.join(sorted(known))}.")
    chosen = {**defaults, **{k: v for k, v in given.items() if v is not None}}
    if "length_ramp" in chosen:
        chosen["length_ramp"] = parse_length_ramp(chosen["length_ramp"])
    options = DecodeOptions(**chosen)
    for name in INERT.get(options.mode, ()):
        if given.get(name) not in (None, False):
            raise RequestError(name, f"{name} does not act in mode {options.mode}; leave it out, or choose mode fill.")
    return options


def parse_length_ramp(value: object) -> LengthRamp | None:
    """`off`, `START:STOP:MAX_BIAS`, the same as a JSON object, or a LengthRamp. Raises RequestError."""
    if value is None or isinstance(value, LengthRamp):
        return value
    if value == "off":
        return None
    parts: list[Any] = []
    if isinstance(value, str):
        parts = value.split(":")
    elif isinstance(value, Mapping) and set(value) == {"start", "stop", "max_bias"}:
        parts = [value["start"], value["stop"], value["max_bias"]]
    try:
        start, stop, bias = int(parts[0]), int(parts[1]), float(parts[2])
        if len(parts) != 3 or not 0 <= start < stop or not 0.0 <= bias <= 100.0:
            raise ValueError
    except (IndexError, TypeError, ValueError, OverflowError):
        raise RequestError(
            "length_ramp",
            f"length_ramp is {value!r}; give off, or START:STOP:MAX_BIAS with START below STOP (8192:16384:5).",
        ) from None
    return LengthRamp(start, stop, bias)
