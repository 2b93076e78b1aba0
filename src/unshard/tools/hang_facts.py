"""What the explainer of hangs finds out about processes: stacks of this one, and the state of others on this host."""

from __future__ import annotations

import itertools
import json
import linecache
import os
import signal
import socket
import sys
import sysconfig
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ..torch_private import LIBRARY_FILES, RUN_BACKWARD, frames

_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple({f"{sysconfig.get_paths()[each]}{os.sep}" for each in ("purelib", "platlib")})
_OWN = LIBRARY_FILES[1]
_TORCH = LIBRARY_FILES[0]
_MOST_FRAMES, _MOST_THREADS = 24, 8
OWN_THREADS = "unshard "
"""The names of this library's threads begin with this."""

DATA = "in its data loader"
LOCK = "waiting for a lock, a queue or a thread"
SLEEP = "sleeping"


# -- stacks ------------------------------------------------------------------------------------------------


def _is_user(name: str) -> bool:
    """Return True for the user's files and installed packages other than torch and this one."""
    if name.startswith("<frozen"):
        return False
    return not name.startswith(LIBRARY_FILES) and (not name.startswith(_STANDARD) or name.startswith(_PACKAGES))


def _shown(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    for folder in (os.path.dirname(_OWN[:-1]) + os.sep, *_PACKAGES, _STANDARD):
        name = name.removeprefix(folder)
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}" + (f": {text}" if text else "")


def line_of(chain: list[FrameType]) -> str:
    """Return the user's innermost line in `chain`, as file, line and function, or an empty string."""
    user = next((each for each in chain if _is_user(each.f_code.co_filename)), None)
    return f"{user.f_code.co_filename}:{user.f_lineno} in {user.f_code.co_name}" if user else ""


def stack_of(chain: list[FrameType]) -> list[str]:
    """Return the frames of `chain` as text: first the user's, innermost first, then the innermost of libraries."""
    user = [each for each in chain if _is_user(each.f_code.co_filename)]
    library = [each for each in chain if not _is_user(each.f_code.co_filename)]
    return [_shown(each) for each in user[:_MOST_FRAMES]] + [
        f"({_shown(each)})" for each in library[: _MOST_FRAMES // 3]
    ]


def caller_of_library(chain: list[FrameType]) -> list[FrameType]:
    """Return `chain` without its innermost frames, up to the one that called this library."""
    return list(itertools.dropwhile(lambda each: each.f_code.co_filename.startswith(_OWN), chain))


def main_chain() -> list[FrameType]:
    """Return the frames of the main thread, innermost first."""
    return list(frames(sys._current_frames().get(threading.main_thread().ident or 0)))


def other_threads() -> dict[str, list[str]]:
    """Return the stacks of other threads that run the user's code, this library or autograd."""
    names = {each.ident: each.name for each in threading.enumerate()}
    skipped = {threading.main_thread().ident, threading.get_ident()}
    found: dict[str, list[str]] = {}
    for number, first in sys._current_frames().items():
        chain, name = list(frames(first)), names.get(number, f"autograd or other thread {number}")
        ours = any(each.f_code.co_filename.startswith(_OWN) or _is_user(each.f_code.co_filename) for each in chain)
        if number not in skipped and ours and not name.startswith(OWN_THREADS) and len(found) < _MOST_THREADS:
            found[name] = stack_of(chain)
    return found


def activity(chain: list[FrameType]) -> str:
    """Return what a thread with these frames is doing, in a few words, or an empty string if that is not known."""
    for frame in chain:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(_TORCH + os.path.join("utils", "data", "")):
            return DATA
        if name.startswith((_OWN + "checkpoint", _TORCH + "serialization.py", _TORCH + "distributed/checkpoint")):
            loads = any(each.f_code.co_name.lstrip("_").startswith("load") for each in chain)
            return f"{'loading' if loads else 'saving'} a checkpoint"
        if name == _TORCH + "distributed/distributed_c10d.py" and not function.startswith("_"):
            return f"in torch.distributed.{function}"
        if name.startswith(_OWN + os.path.join("comm", "")):
            return "in a collective"
    if chain and (found := _blocked_at(chain[0])):
        return found
    if any(each.f_code is RUN_BACKWARD for each in chain):
        return "in backward"
    return "in forward" if any(each.f_code.co_name == "forward" for each in chain) else ""


def _blocked_at(frame: FrameType) -> str:
    # Functions in C have no frames, so the line that calls them is all there is to see.
    name = frame.f_code.co_filename
    if name.startswith((os.path.join(_STANDARD, "threading.py"), os.path.join(_STANDARD, "queue.py"))):
        return LOCK
    text = linecache.getline(name, frame.f_lineno)
    if "sleep(" in text:
        return SLEEP
    if ".acquire(" in text or ("with " in text and "lock" in text.lower()):
        return LOCK
    return "waiting for another process" if name.startswith(os.path.join(_STANDARD, "multiprocessing")) else ""


def cpu_seconds() -> float:
    """Return the CPU time of the main thread, or 0 if it is not known."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


# -- processes ---------------------------------------------------------------------------------------------


def kernel() -> str:
    """Return a text that is equal on processes that see each other under the same process numbers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}"


_STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "blocked in the kernel (state D)"}


def process_state(pid: int, error_file: str = "") -> str:
    """Return what the kernel and torchrun say about a process of this host, or an empty string if nothing is known.

    The text begins with "dead" if the process has ended.
    """
    if not os.path.exists("/proc/self/stat"):
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"dead: process {pid} is gone{_cause_of_death(pid, error_file)}"
    if fields[0] in "ZX":
        return f"dead: {_how(int(fields[-1]))}{_cause_of_death(pid, error_file)}"
    return _STATES.get(fields[0], f"alive (state {fields[0]})")


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def _cause_of_death(pid: int, error_file: str) -> str:
    found = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(Path(error_file).read_text())["message"]
        found.append(f"torchrun noted: {message['message'] if isinstance(message, dict) else message}"[:300])
    if f"Killed process {pid} " in _kernel_log():
        found.append("the kernel killed it for lack of memory")
    elif (kills := memory_kills() - _kills_before) > 0:
        found.append(f"the kernel has killed {kills} process(es) of this container for lack of memory")
    return "".join(f"; {each}" for each in found)


def _kernel_log() -> str:
    parts: list[bytes] = []
    with suppress(OSError):  # at the end of the log, and most containers may not read it
        with open(
            "/dev/kmsg", "rb", buffering=0, opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        ) as log:
            while part := log.read(8192):
                parts.append(part)
    return b"".join(parts).decode(errors="replace")


def memory_kills(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this container the kernel has killed for lack of memory."""
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            folder = root / ("memory" if kinds else "") / path.lstrip("/")
            for file in (folder / "memory.events", folder / "memory.oom_control"):
                if kinds in ("", "memory") and file.exists():
                    counts = dict(each.split() for each in file.read_text().splitlines())
                    return int(counts.get("oom_kill", 0))
    return 0


_kills_before = memory_kills()
