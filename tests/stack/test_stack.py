"""Programs for other libraries compute the same on unshard as on PyTorch's FSDP, bit by bit ([docs/stack.md]).

`make test-stack` installs the libraries into an environment of its own and runs these tests.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bed.programs import DROPIN, TORCHRUN, python

PROGRAMS = [
    ("accelerate", "2"),
    ("accelerate", "1"),
    ("transformers", "2"),
    ("transformers", "1"),
    ("trl", ""),
    ("peft", ""),
    ("lightning", "2"),
    ("lightning", "1"),
    ("torchtitan", ""),
    ("torchao", "float8"),
    ("torchao", "int8"),
    ("torchao", "int8-mixed"),
    ("bitsandbytes", ""),
    ("dcp", "2"),
    ("dcp", "1"),
]


def run(name: str, option: str, folder: Path, drop_in: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder.mkdir()
    program = Path(__file__).parent / f"{name}_program.py"
    python("-W", "ignore", *TORCHRUN, *DROPIN * drop_in, program, folder, *[option] * bool(option))
    return json.loads((folder / "outcome.json").read_text()), torch.load(folder / "weights.pt")


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Packed 4-bit weights are stored as float32, and some of their bit patterns are NaN."""
    return value.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), PROGRAMS)
def test_a_program_computes_the_same(name: str, option: str, tmp_path: Path) -> None:
    if find_spec({"dcp": "torch"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed: `make test-stack` installs it")
    theirs, weights = run(name, option, tmp_path / "torch", drop_in=False)
    ours, same = run(name, option, tmp_path / "unshard", drop_in=True)
    print(name, *ours["versions"])
    assert theirs.pop("engines") == ["torch.distributed"] and ours.pop("engines") == ["unshard"]
    assert ours == theirs and ours["units"] >= 3 and len(ours["losses"]) > 2
    # accelerate loads sharded optimizer state of FSDP1 into an optimizer without state, which loses it. unshard warns.
    assert ours.get("resumed", True) == ((name, option) != ("transformers", "1"))
    more = same.keys() - weights.keys()  # the scales of 4-bit weights, which PyTorch's FSDP2 loses
    assert not weights.keys() - same.keys() and bool(more) == (name == "bitsandbytes")
    assert len(weights) > 10 and all(
        torch.equal(bytes_of(value), bytes_of(same[key])) for key, value in weights.items()
    )
