"""The folders under a checkpoint path: published checkpoints, saves in progress, and leftovers of dead saves.

    step_00000012                         a published checkpoint
    .saving_step_00000012_<random>        a save that is not published yet; rank 0 holds a lock on its file `lock`
    .deleting_step_00000008_<random>      a checkpoint that is being deleted
    damaged_step_00000012_<random>        an incomplete checkpoint that a save of the same step has renamed

A rename publishes a folder after everything in it is on the disk. Another rename hides a folder before anything in it
is deleted. So an interrupted save or deletion never leaves an incomplete folder with a public name.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from ..errors import ArgumentError, CheckpointError
from . import storage
from .manifest import MANIFEST, read_manifest

_log = logging.getLogger("unshard")

_PUBLIC = re.compile(r"step_([0-9]{8,18})")
_SAVING, _DELETING = ".saving_step_", ".deleting_step_"
_DAMAGED = "damaged_"
_LOCK = "lock"
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNLOCKED_SECONDS = 3600.0
"""Age at which a save without a lock file counts as dead. Younger saves may be about to create their lock file."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def published(path: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) for each folder with a public name, highest step first. Manifests are not read."""
    try:
        names = storage.names_in(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    found = [(int(match[1]), path / name) for name in names if (match := _PUBLIC.fullmatch(name))]
    return sorted(found, reverse=True)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint with the highest step under `path`; None if there is none.

    Folders without a valid manifest are skipped with a warning in the log. A manifest that exists and cannot be read
    (for example, for lack of permission) raises a CheckpointError.
    """
    if not storage.is_folder(Path(path)):
        return None
    for _, folder in published(Path(path)):
        problem = _problem_of(folder)
        if problem is None:
            return folder
        _log.warning("Skipped while looking for the latest checkpoint: %s", problem)
    return None


def _problem_of(folder: Path) -> CheckpointError | None:
    """Return the reason why `folder` is not a complete checkpoint, or None. Raise if its manifest cannot be read."""
    try:
        read_manifest(folder)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOT_THERE:
            raise
        return error
    return None


def later_than(step: int, path: Path) -> Path | None:
    """Return the latest complete checkpoint under `path` with a step after `step`, or None."""
    later = (folder for each, folder in published(path) if each > step)
    return next((folder for folder in later if _problem_of(folder) is None), None)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it names a checkpoint, else the latest checkpoint under `path`. Raise if there is none."""
    given = Path(path)
    if _PUBLIC.fullmatch(given.absolute().name) or storage.exists(given / MANIFEST):
        return given
    found = latest(given)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {given}: no folder step_<number> with a valid manifest. Check the path."
        )
    return found


class Unpublished:
    """The folder of a save in progress and the lock on that folder. Only rank 0 creates this object."""

    def __init__(self, path: Path, step: int):
        self.target = path / folder_name(step)
        storage.make_folder(path, exist_ok=True)
        remove_leftovers(path)
        later = later_than(step, path)
        if later is not None:
            raise CheckpointError(
                f"{later} has a later step than {step}, so it would stay the latest checkpoint. If the run went back "
                "to an earlier checkpoint, move or delete the later ones first. Otherwise, save to another path."
            )
        if storage.exists(self.target):
            problem = _problem_of(self.target)
            if problem is None:
                raise self._exists()
            # An incomplete checkpoint, for example an interrupted copy.
            aside = self.target.with_name(f"{_DAMAGED}{self.target.name}_{os.urandom(8).hex()}")
            storage.rename(self.target, aside)
            _log.warning("%s Renamed to %s.", problem, aside)
        self.folder = path / f"{_SAVING}{step:08d}_{os.urandom(8).hex()}"
        storage.make_folder(self.folder)
        self._lock = storage.lock(self.folder / _LOCK, create=True)

    def _exists(self) -> CheckpointError:
        return CheckpointError(f"{self.target} exists already. Delete it first, or save to another path.")

    def publish(self) -> None:
        """Give the folder its public name. Call this when all files in it are on the disk."""
        storage.sync_folder(self.folder)
        try:
            storage.rename(self.folder, self.target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another job published first
                raise self._exists() from error
            raise
        storage.sync_folder(self.target.parent)
        storage.delete(self.target / _LOCK)
        self.close()

    def remove(self) -> None:
        storage.delete(self.folder)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            storage.unlock(self._lock)
            self._lock = None


def remove_leftovers(path: Path) -> None:
    """Delete the folders of dead saves and of interrupted deletions under `path`.

    Rank 0 holds the lock of a save's folder until the save ends or the process dies, so a free lock means a dead save.
    If the lock is taken, or the file system does not support locks, the folder stays.
    """
    for name in storage.names_in(path):
        folder = path / name
        if name.startswith(_DELETING):
            _delete(folder)
        elif name.startswith(_SAVING):
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = storage.lock(folder / _LOCK)
    except FileNotFoundError:
        with suppress(OSError):  # the save has just published or removed the folder
            if storage.age_of(folder) > _UNLOCKED_SECONDS:
                storage.delete(folder)
        return
    except OSError:
        return
    if lock is not None:
        storage.delete(folder)
        storage.unlock(lock)


def keep_only(path: Path, count: int, newest: Path) -> None:
    """Delete all checkpoints except `newest` and the `count` - 1 others with the highest steps.

    `newest` has just been published. Folders without a valid manifest are neither counted nor deleted.
    """
    others = [folder for _, folder in published(path) if folder != newest and _is_whole(folder)]
    for folder in others[count - 1 :]:
        hidden = path / f"{_DELETING}{folder.name.removeprefix('step_')}_{os.urandom(8).hex()}"
        try:
            storage.rename(folder, hidden)
            storage.sync_folder(path)
        except OSError as error:  # the save itself succeeded: the new checkpoint is published
            _log.warning("%s could not be deleted: %s", folder, error)
            continue
        _delete(hidden)


def _is_whole(folder: Path) -> bool:
    try:
        return _problem_of(folder) is None
    except CheckpointError:
        return False


def _delete(hidden: Path) -> None:
    """Delete a checkpoint that was renamed for deletion. If this fails, log a warning: the next save tries again."""
    if not storage.delete(hidden):
        _log.warning("%s could not be deleted completely. Check who owns its files.", hidden)


def check_step(step: object, keep_last: object) -> None:
    if type(step) is not int or step < 0 or step >= 10**18:
        raise ArgumentError(f"step must be a Python int from 0 to 10**18 - 1, got {step!r}.")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ArgumentError(f"keep_last must be None or an integer of at least 1, got {keep_last!r}.")
