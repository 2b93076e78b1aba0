"""The end of a program whose process groups have threads of their own."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from bed import world

from unshard.comm.farewell import expect_end
from unshard.comm.process_group import transport_for

# A thread that wants the interpreter as the program ends, as Gloo's do to free the tensors of the last collective.
PROGRAM = """
import os, threading, time
from unshard.comm.farewell import expect_end

def put_down():
    ended.acquire()
    time.sleep(0.02)
    os.write(1, b"put down")

expect_end()
ended = threading.Lock()
ended.acquire()
threading.Thread(target=put_down, daemon=True).start()
ended.release()
"""


def test_threads_get_the_interpreter_before_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "put down"


@world(2)
def test_process_groups_are_waited_for() -> None:
    transport_for(dist.group.WORLD, torch.device("cpu"))
    assert expect_end.cache_info().currsize == 1
