"""The `unshard` command. Commands import torch lazily, so that help and usage errors appear at once."""

from __future__ import annotations

import argparse
import builtins
import difflib
import importlib
import importlib.metadata
import io
import os
import runpy
import signal
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn

from . import __version__

_HELP = ("-h", "--help")
_COMMANDS = ("run", "checkpoint", "export")
_PATHS = {"verify": 1, "inspect": 1, "diff": 2}

_USAGE = """usage: unshard COMMAND [arguments]
       unshard --version

run          run a program written for torch.distributed.fsdp on unshard, without editing it
checkpoint   verify, inspect or compare checkpoints
export       write the model of a checkpoint as safetensors files

See `unshard COMMAND --help` for details."""

_RUN = """usage: unshard run script.py [arguments]
       unshard run -m module [arguments]
       unshard run --nproc-per-node 8 [other torchrun options] script.py [arguments]

Runs a Python program with torch.distributed.fsdp replaced by unshard. With torchrun options, it starts processes as
torchrun does. When the program ends, rank 0 prints how many units were sharded."""

_CHECKPOINT = """usage: unshard checkpoint verify PATH
       unshard checkpoint inspect PATH
       unshard checkpoint diff PATH PATH

PATH is a checkpoint written by unshard.checkpoint.save, or a folder of several checkpoints (uses the latest).

verify    read everything and compare all checksums; the exit status is 1 if the checkpoint is damaged
inspect   print a table of the tensors
diff      print the differences between two checkpoints; the exit status is 0 if they are equal, else 1

These commands run in one process and need no GPU."""

_EXPORT = """usage: unshard export CHECKPOINT FOLDER [--dtype DTYPE] [--max-file-size SIZE] [--prefix PREFIX]
                      [--tied-name NAME]... [--overwrite]

Writes the model of a checkpoint as safetensors files.

--dtype           convert floating-point tensors, for example to bfloat16
--max-file-size   for example 5GB (the default)
--prefix          prepend this to all names
--tied-name       name to write a tied tensor under, instead of its first name
--overwrite       replace the files of an earlier export"""


def main() -> int:
    command, *rest = sys.argv[1:] or [""]
    if command == "run" and rest and rest[0] not in _HELP:
        return run(rest)  # outside the `try`: exceptions belong to the program
    try:
        status = _answer(command, rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has exited: `unshard checkpoint inspect PATH | head`
        # Python flushes stdout again at exit and would report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _refuse(f"unshard {command}: interrupted.", 128 + signal.SIGINT)


def _answer(command: str, rest: list[str]) -> int:
    if command == "checkpoint":
        return _checkpoint(rest)
    if command == "export":
        return _export(rest)
    if command == "run":
        return _show(_RUN, asked=bool(rest))
    if command in ("-V", "--version"):
        return _show(_version())
    if command in ("", *_HELP):
        return _show(_USAGE, asked=bool(command))
    return _unknown("unshard", command, _COMMANDS)


def _version() -> str:
    try:
        return f"unshard {__version__} (torch {importlib.metadata.version('torch')})"
    except importlib.metadata.PackageNotFoundError:  # torch was not installed as a package
        return f"unshard {__version__}"


def _show(text: str, asked: bool = True) -> int:
    # Without a command, the help is an error message.
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _unknown(title: str, command: str, known: Iterable[str]) -> int:
    kind, known = ("option", ("--help", "--version")) if command.startswith("-") else ("command", tuple(known))
    near = difflib.get_close_matches(command, known, 1)
    if command.endswith(".py"):
        near = [f"run {command}"]
    hint = f"Did you mean `{title} {near[0]}`?" if near else f"Known: {', '.join(known)}."
    return _refuse(f"{title}: unknown {kind} {command!r}. {hint} See `{title} --help`.")


def _refuse(message: str, status: int = 2) -> int:
    print(message, file=sys.stderr)
    return status


# -- checkpoints --------------------------------------------------------------------------------------------


def _checkpoint(arguments: list[str]) -> int:
    command, *paths = arguments or [""]
    if command in ("", *_HELP) or (paths and paths[0] in _HELP):
        return _show(_CHECKPOINT, asked=bool(command))
    if command not in _PATHS:
        return _unknown("unshard checkpoint", command, _PATHS)
    title, count = f"unshard checkpoint {command}", _PATHS[command]
    options = [each for each in paths if each.startswith("-")]
    if options:
        return _refuse(f"{title}: unknown option {options[0]!r}. See `unshard checkpoint --help`.")
    if len(paths) != count:
        return _refuse(f"{title}: expected {count} PATH argument{'s'[: count - 1]}, got {len(paths)}.")
    from . import checkpoint

    try:
        if command == "diff":
            found = checkpoint.diff(*paths)
            print(found)
            return 0 if found.equal else 1
        if command == "inspect":
            print(checkpoint.inspect(*paths))
        else:
            print(f"{checkpoint.verify(*paths)} is complete: all checksums match.")
    except checkpoint.CheckpointError as error:
        return _refuse(f"{title}: {error}", 1)
    return 0


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return f"{_EXPORT}\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def _export(arguments: list[str]) -> int:
    parser = _Parser("unshard export")
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--dtype")
    parser.add_argument("--max-file-size", default="5GB")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--tied-name", action="append", default=[], dest="tied_names")
    parser.add_argument("--overwrite", action="store_true")
    given = vars(parser.parse_args(arguments))
    from . import checkpoint
    from .errors import ArgumentError

    try:
        files = checkpoint.export(given.pop("checkpoint"), given.pop("folder"), **given)
    except (checkpoint.CheckpointError, ArgumentError) as error:
        return _refuse(f"unshard export: {error}", 1)
    print(*files, sep="\n")
    return 0


# -- programs -----------------------------------------------------------------------------------------------


def run(arguments: list[str]) -> int:
    """Run a program on unshard instead of torch.distributed.fsdp. Exceptions and `sys.exit` reach the caller."""
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    asked = bool(rest) and rest[0] in _HELP
    if not rest or asked or (as_module and rest[0].startswith("-")):
        return _show(_RUN, asked)
    if rest[0].startswith("-"):
        return _run_processes(arguments)
    if not as_module and not os.path.exists(rest[0]):
        return _refuse(f"unshard run: there is no file {rest[0]!r}.")
    import torch

    from .dropin import install

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


def _run_processes(arguments: list[str]) -> int:
    """Call torchrun with these arguments. The processes that it starts run `python -m unshard.dropin <program>`."""
    launcher = importlib.import_module("torch.distributed.run")
    parsed = launcher.get_args_parser().parse_args(arguments)
    if parsed.no_python:
        return _refuse("unshard run: --no-python is not supported, because it starts no Python program. Use torchrun.")
    program = [parsed.training_script, *parsed.training_script_args]
    options = arguments[: len(arguments) - len(program)]
    if parsed.module:
        options = [each for each in options if each not in ("-m", "--module")]
        program = ["-m", *program]
    launcher.main([*options, "-m", "unshard.dropin", *program])
    return 0


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
    from .engine.api import Unit

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


if __name__ == "__main__":
    sys.exit(main())
