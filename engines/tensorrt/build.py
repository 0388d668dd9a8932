"""Runs the builder process and turns whatever happens to it into an engine file or one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clover.engines.tensorrt.backend import library_environment, version
from clover.engines.tensorrt.network import Layer, Tensors
from clover.engines.tensorrt.request import EngineRequest
from clover.runtime.errors import CloverError

Step = Callable[[str, int, int], None]  # (what, 0, 0): TensorRT's phases have no common measure
LOG_LINES = 40


@dataclass(frozen=True)
class BuiltEngine:
    """A finished engine file, and layers, inputs and outputs of the network it was made from."""

    path: Path
    layers: tuple[Layer, ...]
    tensors: Tensors
    limited_attention: int  # attention layers that read only the live keys
    version: str


def build_engine(request: EngineRequest, progress: Step = lambda what, done, total: None) -> BuiltEngine:
    """Builds `request.engine`. Raises CloverError when TensorRT is missing, refuses the graph, crashes or is killed.

    The engine file appears whole or not at all.
    """
    installed = version(request.backend)
    layers: list[Layer] = []
    tensors: Tensors = {}
    attention = 0
    error: str | None = None
    with library_environment(request.backend) as environment:
        child = subprocess.Popen(
            [sys.executable, "-m", "clover.engines.tensorrt.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        log: deque[str] = deque(maxlen=LOG_LINES)
        reader = threading.Thread(target=_keep_last, args=(child.stderr, log), daemon=True)
        reader.start()
        try:
            try:
                child.stdin.write(request.dump())
                child.stdin.close()
            except BrokenPipeError:
                pass  # it is gone already; the exit code below says how
            for line in child.stdout:
                event = _event(line)
                layers = event.get("layers", layers)
                tensors = event.get("tensors", tensors)
                attention = event.get("attention", attention)
                error = event.get("error", error)
                if "log" in event:
                    log.append(event["log"])
                if "phase" in event:
                    progress(_PHASES.get(event["phase"], f"engine: {event['phase'].lower()}"), 0, 0)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            reader.join(timeout=5)
            child.stdout.close()
            child.stderr.close()
            Path(f"{request.engine}.partial").unlink(missing_ok=True)
    if code:
        raise CloverError(error or _ending(request, code, log))
    return BuiltEngine(Path(request.engine), tuple(layers), tensors, attention, installed)


_PHASES = {
    "parse": "reading the step graph",
    "network": "checking the network",
    "build": "building the engine",
    "done": "engine built",
}


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _keep_last(stream: IO[str], log: deque[str]) -> None:
    for line in stream:
        log.append(line.rstrip())


def _ending(request: EngineRequest, code: int, log: deque[str]) -> str:
    """One sentence about a builder process that ended without a word."""
    weights = sum(p.stat().st_size for p in Path(request.graph).parent.glob("*.converted"))
    if code in (-9, 137):
        return (
            f"the {request.backend} builder was killed, most likely because memory ran out (it needs about twice the "
            f"dense weights, here at least {2 * weights / 1e9 + 1:.0f} GB); close other programs and build again, which "
            "goes on from the finished weights."
        )
    last = next((line for line in reversed(log) if line.strip()), "it left no message")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return (
        f"the {request.backend} builder ended with {how}: {last.strip()}; build again, or report this with the message."
    )
