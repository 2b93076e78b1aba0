"""`unshard run script.py ...`: like `python script.py ...`, with the drop-in installed."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch

from .. import __version__
from ..engine.api import Unit
from ..usage import RUN
from . import install


def run(arguments: list[str]) -> int:
    """Run the program that the arguments name. Its exceptions and `sys.exit` reach the caller."""
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    asked = rest[:1] in (["-h"], ["--help"])
    if not rest or asked or (as_module and rest[0].startswith("-")):
        print(RUN, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if rest[0].startswith("-"):
        return _run_processes(arguments)
    if not as_module and not os.path.exists(rest[0]):
        print(f"unshard run: there is no file {rest[0]!r}.", file=sys.stderr)
        return 2
    install(child_processes=True)
    _say(f"unshard {__version__} replaces torch.distributed.fsdp (torch {torch.__version__})")
    try:
        (_run_module if as_module else _run_script)(rest)
    except SystemExit as end:
        if not end.code:
            _say(_summary())
        raise
    _say(_summary())
    return 0


def _summary() -> str:
    if Unit.built:
        return f"unshard sharded {Unit.built} unit{'s' if Unit.built > 1 else ''}."
    return (
        "unshard sharded nothing: this process called neither fully_shard nor FullyShardedDataParallel. Check that "
        "the program's options turn FSDP on. Child processes are not counted."
    )


def _say(text: str) -> None:
    """Print on rank 0 only, to stderr: stdout belongs to the program."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _run_processes(arguments: list[str]) -> int:
    """Call `torchrun` with these arguments; its processes run `python -m unshard.dropin` with the program."""
    launcher = importlib.import_module("torch.distributed.run")
    parsed = launcher.get_args_parser().parse_args(arguments)
    if parsed.no_python:
        print(
            "unshard run: --no-python is not supported, because it starts no Python program. Use torchrun.",
            file=sys.stderr,
        )
        return 2
    program = [parsed.training_script, *parsed.training_script_args]
    options = arguments[: len(arguments) - len(program)]
    if parsed.module:
        options = [each for each in options if each not in ("-m", "--module")]
        program = ["-m", *program]
    launcher.main([*options, "-m", "unshard.dropin", *program])
    return 0


def _run_module(arguments: list[str]) -> None:
    sys.argv = arguments
    _put_first(os.getcwd())
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_script(arguments: list[str]) -> None:
    sys.argv, path = arguments, os.path.abspath(arguments[0])
    if not os.path.isfile(path) or path.endswith((".zip", ".pyz", ".pyc")):
        _put_first(path)
        runpy.run_path(path, run_name="__main__")
        return
    _put_first(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        source = file.read()
    # The new main module stays in `sys.modules`: functions that run at exit and spawned processes look it up.
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _put_first(place: str) -> None:
    """Set the first entry of `sys.path` as Python would for the program; safe-path mode has no such entry."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = place
