"""Trains published Flax models, unmodified, by fsdp_jax and by a control; prints a table.

    python3.11 scripts/third_party.py [--models "Llama 3" GPT-2 ...] [--environment FOLDER]
                                      [--topology h100:8 | none] [--json FILE]

Makes an environment of its own (.venv-third-party) with the packages as pip installs them, at the
versions of scripts/constraints-third-party.txt, and runs scripts/third_party_runner.py in it, one
process per model. Nothing is downloaded but packages: weights are random.

Conventions
- Models are small (2 layers, 64 features), batches are random, parameters of at least 256 elements
  are sharded over 8 virtual CPU devices. `units` are the block classes.
- The control is Flax, optax and jax.jit on one device, from the same initial values: no fsdp_jax.
- Loss differences are the largest relative one of 5 steps of AdamW; the limit is 1e-5.
- Evaluation: the loss in inference mode after these steps, against plain Flax (`mutable=False`, or
  `model.eval()`).
- Restored: saved after 5 steps of full_shard, restored into hybrid_shard_zero2 on 2 x 4 devices:
  parameters bit for bit, and the next loss of both.
- Contract: full_shard of a wide model (2 layers, 1024 features) in bfloat16,
  `Precision(compute="bfloat16")`, compiled for the topology: bytes sent against those declared, of
  the model as pip installs it, and with what the library's messages then ask for, such as
  `dtype=jnp.bfloat16`; the latter is at most 1.02, and nothing is warned of any more.
- Exit code 3 if a model misses any of these.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints-third-party.txt"
RUNNER = ROOT / "scripts" / "third_party_runner.py"
MODELS = (
    "Llama 3",
    "Qwen3-MoE",
    "Gemma 3",
    "ViT, jimm",
    "ViT, jimm, explicit",
    "GPT-2",
    "BERT",
    "ViT",
    "ResNet",
    "ResNet-18",
    "UNet",
    "Griffin",
)
# With all that they ask for; then those whose bounds exclude each other, without.
PACKAGES = (
    *("jax[cuda13-local]", "nvidia-cuda-nvcc", "grain", "xxhash", "einops"),
    *("google-tunix", "transformers", "diffusers", "einshape", "pydantic"),
)
ALONE = ("recurrentgemma", "typeguard<3", "jax-resnet", "jax-image-models", "tokamax")
SHOWN = (
    *("jax", "flax", "optax", "orbax-checkpoint", "google-tunix", "transformers", "diffusers"),
    *("jax-image-models", "recurrentgemma", "jax-resnet"),
)
LOSSES = (
    "full_shard, accumulation 1",
    "hybrid_shard, accumulation 1",
    "full_shard, accumulation 2",
)
MOST_LOSS, MOST_SENT = 1e-5, 1.02


def make_environment(folder: Path) -> Path:
    """Returns the interpreter of the environment; makes it where it is not ready."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == CONSTRAINTS.read_text():
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["-c", str(CONSTRAINTS)]
    subprocess.run([*install, *PACKAGES], check=True)
    subprocess.run([*install, "--no-deps", *ALONE, "-e", str(ROOT)], check=True)
    ready.write_text(CONSTRAINTS.read_text())
    return python


def versions(folder: Path) -> dict[str, str]:
    """Returns the version of every package of an environment."""
    paths = [str(path) for path in folder.glob("lib/python*/site-packages")]
    return {each.name: each.version for each in distributions(path=paths)}


def run_one(python: Path, model: str, topology: str) -> dict[str, Any]:
    """Runs one model in a process of its own: one that crashes loses one row."""
    command = [str(python), str(RUNNER), model]
    command += ["--topology", topology] if topology != "none" else []
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"model": model, "errors": {"process": lines[-1]}, "said": []}
    return {"model": model} | json.loads(done.stdout.splitlines()[-1])


def passes(row: dict[str, Any], topology: str) -> bool:
    """Returns whether a model holds all that is asked of it."""
    if row["errors"]:
        return False
    close = all(row[name] <= MOST_LOSS for name in (*LOSSES, "evaluation", "next loss"))
    sent = topology == "none" or (row["contract"] and row["sent / declared"] <= MOST_SENT)
    return bool(close and row["restored bitwise"] and sent and not row["said"])


def table(rows: list[dict[str, Any]], topology: str) -> str:
    """Returns the rows as a Markdown table; messages follow it."""
    lines = [
        "| model | package | full_shard | hybrid_shard | accumulation 2 | evaluation "
        f"| restored bitwise | next loss | sent / declared, {topology}: as it is | needs | then |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        cells = [f"{row[name]:.0e}" if name in row else "-" for name in (*LOSSES, "evaluation")]
        restored = "-"
        if "restored bitwise" in row:
            restored = "yes" if row["restored bitwise"] else "NO"
        cells += [restored, f"{row['next loss']:.0e}" if "next loss" in row else "-"]
        sent = "-"
        if "contract" in row:
            sent = f"{row['sent / declared']:.3f}"
            sent += "" if row["contract"] else " (broken)"
        before = f"{row['as it is']:.3f}" if "as it is" in row else "-"
        cells += [before, ", ".join(row.get("needs", [])) or "-", sent]
        lines.append(f"| {' | '.join([row['model'], row.get('package', ''), *cells])} |")
        notes += [f"{row['model']}, {name}: {text}" for name, text in row["errors"].items()]
        notes += [f"{row['model']}: {text}" for text in row["said"] + row.get("violations", [])]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-third-party")
    parser.add_argument("--topology", default="h100:8", help="none: no contract")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    python = make_environment(options.environment.absolute())
    rows = []
    for model in options.models:
        rows.append(run_one(python, model, options.topology))
        print(table(rows[-1:], options.topology).split("\n", 2)[2], file=sys.stderr, flush=True)
    installed = versions(options.environment)
    print(table(rows, options.topology))
    print("\n" + ", ".join(f"{name} {installed.get(name, 'missing')}" for name in SHOWN))
    report = {"python": sys.version.split()[0], "packages": installed, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if all(passes(row, options.topology) for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
