"""Training across hosts: equal to the unsharded model."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from bed.hosts import HostPool, hosts
from bed.models import CASES, Case
from bed.parity import check_parity, each_unit
from bed.stack import mesh
from bed.world import mostly_slow
from bed.wrapped import check_wrapped

from unshard import ShardingStrategy, fully_shard

SHAPES = [(2, 1), (2, 2), (4, 1)]
FRONT_ENDS = ["fully_shard", "hybrid", "wrapper"]


@pytest.fixture(scope="module", params=mostly_slow(SHAPES, [(2, 2)]), ids=str)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    with hosts(*request.param, tmp_path_factory.mktemp("hosts")) as bed:
        made = HostPool(bed)
        yield made
        made.close()


def parity(case: Case, front_end: str) -> str:
    if front_end == "wrapper":
        check_wrapped(case, device_mesh=mesh(2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    else:
        options = {"mesh": mesh(2)} if front_end == "hybrid" else {}
        check_parity(case, each_unit(case, fully_shard, **options), steps=4)
    return os.uname().nodename


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(pool: HostPool, case: Case, front_end: str) -> None:
    """Losses, gradients and parameters of four steps, with shards (or, in a hybrid, replicas) on all hosts."""
    bed = pool.bed
    before = [bed.sent(host) for host in range(bed.count)]
    names = pool.run(parity, bed.count * bed.ranks, {"case": case, "front_end": front_end})
    assert names == [f"host{host}" for host in range(bed.count) for _ in range(bed.ranks)]
    assert all(bed.sent(host) - before[host] > 10_000 for host in range(bed.count))
