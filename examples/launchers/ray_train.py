"""Train with Ray Train: `elastic.train` on two workers, which resume from the last checkpoint after a failure.

python examples/launchers/ray_train.py checkpoints
"""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    import elastic  # on the workers only, from `working_dir`

    elastic.train(config["folder"])


if __name__ == "__main__":
    folder = str(Path(sys.argv[1]).absolute())  # on a file system that all hosts mount
    ray.init(runtime_env={"working_dir": str(Path(__file__).parents[1])})
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=ray.cluster_resources().get("GPU", 0) >= 2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
    ).fit()
