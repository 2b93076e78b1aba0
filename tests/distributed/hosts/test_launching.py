"""`unshard run` on several hosts, with the options that torchrun has for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bed.hosts import hosts

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
gradient = model.weight.grad.full_tensor().sum().item()
where = f"{os.uname().nodename} {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
facts = [f"rank {rank} of {dist.get_world_size()} on {where}", fully_shard.__module__, gradient, sys.argv[1:]]
sys.stdout.write(", ".join(map(str, facts)) + "\\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""

STATIC = "--nnodes 2 --nproc-per-node 2 --node-rank {host} --master-addr {first} --master-port 29511"
C10D = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=host0:29512 --rdzv-id=7"
WAYS = {
    "static": STATIC,
    "underscores": STATIC.replace("-per-node", "_per_node").replace("-rank", "_rank").replace("master-", "master_"),
    "c10d": f"{C10D} --local-addr {{own}}",
    "elastic": f"{C10D.replace('--nnodes=2', '--nnodes=1:2')} --rdzv-conf last_call_timeout=20,join_timeout=120",
}


@pytest.mark.parametrize("way", WAYS)
def test_options_of_torchrun(tmp_path: Path, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["--nnodes", "9"]  # of the program
    with hosts(2, 2, tmp_path) as bed:
        running = []
        for host in range(2):
            options = WAYS[way].format(host=host, first=bed.address(0), own=bed.address(host)).split()
            command = [sys.executable, "-m", "unshard.cli", "run", *options, program, *arguments]
            running.append(bed.start(host, command))
        done = [each.finish(300) for each in running]
    assert [each.status for each in done] == [0, 0], done
    lines = sorted(line for each in done for line in each.output.splitlines() if line.startswith("rank "))
    places = {line.partition(",")[0] for line in lines}
    assert len(places) == 4 and {place.partition(" on ")[2] for place in places} == {
        f"host{host} {rank} of 2" for host in range(2) for rank in range(2)
    }
    assert len(lines) == 4, lines
    assert all(line.endswith(f", unshard.fsdp2.fully_shard, 32.0, {arguments}") for line in lines), lines
