"""Where a comparison runs: ranks of NCCL on GPUs, one rank of a simulated job, or CPU processes with Gloo."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from . import loopback, mps

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
    shares_gpu: bool = False
    """Whether all ranks run on one GPU, and talk over sockets."""

    @property
    def device(self) -> torch.device:
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", 0 if self.shares_gpu else self.rank)

    @property
    def has_other_ranks(self) -> bool:
        return self.kind != "simulated" and self.world > 1

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
        if self.has_other_ranks:
            dist.barrier()
            self.synchronize()

    def slowest(self, figure: float) -> float:
        """The largest of all ranks."""
        if not self.has_other_ranks:
            return figure
        largest = torch.tensor(figure, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def __str__(self) -> str:
        device = torch.cuda.get_device_name(0) if self.on_gpu else "CPU"
        how = {"nccl": "NCCL", "gloo": "Gloo", "simulated": "one process as one of them"}[self.kind]
        how += " over sockets, on one GPU" if self.shares_gpu else ""
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
    launched = dist.is_torchelastic_launched() and options.place != "simulated"
    rank = 0
    if launched:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shares_gpu = options.place == "nccl" and torch.cuda.device_count() < world
    if shares_gpu and not launched and not mps.is_there():
        raise ValueError(
            f"--place nccl --world {world} needs as many GPUs, or CUDA's multi-process service ({mps.CONTROL}) to run "
            f"all ranks on one. Here are {torch.cuda.device_count()} GPUs and no such service; --place simulated "
            "needs neither."
        )
    device_type = {"nccl": "cuda", "gloo": "cpu"}.get(options.place, options.device)
    return Place(options.place, world, device_type, options.threads, rank, shares_gpu)


def run(place: Place, work: Work, options: Any) -> Any:
    """What `work(place, options)` returns on rank 0. If there are other ranks, each is a process of its own.

    If torchrun has started the ranks, this process is one of them.
    """
    if not place.has_other_ranks:
        with _joined(place, dist.HashStore() if place.kind == "simulated" else _store()):
            return work(place, options)
    if dist.is_torchelastic_launched():
        store, _, _ = next(dist.rendezvous("env://"))
        with _joined(place, store):
            result = work(place, options)
            dist.barrier()
            return result
    service: AbstractContextManager[dict[str, str]] = mps.running() if place.shares_gpu else nullcontext({})
    with service as environment:
        return _run_ranks(place, work, options, environment)


def _run_ranks(place: Place, work: Work, options: Any, environment: dict[str, str]) -> Any:
    store = _store()
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    ranks = []
    for rank in range(place.world):
        own = {**mps.SOCKETS, **mps.QUEUES, **mps.host_of(rank)} if place.shares_gpu else {}
        arguments = replace(place, rank=rank), store.port, work, options, send, {**environment, **own}
        ranks.append(context.Process(target=_rank, args=arguments))
        ranks[-1].start()
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


def _rank(place: Place, port: int, work: Work, options: Any, send: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables)
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
        torch.cuda.set_device(place.device)
        torch.empty(1, device="cuda")
        if place.shares_gpu:
            torch.cuda.set_per_process_memory_fraction(0.95 / place.world)
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
