"""A rank that is killed, ends or sleeps inside `unshard.step`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from bed.programs import free_port

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from bed.branches import quick
from bed.stack import loss_of, sharded
import unshard
from unshard.errors import CollectiveError, OrderError

way, units = sys.argv[1:]
dist.init_process_group("gloo")
odd = dist.get_rank() == 2
with quick():
    model = sharded()
    try:
        for number in range(4):
            with unshard.step(model, units=units) as step:
                step.backward(loss_of(model))
                if odd and number == 2:
                    if way == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif way == "ends":
                        sys.exit(3)
                    time.sleep(6)
                step.backward(loss_of(model), weight=2)
        print("weight", step.weight.item(), flush=True)
    except (CollectiveError, OrderError) as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("units", ["keep", "follow"])
@pytest.mark.parametrize("way", ["killed", "ends", "sleeps"])
def test_the_other_ranks_are_told_or_wait(way: str, units: str) -> None:
    common = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, way, units],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if way == "sleeps":
        assert outputs == ["weight 9.0\n"] * 3
    else:
        for text in outputs[:2]:
            assert text.startswith(("CollectiveError", "OrderError")), text
            assert "rank 2" in text, text
