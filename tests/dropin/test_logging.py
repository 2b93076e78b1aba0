"""Readers of PyTorch's log and profiles find the stages of a step under PyTorch's names."""

from __future__ import annotations

import logging

import torch
from bed import world
from bed.stack import loss_of, sharded

from unshard import dropin


@world(1)
def test_stages_have_the_names_of_torch() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.fsdp")  # what TORCH_LOGS="+fsdp" sets
    logger.addHandler(handler)
    level = logger.level
    try:
        with dropin.stand_in():
            model = sharded()
            model._get_fsdp_state()._lazy_init()
            logger.setLevel(logging.INFO)
            loss_of(model).backward()
            assert records == []
            logger.setLevel(logging.DEBUG)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
                loss_of(model).backward()
        logged = len(records)
        loss_of(model).backward()
        assert len(records) == logged  # the drop-in is not installed any more
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    stages = {f"FSDP::{stage} (blocks.1)" for stage in ("pre_forward", "post_forward", "pre_backward", "post_backward")}
    stages |= {"FSDP::root_pre_forward", "FSDP::root_post_backward"}
    assert stages <= set(records) and stages <= {event.key for event in profile.key_averages()}
