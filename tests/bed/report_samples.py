"""Results of every kind, as the tools return them for a model of 24 blocks and 200 steps on 8 ranks."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

GIB = 2**30
BLOCKS = 24
UNITS = ["embed", *(f"blocks.{i}" for i in range(BLOCKS)), ""]
RANKS = list(range(8))


def _units(ran: bool = True) -> list[dict[str, Any]]:
    """A recording knows the ranks of each unit, a plan and a ledger the sizes of the shards."""
    sizes = {"embed": 131_072_000, "": 131_076_096}
    return [
        {
            "name": name,
            "parameters": 1 if name == "embed" else 2 if not name else 12,
            "elements": sizes.get(name, 201_347_072),
            "bytes": 4 * sizes.get(name, 201_347_072),
            **({"ranks": RANKS} if ran else {"shards": 8, "bytes_per_shard": [4 * 2**20] * 7 + [2**20]}),
        }
        for name in UNITS
    ]


def _timeline(measured: bool) -> list[dict[str, Any]]:
    rounds = random.Random(measured)
    rows, state, activations, gradients = [], 4.8 * GIB, 0.0, 0.0
    stages = [("forward", name) for name in UNITS] + [("backward", name) for name in reversed(UNITS)]
    for stage, name in stages:
        activations += 1.1 * GIB if stage == "forward" else -1.1 * GIB
        gradients += 0 if stage == "forward" else 0.093 * GIB
        noise = 1 + (rounds.random() * 0.06 if measured else 0)
        rows.append(
            {
                "at": f"{stage} {name or '(root)'}",
                "parameters": int(2.4 * GIB),
                "gradients": int(gradients),
                "optimizer state": int(state),
                "all-gathers": int(1.5 * GIB * noise),
                "reductions": int(0.75 * GIB) if stage == "backward" else 0,
                "activations": int(max(0.0, activations) * noise),
                "buffers": 2**26,
                "other": int(0.4 * GIB * noise) if measured else 0,
            }
        )
    return rows


def _memory(kind: str) -> dict[str, Any]:
    timeline = _timeline(kind == "ledger")
    kinds = [key for key in timeline[0] if key != "at"]
    top = max(timeline, key=lambda at: sum(at[key] for key in kinds))
    return {
        "kind": kind,
        "unshard": "0.2.0",
        "world": 8,
        "device_memory": 40 * GIB,
        "peak": sum(top[key] for key in kinds),
        "peak_at": top["at"],
        "fits": True,
        "rows": [{"kind": key, "at_rest": timeline[0][key], "at_peak": top[key]} for key in kinds],
        "timeline": timeline,
        "largest": [
            {"what": "lm_head.weight gradient", "kind": "gradients", "bytes": 524_288_000},
            {"what": "blocks.0.mlp.up.weight unsharded", "kind": "all-gathers", "bytes": 134_217_728},
        ],
        "advice": [
            {"change": "activation checkpointing of every block", "peak": 14 * GIB, "fits": True},
            {"change": "reshard_after_forward=False", "peak": 62 * GIB, "fits": False},
        ],
        "units": _units(ran=False),
    }


def _times() -> dict[str, Any]:
    draw = random.Random(3)
    units = []
    for name in UNITS:
        share = 0.3 if name in ("embed", "") else 1.0
        exposed = 6.1 if name == "embed" else draw.random() * 1.4
        units.append(
            {
                "name": name,
                "forward_ms": round(9.7 * share * (1 + draw.random() / 9), 3),
                "backward_ms": round(19.9 * share * (1 + draw.random() / 9), 3),
                "all_gather_ms": round(7.9 + draw.random(), 3),
                "all_gather_exposed_ms": round(exposed, 3),
                "reduce_ms": round(9.1 + draw.random(), 3),
                "reduce_exposed_ms": round(exposed / 2, 3),
            }
        )
    ranks = [{"rank": r, "step_ms": 812.5 + (31.2 if r == 5 else draw.random()), "exposed_ms": 61.7} for r in RANKS]
    return {
        "kind": "timeline",
        "unshard": "0.2.0",
        "steps": 20,
        "device": "cuda",
        "ranks": ranks,
        "slowest": 5,
        "units": units,
    }


def _watch() -> dict[str, Any]:
    draw = random.Random(4)
    norms = [
        {
            "step": step,
            "name": name,
            "gradient": {"norm": 3 / (1 + step / 20) / (1 + i) * (1 + draw.random() / 3), "max": 0.3, "mean": 1e-4},
            "value": {"norm": 51.0, "max": 1.2, "mean": 0.0},
        }
        for step in range(1, 201, 5)
        for i, name in enumerate(UNITS)
    ]
    scale, scaler = 65536.0, []
    for step in range(1, 201):
        skipped = step in (3, 4, 118)
        scale = scale / 2 if skipped else scale * 2 if step % 60 == 0 else scale
        why = "blocks.3.mlp.down.weight: gradient is inf on rank 2" if skipped else ""
        scaler.append({"step": step, "scale": scale, "skipped": skipped, "why": why})
    finding = {
        "step": 118,
        "what": "gradient",
        "unit": "blocks.3",
        "parameter": "blocks.3.mlp.down.weight",
        "ranks": [2],
        "elements": 17,
        "dtype": "fp16",
        "largest_finite": 64992.0,
        "text": "Step 118: the gradient of blocks.3.mlp.down.weight has 17 infinite elements on rank 2.",
    }
    return {"kind": "watch", "unshard": "0.2.0", "findings": [finding], "norms": norms, "scaler": scaler}


def _verify() -> dict[str, Any]:
    differs = {
        "what": "gradient",
        "name": "blocks.7.attention.q.bias",
        "step": 2,
        "difference": 3.4e-3,
        "tolerance": 1e-5,
    }
    causes = ["the loss is a mean over tokens, and ranks have different numbers of tokens"]
    runs = [
        {"ranks": 2, "agree": True, "differs": None, "causes": []},
        {"ranks": 4, "agree": False, "differs": differs, "causes": causes},
    ]
    return {"kind": "verify", "unshard": "0.2.0", "agree": False, "steps": 3, "runs": runs}


def _precision() -> dict[str, Any]:
    dtypes = {"stored": "fp32", "gathered": "bf16", "computed": "bf16", "wire": "fp32", "reduced": "fp32"}
    units = [
        {"name": unit["name"], "parameters": [f"{unit['name']}.{i}" for i in range(unit["parameters"])], **dtypes}
        for unit in _units()
    ]
    findings = ["Unit '(root)': the model returns bf16, so a loss of its output is computed in 16 bits."]
    return {"kind": "precision", "unshard": "0.2.0", "units": units, "findings": findings}


def _doctor() -> dict[str, Any]:
    rows = [
        {"what": "torch", "value": "2.13.0", "ok": True, "advice": ""},
        {"what": "NCCL_P2P_DISABLE", "value": "1", "ok": False, "advice": "unset it: copies go through the host"},
        {"what": "devices", "value": "8", "ok": None, "advice": ""},
    ]
    return {"kind": "doctor", "unshard": "0.2.0", "rows": rows}


def _hang() -> dict[str, Any]:
    stack = ["train.py:88 train", "train.py:41 evaluate", "torch/nn/modules/module.py:1775 _call_impl"]
    rows = [
        {
            "rank": rank,
            "host": "node-0",
            "pid": 4100 + rank,
            "state": "outside" if rank == 5 else "waits",
            "waits_for": None if rank == 5 else "all-gather unit 'blocks.3'",
            "unit": "blocks.3",
            "line": "train.py:41" if rank == 5 else "train.py:88",
            "stack": stack,
            "threads": {"loader": ["queue.py:171 get"]},
        }
        for rank in RANKS
    ]
    finding = "Rank 5 never reached the all-gather of unit 'blocks.3': it is in evaluate (train.py:41)."
    return {
        "kind": "hang",
        "unshard": "0.2.0",
        "position": 1042,
        "collective": "all-gather unit 'blocks.3'",
        "missing": [5],
        "rows": rows,
        "finding": finding,
    }


def _recording() -> dict[str, Any]:
    draw = random.Random(5)
    steps = []
    for step in range(1, 201):
        loss = 2.2 + 8.6 * math.exp(-step / 35) + draw.gauss(0, 0.05)
        steps.append(
            {
                "step": step,
                "seconds": (4.2 if step == 1 else 0.81) + abs(draw.gauss(0, 0.01)),
                "loss": math.inf if step == 118 else loss,
                "lr": 3e-4 * min(1, step / 20),
                "grad_norm": 2 * math.exp(-step / 80) + draw.random() / 5,
                "allocated": int(7.3 * GIB),
                "peak": int((32 if step > 1 else 31) * GIB),
            }
        )
    return {
        "kind": "recording",
        "unshard": "0.2.0",
        "model": "Transformer",
        "world": 8,
        "torch": "torch 2.13.0",
        "device": "NVIDIA H100",
        "started": "2026-01-12 09:30",
        "error": None,
        "units": _units(),
        "results": [],
        "steps": steps,
        "ranks": [{"rank": rank, "step_ms": 812.0 + rank} for rank in RANKS],
    }


def samples() -> dict[str, dict[str, Any]]:
    """Return one result of each kind, by its kind."""
    found = [_memory("plan"), _memory("ledger"), _times(), _watch(), _verify(), _precision(), _doctor(), _hang()]
    return {each["kind"]: each for each in [*found, _recording()]}


def write_recording(folder: Path) -> Path:
    """Write the sample recording as `unshard.tools.record` does."""
    recording = samples()["recording"]
    lines = "".join(json.dumps(step) + "\n" for step in recording.pop("steps"))
    (folder / "rank0.jsonl").write_text(lines)
    (folder / "summary.json").write_text(json.dumps(recording))
    return folder
