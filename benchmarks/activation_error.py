"""What rounding activations to 8 bits costs: a bundle's step graph with and without it, the same integer weights in each.

    python benchmarks/activation_error.py BUNDLE [--blocks 8] [--threads 2]

Every block is previewed half masked after a prompt of its own; compared are the logits of its rows, prompt and state
included. Prompts and blocks are nano's held-out ones where the bundle is nano's, else random tokens. The GDN layers'
output projections keep float32 activations in every build; the last line shows why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.engines.observed_session import ObservedSession, give_out
from clover.engines.validate.runs import ordinary_ids
from clover.exporter.graph.dense import EXACT_ACCURACY, FAST_ACCURACY
from clover.runtime.clover import TOKENIZER_DIRECTORY, load_template
from clover.runtime.errors import CloverError
from clover.runtime.session import SequenceRows
from clover.runtime.terminal.progress import Progress
from clover.runtime.text.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# accuracy level of the matrices, and of the GDN layers' output projections
WAYS = {
    "float32": (EXACT_ACCURACY, EXACT_ACCURACY),
    "8-bit, as built": (FAST_ACCURACY, EXACT_ACCURACY),
    "8-bit, out_proj too": (FAST_ACCURACY, FAST_ACCURACY),
}


class LogitsSession(ObservedSession):
    """The bundle's graph at other accuracy levels, which keeps the logits of the rows that ask."""

    def __init__(self, bundle: Bundle, levels: tuple[int, int], threads: int | None) -> None:
        import onnx

        model = onnx.load_model_from_string(bundle.graph_bytes)
        head = ""
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = levels[any(name.endswith("gdn.out_proj.qweight") for name in node.input)]
            if any(name in ("lm_head.qweight", "lm_head.weight") for name in node.input) and node.op_type != "Cast":
                head = node.output[0]
        give_out(model, [head])
        super().__init__(model.SerializeToString(), bundle.directory, [head], max_context=1024, threads=threads)
        self._included = np.ones(bundle.manifest.config.vocab_size, bool)
        self._included[list(bundle.manifest.excluded_token_ids)] = False  # their logits are -1e30
        self.logits: Floats = np.zeros((0, 0), np.float32)

    def observe(self, rows: Sequence[SequenceRows], values: dict[str, npt.NDArray[Any]]) -> None:
        (logits,) = values.values()
        self.logits = logits[:, self._included]


def blocks(bundle: Bundle, count: int) -> Iterator[tuple[Ints, Ints]]:
    """(prompt, half-masked block) of token ids."""
    manifest, r = bundle.manifest, np.random.default_rng(0)
    size, folder = int(manifest.defaults["block_size"]), bundle.directory / TOKENIZER_DIRECTORY
    pairs: list[tuple[Any, Any]]
    if manifest.model.name == "nano":
        from quality import held_out

        tokenizer = Tokenizer.load(folder)
        template = load_template(folder, tokenizer)
        assert template is not None
        pairs = [
            (tokenizer.encode_prompt(template.render([{"role": "user", "content": p}])), tokenizer.encode(a)[:size])
            for p, a in held_out("dispatch", count)
        ]
    else:
        ids = ordinary_ids(manifest)
        pairs = [(r.choice(ids, 64), r.choice(ids, size)) for _ in range(count)]
    for prompt, block in pairs:
        tokens = np.array(block, np.int64)
        yield np.array(prompt, np.int64), np.where(r.random(len(tokens)) < 0.5, manifest.mask_token_id, tokens)


def run(bundle: Bundle, way: str, given: Sequence[tuple[Ints, Ints]], threads: int | None) -> list[Floats]:
    """Logits [rows, V] of every block."""
    session = LogitsSession(bundle, WAYS[way], threads)
    top_p, found = float(bundle.manifest.defaults["coreset_top_p"]), []
    for prompt, block in given:
        session.reset(0)
        session.step([SequenceRows(0, prompt, len(prompt), np.zeros(0, np.int64))])
        session.step([SequenceRows(0, block, 0, np.arange(len(block)), coreset_top_p=top_p)])
        found.append(session.logits)
    session.close()
    return found


def errors(found: Sequence[Floats], exact: Sequence[Floats]) -> dict[str, float]:
    """Relative errors ‖l - l'‖ / ‖l'‖ of rows, of whole blocks and of all, and the share of rows with the same best token."""
    square = [((f.astype(np.float64) - e) ** 2).sum(1) for f, e in zip(found, exact, strict=True)]
    size = [(e.astype(np.float64) ** 2).sum(1) for e in exact]
    rows = np.sqrt(np.concatenate(square) / np.concatenate(size))
    whole = [float(np.sqrt(s.sum() / n.sum())) for s, n in zip(square, size, strict=True)]
    same = np.concatenate([f.argmax(1) == e.argmax(1) for f, e in zip(found, exact, strict=True)])
    return {
        "median_row": float(np.median(rows)),
        "least_block": min(whole),
        "most_block": max(whole),
        "rms": float(np.sqrt(np.concatenate(square).sum() / np.concatenate(size).sum())),
        "same_best": float(same.mean()),
    }


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("bundle", type=Path)
    a.add_argument("--blocks", type=int, default=8)
    a.add_argument("--threads", type=int)
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    try:
        bundle = Bundle.open(args.bundle, verify=False)
        if not {"int4", "int8"} & set(bundle.manifest.precision_plan.classes.values()):
            raise CloverError(f"{args.bundle} has no integer weights, which alone meet 8-bit activations.")
        given, results = list(blocks(bundle, args.blocks)), {}
        with Progress("running", " ways", quiet=args.json) as bar:
            for n, way in enumerate(WAYS):
                results[way] = run(bundle, way, given, args.threads)
                bar(way, n + 1, len(WAYS))
    except CloverError as error:
        print(f"activation_error: {error}", file=sys.stderr)
        return 2
    found = {way: errors(results[way], results["float32"]) for way in WAYS if way != "float32"}
    if args.json:
        print(json.dumps({"bundle": str(args.bundle), "blocks": args.blocks, "errors": found}, indent=1))
        return 0
    print("| activations | median row | whole blocks | RMS | same best token |\n|---|---|---|---|---|")
    for way, e in found.items():
        whole = f"{100 * e['least_block']:.1f} to {100 * e['most_block']:.1f} %"
        print(
            f"| {way} | {100 * e['median_row']:.1f} % | {whole} | {100 * e['rms']:.1f} % | {100 * e['same_best']:.1f} % |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
