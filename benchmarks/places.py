"""Where a comparison runs: one GPU with NCCL, one rank of a simulated job, or several CPU processes with Gloo."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from . import loopback

KINDS = ("nccl", "simulated", "gloo")
_TIMEOUT = timedelta(seconds=300)

Work = Callable[["Place", Any], Any]


@dataclass(frozen=True)
class Place:
    """One rank of a job; `simulated` has no other ranks, whatever `world` says."""

    kind: str
    world: int
    device_type: str
    threads: int = 1
    rank: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that prints."""
        return self.rank == 0

    def for_memory(self) -> Place:
        """Where memory is counted instead: Gloo's threads let go of what they sent, unseen by the profiler."""
        return replace(self, kind="simulated") if self.kind == "gloo" else self

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks begin what follows together."""
        self.synchronize()
        if self.kind == "gloo" and self.world > 1:
            dist.barrier()

    def __str__(self) -> str:
        device = torch.cuda.get_device_name(0) if self.on_gpu else "CPU"
        how = {"nccl": "NCCL", "gloo": "Gloo", "simulated": "one process as one of them"}[self.kind]
        return f"{device}, {self.world} rank{'s' if self.world > 1 else ''}, {how}"


def add_arguments(parser: argparse.ArgumentParser, one_rank: bool = False) -> None:
    """The flags that choose a place. `one_rank`: what is measured does not depend on other ranks."""
    gpu = torch.cuda.is_available()
    default = ("nccl" if one_rank else "simulated") if gpu else "gloo"
    parser.add_argument("--place", choices=KINDS, default=default, help=f"here: {default}")
    gloo = 1 if one_rank else 2
    parser.add_argument("--world", type=int, help=f"ranks; by default nccl 1, simulated 8, gloo {gloo}")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="of a simulated job"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per process, where the device is a CPU")
    parser.set_defaults(gloo_world=gloo)


def chosen(options: argparse.Namespace) -> Place:
    worlds = {"nccl": 1, "simulated": 8, "gloo": options.gloo_world}
    world = worlds[options.place] if options.world is None else options.world
    if options.place == "nccl" and world != 1:
        raise ValueError("NCCL needs a GPU per rank; here it runs one rank. For more, --place simulated --world N.")
    device_type = {"nccl": "cuda", "gloo": "cpu"}.get(options.place, options.device)
    return Place(options.place, world, device_type, options.threads)


def run(place: Place, work: Work, options: Any) -> Any:
    """What `work(place, options)` returns on rank 0; with Gloo, every rank is a process of its own."""
    if place.kind != "gloo" or place.world == 1:
        with _joined(place, dist.HashStore() if place.kind == "simulated" else _store()):
            return work(place, options)
    store = _store()
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(replace(place, rank=rank), store.port, work, options, send))
        for rank in range(place.world)
    ]
    for process in ranks:
        process.start()
    send.close()  # so that the end of all ranks is the end of the pipe
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError("the ranks ended without a result; what they wrote says why") from None
    finally:
        for process in ranks:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()


def _store() -> dist.TCPStore:
    """On a port that is free, so that two benchmarks can run at once."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _rank(place: Place, port: int, work: Work, options: Any, send: Connection) -> None:
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        with _joined(place, store):
            result = work(place, options)
            if place.rank == 0:
                send.send(result)
            dist.barrier()  # the first to leave would take the connections of the others with it
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # Gloo's threads may wait for the others, and Python for Gloo's threads


@contextlib.contextmanager
def _joined(place: Place, store: Any) -> Iterator[None]:
    backend = {"simulated": loopback.NAME}.get(place.kind, place.kind)
    if place.kind == "simulated":
        loopback.register()
    if place.on_gpu:
        torch.cuda.set_device(0)
        torch.empty(1, device="cuda")
    threads, hook = torch.get_num_threads(), sys.excepthook
    if not place.on_gpu:
        torch.set_num_threads(place.threads)
    options: dict[str, Any] = {"device_id": place.device} if place.kind == "nccl" else {}
    try:
        with warnings.catch_warnings():
            # Torch about itself: a CPU without instructions for bf16, events that a profiler drops.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed|Warning: Profiler clears events")
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.world, timeout=_TIMEOUT, **options
            )
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        sys.excepthook = hook  # init_process_group wraps it
