"""What optimizers send, read from the step compiled for H100s.

    python scripts/bench_optimizers.py [--model gpt llama] [--optimizers adamw ...] [--json FILE]

Conventions
- `full_shard` on h100:8, bfloat16 compute, float32 optimizer state, one sequence per device,
  explicit collectives (`local_batch=True`), no prefetch.
- gpt: 3 layers of width 128. llama: 8 layers of width 2048.
- Sent and declared bytes are those of the contract (fsdp_jax/contract), per device and step, by a
  ring; metrics, which are numbers, are among them.
- By the optimizer: what is sent beside what the same model sends with adamw, in bytes and in
  executions of collectives.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import fsdp_jax as fsdp
from fsdp_jax import optim
from fsdp_jax.contract import check_contract
from fsdp_jax.errors import human_bytes
from fsdp_jax.models import GPT, Llama, next_token_loss
from fsdp_jax.models.gpt import GPTConfig
from fsdp_jax.models.llama import LlamaConfig
from fsdp_jax.tables import text_table
from fsdp_jax.testing import mesh_of

TOPOLOGY, RATE = "h100:8", 1e-3
ADAMW = "adamw"

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    ADAMW: lambda: optax.adamw(RATE),
    "muon of fsdp_jax": lambda: optim.muon(RATE),
    "muon of fsdp_jax, bfloat16": lambda: optim.muon(RATE, dtype="bfloat16"),
    "contrib.muon": lambda: contrib.muon(RATE, muon_weight_dimension_numbers=optim.hidden_matrices),
    "adam": lambda: optax.adam(RATE),
    "sgd": lambda: optax.sgd(RATE, momentum=0.9),
    "lion": lambda: optax.lion(RATE),
    "novograd": lambda: optax.novograd(RATE),
    "lamb": lambda: optax.lamb(RATE),
    "lars": lambda: optax.lars(RATE),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(RATE)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
    "adafactor": lambda: optax.adafactor(RATE),
    "sm3": lambda: optax.sm3(RATE),
    "lbfgs": lambda: optax.lbfgs(RATE, linesearch=None),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(RATE),
    "contrib.prodigy": lambda: contrib.prodigy(RATE),
    "contrib.galore": lambda: contrib.galore(RATE, rank=8),
}


def make_gpt() -> tuple[Callable[..., Any], int]:
    """Makes the small GPT: (its constructor, the sequence length)."""
    config = GPTConfig(vocab_size=384, sequence_length=64, layers=3, heads=4, width=128)
    return lambda rngs: GPT(config, rngs=rngs), config.sequence_length


def make_llama() -> tuple[Callable[..., Any], int]:
    """Makes the Llama of 8 layers: (its constructor, the sequence length)."""
    config = LlamaConfig(
        vocab_size=32_000,
        sequence_length=2048,
        layers=8,
        heads=16,
        kv_heads=16,
        width=2048,
        hidden=5632,
    )
    return lambda rngs: Llama(config, rngs=rngs), config.sequence_length


MODELS = {"gpt": make_gpt, "llama": make_llama}


def measure(model: str, optimizer: str) -> dict[str, Any]:
    """Compiles a step and reads its contract."""
    make_model, length = MODELS[model]()
    mesh = mesh_of(TOPOLOGY)
    sharded = fsdp.fully_shard(
        make_model,
        OPTIMIZERS[optimizer](),
        mesh,
        precision=fsdp.Precision(compute="bfloat16"),
        remat="full",
        prefetch="none",
        min_size=64,
    )
    step = sharded.make_train_step(next_token_loss, local_batch=True)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, length + 1), jnp.int32)}
    contract = check_contract(step, batch)
    return {
        "model": model,
        "optimizer": optimizer,
        "wire_bytes": contract.wire_bytes,
        "wire_bytes_limit": contract.wire_bytes_limit,
        "executions": sum(row["count"] for row in contract.rows()),
        "holds": contract.holds,
        "violations": [str(violation) for violation in contract.violations],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--model", nargs="+", default=["gpt"], choices=MODELS)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args()
    rows = []
    for model in options.model:
        reference = measure(model, ADAMW)
        for optimizer in options.optimizers:
            row = reference if optimizer == ADAMW else measure(model, optimizer)
            row["optimizer_bytes"] = row["wire_bytes"] - reference["wire_bytes"]
            row["optimizer_executions"] = row["executions"] - reference["executions"]
            rows.append(row)
            print(f"{model}, {optimizer}: compiled", file=sys.stderr, flush=True)
    header = (
        "model",
        "optimizer",
        "sent",
        "declared",
        "contract",
        "by the optimizer",
        "collectives",
    )
    cells = [
        (
            row["model"],
            row["optimizer"],
            human_bytes(row["wire_bytes"]),
            human_bytes(row["wire_bytes_limit"]),
            "holds" if row["holds"] else "does not hold",
            human_bytes(row["optimizer_bytes"]),
            str(row["optimizer_executions"]),
        )
        for row in rows
    ]
    print(text_table(header, cells))
    versions = {name: version(name) for name in ("jax", "optax", "flax")}
    record = {"bench": "optimizers", "topology": TOPOLOGY, "rows": rows, "versions": versions}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
