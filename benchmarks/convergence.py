"""Losses of FSDP2 and unshard over a whole training run, step by step.

    python -m benchmarks.convergence --place nccl --json convergence.json    # two ranks on as many GPUs, or on one
    python -m benchmarks.convergence --place gloo --steps 20 --seeds 1 --layers 1 --dim 32 --seq 16 --batch 4
    python -m benchmarks.picture convergence.svg convergence.json

Trains the model of examples/train_bytes.py (10 M parameters by default) on its data. For each seed and precision, both
sides start from the same weights, read the same windows in the same order and use the same optimizer. `bf16` and `fp16`
compute in that dtype and reduce gradients in fp32; `fp16` scales the loss, each side with its own `GradScaler`.
Algorithms are deterministic (`torch.use_deterministic_algorithms`), so that a difference comes from the sharding.

`identical losses` and `identical weights` compare bits, on all ranks. `difference` is the largest relative difference
between the losses of one step. The JSON file keeps the first, every tenth and the last loss. It is written again after
each run of both sides.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import unshard

from . import measure, places, tables
from .command import parser_for
from .places import Place
from .tables import Row

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIDES = ("fsdp2", "unshard")
THINNED = 10
COLUMNS = {"precision": "precision", "seed": "seed", "first": "first loss", "last": "last loss"}
COLUMNS |= {"same_losses": "identical losses", "same_weights": "identical weights", "difference": "difference"}
COLUMNS |= {"seconds_fsdp2": "FSDP2 s", "seconds_unshard": "unshard s"}

demo = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_bytes.py")))


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # all memory is written before it is read
    data = demo.load_corpus(options.seq)[0]
    rows: list[Row] = []
    for seed in range(options.seeds):
        for precision in options.precisions:
            found = {side: _trained(side, precision, seed, data, place, options) for side in SIDES}
            rows.append({"precision": precision, "seed": seed, **_compared(found)})
            tables.show(place, f"{options.steps} steps, {place}", rows[-1:], COLUMNS)
            tables.save(options.json, place, options, convergence=rows)
    return {"convergence": rows}


def _trained(
    side: str, precision: str, seed: int, data: Tensor, place: Place, options: Any
) -> tuple[Tensor, Any, float]:
    """Return the losses, by rank and step, the final weights and the seconds."""
    args = argparse.Namespace(**{**vars(options), "seed": seed})
    torch.manual_seed(seed)
    model = demo.ByteTransformer(args.layers, args.dim, args.seq).to(place.device)
    _shard(model, side, DTYPES[precision], place)
    scaled = precision == "fp16"
    # A fused AdamW takes fewer calls, but gets the scale as a plain tensor beside DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=not scaled, foreach=scaled)
    scaler = (unshard.optim.GradScaler if side == "unshard" else torch.amp.GradScaler)(
        place.device_type, enabled=scaled
    )
    losses = []
    place.meet()
    began = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = demo.learning_rate(step, args)
        loss = demo.loss_of(model, data, demo.draw_starts(data, step, args), args.seq, place.device)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mine = torch.stack(losses)
    place.synchronize()
    seconds = time.perf_counter() - began
    ranks = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(ranks, mine)
    weights = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    del model, optimizer
    measure.release(place)
    return torch.stack(ranks).cpu(), weights, seconds


def _shard(model: nn.Module, side: str, dtype: torch.dtype | None, place: Place) -> None:
    if side == "unshard":
        from unshard import MixedPrecisionPolicy, fully_shard
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # type: ignore[assignment]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    mesh = init_device_mesh(place.device_type, (place.world,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _compared(found: dict[str, tuple[Tensor, Any, float]]) -> Row:
    (theirs, their_weights, their_seconds), (ours, our_weights, our_seconds) = (found[side] for side in SIDES)
    curves = {side: found[side][0].double().mean(0) for side in SIDES}
    row: Row = {"first": curves["unshard"][0].item(), "last": curves["unshard"][-1].item()}
    row["same_losses"] = torch.equal(theirs, ours)
    row["same_weights"] = all(torch.equal(each, our_weights[name]) for name, each in their_weights.items())
    row["difference"] = ((ours - theirs).abs() / theirs.abs()).max().item()
    row |= {"seconds_fsdp2": their_seconds, "seconds_unshard": our_seconds}
    last = ours.shape[1]
    row["steps"] = sorted({1, *range(THINNED, last, THINNED), last})
    row["losses"] = {
        side: [round(curve[step - 1].item(), 6) for step in row["steps"]] for side, curve in curves.items()
    }
    return row


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, own_sides=True)
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side and precision, with seeds from 0")
    parser.add_argument(
        "--precisions", type=lambda text: text.split(","), default="fp32,bf16,fp16", help="some of these"
    )
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model, one unit each")
    parser.add_argument("--dim", type=int, default=640, help="width of the model, a multiple of 32")
    parser.add_argument("--seq", type=int, default=128, help="bytes per window")
    parser.add_argument("--batch", type=int, default=16, help="windows per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.set_defaults(place="nccl" if torch.cuda.is_available() else "gloo", world=2)
    return parser


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    if unknown := set(options.precisions) - set(DTYPES):
        raise SystemExit(f"no such precision: {', '.join(sorted(unknown))}; there are {', '.join(DTYPES)}")
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
