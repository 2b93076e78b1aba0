"""The arguments of all commands. This module imports nothing that takes time."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import re
import shutil
from typing import Any, NoReturn

from .. import __version__
from ..sizes import bytes_in

HELP = ("-h", "--help")

_TOP = "Train PyTorch models that do not fit on one device: run programs, look before, and look after."
_EXIT_CODES = """exit codes:
  0    fine
  1    the answer is "no": damaged, different, does not fit, a red line
  2    bad input: wrong arguments, or a file that cannot be used
  130  interrupted

`unshard run` ends with the exit code of the program. Errors are one line; --traceback or UNSHARD_TRACEBACK=1 shows
where they were raised. With --json, a command prints one JSON document on stdout, and everything else on stderr.
See `unshard COMMAND --help` for examples.
From Python, `unshard.tools` also has watch (finds NaN), timeline, ledger, record and explain_hangs."""

_RUN = """Runs a Python program with torch.distributed.fsdp replaced by unshard. With torchrun options, it starts
processes as torchrun does. When the program ends, rank 0 prints how many units were sharded. To find out where NaN
comes from, use unshard.tools.watch in the program."""
_RUN_USAGE = """unshard run [--explain-hangs SECONDS[:FILE]|off] script.py [arguments]
       unshard run [--explain-hangs SECONDS[:FILE]|off] -m module [arguments]
       unshard run [--explain-hangs SECONDS[:FILE]|off] --nproc-per-node 8 [torchrun options] script.py [arguments]"""
_PROGRAM = """FILE:FUNCTION names the function that builds the model, such as train.py:build_model. Functions of the
same file replace the defaults:
  shard(model)        default: each block of the longest list of modules is a unit
  optimizer(model)    default: AdamW"""
_STEP = """
  loss(model, batch)  default: the loss in the output, or the mean square of the output
  batch(rank, step)   default: random values (--batch). A dict becomes keyword arguments of the model"""
_CHECKPOINT_PATH = "a checkpoint written by unshard.checkpoint.save, or a folder of several (uses the latest)"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(
            prog, max_help_position=32, width=min(120, max(60, shutil.get_terminal_size((120, 24)).columns))
        )


class Parser(argparse.ArgumentParser):
    """Ends with one line for each mistake, and suggests the nearest command or option."""

    def __init__(self, *names: Any, example: str = "", **settings: Any):
        self.flags: list[str] = []
        self._words: list[str] = []
        self.commands: dict[str, Parser] = {}
        if example:
            settings["epilog"] = f"example:\n  {example}"
        settings.update(allow_abbrev=False, formatter_class=_Formatter)
        super().__init__(*names, **settings)
        self.set_defaults(parser=self, command=None, version=False, json=False, traceback=False)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        self.flags += [each for each in names if each.startswith("-")]
        return super().add_argument(*names, **settings)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse ignores a reader that has left

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or [])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            # A misspelled option is the better message.
            options = (each.partition("=")[0] for each in self._words if re.match("--?[a-z]", each))
            message = next((f"unrecognized arguments: {each}" for each in options if each not in self.flags), message)
        choice = re.search(r"invalid choice: '(.*?)'", message)
        unknown = re.fullmatch(r"unrecognized arguments: (-[^ =]+).*", message)
        if choice and choice[1] not in self.commands and self.commands:
            message = f"unknown command {choice[1]!r}. {self._hint(choice[1], list(self.commands))}"
        elif unknown:
            message = f"unknown option {unknown[1]!r}. {self._hint(unknown[1], self.flags)}"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} See `{self.prog} --help`.\n")

    def _hint(self, word: str, known: list[str]) -> str:
        near = difflib.get_close_matches(word, known, 1)
        if word.endswith(".py"):
            near = [f"run {word}"]
        named = [each for each in known if each.startswith("--")] or known
        return f"Did you mean `{self.prog} {near[0]}`?" if near else f"Known: {', '.join(named)}"


def show_version() -> int:
    try:
        print(f"unshard {__version__} (torch {importlib.metadata.version('torch')})")
    except importlib.metadata.PackageNotFoundError:  # torch was not installed as a package
        print(f"unshard {__version__}")
    return 0


def parser() -> Parser:
    top = Parser("unshard", usage="unshard COMMAND [arguments]\n       unshard --version", description=_TOP)
    top.epilog = _EXIT_CODES
    top.add_argument("-V", "--version", action="store_true", help="print the versions of unshard and torch")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog="unshard")
    top.commands = commands.choices
    _add_run(commands)
    _add_program_commands(commands)
    _add_checkpoint_commands(commands)
    _add_others(commands)
    return top


def _command(commands: Any, name: str, does: str, example: str, description: str = "", as_json: bool = True) -> Parser:
    """Add a command. Its `command` is the name of a function in `commands.py`."""
    text = f"{does[0].upper()}{does[1:]}.\n\n{description}".rstrip()
    added: Parser = commands.add_parser(name, help=does, description=text, example=example)
    if as_json:
        added.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    added.add_argument("--traceback", action="store_true", help="show where an error was raised")
    added.set_defaults(command=added.prog.removeprefix("unshard ").replace(" ", "_"))
    return added


def _add_run(commands: Any) -> None:
    added: Parser = commands.add_parser(
        "run",
        help="run a program written for torch.distributed.fsdp on unshard, without editing it",
        usage=_RUN_USAGE,
        description=_RUN,
        example="unshard run --nproc-per-node 8 train.py --lr 1e-3",
    )
    added.add_argument(
        "--explain-hangs",
        metavar="SECONDS[:FILE]|off",
        help="if a collective waits longer than this, say which ranks are missing and where they are, on stderr and as "
        "JSON in FILE (default: 30)",
    )


def _add_program_commands(commands: Any) -> None:
    plan = _command(
        commands,
        "plan",
        "compute the memory of a training step on many ranks, without running it",
        "unshard plan train.py:build_model --world 64 --mesh 8x8 --batch 4x2048 --device-memory 80GiB",
        f"{_PROGRAM}{_STEP}\nThe exit code is 1 if the step does not fit on the device.",
    )
    plan.add_argument("program", metavar="FILE:FUNCTION")
    plan.add_argument("--world", type=positive, required=True, help="number of ranks")
    plan.add_argument("--mesh", type=sizes, metavar="8x8", help="replicas x shards; without it, all ranks shard")
    plan.add_argument(
        "--batch",
        type=batch,
        metavar="4x2048",
        help="random tokens of this shape per rank, or floats for a model without embeddings; required if the file has "
        "no function batch",
    )
    plan.add_argument("--device-memory", type=memory, metavar="SIZE", help="for example 80GiB")

    verify = _command(
        commands,
        "verify",
        "train the model unsharded and sharded over local ranks, and compare",
        "unshard verify train.py:build_model --ranks 2,3,4 --steps 3 --batch 4x16",
        f"{_PROGRAM}{_STEP}\nThe exit code is 1 if losses, gradients or parameters differ.",
    )
    verify.add_argument("program", metavar="FILE:FUNCTION")
    verify.add_argument("--ranks", type=ranks, default=(2, 3), metavar="2,3,4", help="default: 2,3")
    verify.add_argument("--steps", type=positive, default=3, help="steps to compare (default: 3)")
    verify.add_argument("--batch", type=batch, metavar="4x16", help="shape of random values, per rank")
    verify.add_argument("--device", default="cpu", help="cpu (default) or cuda")

    precision = _command(
        commands,
        "precision",
        "list the dtypes of every unit at every stage of a step, and flag unintended ones",
        "unshard precision train.py:build_model",
        f"{_PROGRAM}\nBuilds and shards the model in this process.",
    )
    precision.add_argument("program", metavar="FILE:FUNCTION")


def _add_checkpoint_commands(commands: Any) -> None:
    group: Parser = commands.add_parser(
        "checkpoint",
        help="verify, inspect or compare checkpoints",
        description="Verifies, inspects or compares checkpoints of unshard.checkpoint.save and Saver. Needs one "
        "process and no GPU.",
        example="unshard checkpoint verify checkpoints",
    )
    inner = group.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    group.commands = inner.choices
    verify = _command(
        inner,
        "verify",
        "read everything and compare all checksums",
        "unshard checkpoint verify checkpoints",
        "The exit code is 1 if the checkpoint is damaged.",
    )
    inspect = _command(inner, "inspect", "print a table of the tensors", "unshard checkpoint inspect checkpoints")
    for each in (verify, inspect):
        each.add_argument("path", metavar="PATH", help=_CHECKPOINT_PATH)
    diff = _command(
        inner,
        "diff",
        "print the differences between two checkpoints",
        "unshard checkpoint diff run/step_00000100 other/step_00000100",
        "The exit code is 0 if the checkpoints are equal, else 1.",
    )
    diff.add_argument("paths", metavar="PATH", nargs=2, help=_CHECKPOINT_PATH)

    export = _command(
        commands,
        "export",
        "write the model of a checkpoint as safetensors files",
        "unshard export checkpoints weights --dtype bfloat16 --max-file-size 5GB",
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT")
    export.add_argument("folder", metavar="FOLDER")
    export.add_argument("--dtype", help="convert floating-point tensors, for example to bfloat16")
    export.add_argument("--max-file-size", default="5GB", metavar="SIZE", help="for example 500MiB (default: 5GB)")
    export.add_argument("--prefix", default="", help="prepend this to all names")
    export.add_argument(
        "--tied-name",
        action="append",
        default=[],
        dest="tied_names",
        metavar="NAME",
        help="write a tied tensor under this name instead of its first name; may be repeated",
    )
    export.add_argument("--overwrite", action="store_true", help="replace the files of an earlier export")


def _add_others(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        "draw results and recordings as one HTML page",
        "unshard report plan.json recordings/ -o report.html",
        "Takes JSON of plan, verify, precision and doctor, hang reports, and folders of recordings.",
    )
    report.add_argument("paths", metavar="PATH", nargs="+", help="a JSON file or a folder")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")

    doctor = _command(
        commands,
        "doctor",
        "check this machine, its limits and the connection of its ranks",
        "unshard doctor --nproc-per-node 8",
        "Starts local ranks that measure collectives and train a small model. Under torchrun (`torchrun ... -m\n"
        "unshard doctor`), uses the ranks of the job. The exit code is 1 if a line is red. Attach the output of\n"
        "--json to an issue.",
    )
    doctor.add_argument("--nproc-per-node", type=positive, metavar="N", help="local ranks (default: one per GPU, or 2)")
    doctor.add_argument("--quick", action="store_true", help="start no ranks")


# -- values -------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(each) for each in text.split("x"))


def batch(text: str) -> str:
    sizes(text)
    return text


def ranks(text: str) -> tuple[int, ...]:
    return tuple(positive(each) for each in text.split(","))


def memory(text: str) -> int:
    try:
        return bytes_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
