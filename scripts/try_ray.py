"""Trains on a real local Ray with two workers, one of which is killed; prints a table and JSON.

    python3.11 scripts/try_ray.py [--environment FOLDER] [--json FILE]

Makes an environment of its own (.venv-ray) with `fsdp_jax[train,ray]`, starts Ray in this machine,
and runs `ray_trainer` with two workers of two virtual CPU devices each.

Conventions
- `control`: `fsdp-jax train` of one process with four devices, without Ray.
- `two workers`: the losses of every step are within 1e-5, relative, of the control's.
- `killed`: one worker gets SIGKILL after step 12; Ray restarts both, once, and the run resumes
  from the newest checkpoint, with the losses of the undisturbed two workers, bit for bit.
- `refused`: a relative `output`, and a key that Ray decides, raise ConfigError before Ray starts
  anything.
- Exit code 3 if one of these does not hold.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints-py311.txt"
STEPS, EVERY, KILL_AT = 30, 5, 12
CONFIG = f"""
model: {{layers: 1, width: 64, heads: 2, vocab_size: 384}}
units: {{classes: [Block]}}
data: {{sequence_length: 32}}
train: {{steps: {STEPS}, global_batch_size: 8, eval_every: {STEPS}, eval_batches: 1, log_every: 5,
        sample: 0}}
checkpoint: {{every: {EVERY}}}
"""


def losses(output: Path) -> list[float]:
    """Reads the loss of every step."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def kill_after(output: Path, step: int) -> None:
    """Kills a process of the run once it has written the metrics of a step."""
    started = time.monotonic()
    while time.monotonic() - started < 300:
        time.sleep(0.05)
        try:
            done = len(losses(output))
        except (OSError, ValueError):
            continue
        if done >= step:
            # Of process 1: the lease names process 0.
            lead = json.loads((output / "lease.json").read_text())["pid"]
            for worker in workers():
                if worker != lead:
                    os.kill(worker, signal.SIGKILL)
                    return


def workers() -> list[int]:
    """Finds the processes of Ray's workers that train."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "RayTrainWorker" in title:
            found.append(int(folder.name))
    return found


def fit(config: Path, output: Path, failures: int, *overrides: str) -> None:
    """Trains with two workers, which Ray restarts so many times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from fsdp_jax.train.ray_trainer import ray_trainer

    trainer = ray_trainer(
        config,
        ["--output", str(output), "--train.devices", "2", *overrides],
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=output.name,
            storage_path=str(output.parent / "ray"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    trainer.fit()


def trials(folder: Path) -> dict[str, str]:
    """Does the trials; returns for each what was wrong, or an empty text."""
    import ray

    from fsdp_jax.errors import ConfigError

    config = folder / "run.yaml"
    config.write_text(CONFIG)
    results = {}
    words = ["train", str(config), "--output", str(folder / "control"), "--train.devices", "4"]
    command = [str(Path(sys.executable).parent / "fsdp-jax"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    control = losses(folder / "control")

    results["refused"] = ""
    own = folder / "refused"
    wrong = ((Path("relative"), ()), (own, ("--cluster.detect", "false")))
    for output, overrides in wrong:
        try:
            fit(config, output, 0, *overrides)
            results["refused"] = f"accepted: {output} {overrides}"
        except ConfigError:
            pass

    environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment)
    fit(config, folder / "two", 0)
    together = losses(folder / "two")
    far = [abs(a - b) / abs(b) for a, b in zip(together, control, strict=True)]
    results["two workers"] = "" if max(far) < 1e-5 else f"losses differ by {max(far):.1e}"

    killer = threading.Thread(target=kill_after, args=[folder / "killed", KILL_AT], daemon=True)
    killer.start()
    fit(config, folder / "killed", 1)
    starts = (folder / "killed" / "starts.jsonl").read_text().splitlines()
    resumed = [json.loads(line)["step"] for line in starts]
    results["killed"] = "" if losses(folder / "killed") == together else "losses differ"
    if len(resumed) != 2 or resumed[1] < KILL_AT // EVERY * EVERY:
        results["killed"] += f"it started from steps {resumed}"
    ray.shutdown()
    return results


def main() -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-ray")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        return report(trials(options.inside), options.json)
    python = options.environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", options.environment], check=True)
        package = f"{ROOT}[train,ray]"
        install = [python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "-e", package]
        subprocess.run(install, check=True)
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python), __file__, "--inside", folder]
        if options.json is not None:
            words += ["--json", str(options.json)]
        clean = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run(words, env=clean, check=False).returncode


def report(results: dict[str, str], file: Path | None) -> int:
    """Prints the results, and returns the exit code."""
    import ray

    from fsdp_jax.tables import text_table

    rows = [[name, wrong or "holds"] for name, wrong in results.items()]
    print(text_table(["trial", f"ray {ray.__version__}"], rows))
    text = json.dumps({"ray": ray.__version__, "wrong": results})
    print(text)
    if file is not None:
        file.write_text(text + "\n")
    return 3 * any(results.values())


if __name__ == "__main__":
    sys.exit(main())
