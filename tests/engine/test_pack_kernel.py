"""The kernel that packs gradients on a device, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from unshard.engine import packing


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_equal_to_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    ran = subprocess.run([sys.executable, "-m", "bed.packed"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "equal\n"), ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where the kernel cannot run")
def test_torch_packs_where_the_kernel_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    """Without Triton, or without a device. The reason is logged, once."""
    packing.pack_kernel_on.cache_clear()
    with caplog.at_level(logging.INFO, "unshard"):
        assert [packing.pack_kernel_on(torch.device("cuda", 0)) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert record.message.startswith("Gradients are packed without Triton: ")
    assert packing.pack_kernel_on(torch.device("cpu")) is None
