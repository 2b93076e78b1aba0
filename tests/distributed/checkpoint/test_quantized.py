"""Quantised layers keep scales beside their weights: checkpoints and state dicts of sharded models have them, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from bed import world
from bed.quantized import build_stand_in, check_checkpoints, shard_layers

from unshard import CheckpointError, checkpoint


@pytest.mark.parametrize("kind", ["SavesItself", "SavesInHook", "Gptq", "WithExtraState"])
@world(1, 3)
def test_scales_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    check_checkpoints(partial(build_stand_in, kind), "fully_shard", tmp_path)


@world(2, slow=())
def test_what_a_layer_does_not_take_is_refused(tmp_path: Path) -> None:
    model = shard_layers(build_stand_in("SavesOnly", 0), "fully_shard")
    checkpoint.save(tmp_path, model=model, step=1)
    checkpoint.load(tmp_path, model=model)  # what it has is what was saved
    other = shard_layers(build_stand_in("SavesOnly", 1), "fully_shard")
    with pytest.raises(CheckpointError, match=r"'1', a FSDPSavesOnly, adds 'scale' to its state dict and does not"):
        checkpoint.load(tmp_path, model=other)
    with pytest.raises(CheckpointError, match=r"'1', a FSDPSavesText, adds 'kind' .* a str"):
        checkpoint.save(tmp_path, model=shard_layers(build_stand_in("SavesText", 0), "fully_shard"), step=2)
