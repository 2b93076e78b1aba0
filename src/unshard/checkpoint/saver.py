"""Saving a run while it goes on: training waits for copies to host memory only."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from .background import BackgroundSave
from .folders import check_step, folder_name
from .host_buffers import HostBuffers
from .ranks import begin, on_first_rank, rank_and_size, together
from .save import Saving
from .staging import Staging


class Saver:
    """Saves checkpoints under `path` in the background. All ranks have to call all methods, on the training's thread.

    `keep_last`: as in `save`. `host_bytes`: use at most so much host memory on each rank. The copies then wait for the
    disk, and `save` returns when the last of them is made. None: as much as the rank's part of a checkpoint has.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_last: int | None = None, host_bytes: int | None = None):
        check_step(0, keep_last)
        self._path, self._keep_last = Path(path), keep_last
        self._buffers = HostBuffers(host_bytes)
        self._pending: BackgroundSave | None = None
        self._target: Path | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory that this rank's buffers have."""
        return sum(each.nbytes for each in self._buffers.buffers)

    def prepare(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
    ) -> None:
        """Make the host buffers in the background, so that the first `save` takes no longer than the others.

        Call it after the first step of the optimizer: before, it has no state. Returns at once; `wait` waits for it.
        """
        self.wait()
        what = f"Preparing to save to {self._path}"
        saving = self._planned(what, 0, model, optimizer, scheduler, scaler, data)
        together(what, lambda: self._buffers.prepare(saving.nbytes, saving.on_cuda))

    def save(
        self,
        *,
        model: nn.Module,
        step: int,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
    ) -> None:
        """Begin to save a run in the new folder `step_<step>`; arguments as those of `unshard.checkpoint.save`.

        Returns when this rank's bytes are copied: everything may change then. If the save before is in progress,
        waits for it first; if it failed, raises its error, and nothing new is begun.
        """
        check_step(step, None)
        self.wait()
        what = f"Saving step {step} to {self._path}"
        saving = self._planned(what, step, model, optimizer, scheduler, scaler, data)
        saving.warn(what)
        try:
            folder, algorithm = on_first_rank(what, saving.make_folder)
        except BaseException:
            saving.clean_up()
            raise
        pending = BackgroundSave(what, saving, folder, algorithm, self._keep_last)
        self._pending, self._target = pending, self._path / folder_name(step)
        pending.fill(
            lambda: self._buffers.reserve(saving.nbytes, saving.on_cuda),
            lambda: Staging(pending.next_buffer, pending.hand_over).copy(saving.views()),
        )

    def _planned(
        self, what: str, step: int, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, data: Any
    ) -> Saving:
        begin("save a checkpoint (Saver)", model)
        saving, shared = Saving(self._path, step), {"scheduler": scheduler, "scaler": scaler}
        saving.plan(together(what, lambda: saving.collect(model, optimizer, shared, data)))
        return saving

    def wait(self) -> Path | None:
        """Wait until the save in progress is published; returns its folder, or None if there is none.

        If it failed on any rank, all ranks raise a CheckpointError that names it. The checkpoints that exist stay, and
        the saver can save again.
        """
        self._buffers.wait()
        pending = self._pending
        if pending is None:
            return None
        begun, now = (pending.saving.rank, pending.saving.size), rank_and_size()
        if begun != now:
            raise CheckpointError(
                f"{pending.what} was begun by rank {begun[0]} of {begun[1]}, which is rank {now[0]} of {now[1]} now. "
                "Call wait() before the process group is destroyed."
            )
        self._pending = None
        begin("wait for a checkpoint (Saver.wait)")
        try:
            together(pending.what, pending.finish_writing)
            # All entries are there, so rank 0 waits for nothing but the disk.
            on_first_rank(pending.what, pending.finish_publishing)
        finally:
            pending.end()
        return self._target

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.wait()
        # Else other ranks may not come here, and a collective would wait for them. The save is finished at exit.
