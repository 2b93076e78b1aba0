"""Runs programs on unshard instead of torch.distributed.fsdp: `unshard run`, and `python -m unshard.dropin`."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn

from .. import __version__
from .options import HELP, parser

EXPLAIN_HANGS_AFTER = "30"
"""Seconds after which a waiting collective is explained, in programs that `unshard run` starts."""
_HANGS, _OPTION = "UNSHARD_EXPLAIN_HANGS", "--explain-hangs"


def run(arguments: list[str], explain_hangs: str = "") -> int:
    """Run a program on unshard instead of torch.distributed.fsdp. Exceptions and `sys.exit` reach the caller.

    `explain_hangs` is the default of UNSHARD_EXPLAIN_HANGS in the program and its child processes.
    """
    try:
        if arguments and arguments[0].partition("=")[0] == _OPTION:
            arguments = [*_take_hangs(arguments[:2]), *arguments[2:]]
    except ValueError as error:
        return _refuse(str(error))
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    asked = bool(rest) and rest[0] in HELP
    if not rest or asked or (as_module and rest[0].startswith("-")):
        parser().commands["run"].print_help(sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if rest[0].startswith("-"):
        return _run_processes(arguments, explain_hangs)
    if not as_module and not os.path.exists(rest[0]):
        return _refuse(f"there is no file {rest[0]!r}.")
    _settle_hangs(explain_hangs)
    import torch

    from ..dropin import install

    install(child_processes=True)
    _say(f"unshard {__version__} replaces torch.distributed.fsdp (torch {torch.__version__})")
    sys.argv = rest
    try:
        if as_module:
            _put_first(os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(os.path.abspath(rest[0]))
    except SystemExit as end:
        if not end.code:
            _summarize()
        raise
    _summarize()
    return 0


def _run_processes(arguments: list[str], explain_hangs: str) -> int:
    """Call torchrun with these arguments. The processes that it starts run `python -m unshard.dropin <program>`."""
    launcher = importlib.import_module("torch.distributed.run")
    known = launcher.get_args_parser()
    known.add_argument(_OPTION)
    known.error = _raise  # instead of torchrun's usage
    try:
        parsed = known.parse_args(arguments)
    except ValueError as error:
        return _refuse(f"{error}.")
    if parsed.no_python:
        return _refuse("--no-python is not supported, because it starts no Python program. Use torchrun.")
    if not (parsed.module or os.path.exists(parsed.training_script)):
        return _refuse(f"there is no file {parsed.training_script!r}.")
    try:
        if launcher.determine_local_world_size(parsed.nproc_per_node) < 1:
            raise ValueError("expected at least 1 process")
    except ValueError as error:
        return _refuse(f"--nproc-per-node {parsed.nproc_per_node}: {error}.")
    program = [parsed.training_script, *parsed.training_script_args]
    options = arguments[: len(arguments) - len(program)]
    try:
        options = _take_hangs(options)
    except ValueError as error:
        return _refuse(str(error))
    if parsed.module:
        options = [each for each in options if each not in ("-m", "--module")]
        program = ["-m", *program]
    _settle_hangs(explain_hangs)
    launcher.main([*options, "-m", "unshard.dropin", *program])
    return 0


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _run_script(path: str) -> None:
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
    # Python does the same for a program, except in safe-path mode.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = place


def _summarize() -> None:
    from ..engine.api import Unit

    if Unit.built:
        _say(f"unshard sharded {Unit.built} unit{'s' if Unit.built > 1 else ''}.")
    else:
        _say(
            "unshard sharded nothing: this process called neither fully_shard nor FullyShardedDataParallel. Check that "
            "the program's options turn FSDP on. Child processes are not counted."
        )


def _say(text: str) -> None:
    # stdout belongs to the program.
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


# -- options --------------------------------------------------------------------------------------------------------


def _take_hangs(options: list[str]) -> list[str]:
    """Set the variable that turns on `unshard.tools.explain_hangs`. Return the options without --explain-hangs."""
    place = next((number for number, each in enumerate(options) if each.partition("=")[0] == _OPTION), None)
    if place is None:
        return options
    count = 1 if "=" in options[place] else 2
    value = options[place].partition("=")[2] if count == 1 else "".join(options[place + 1 : place + 2])
    try:
        if value != "off" and not 0 < float(value.partition(":")[0]) < float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"{_OPTION} expects SECONDS, SECONDS:FILE or `off`, got {value!r}.") from None
    os.environ[_HANGS] = value
    return options[:place] + options[place + count :]


def _settle_hangs(default: str) -> None:
    if default:
        os.environ.setdefault(_HANGS, default)
    if os.environ.get(_HANGS) in ("", "off"):
        del os.environ[_HANGS]


def _refuse(message: str) -> int:
    print(f"unshard run: {message} See `unshard run --help`.", file=sys.stderr)
    return 2
