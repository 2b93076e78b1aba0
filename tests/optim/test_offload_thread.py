"""The thread of steps on the host: it takes nothing from other threads, and ends when all of them have."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, threading, time
import torch
from unshard.optim import offload as host

torch.set_num_threads(2)
host.cores_of_this_rank = lambda: 5
found = {}


def in_thread(name):
    thread = threading.Thread(target=lambda: found.update({name: torch.get_num_threads()}))
    thread.start()
    thread.join()


in_thread("before")
found["there"] = host.submit(torch.get_num_threads).result()
in_thread("after")
print(found["before"], found["there"], found["after"], torch.get_num_threads())
print(repr(host.submit(lambda: 1 / 0).exception()))
child = os.fork()
if not child:
    print("a child:", host.submit(lambda: 3).result(), flush=True)
    os._exit(0)
os.waitpid(child, 0)


def train():
    threading.main_thread().join()
    time.sleep(0.1)
    print("main has ended:", host.submit(lambda: 7).result())
    host.submit(lambda: (time.sleep(0.2), print("done before the program ends")))


threading.Thread(target=train).start()
"""


def test_the_thread_of_offloaded_steps() -> None:
    done = subprocess.run([sys.executable, "-u", "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "2 5 2 2",
        "ZeroDivisionError('division by zero')",
        "a child: 3",
        "main has ended: 7",
        "done before the program ends",
    ], done.stderr
    assert done.returncode == 0
