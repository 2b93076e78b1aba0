"""`make test-upstream` counts a test only if PyTorch's FSDP passes it, and notices what unshard does otherwise."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bed.programs import python

RUN = Path(__file__).parent / "run.py"

FILE = """
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest

class TestTraining(FSDPTest):
    @property
    def world_size(self):
        return 2

    def engine(self):
        model = fully_shard(nn.Linear(4, 4, device="cuda"))
        model(torch.ones(2, 4).cuda()).sum().backward()
        torch.cuda.synchronize()
        assert model.weight.grad.device == torch.device("cuda", 0)
        return FSDPModule.__module__.partition(".")[0]

    @skip_if_lt_x_gpu(2)
    def test_both(self):
        assert self.engine() in ("torch", "unshard")

    def test_torch_only(self):
        assert self.engine() == "torch"

    def test_another_message(self):
        with self.assertRaisesRegex(ValueError, "of torch"):
            raise ValueError(f"of {self.engine()}")

    def test_neither(self):
        assert self.engine() == ""
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need the package expecttest")
def test_counts(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(FILE)
    told = python(RUN, tmp_path, "--files", "test_*.py", "--ranks", "2").stdout
    assert "4 tests,    3 pass with torch,    1 of these with unshard" in told
    assert "failed, fails otherwise: TestTraining.test_torch_only" in told
    assert "failed, expects another message: TestTraining.test_another_message" in told
    assert "test_neither" not in told


def test_no_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, RUN, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "has no files" in done.stderr
