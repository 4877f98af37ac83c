"""Runs `train` on the workers of Ray: one process of the run in each, restarted by Ray."""

import os
import secrets
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_jax.errors import ConfigError, ProcessLostError, extra
from fsdp_jax.train.config import ClusterConfig
from fsdp_jax.train.config_file import dump_config, load_config
from fsdp_jax.train.main import train

with extra("ray"):
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.v2.jax import JaxConfig, JaxTrainer

# Keys of `cluster` that Ray decides; without `detect` each worker would be a run of its own.
OF_RAY = ("coordinator", "processes", "process", "detect")


def ray_trainer(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    scaling_config: ScalingConfig,
    run_config: RunConfig | None = None,
) -> JaxTrainer:
    """Makes a trainer of Ray whose `fit()` trains as `fsdp-jax train CONFIG` does, in its workers.

    `output` has to be a path that all workers share: its checkpoints are what a restart resumes
    from, whether by Ray (`RunConfig(failure_config=FailureConfig(max_failures=...))`) or by a new
    `fit()`. What a run measures is in `output` too; nothing is reported to Ray.

    Args:
        config: a configuration file, which this process reads.
        overrides: dotted overrides of its keys, as on the command line.
        scaling_config: the workers. Each takes all GPUs that Ray gives it.
        run_config: name, storage, and how often to restart; as Ray takes it.

    Raises:
        ConfigError: the configuration cannot be used, or has keys of `cluster` that Ray decides.

    """
    loaded = load_config(config, overrides)
    default = ClusterConfig()
    given = [key for key in OF_RAY if getattr(loaded.cluster, key) != getattr(default, key)]
    if given:
        raise ConfigError(
            "Ray decides on the processes of the run",
            where="cluster",
            got=", ".join(given),
            fix=f"leave out {', '.join(OF_RAY)}",
        )
    if not Path(loaded.output).is_absolute():
        raise ConfigError(
            "workers have directories of their own",
            where="output",
            expected="an absolute path that all workers share",
            got=loaded.output,
        )
    return JaxTrainer(
        _train_on_worker,
        train_loop_config={"config": dump_config(loaded)},
        # Ray then starts no cluster of jax's: `train` does, and ends all processes if one fails.
        jax_config=JaxConfig(use_tpu=False, use_gpu=False),
        scaling_config=scaling_config,
        run_config=run_config,
    )


def _train_on_worker(job: Mapping[str, str]) -> None:
    """Trains in one worker; returns when all have. Raises ProcessLostError if it was stopped."""
    _set_environment()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(job["config"])
        config = load_config(file)
    code = train(config)
    if code:
        raise ProcessLostError("the run was stopped", got=f"exit code {code}")


def _set_environment() -> None:
    """Tells jax and `train`, by the environment, which process of the run this worker is."""
    context = ray.train.get_context()
    place = {}
    if context.get_world_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        place["JAX_COORDINATOR_ADDRESS"] = f"{ray.util.get_node_ip_address()}:{port}"
        place["FSDP_JAX_CLUSTER_SECRET"] = secrets.token_hex(32)
    os.environ.update(broadcast_from_rank_zero(place))
    os.environ["JAX_NUM_PROCESSES"] = str(context.get_world_size())
    os.environ["JAX_PROCESS_ID"] = str(context.get_world_rank())
    # Ray shows a worker the GPUs of all workers of its node.
    gpus = ray.get_gpu_ids()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
