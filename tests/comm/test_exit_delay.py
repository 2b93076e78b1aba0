"""The end of a program whose process groups have threads of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from bed import world

from unshard.comm.process_group import EXIT_DELAY, delay_exit
from unshard.comm.transports import transport_for

# A thread that needs the interpreter once the main thread has ended, as Gloo's do to free the tensors of the last
# collective. The delay is the only one who lets it begin, and lasts here until it is done.
PROGRAM = """
import os, threading, time
from unshard.comm.process_group import EXIT_DELAY, delay_exit

begin, done = threading.Event(), threading.Event()

def free_tensors():
    begin.wait()
    os.write(1, b"freed")
    done.set()

def delay(seconds):
    os.write(1, f"{seconds} s: ".encode())
    begin.set()
    done.wait()

time.sleep = delay
delay_exit()
threading.Thread(target=free_tensors, daemon=True).start()
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such threads do no harm from Python 3.14 on")
def test_threads_get_the_interpreter_before_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == f"{EXIT_DELAY} s: freed"


@world(2)
def test_process_groups_are_waited_for() -> None:
    transport_for(dist.group.WORLD, torch.device("cpu"))
    assert delay_exit.cache_info().currsize == 1
