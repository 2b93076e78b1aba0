"""Names, publishes and deletes the folders under a checkpoint path.

    step_00000012                         a published checkpoint
    .saving_step_00000012_<random>        a save in progress, for which rank 0 locks the file `lock` in this folder
    .deleting_step_00000008_<random>      a checkpoint that is being deleted
    damaged_step_00000012_<random>        an incomplete checkpoint that a later save of the same step has renamed

A save renames its folder to the public name after all files are on the disk. A deletion first renames the folder to a
hidden name. An interrupted save or deletion therefore never leaves an incomplete folder with a public name.
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
"""Age at which a save folder without a lock file is deleted. Before that, the save may still create the lock file."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def published(path: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) for each folder named `step_<number>`, highest step first, without reading manifests."""
    try:
        names = storage.names_in(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    found = [(int(match[1]), path / name) for name in names if (match := _PUBLIC.fullmatch(name))]
    return sorted(found, reverse=True)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint with the highest step under `path`, or None if there is none.

    Folders without a valid manifest are skipped, and a warning is logged for each of them. If a manifest exists but
    cannot be read (for example, because permission is missing), a CheckpointError is raised.

    Example::

        start = checkpoint.load("checkpoints", model=model) if checkpoint.latest("checkpoints") else 0
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
    """Return an error if `folder` is not a complete checkpoint, or else None. Raise if the manifest is unreadable."""
    try:
        read_manifest(folder)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOT_THERE:
            raise
        return error
    return None


def later_than(step: int, path: Path) -> Path | None:
    """Return the latest complete checkpoint under `path` with a higher step than `step`, or None."""
    later = (folder for each, folder in published(path) if each > step)
    return next((folder for folder in later if _problem_of(folder) is None), None)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a checkpoint, or else the latest checkpoint under `path`. Raise if there is none."""
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
    """Creates, locks and publishes the folder of a save. Only rank 0 uses this class."""

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
        return CheckpointError(
            f"{self.target} exists already. If another job saves to this folder, choose another one. Otherwise, delete "
            "the checkpoint first."
        )

    def publish(self) -> None:
        """Rename the folder to its public name. Call this after all files in it are on the disk."""
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
    """Delete the folders of dead saves and interrupted deletions under `path`.

    Rank 0 locks the folder of a save until the save ends or the process dies, so a folder that can be locked belongs to
    a dead save. Folders are kept if their lock is taken or if the file system does not support locks.
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
        with suppress(OSError):  # the save may have published or removed the folder meanwhile
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

    `newest` was just published. Folders without a valid manifest are neither counted nor deleted.
    """
    others = [folder for _, folder in published(path) if folder != newest and _is_whole(folder)]
    for folder in others[count - 1 :]:
        hidden = path / f"{_DELETING}{folder.name.removeprefix('step_')}_{os.urandom(8).hex()}"
        try:
            storage.rename(folder, hidden)
            storage.sync_folder(path)
        except OSError as error:  # the save succeeded, so do not raise
            _log.warning("%s could not be deleted: %s", folder, error)
            continue
        _delete(hidden)


def _is_whole(folder: Path) -> bool:
    try:
        return _problem_of(folder) is None
    except CheckpointError:
        return False


def _delete(hidden: Path) -> None:
    if not storage.delete(hidden):  # `remove_leftovers` tries again before the next save
        _log.warning("%s could not be deleted completely. Check who owns its files.", hidden)


def check_step(step: object, keep_last: object) -> None:
    if type(step) is not int or step < 0 or step >= 10**18:
        raise ArgumentError(f"step must be a Python int from 0 to 10**18 - 1, got {step!r}.")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ArgumentError(f"keep_last must be None or an integer of at least 1, got {keep_last!r}.")
