"""Tests that write checkpoints with `torch.distributed.checkpoint`."""

from __future__ import annotations

import pytest

# Planning a save warns about things that only matter to those who wrote it.
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
