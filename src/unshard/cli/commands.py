"""What each command does. The names of the functions are those of the commands; the result is the exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from .output import progress, show, working

# -- programs; PyTorch's FSDP is replaced as by `unshard run`, also in processes that the tools start ----------------


def plan(given: argparse.Namespace) -> int:
    from .. import tools
    from ..dropin import stand_in
    from ..tools.program import load_program

    with working("planning"), stand_in():
        found = tools.plan(
            load_program(given.program),
            world=given.world,
            mesh=given.mesh,
            batch=given.batch,
            device_memory=given.device_memory,
        )
    show(found)
    return 1 if found.fits is False else 0


def verify(given: argparse.Namespace) -> int:
    from .. import tools
    from ..dropin import stand_in
    from ..tools.program import load_program

    with working("training unsharded and sharded"), stand_in():
        found = tools.verify(
            load_program(given.program), ranks=given.ranks, steps=given.steps, device=given.device, batch=given.batch
        )
    show(found)
    return 0 if found.agree else 1


def precision(given: argparse.Namespace) -> int:
    from .. import tools
    from ..dropin import stand_in
    from ..tools.program import load_program

    with stand_in():
        program = load_program(given.program)
        with _one_rank():
            model = program.sharded(program.model())
            show(tools.precision(model, program.optimizer_of(model), file=io.StringIO()))
    return 0


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Join a process group of one rank, unless the program has made a process group when it was imported."""
    dist = importlib.import_module("torch.distributed")
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def report(given: argparse.Namespace) -> int:
    from .. import tools

    path = tools.report(given.output, *given.paths)
    show({"kind": "report", "path": str(path)}, str(path))
    return 0


def doctor(given: argparse.Namespace) -> int:
    from .. import tools

    with working("looking at this machine") as say:
        found = tools.doctor(given.nproc_per_node, quick=given.quick, say=say)
    if os.environ.get("RANK", "0") == "0":
        show(found)
    return 0 if found.ok else 1


# -- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoint_verify(given: argparse.Namespace) -> int:
    from .. import checkpoint

    try:
        with progress("verifying") as bar:
            folder = checkpoint.verify(given.path, progress=bar) if bar else checkpoint.verify(given.path)
    except checkpoint.CheckpointError as error:
        if not os.path.lexists(given.path):
            raise
        print(f"{given.parser.prog}: {error}", file=sys.stderr)
        show({"kind": "checkpoint verify", "folder": given.path, "complete": False, "error": str(error)}, "")
        return 1
    found = {"kind": "checkpoint verify", "folder": str(folder), "complete": True, "error": None}
    show(found, f"{folder} is complete: all checksums match.")
    return 0


def checkpoint_inspect(given: argparse.Namespace) -> int:
    from .. import checkpoint
    from ..checkpoint.reports import contents

    show(contents(given.path), checkpoint.inspect(given.path))
    return 0


def checkpoint_diff(given: argparse.Namespace) -> int:
    from .. import checkpoint

    with working("comparing"):
        found = checkpoint.diff(*given.paths)
    show({"kind": "checkpoint diff", "equal": found.equal, **dataclasses.asdict(found)}, str(found))
    return 0 if found.equal else 1


def export(given: argparse.Namespace) -> int:
    from .. import checkpoint

    names = ("dtype", "max_file_size", "prefix", "tied_names", "overwrite")
    options: dict[str, Any] = {name: getattr(given, name) for name in names}
    with working("exporting"):
        files = checkpoint.export(given.checkpoint, given.folder, **options)
    show({"kind": "export", "files": [str(each) for each in files]}, "\n".join(map(str, files)))
    return 0
