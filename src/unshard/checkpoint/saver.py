"""Saving a run in the background: training waits only for copies to host memory.

A thread per rank writes the copies. It issues no collectives, because training issues its own at the same time, and
ranks that issue collectives in different orders deadlock. Each thread writes its data file, then an entry next to it:

    rank_00003.bin
    rank_00003.entry      JSON: the file's size and checksums, or why the rank failed

Rank 0's thread waits for the entries of all ranks, writes the manifest and publishes. If a rank dies, its entry never
appears; the saver's next collective then fails, and rank 0 gives up.
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

from ..errors import CheckpointError
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
"""At an exit without `wait`, a rank that has written its file waits at most this long for the other ranks."""

_under_way: set[BackgroundSave] = set()


class BackgroundSave:
    """One save on one rank. The training thread fills host buffers, and the save's own thread writes them."""

    def __init__(self, saving: Saving):
        self.saving = saving
        self._free: SimpleQueue[HostBuffer | None] = SimpleQueue()
        """Empty buffers that the thread returns to training; None when the thread has stopped writing."""
        self._full: SimpleQueue[tuple[HostBuffer, int] | BaseException | None] = SimpleQueue()
        """Full buffers that training passes to the thread; at the end, None or the exception that stopped copying."""
        self._written = threading.Event()
        """Set by the thread when this rank's file is on the disk, or when writing has failed."""
        self._stopped = threading.Event()
        """Set by training to make rank 0's thread stop waiting for the entries of other ranks."""
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
            # Keep only the copies, so that training may delete the model while the thread writes them.
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
        """End the thread, and delete the folder unless it is published. Call this when no rank is writing any more."""
        self._stopped.set()
        self._thread.join()
        self.saving.clean_up()
        _under_way.discard(self)

    # -- on the thread of the save ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            entry = self._write()
        except BaseException as error:
            # Drop the frames: they hold host buffers.
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
            # Best effort: the disk may fail again. Ranks also exchange errors in the saver's next collective.
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
        """Finish this save at the exit of a program that did not call `wait`. Log an error instead of raising it."""
        self._written.wait()
        self._thread.join(_EXIT_SECONDS)
        self.end()
        error = self._write_error or self._publish_error
        if error is not None:
            _log.error("%s failed, and the program exits without wait(): %s", self.saving.what, error_text(error))


class _WritingFailed(Exception):
    """Stops the copies on the training thread after the writing thread has failed and stored its own error."""


@atexit.register
def _finish_all() -> None:
    for each in list(_under_way):
        each.finish_at_exit()


# Threads do not survive a fork: a child process would wait for them forever, and delete the parent's files.
os.register_at_fork(after_in_child=_under_way.clear)


class Saver:
    """Saves checkpoints under `path` in the background. All ranks must call all methods, on the training thread.

    `keep_last`: as in `save`. `host_bytes`: limit of each rank's host memory; by default, the size of its file. With a
    smaller limit, copies wait for the disk, so `save` returns later.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_last: int | None = None, host_bytes: int | None = None):
        check_step(0, keep_last)
        self._path, self._keep_last = Path(path), keep_last
        self._buffers = HostBuffers(host_bytes)
        self._pending: BackgroundSave | None = None

    @property
    def host_bytes(self) -> int:
        """Size of this rank's host buffers in bytes."""
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
        """Allocate the host buffers in the background, so that the first `save` is as fast as later ones.

        Call it after the first optimizer step, which creates optimizer state. `wait` waits for the allocation.
        """
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
        """Start saving a run in the new folder `step_<step>`. Takes the same arguments as `unshard.checkpoint.save`.

        First waits for the previous save; if that save failed, raises its error and starts nothing. Returns when this
        rank's bytes are copied to host memory. Training may then change the model and all other arguments.
        """
        check_step(step, None)
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
        """Wait until the save in progress is published; return its folder, or None if no save is in progress.

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
