"""Trains the nano Clover: causal and block-preview losses together, on one CPU core.

python train.py OUT --minutes 90 [--init CHECKPOINT] [--seed 1]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import data
import evaluate
import torch
import torch.nn.functional as F
from batch import Masks, make_masks
from config import Config
from model import Commit, NanoClover, set_half
from optimizer import Muon
from packing import TrainingBatch, batches
from safetensors.torch import load_file, save_file
from tokenizer import MASK, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn


def save_checkpoint(model: NanoClover, directory: Path) -> None:
    """Writes model.safetensors and config.json in the Hugging Face layout."""
    tensors = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.c.save(directory, "float32")


def split_parameters(model: NanoClover) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside the layers go to Muon; embeddings, head, router, gates, taps and vectors to Adam."""
    adam_names = ("embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate", "conv", "in_proj_a", "in_proj_b")
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (adam if p.dim() < 2 or any(a in name for a in adam_names) else muon).append(p)
    return muon, adam


@torch.no_grad()
def own_fill(model: NanoClover, batch: TrainingBatch, masks: Masks, commit: Commit, steps: int, blocks: Tensor) -> None:
    """Replaces the noise of `blocks` [N, J] by what threshold fill leaves after `steps` steps, in place.

    Random masks seldom look like the states that decoding meets; these do. Confident positions get the true token.
    """
    masked = torch.ones_like(batch.masked)
    for _ in range(steps):
        noisy = torch.where(masked, MASK, batch.targets)
        hidden, _ = model.preview(noisy, batch.packed, masks, commit)
        confidence = torch.softmax(model.lm_head(hidden), -1).amax(-1).masked_fill(~masked, -1.0)  # [N, J, B]
        confident = confidence > 0.95
        best = torch.zeros_like(masked).scatter(-1, confidence.argmax(-1, keepdim=True), True)
        masked &= ~torch.where(confident.any(-1, keepdim=True), confident, best)
    blocks = blocks & masked.any(-1)  # a block that is full already keeps its random noise
    batch.masked = torch.where(blocks[..., None], masked, batch.masked)
    batch.noisy = torch.where(batch.masked, MASK, batch.targets)


def losses(model: NanoClover, batch: TrainingBatch, own_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Causal loss, preview loss, balance loss; with `own_steps` > 0, half of the blocks get `own_fill` noise."""
    masks = make_masks(batch.packed)
    commit = model.commit(batch.packed, masks)
    if own_steps:
        own_fill(model, batch, masks, commit, own_steps, torch.rand(batch.targets.shape[:2]) < 0.5)
    hidden, balance = model.preview(batch.noisy, batch.packed, masks, commit)
    weight = batch.causal_weight[:, 1:].flatten()
    targets = batch.packed.tokens[:, 1:].flatten()
    causal_rows = weight.nonzero()[:, 0]
    rows = commit.hidden[:, :-1].flatten(0, 1)[causal_rows]
    weight = weight[causal_rows]
    causal = F.cross_entropy(model.lm_head(rows), targets[causal_rows], reduction="none") @ weight / weight.sum()
    preview = F.cross_entropy(model.lm_head(hidden[batch.masked]), batch.targets[batch.masked])
    return causal, preview, torch.stack(commit.balance + balance).mean()


def learning_rate(fraction: float, step: int, decay: float, warmup: int = 60) -> float:
    """Warm-up, constant, then linear decay over the last part: relative to the peak."""
    return min(1.0, (step + 1) / warmup) * min(1.0, (1 - fraction) / decay + 0.01)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("out", type=Path)
    a.add_argument("--minutes", type=float, required=True)
    a.add_argument("--init", type=Path, help="start from this checkpoint's weights")
    a.add_argument("--rows", type=int, default=6)
    a.add_argument("--chunks", type=int, default=6, help="32-token chunks per row")
    a.add_argument("--blocks", type=int, default=6, help="previewed blocks per row")
    a.add_argument("--muon-lr", type=float, default=0.02)
    a.add_argument("--adam-lr", type=float, default=3e-3)
    a.add_argument("--echo", type=float, default=0.5, help="share of echo samples at the start; falls to 0.05")
    a.add_argument("--shares", type=float, nargs=3, default=[0.55, 0.25, 0.2], help="of dispatch, tool, decide")
    a.add_argument("--decay", type=float, default=0.35, help="part of the time in which the learning rate falls to 0")
    a.add_argument("--full-precision-from", type=float, default=0.85, help="part of the time after which bfloat16 ends")
    a.add_argument("--own-fill", type=float, default=0.0, help="share of steps with the model's own fill as noise")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--eval-minutes", type=float, default=8.0)
    args = a.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = args.out / "tokenizer.json"
    if args.init:
        tokenizer_path.write_bytes((args.init / "tokenizer.json").read_bytes())
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = train_tokenizer(tokenizer_path, Config.vocab_size)
    model = NanoClover(Config())
    if args.init:
        model.load_state_dict({k: v.float() for k, v in load_file(args.init / "model.safetensors").items()})
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    plain = NanoClover(model.c)  # evaluates in float32
    matrices, rest = split_parameters(model)
    muon, adam = Muon(matrices), torch.optim.Adam(rest, betas=(0.9, 0.98), fused=True)
    r, fraction = Random(args.seed), 0.0

    def draw() -> tuple[str, str]:
        share = args.echo if fraction < 0.2 else max(0.05, args.echo * (1 - (fraction - 0.2) / 0.3))
        if r.random() < share:
            return data.echo(r)
        return data.sample(r, dict(zip(data.TASKS_BY_NAME, args.shares, strict=True)))

    stream = batches(draw, tokenizer, args.seed, args.rows, args.chunks, args.blocks, prompt_weight=0.1)
    start = last_eval = time.monotonic()
    step, smooth = 0, (0.0, 0.0)
    set_half(model, True)
    while (fraction := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        if fraction > args.full_precision_from:  # the last part in full precision, which is what evaluation uses
            set_half(model, False)
        scale = learning_rate(fraction, step, args.decay)
        own_steps = r.randint(1, 3) if r.random() < args.own_fill else 0
        causal, preview, balance = losses(model, next(stream), own_steps)
        model.zero_grad(set_to_none=True)
        (causal + preview + 0.01 * balance).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(rest, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * scale
        adam.step()
        muon.step(args.muon_lr * scale)
        step += 1
        keep = min(0.98, 1 - 1 / step)
        smooth = (smooth[0] * keep + causal.item() * (1 - keep), smooth[1] * keep + preview.item() * (1 - keep))
        now = time.monotonic()
        if step % 100 == 0:
            print(
                f"step {step}  causal {smooth[0]:.4f}  preview {smooth[1]:.4f}  lr {scale:.3f}  "
                f"{step / (now - start):.2f} steps/s  cpu {time.process_time() / 60:.1f} min  {args.minutes - (now - start) / 60:.1f} min left",
                flush=True,
            )
        if now - last_eval > 60 * args.eval_minutes:
            last_eval = now
            plain.load_state_dict(model.state_dict())
            causal_scores = {task: evaluate.causal_score(plain, tokenizer, task, 32) for task in data.TASKS_BY_NAME}
            print(
                "held out, autoregressive: " + "  ".join(f"{t} {s:.3f}" for t, s in causal_scores.items()), flush=True
            )
            if causal_scores["dispatch"] > 0.25:  # before, threshold fill only takes long
                print(f"held out: dispatch {evaluate.score(plain, tokenizer, 'dispatch', 32)}", flush=True)
            save_checkpoint(model, args.out)
    plain.load_state_dict(model.state_dict())
    for task in data.TASKS_BY_NAME:
        print(f"held out: {task} {evaluate.score(plain, tokenizer, task, 100)}", flush=True)
    save_checkpoint(model, args.out)


if __name__ == "__main__":
    main()
