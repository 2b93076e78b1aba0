"""What the commands have in common: flags, and sides that may fail without ending the others."""

from __future__ import annotations

import argparse
import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import places, sides
from .models import Case
from .tables import failure


def parser_for(
    doc: str | None, cases: str | None = None, cpu_cases: str = "", one_rank: bool = False, own_sides: bool = False
) -> Any:
    """A parser with the flags of every command; `cases` are the default ones on a GPU.

    `own_sides`: the command adds `--sides` itself.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    names = "unsharded, fsdp2, fsdp1, unshard, unshard-flat, unshard-wrapper, or all of these; shards on the host: "
    names += "fsdp2-offload, unshard-offload, unshard-offload-flat, unshard-offload-step-in-backward; "
    names += "the optimizer's state alone: unshard-offload-state"
    if not own_sides:
        parser.add_argument("--sides", type=_explained(sides.known), default="all", help=names)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    places.add_arguments(parser, one_rank)
    if cases is not None:
        default = cases if torch.cuda.is_available() else cpu_cases
        parser.add_argument("--cases", type=_explained(_cases), default=default, help="SIZE:SAMPLESxLENGTH[:DTYPE],...")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The text as it is written, and the default of every flag."""


def _explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show what is wrong with a value: of other errors it shows the name of the function."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _cases(text: str) -> list[Case]:
    return [Case.parse(each) for each in text.split(",")]


class ParamGroup:
    """One side of one comparison, and its row. Once it has failed it is left out."""

    def __init__(self, case: object, side: str) -> None:
        self.side = side
        self.row: dict[str, Any] = {"case": str(case), "side": side}

    @property
    def failed(self) -> bool:
        return "error" in self.row

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """What goes wrong in here is written into the row; `BENCHMARKS_TRACE=1` shows where it was."""
        try:
            yield
        except Exception as error:
            if os.environ.get("BENCHMARKS_TRACE"):
                traceback.print_exc()
            self.row["error"] = failure(error)
            # The frames hold the model that failed, and its memory would be the next side's.
            traceback.clear_frames(error.__traceback__)
