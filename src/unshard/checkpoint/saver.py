"""Saves training runs in the background, so training waits only for copies to host memory.

On each rank, a background thread writes the copies to the disk. The thread issues no collectives, because
training issues collectives at the same time and ranks deadlock if their orders differ. The thread writes two files:

    rank_00003.bin        the rank's data file
    rank_00003.entry      JSON with the size and checksums of the data file, or the error of the rank

Rank 0's thread waits for the entries of all ranks, writes the manifest and publishes the checkpoint. If a rank dies,
its entry never appears. The next collective of the saver then fails, and rank 0 stops waiting for the entry.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..comm.order.check import job_failed
from ..errors import CheckpointError
from ..state.model import check_model_and_optimizer
from . import storage
from .folders import check_step
from .host_buffers import HostBuffer, HostBuffers, Staging
from .manifest import FileEntry
from .ranks import begin, error_text, on_first_rank, rank_and_size, together
from .save import Saving

_log = logging.getLogger("unshard")

_SAVE = "save a checkpoint (Saver)"
_POLL_SECONDS = 0.02
_EXIT_SECONDS = 60.0
"""If the program exits without `wait`, rank 0 writes its file and then waits at most this long for other ranks."""
_FAILED_EXIT_SECONDS = 10.0
"""The same limit after a collective has failed. A lost rank writes no file, and launchers restart the job only after
this process has ended."""

_under_way: set[BackgroundSave] = set()


class BackgroundSave:
    """One save on one rank. The training thread fills host buffers, and a background thread writes them to a file."""

    def __init__(self, saving: Saving):
        self.saving = saving
        self._free: SimpleQueue[HostBuffer | None] = SimpleQueue()
        """Empty buffers for the training thread. None means that the background thread has stopped writing."""
        self._full: SimpleQueue[tuple[HostBuffer, int] | BaseException | None] = SimpleQueue()
        """Full buffers for the background thread, followed by None or by the exception that stopped the copies."""
        self._written = threading.Event()
        """Set by the background thread when this rank's file is on the disk or writing has failed."""
        self._stopped = threading.Event()
        """Set by the training thread to stop rank 0's background thread from waiting for other ranks' entries."""
        self._write_error: BaseException | None = None
        self._publish_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="unshard checkpoint", daemon=True)

    # -- on the training thread ----------------------------------------------------------------------------------

    def fill(self, host: HostBuffers) -> None:
        """Start the thread and copy this rank's bytes to host buffers. `finish_writing` later raises any error."""
        _under_way.add(self)
        self._thread.start()
        try:
            for buffer in host.reserve(self.saving.nbytes, self.saving.on_cuda):
                self._free.put(buffer)
            Staging(self._next_buffer, self._full.put).copy(self.saving.views())
            self._full.put(None)
        except _WritingFailed:
            pass
        except BaseException as error:
            self._full.put(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # Keep only the copies, so training can free the model while the background thread writes.
            self.saving.tensors.clear()

    def _next_buffer(self) -> HostBuffer:
        buffer = self._free.get()
        if buffer is None:
            raise _WritingFailed
        return buffer

    def finish_writing(self) -> None:
        """Wait until this rank's file is on the disk. Raise the error if writing failed."""
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def finish_publishing(self) -> None:
        """Wait until the checkpoint is published. Call this on rank 0 after all ranks have written their files."""
        self._thread.join()
        if self._publish_error is not None:
            raise self._publish_error

    def end(self) -> None:
        """Stop the background thread, and delete the folder unless it has been published.

        Call this after writing has finished or failed on all ranks, or when the program exits.
        """
        self._stopped.set()
        self._thread.join()
        self.saving.clean_up()
        _under_way.discard(self)

    # -- on the background thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            entry = self._write()
        except BaseException as error:
            # Drop the traceback, because its frames reference host buffers.
            self._write_error = error.with_traceback(None)
            return
        finally:
            self._written.set()
            self._free.put(None)  # wakes up `_next_buffer`, which then raises
        try:
            if self.saving.rank == 0:
                self._publish(entry)
        except BaseException as error:
            self._publish_error = error.with_traceback(None)

    def _write(self) -> FileEntry | None:
        try:
            entry = self.saving.write(self._full_buffers())
            self._write_entry({"file": entry})
        except BaseException as error:
            # Best effort, because the disk may fail again. The saver's next collective also exchanges errors.
            with contextlib.suppress(CheckpointError):
                self._write_entry({"error": error_text(error)})
            raise
        return entry

    def _full_buffers(self) -> Iterator[memoryview]:
        while True:
            item = self._full.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            buffer, nbytes = item
            yield buffer.view[:nbytes]
            self._free.put(buffer)

    def _write_entry(self, content: dict[str, object]) -> None:
        storage.write_text(self._entry_of(self.saving.rank), json.dumps(content))

    def _entry_of(self, rank: int) -> Path:
        return self.saving.folder / f"rank_{rank:05d}.entry"

    def _publish(self, own: FileEntry | None) -> None:
        files = [own, *(self._entry_from(rank) for rank in range(1, self.saving.size))]
        for rank in range(self.saving.size):
            storage.delete(self._entry_of(rank))
        self.saving.publish(files)

    def _entry_from(self, rank: int) -> FileEntry | None:
        path = self._entry_of(rank)
        while not storage.exists(path):
            if self._stopped.wait(_POLL_SECONDS):
                raise CheckpointError(f"Rank {rank} did not write its file.")
        with storage.open_file(path) as file:
            content = json.load(file)
        if "error" in content:
            raise CheckpointError(f"Rank {rank} failed: {content['error']}")
        return None if content["file"] is None else FileEntry(*content["file"])

    def finish_at_exit(self) -> None:
        """Finish this save when the program exits without calling `wait`. Errors are logged instead of raised."""
        self._written.wait()
        self._thread.join(_FAILED_EXIT_SECONDS if job_failed() else _EXIT_SECONDS)
        self.end()
        error = self._write_error or self._publish_error
        if error is not None:
            _log.error("%s failed, and the program exits without wait(): %s", self.saving.what, error_text(error))


class _WritingFailed(Exception):
    """Raised on the training thread to stop copying after the background thread has failed and stored its error."""


@atexit.register
def _finish_all() -> None:
    for each in list(_under_way):
        each.finish_at_exit()


# Threads do not survive a fork. A child process would wait for them forever, and delete the parent's files.
os.register_at_fork(after_in_child=_under_way.clear)


class Saver:
    """Saves checkpoints under `path` in the background.

    All ranks must call every method from the training thread. If `keep_last` is given, all but the latest `keep_last`
    checkpoints are deleted after each save. `host_bytes` limits the size of each rank's host buffers. By default, the
    buffers hold the rank's whole file. If they are smaller, `save` takes longer because copies wait for the disk.

    Example::

        saver = checkpoint.Saver("checkpoints", keep_last=3)
        saver.save(step=1000, model=model, optimizer=optimizer)
        saver.wait()
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_last: int | None = None, host_bytes: int | None = None):
        check_step(0, keep_last)
        self._path, self._keep_last = Path(path), keep_last
        self._buffers = HostBuffers(host_bytes)
        self._pending: BackgroundSave | None = None

    @property
    def host_bytes(self) -> int:
        """Total size of this rank's host buffers in bytes."""
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
        """Allocate the host buffers in the background, so the first `save` is as fast as later ones.

        Call this after the first optimizer step, which creates the optimizer state. `wait` waits for the allocation.
        `model`, `optimizer`, `scheduler`, `scaler` and `data` are the arguments of `save`.
        """
        check_model_and_optimizer(model, optimizer)
        self.wait()
        saving = Saving(f"Preparing to save to {self._path}", self._path, 0, None)
        begin(_SAVE, model)
        saving.plan(model, optimizer, scheduler, scaler, data)
        together(saving.what, lambda: self._buffers.prepare(saving.nbytes, saving.on_cuda))

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
        """Start saving a training run in the new folder `step_<step>`.

        `model`, `optimizer`, `scheduler`, `scaler` and `data` are the arguments of `unshard.checkpoint.save`. This
        method first waits for the previous save. If that save failed, its error is raised and no new save starts. The
        method returns after this rank's bytes are copied to host buffers. Training may then change all arguments.
        """
        check_step(step, None)
        check_model_and_optimizer(model, optimizer)
        self.wait()
        saving = Saving(f"Saving step {step} to {self._path}", self._path, step, self._keep_last)
        begin(_SAVE, model)
        saving.plan(model, optimizer, scheduler, scaler, data)
        try:
            saving.make_folder()
        except BaseException:
            saving.clean_up()
            raise
        self._pending = BackgroundSave(saving)
        self._pending.fill(self._buffers)

    def wait(self) -> Path | None:
        """Wait until the save in progress is published, and return its folder. Return None if no save is in progress.

        If the save failed on any rank, all ranks raise a CheckpointError that names the rank. Existing checkpoints stay
        unchanged, and the saver can save again.
        """
        self._buffers.wait()
        pending = self._pending
        if pending is None:
            return None
        begun, now = (pending.saving.rank, pending.saving.size), rank_and_size()
        if begun != now:
            raise CheckpointError(
                f"{pending.saving.what} was started as rank {begun[0]} of {begun[1]}, and this is rank {now[0]} of "
                f"{now[1]} now. Call wait() before the process group is destroyed."
            )
        self._pending = None
        begin("wait for a checkpoint (Saver.wait)")
        try:
            together(pending.saving.what, pending.finish_writing)
            # All entries exist now, so rank 0 waits only for the disk.
            on_first_rank(pending.saving.what, pending.finish_publishing)
        finally:
            pending.end()
        return pending.saving.target

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.wait()
        # After an exception, other ranks may not get here, and a collective would hang. The save ends at program exit.
