"""The folders under a checkpoint path: which are published, which is the latest, and what dead saves left.

    step_00000012                         a published checkpoint
    .saving_step_00000012_<random>        a save that is not published yet; its process holds a lock on `lock` in it
    .deleting_step_00000008_<random>      a checkpoint that is being deleted
    damaged_step_00000012_<random>        a folder with a public name that was not whole, and stood in a save's way

A folder gets its public name by one rename, after everything in it is on the disk. It loses the name, by one rename,
before anything in it is deleted. So a folder with a public name is always whole.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from pathlib import Path

from ..errors import ArgumentError, CheckpointError
from .manifest import read_manifest

_log = logging.getLogger("unshard")

_PUBLIC = re.compile(r"step_([0-9]{8,18})")
_SAVING, _DELETING = ".saving_step_", ".deleting_step_"
_DAMAGED = "damaged_"
_LOCK = "lock"
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNLOCKED_SECONDS = 3600.0
"""A folder of a save without a lock file is taken for dead after so long: it is made before its lock file is."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def published(path: Path) -> list[tuple[int, Path]]:
    """The folders with a public name and their steps, newest first. Their manifests are not read."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    found = [(int(match[1]), path / name) for name in names if (match := _PUBLIC.fullmatch(name))]
    return sorted(found, reverse=True)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the checkpoint with the highest step under `path`; None if there is none.

    A folder whose manifest is missing or damaged is not a checkpoint; a warning in the log names it. A manifest that
    cannot be read, for want of a permission for example, is an error.
    """
    if not Path(path).is_dir():
        return None
    for _, folder in published(Path(path)):
        problem = _problem_of(folder)
        if problem is None:
            return folder
        _log.warning("Left out when looking for the latest checkpoint: %s", problem)
    return None


def _problem_of(folder: Path) -> CheckpointError | None:
    """Why a folder is not a whole checkpoint; None if it is one. Raises if the disk does not tell."""
    try:
        read_manifest(folder)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOT_THERE:
            raise
        return error
    return None


def later_than(step: int, path: Path) -> Path | None:
    """The latest checkpoint under `path`, if it is of a later step."""
    later = (folder for each, folder in published(path) if each > step)
    return next((folder for folder in later if _problem_of(folder) is None), None)


def resolve(path: str | os.PathLike[str]) -> Path:
    """`path` if it is a checkpoint, else the latest one under it."""
    given = Path(path)
    if _PUBLIC.fullmatch(given.absolute().name) or (given / "manifest.json").exists():
        return given
    found = latest(given)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {given}: no folder step_<number> with a whole manifest. Check the path."
        )
    return found


class Unpublished:
    """The folder of a save that is in progress, and the lock that says so. For rank 0."""

    def __init__(self, path: Path, step: int):
        self.target = path / folder_name(step)
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        later = later_than(step, path)
        if later is not None:
            raise CheckpointError(
                f"{later} is of a later step than {step}, and would stay the latest checkpoint. If the run has gone "
                "back to an earlier one, move the later ones away or delete them first; else save to another path."
            )
        self._make_way()
        self.folder = path / f"{_SAVING}{step:08d}_{os.urandom(8).hex()}"
        self.folder.mkdir()
        self._lock: int | None = _locked(self.folder / _LOCK, os.O_CREAT)

    def _make_way(self) -> None:
        """For the target: what has its name and is not whole, an interrupted copy for example, gets another one."""
        if not os.path.lexists(self.target):
            return
        problem = _problem_of(self.target)
        if problem is None:
            raise self._exists()
        aside = self.target.with_name(f"{_DAMAGED}{self.target.name}_{os.urandom(8).hex()}")
        os.rename(self.target, aside)
        _log.warning("%s It is %s now.", problem, aside)

    def _exists(self) -> CheckpointError:
        return CheckpointError(f"{self.target} exists already. Delete it first, or save to another path.")

    def publish(self) -> None:
        """Give the folder its public name. Everything in it is on the disk."""
        sync_folder(self.folder)
        try:
            os.rename(self.folder, self.target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another job was quicker
                raise self._exists() from error
            raise
        sync_folder(self.target.parent)
        (self.target / _LOCK).unlink(missing_ok=True)
        self.close()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path, flags: int) -> int | None:
    """An open file with an exclusive lock, which ends with this process; None if another process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(path: Path) -> None:
    """Delete what dead saves and interrupted deletions left under `path`.

    A save holds the lock of its folder as long as its rank 0 lives. So a folder whose lock is free is of a dead save,
    and one whose lock is taken belongs to another job, or to a file system without locks, and stays.
    """
    for name in os.listdir(path):
        folder = path / name
        if name.startswith(_DELETING):
            _delete(folder)
        elif name.startswith(_SAVING):
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = _locked(folder / _LOCK, 0)
    except FileNotFoundError:
        try:
            age = time.time() - folder.stat().st_mtime
        except OSError:
            return  # its save has just published or removed it
        if age > _UNLOCKED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_only(path: Path, count: int, newest: Path) -> None:
    """Delete all but `count` checkpoints: `newest`, which was just published, and those with the highest steps.

    Folders without a whole manifest are neither counted nor deleted.
    """
    others = [folder for _, folder in published(path) if folder != newest and _is_whole(folder)]
    for folder in others[count - 1 :]:
        hidden = path / f"{_DELETING}{folder.name.removeprefix('step_')}_{os.urandom(8).hex()}"
        try:
            os.rename(folder, hidden)
            sync_folder(path)
        except OSError as error:  # the new checkpoint is published: its save has not failed
            _log.warning("%s could not be deleted: %s", folder, error)
            continue
        _delete(hidden)


def _is_whole(folder: Path) -> bool:
    try:
        return _problem_of(folder) is None
    except CheckpointError:
        return False


def _delete(hidden: Path) -> None:
    """What cannot be deleted now is tried again by the next save."""
    if hidden.is_symlink():
        hidden.unlink()
        return
    shutil.rmtree(hidden, ignore_errors=True)
    if hidden.exists():
        _log.warning("%s could not be deleted wholly. Has it another owner?", hidden)


def check_step(step: object, keep_last: object) -> None:
    if type(step) is not int or step < 0 or step >= 10**18:
        raise ArgumentError(f"step must be a Python int from 0 to 10**18 - 1, got {step!r}.")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ArgumentError(f"keep_last must be None or an integer of at least 1, got {keep_last!r}.")
