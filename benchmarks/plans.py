"""Checkpoint plans of many ranks, without these ranks: what each rank would describe, from the shapes of a model."""

from __future__ import annotations

import pickle
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unshard.checkpoint.files import CheckpointFiles
from unshard.checkpoint.manifest import BLOCK_BYTES, MANIFEST, FileEntry, Manifest, manifest_bytes
from unshard.checkpoint.optimizer import SHARDED, merged
from unshard.checkpoint.plan import Described, make_plan
from unshard.checkpoint.ranks import pack, unpacked
from unshard.checkpoint.save import RankEntry
from unshard.checkpoint.values import encode_apart, rng_state
from unshard.layout.shardings import FlatSharding, RowSharding, flat_offsets
from unshard.state.boxes import Box, boxes_of_range, full_box

from .formulas import Shape

Shapes = dict[str, Shape]
STATE = ("exp_avg", "exp_avg_sq")


def llama(layers: int, width: int, keys: int, hidden: int, vocabulary: int = 128256) -> list[Shapes]:
    """Parameters by unit: the root's own, and one unit per block."""
    block = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    block |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)}
    block |= {"mlp.down_proj": (width, hidden), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    root = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,), "lm_head": (vocabulary, width)}
    blocks = [{f"model.layers.{n}.{name}": shape for name, shape in block.items()} for n in range(layers)]
    return [{f"{name}.weight": shape for name, shape in unit.items()} for unit in (root, *blocks)]


MODELS = {"8b": llama(32, 4096, 1024, 14336), "70b": llama(80, 8192, 1024, 28672)}


def boxes_of(kind: str, unit: Shapes, rank: int, world: int, replicas: int) -> dict[str, tuple[Box, ...]]:
    """The boxes of a unit's parameters on a rank, for `fully_shard` ("plain", "columns") or the wrapper."""
    shards = world // replicas
    rank %= shards
    if kind == "wrapper":
        found, numels = {}, [torch.Size(shape).numel() for shape in unit.values()]
        offsets = flat_offsets(numels, shards, 4, aligned=True)
        for (name, shape), begin in zip(unit.items(), offsets.begins, strict=True):
            sharding = FlatSharding(shape, _stride(shape), begin, offsets.shard_numel, shards)
            found[name] = tuple(box for _, box in boxes_of_range(shape, *sharding.elements(rank)))
        return found
    return {name: _rows(kind, shape, rank, shards) for name, shape in unit.items()}


def _stride(shape: Shape) -> Shape:
    return torch.empty(shape, device="meta").stride()


def _rows(kind: str, shape: Shape, rank: int, shards: int) -> tuple[Box, ...]:
    dim = int(kind == "columns" and len(shape) > 1 and shape[1] % shards == 0)
    first, count = RowSharding(shape, shards, dim).rows(rank)
    begin, size = [0] * len(shape), list(shape)
    begin[dim], size[dim] = first, count
    return (Box(tuple(begin), tuple(size)),) if count else ()


def entry_of(kind: str, units: list[Shapes], rank: int, world: int, replicas: int = 1) -> RankEntry:
    """What `Saving.collect` returns on a rank, for a model in fp32 and its Adam."""
    groups: dict[Described, list[str]] = {}
    states: dict[str, Any] = {}
    for unit in units:
        held = boxes_of(kind, unit, rank, world, replicas)
        for name, shape in unit.items():
            if held[name] or rank == 0:
                groups.setdefault(Described("float32", shape, False, held[name]), []).append(f"model/{name}")
            if held[name]:
                names = [f"optimizer/{key}/{name}" for key in STATE]
                groups[Described("float32", shape, False, held[name])] += names
                states[name] = {"step": {"$": "tensor", "dtype": "float32", "shape": [], "data": "AACAPw=="}}
                states[name] |= dict.fromkeys(STATE, SHARDED)
    entry = RankEntry(step=1)
    stored: dict[str, torch.Tensor] = {}
    entry.own["rng"] = encode_apart(rng_state(), f"rng/{rank}", stored.__setitem__, world)
    for name, value in stored.items():
        groups[Described("uint8", tuple(value.shape), True, (full_box(value.shape),))] = [name]
    entry.tensors = {tuple(names): described for described, names in groups.items()}
    names = [name for unit in units for name in unit]
    options = {"lr": 0.001, "betas": {"$": "tuple", "items": [0.9, 0.999]}, "eps": 1e-8, "weight_decay": 0.01}
    entry.optimizer = {"defaults": sorted(options), "groups": [{"params": names, "options": options}]}
    entry.optimizer |= {"state": states, "others": {}}
    return entry


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the CPU time in seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


def plan_row(units: list[Shapes], kind: str, world: int, replicas: int = 1) -> dict[str, Any]:
    """Plan, write and read the checkpoint of a job. Only the sending and the tensors' bytes are left out."""
    sent: list[bytes] = []
    packing = 0.0
    for rank in range(world):
        entry = entry_of(kind, units, rank, world, replicas)
        data, seconds = timed(lambda entry=entry: pickle.dumps((pack(vars(entry).values()), None)))
        packing = max(packing, seconds)
        sent.append(data)
    row: dict[str, Any] = {"kind": kind, "world": world, "packing": packing}
    row["sent_mib"] = sum(map(len, sent)) / 2**20

    def unpack() -> list[RankEntry]:
        received = [pickle.loads(data)[0] for data in sent]  # as `all_gather_object` does
        return [RankEntry(*fields) for fields in unpacked(received)]

    entries, row["unpacking"] = timed(unpack)
    (plan, nbytes), row["planning"] = timed(lambda: make_plan([each.tensors for each in entries]))
    row["plan"] = row["packing"] + row["unpacking"] + row["planning"]
    row["tensors"], row["boxes"] = len(plan), sum(len(each.boxes) for each in plan.values())
    row["file_spread"] = max(nbytes) / max(min(nbytes), 1)
    files = [
        FileEntry(f"rank_{rank:05d}.bin", each, ["0" * 8] * -(-each // BLOCK_BYTES)) for rank, each in enumerate(nbytes)
    ]

    def write() -> bytes:
        values = {"optimizer": merged([each.optimizer for each in entries]), "ranks": [each.own for each in entries]}
        return manifest_bytes(Manifest(1, world, "crc32", BLOCK_BYTES, files, plan, {}, values))

    content, row["writing"] = timed(write)
    row["manifest_mib"] = len(content) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, MANIFEST).write_bytes(content)
        found, row["reading"] = timed(lambda: CheckpointFiles(Path(folder)))
    reader = random.Random(0).randrange(world)
    mine = [(name, each) for unit in units for name, each in boxes_of(kind, unit, reader, world, replicas).items()]

    def look_up() -> int:
        names = [
            (f"{part}/{name}", boxes) for name, boxes in mine for part in ("model", *(f"optimizer/{k}" for k in STATE))
        ]
        return sum(
            1 for name, boxes in names for box in boxes for _ in found.blocks_of(found.manifest.tensors[name], box)
        )

    row["found"], row["lookup"] = timed(look_up)
    return row
