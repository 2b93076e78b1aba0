"""A save that a thread writes and publishes while training goes on.

The thread issues no collectives: those of training are issued at the same time, and ranks that issue them in different
orders wait for ever. Each rank's thread writes its data file, and then its entry of the manifest beside it:

    rank_00003.bin
    rank_00003.entry      JSON: the file's size and checksums, or why the rank has failed

The thread of rank 0 waits for the entries of all ranks, then writes the manifest and publishes. A rank that dies never
writes an entry; the next collective of the saver fails then, as that of training does, and rank 0 gives up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

from ..errors import CheckpointError
from .files import not_written
from .host_buffers import HostBuffer
from .manifest import FileEntry
from .ranks import error_text
from .save import Saving

_log = logging.getLogger("unshard")

_POLL_SECONDS = 0.02
_EXIT_SECONDS = 60.0
"""So long a program that ends without `wait` waits for the other ranks, after this rank has written its file."""

_under_way: set[BackgroundSave] = set()


class BackgroundSave:
    """One save on one rank: `fill` on the training's thread, everything else on its own."""

    def __init__(self, what: str, saving: Saving, folder: Path, algorithm: str, keep_last: int | None):
        self.what, self.saving = what, saving
        self._folder, self._algorithm, self._keep_last = folder, algorithm, keep_last
        self._free: SimpleQueue[HostBuffer | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[HostBuffer, int] | BaseException | None] = SimpleQueue()
        self._written, self._stopped = threading.Event(), threading.Event()
        self._write_error: BaseException | None = None
        self._publish_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="unshard checkpoint", daemon=True)

    # -- on the training's thread ----------------------------------------------------------------------------------

    def fill(self, reserve: Callable[[], list[HostBuffer]], copy: Callable[[], None]) -> None:
        """Start the thread and copy this rank's bytes. What fails is raised when all ranks have finished writing."""
        _under_way.add(self)
        self._thread.start()
        try:
            for buffer in reserve():
                self._free.put(buffer)
            copy()
            self._full.put(None)
        except _WritingFailed:
            pass
        except BaseException as error:
            self._full.put(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.saving.forget_tensors()

    def next_buffer(self) -> HostBuffer:
        buffer = self._free.get()
        if buffer is None:
            raise _WritingFailed
        return buffer

    def hand_over(self, buffer: HostBuffer, nbytes: int) -> None:
        self._full.put((buffer, nbytes))

    def finish_writing(self) -> None:
        """Wait until this rank's file is on the disk; raises what failed."""
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def finish_publishing(self) -> None:
        """Wait for the thread. On rank 0: all ranks have to have written their files."""
        self._thread.join()
        if self._publish_error is not None:
            raise self._publish_error

    def end(self) -> None:
        """End the thread, and delete what is not published. No other rank writes any more."""
        self._stopped.set()
        self._thread.join()
        self.saving.clean_up()
        _under_way.discard(self)

    # -- on its own thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            entry = self._write()
        except BaseException as error:
            # Without its frames, which hold the host buffers.
            self._write_error = error.with_traceback(None)
            return
        finally:
            self._written.set()
            self._free.put(None)  # `next_buffer` does not wait for one then
        try:
            if self.saving.rank == 0:
                self._publish(entry)
        except BaseException as error:
            self._publish_error = error.with_traceback(None)

    def _write(self) -> FileEntry | None:
        try:
            entry = self.saving.write(self._folder, self._algorithm, self._full_buffers())
            self._write_entry({"file": entry})
        except BaseException as error:
            self._report(error)
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
        path, text = self._entry_of(self.saving.rank), json.dumps(content)
        try:
            path.with_suffix(".half").write_text(text)
            os.rename(path.with_suffix(".half"), path)
        except OSError as error:
            raise not_written(path, error, 0, len(text)) from error

    def _report(self, error: BaseException) -> None:
        # The disk that has failed may fail again. The ranks exchange their errors in the saver's next collective.
        with contextlib.suppress(CheckpointError):
            self._write_entry({"error": error_text(error)})

    def _entry_of(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:05d}.entry"

    def _publish(self, own: FileEntry | None) -> None:
        files = [own, *(self._entry_from(rank) for rank in range(1, self.saving.size))]
        for rank in range(self.saving.size):
            self._entry_of(rank).unlink()
        self.saving.publish(files, self._algorithm, self._keep_last)

    def _entry_from(self, rank: int) -> FileEntry | None:
        path = self._entry_of(rank)
        while not path.exists():
            if self._stopped.wait(_POLL_SECONDS):
                raise CheckpointError(f"Rank {rank} has not written its file.")
        content = json.loads(path.read_text())
        if "error" in content:
            raise CheckpointError(f"Rank {rank} has failed: {content['error']}")
        return None if content["file"] is None else FileEntry(*content["file"])

    def finish_at_exit(self) -> None:
        """The program ends without `wait`."""
        self._written.wait()
        self._thread.join(_EXIT_SECONDS)
        self.end()
        error = self._write_error or self._publish_error
        if error is not None:
            _log.error("%s failed, and the program ends without wait(): %s", self.what, error_text(error))


class _WritingFailed(Exception):
    """The thread has failed, and its error says why."""


@atexit.register
def _finish_all() -> None:
    for each in list(_under_way):
        each.finish_at_exit()


# A forked process has none of the threads; it would wait for them, and delete what they write.
os.register_at_fork(after_in_child=_under_way.clear)
