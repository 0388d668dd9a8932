"""Decode speed: threshold fill at each block size against the autoregressive mode of the same bundle, and both
against transformers' generate on the same checkpoint and llama.cpp on the bundle's own integers, interleaved in one run.

    python benchmarks/decode.py --checkpoint examples/nano --llama-cpp V/bin/python
    python benchmarks/decode.py --checkpoint FULL_WIDTH --bundle BUNDLE --tokens-per-step 8 --no-transformers

With `--tokens-per-step N` (for random weights, whose confidence means nothing) every step fills N positions. Prints
medians with their spread, ratios, where a step's time goes, what a layer takes of it, and Python's share; --json for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf_bundle import write_gguf
from llamacpp import LlamaCpp

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.trace.profile import part_times
from clover.runtime.fill import FillDecoder
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import Floats, Ints, SequenceRows

REPOSITORY = Path(__file__).resolve().parent.parent
LAYER_PARTS = ("GDN", "attention", "routing", "experts", "shared expert")


@dataclass
class Run:
    """One reply of one mode."""

    tokens: int
    steps: int
    seconds: float
    engine: float
    first: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def python_ms(self) -> float:
        return 1e3 * (self.seconds - self.engine) / max(self.steps, 1)


def fixed_fill(count: int) -> Callable[[Floats, float], npt.NDArray[np.intp]]:
    """Fills the `count` most confident positions, whatever the threshold."""
    return lambda confidence, threshold: np.sort(np.argsort(-confidence, kind="stable")[:count])


def run_ours(engine: Clover, prompt: Sequence[int], options: DecodeOptions, tokens_per_step: int | None) -> Run:
    decoder = engine.decoder(prompt, options)
    if tokens_per_step and isinstance(decoder, FillDecoder):
        decoder.choose_positions = fixed_fill(tokens_per_step)
    times, start, first = StepTimes(), time.perf_counter(), 0.0
    engine.session.reset(0)
    for _ in decode(engine.session, decoder, 0, times):
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    counts = decoder.counts
    return Run(counts.response_tokens, counts.steps + counts.prefill_steps, seconds, times.session, first)


class Transformers:
    """transformers' generate on the same weights (it has no preview pass: plain autoregressive)."""

    def __init__(self, checkpoint: Path, threads: int | None) -> None:
        import torch
        from safetensors import safe_open
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

        if threads:
            torch.set_num_threads(threads)
        values = json.loads((checkpoint / "config.json").read_text())
        values = values.get("text_config", values)
        config = Qwen3_5MoeTextConfig(**{k: v for k, v in values.items() if k not in ("model_type", "architectures")})
        with torch.device("meta"):
            self.model = Qwen3_5MoeForCausalLM(config)
        self.model.to_empty(device="cpu")
        state = self.model.state_dict()
        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(str(file), "pt") as f:
                for name in f.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    short = name.replace("model.language_model.", "model.")
                    if short in state:
                        state[short] = f.get_tensor(name)
        self.model.load_state_dict(state, assign=True)
        inverse = self.model.model.rotary_emb
        inverse.__init__(config)
        self.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        self.model.eval()

    def run(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> Run:
        ids, seconds = self.generate(prompt, limit, eos)
        return Run(len(ids), len(ids), seconds, seconds, 0.0)

    def generate(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> tuple[list[int], float]:
        """Greedy: (ids of the reply, the end token included; seconds)."""
        import torch

        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        with torch.no_grad():
            out = self.model.generate(
                ids, max_new_tokens=limit, do_sample=False, eos_token_id=list(eos), pad_token_id=0, use_cache=True
            )
        seconds = time.perf_counter() - start
        return out[0, ids.shape[1] :].tolist(), seconds


def step_parts(bundle: Bundle, rows: int, commit: int, threads: int | None) -> dict[str, float]:
    """Milliseconds of a step in each part of the model, from ONNX Runtime's profile (best of several runs a node)."""
    rng = np.random.default_rng(0)
    vocab = bundle.manifest.config.vocab_size - 8

    def tokens(n: int) -> Ints:
        return rng.integers(4, vocab, n)

    before = SequenceRows(0, tokens(64), 64, np.array([63]))
    asked = np.arange(max(commit, 1) - (rows == commit), rows)
    step = SequenceRows(0, tokens(rows), commit, asked, coreset_top_p=0.9)
    return part_times(bundle, [before, step], max_context=512, threads=threads, repeats=8)[1]


def layer_ms(parts: dict[str, float], layers: int) -> float:
    """Of a step's time, what one layer takes in the mean."""
    return sum(ms for part, ms in parts.items() if part in LAYER_PARTS) / layers


def prompts(engine: Clover, checkpoint: Path, count: int) -> list[list[int]]:
    """Held-out dispatch messages where the checkpoint is the nano model, random tokens elsewhere."""
    if engine.tokenizer is not None and engine.template is not None and (checkpoint / "data.py").is_file():
        sys.path.insert(0, str(checkpoint))
        import data

        out = []
        for question, _ in data.held_out("dispatch", count):
            rendered = engine.template.render([{"role": "user", "content": question}])
            out.append(engine.tokenizer.encode_prompt(rendered))
        return out
    r = random.Random(1)
    return [[r.randrange(4, engine.bundle.manifest.config.vocab_size - 8) for _ in range(64)] for _ in range(count)]


def summary(runs: list[Run]) -> dict[str, float]:
    rates = [r.rate for r in runs]
    return {
        "tokens_per_second": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "tokens_per_step": sum(r.tokens for r in runs) / max(sum(r.steps for r in runs), 1),
        "python_ms_per_step": statistics.median(r.python_ms for r in runs),
        "python_share": sum(r.seconds - r.engine for r in runs) / sum(r.seconds for r in runs),
        "first_token_ms": 1e3 * statistics.median(r.first for r in runs),
    }


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--checkpoint", type=Path, default=REPOSITORY / "examples" / "nano")
    a.add_argument("--bundle", type=Path, help="a bundle of it; built for the run otherwise")
    a.add_argument("--precision", default="int4", choices=["fp32", "int4"])
    a.add_argument("--prompts", type=int, default=8)
    a.add_argument("--repeat", type=int, default=3)
    a.add_argument("--max-new-tokens", type=int, default=128)
    a.add_argument("--tokens-per-step", type=int)
    a.add_argument("--block-size", type=int, action="append", help="repeatable; default all of the bundle")
    a.add_argument("--threads", type=int)
    a.add_argument("--no-transformers", action="store_true")
    a.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    a.add_argument("--gguf", type=Path, help="the bundle's GGUF file (benchmarks/gguf_bundle.py); made when not there")
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    folder = tempfile.TemporaryDirectory()
    if args.bundle is None:
        args.bundle = Path(folder.name) / "bundle"
        build_target(BuildRequest(args.checkpoint, args.bundle, precision=args.precision))
    engine = Clover.load(args.bundle, threads=args.threads, max_context=2048)
    asked = prompts(engine, args.checkpoint, args.prompts)
    sizes = args.block_size or engine.bundle.manifest.block_sizes
    modes: dict[str, DecodeOptions] = {
        "autoregressive": engine.options(mode="autoregressive", max_new_tokens=args.max_new_tokens)
    }
    modes |= {f"fill {b}": engine.options(mode="fill", block_size=b, max_new_tokens=args.max_new_tokens) for b in sizes}
    rival = None if args.no_transformers else Transformers(args.checkpoint, args.threads)
    peer = None
    if args.llama_cpp:
        gguf = args.gguf or Path(folder.name) / "bundle.gguf"
        if not gguf.exists():
            write_gguf(engine.bundle, gguf)
        peer = LlamaCpp(args.llama_cpp, gguf, args.threads or os.cpu_count() or 1)
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    if rival:
        runs["transformers"] = []
    if peer:
        runs["llama.cpp"] = []
    for repeat in range(args.repeat + 1):  # the first round warms up
        for prompt in asked:
            for name, options in modes.items():
                result = run_ours(engine, prompt, options, args.tokens_per_step)
                if repeat:
                    runs[name].append(result)
            if rival and repeat <= 1:
                result = rival.run(prompt, args.max_new_tokens, engine.bundle.manifest.eos_token_ids)
                if repeat:
                    runs["transformers"].append(result)
            if peer:
                ids, seconds, first = peer.run(prompt, args.max_new_tokens, engine.bundle.manifest.eos_token_ids)
                if repeat:
                    runs["llama.cpp"].append(Run(len(ids), len(ids), seconds, seconds, first))
    if peer:
        peer.close()
    table = {name: summary(r) for name, r in runs.items()}
    base = table["autoregressive"]["tokens_per_second"]
    for row in table.values():
        row["against_autoregressive"] = row["tokens_per_second"] / base
        if rival:
            row["against_transformers"] = row["tokens_per_second"] / table["transformers"]["tokens_per_second"]
        if peer:
            row["against_llama_cpp"] = row["tokens_per_second"] / table["llama.cpp"]["tokens_per_second"]
    block = engine.bundle.manifest.trained_block_size
    parts = {
        f"denoise, {block} rows": step_parts(engine.bundle, block, 0, args.threads),
        f"commit and preview, {2 * block} rows": step_parts(engine.bundle, 2 * block, block, args.threads),
        "autoregressive, 1 row": step_parts(engine.bundle, 1, 1, args.threads),
    }
    layers = engine.bundle.manifest.config.num_hidden_layers
    a_layer = {name: layer_ms(step, layers) for name, step in parts.items()}
    conditions = {
        "model": engine.bundle.manifest.model.name,
        "precision": engine.bundle.manifest.precision["classes"]["experts"],
        "onnxruntime": engine.bundle.manifest.target.backend_version,
        "machine": platform.machine(),
        "prompts": len(asked),
        "prompt_tokens": statistics.mean(map(len, asked)),
        "max_new_tokens": args.max_new_tokens,
        "tokens_per_step": args.tokens_per_step or "by threshold",
        "transformers_dtype": rival.dtype if rival else None,
        "llama_cpp_python": peer.version if peer else None,
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "modes": table, "parts_ms": parts, "layer_ms": a_layer}, indent=1))
        return
    print(", ".join(f"{k} {v}" for k, v in conditions.items()))
    print(
        f"{'mode':<16}{'tokens/s':>10}{'spread':>18}{'tok/step':>10}{'x ar':>8}{'x hf':>8}{'x llama':>8}{'python ms':>11}{'share':>8}{'first ms':>10}"
    )
    for name, row in table.items():
        spread = f"{row['low']:.0f}-{row['high']:.0f}"
        against = f"{row['against_transformers']:.1f}" if rival else "-"
        llama = f"{row['against_llama_cpp']:.2f}" if peer else "-"
        print(
            f"{name:<16}{row['tokens_per_second']:>10.1f}{spread:>18}{row['tokens_per_step']:>10.2f}"
            f"{row['against_autoregressive']:>8.2f}{against:>8}{llama:>8}{row['python_ms_per_step']:>11.3f}"
            f"{100 * row['python_share']:>7.1f}%{row['first_token_ms']:>10.1f}"
        )
    for name, step in parts.items():
        shares = sorted(((ms / sum(step.values()), part) for part, ms in step.items()), reverse=True)
        print(f"{name}: " + ", ".join(f"{part} {100 * share:.0f} %" for share, part in shares))
    single = a_layer["autoregressive, 1 row"]
    told = ", ".join(f"{name} {ms:.2f} ms ({ms / single:.1f} x)" for name, ms in a_layer.items())
    print(f"a layer: {told}")


if __name__ == "__main__":
    main()
