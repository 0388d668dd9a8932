"""A CPU session that also hands out values of the step graph which a reply has no use for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from clover.runtime.ort_session import OrtSession
from clover.runtime.session import Candidates, SequenceRows

Array = npt.NDArray[Any]


class ObservedSession(OrtSession):
    """An OrtSession whose graph has the outputs `observed` besides its own; `observe` gets them after every step."""

    def __init__(self, model: bytes, weights: Path, observed: Sequence[str], **options: Any) -> None:
        super().__init__(model, weights, **options)
        self._observed = tuple(observed)

    def observe(self, rows: Sequence[SequenceRows], values: dict[str, Array]) -> None:
        """Takes a step's values. The arrays may be kept."""
        raise NotImplementedError

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        out = super().step(rows, candidates)
        binding = next(reversed(self._bindings.values()))  # the one just used
        given = binding.io.get_outputs()[-len(self._observed) :]
        self.observe(rows, {name: v.numpy() for name, v in zip(self._observed, given, strict=True)})
        return out

    def _bind(self, *shape: int) -> Any:
        binding = super()._bind(*shape)
        for name in self._observed:
            binding.io.bind_output(name, "cpu")
        return binding


def give_out(model: Any, names: Sequence[str]) -> None:
    """Makes computed float32 values outputs of an onnx.ModelProto, each once. Raises KeyError for a name it doesn't compute."""
    from onnx import TensorProto, helper

    made = {o for node in model.graph.node for o in node.output}
    present = {o.name for o in model.graph.output}
    for name in dict.fromkeys(names):
        if name not in made:
            raise KeyError(name)
        if name not in present:
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
