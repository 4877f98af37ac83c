"""Runs all scripts of this folder on one GPU, one after another, in 40 minutes at most.

    python scripts/gpu/all.py [--toy] [--to FOLDER] [--only NAME ...]

Each has a time limit. What fails, or takes longer, does not stop the others; it is named at the
end, and the exit code is 1. The record of each is NAME.json in the folder: benchmarks/results/gpu/,
or output/gpu_toy/ with --toy, which takes two to six minutes on a CPU. Messages and tables of the
scripts are printed as they come.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# {script: seconds that it may take}: 39 minutes; the last three end their own trials before
SECONDS = {"kernels": 540, "plan": 600, "train": 600, "offload": 600}


def run(name: str, toy: bool, folder: Path, seconds: float) -> str:
    """Runs a script; why it failed, or ""."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(folder / f"{name}.json")]
    # a group of its own, so that the processes of its trials end with it
    process = subprocess.Popen(command + ["--toy"] * toy, start_new_session=True)
    try:
        code = process.wait(seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"ended after {seconds:.0f} s"
    return f"exit code {code}" if code else ""


def main() -> int:
    """Runs the scripts; 1 if one of them failed."""
    root = HERE.parents[1]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small models, for a CPU")
    parser.add_argument("--to", type=Path, help="folder of the records")
    parser.add_argument("--only", nargs="+", choices=SECONDS, default=list(SECONDS))
    arguments = parser.parse_args()
    folder = arguments.to
    if folder is None:
        folder = root / ("output/gpu_toy" if arguments.toy else "benchmarks/results/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.toy:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no messages of GPU plugins without a GPU
    failures = []
    for name in arguments.only:
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        failed = run(name, arguments.toy, folder, SECONDS[name])
        if failed:
            failures.append(f"{name}: {failed}")
        print(f"--- {name}: {failed or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"records in {folder}")
    if failures:
        print("failed: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
