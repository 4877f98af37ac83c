"""Measures training on one GPU: ours beside a step written by hand in plain JAX, and PyTorch.

    python scripts/gpu/train.py [--toy] [--seconds 460] [--models NAME ...] [--peers NAME ...]
                                [--json FILE]

Needs torch for PyTorch's rows, and torchao for those in float8; without them these rows are left
out, and named. The settings are in the order of what they tell: what the seconds do not suffice for
is left out, and named. With --toy small models run on a CPU, whose figures mean nothing.

Conventions
- The same model (configs/gpt2.yaml, configs/llama3_2_1b.yaml), the same number of tokens, drawn at
  random and on the device already; layers are unrolled (--words "--model.scan_layers true": ours
  and by hand in a scan), nothing is recomputed, no chunks of the loss. AdamW, clipped by the global
  norm at 1; float32 weights and moments, bfloat16 compute and residual stream.
- `ours`: full_shard of one device, which also reads whether loss, gradients and state are finite.
  `by hand`: the same model class and loss, jax.value_and_grad and optax in one jitted step that
  donates its state; attention by the same kernel (cuDNN's, see --attention).
  `PyTorch`: autocast, torch.compile of each block and of the head with its loss (--whole: of the
  whole model), scaled_dot_product_attention by its flash or cuDNN kernel, the fused AdamW.
- float8, from compute capability 8.9: the matmuls of the blocks' linear layers, e4m3 forward and
  e5m2 for gradients, a scale for each array as it is cast; PyTorch's by torchao.
- Batch: rows are doubled until they do not fit, or tokens per second grow by less than 3%; where
  the first do not fit they are halved until they do. The best is the row. Every peer searches for
  its own, in a process of its own, as two do not fit beside one another. With the seconds that are
  left each runs once more at its best, in the opposite order.
- Tokens per second: by the median of all steps of the best batch after the first two of a process,
  each waited for. MFU: 6 N + 12 L D T FLOPs a token, attention in full although causal, over the
  peak of bfloat16 in the planner's table of chips, in float8 too; `-` for a chip that it lacks.
- Peak: what the allocator has handed out at most (`peak_bytes_in_use`,
  `torch.cuda.max_memory_allocated`), GiB of 2^30 bytes. JAX may use 92% of the memory.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from trials import MODELS, environment, finish, load, peak_bytes, run_trials, step_seconds

PEERS = ("ours", "by hand", "PyTorch")
# (model, sequence, rows to begin with, dtype of the blocks' matmuls)
SETTINGS = [
    ("gpt2-124m", 1024, 64, "bfloat16"),
    ("llama-1b", 2048, 8, "bfloat16"),
    ("gpt2-124m", 1024, 64, "float8"),
    ("llama-1b", 2048, 8, "float8"),
    ("llama-1b", 4096, 4, "bfloat16"),
    ("llama-1b", 1024, 16, "bfloat16"),
]
TOY_SETTINGS = [("gpt2-124m", 64, 2, "bfloat16"), ("llama-1b", 64, 2, "float8")]
GROWTH = 1.03  # a larger batch must be so much faster
TRIAL_SECONDS = 150.0  # for one peer and setting
SECOND_ROUND_SECONDS = 30.0  # left for one more round
Step = Callable[[], float]


@dataclass(frozen=True)
class Trainer:
    """One peer with its weights: steps on so many rows, and what to read of it."""

    step_of: Callable[[int], Step]  # rows -> a step that waits, and returns its loss
    parameters: int
    peak: Callable[[], int]  # bytes


def tokens_of(rows: int, config: Any, vocab_size: int) -> np.ndarray:
    """Draws a batch, int32 [rows, sequence + 1]."""
    shape = (rows, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)


# --- JAX ---


def ours(config: Any, options: dict[str, Any]) -> Trainer:
    """Makes the step of `fully_shard`."""
    import jax

    from fsdp_jax.train.build import build

    run = build(config)
    state = run.sharded.init(0)

    def step_of(rows: int) -> Step:
        batch = run.step.put({"tokens": tokens_of(rows, config, run.model_config.vocab_size)})

        def step() -> float:
            nonlocal state
            state, metrics = run.step(state, batch)
            jax.block_until_ready(state)
            return float(metrics["loss"])

        return step

    return Trainer(step_of, sum(x.size for x in jax.tree.leaves(state.params)), peak_bytes)


def by_hand(config: Any, options: dict[str, Any]) -> Trainer:
    """Makes the step that one writes in plain JAX; of fsdp_jax it uses the model and its loss."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from fsdp_jax.models import FAMILIES
    from fsdp_jax.models.attention import make_attention
    from fsdp_jax.train.model_config import make_model_config

    family = FAMILIES[config.model.family]
    model_config = make_model_config(config.model, config.data)
    attention = make_attention(config.model.attention, jax.devices()[0].platform)

    def make() -> Any:
        model = family.model(model_config, rngs=nnx.Rngs(0), attention=attention)
        if options["dtype"] == "float8":
            for _, module in nnx.iter_graph(model.blocks):
                if isinstance(module, nnx.Linear):
                    module.dot_general = float8_dot_general
        return model

    structure, _ = nnx.split(nnx.eval_shape(make), nnx.Param)
    rate, decay = config.optimizer.learning_rate, config.optimizer.weight_decay
    tx = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip),
        optax.adamw(rate, b2=0.95, weight_decay=decay),
    )

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        total, count = family.loss(nnx.merge(structure, half), {"tokens": tokens})
        return total / count

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = jax.jit(lambda: nnx.state(make(), nnx.Param))()
    state = (params, jax.jit(tx.init)(params))

    def step_of(rows: int) -> Step:
        tokens = jax.device_put(tokens_of(rows, config, model_config.vocab_size))

        def step() -> float:
            nonlocal state
            state, value = train_step(state, tokens)
            jax.block_until_ready(state)
            return float(value)

        return step

    return Trainer(step_of, sum(x.size for x in jax.tree.leaves(params)), peak_bytes)


def float8_dot_general(x: Any, kernel: Any, *_: Any, **__: Any) -> Any:
    """Multiplies [..., K] by [K, N] in float8, with the gradients in float8 too."""
    import jax
    import jax.numpy as jnp

    def cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        largest = jnp.abs(x).max().astype(jnp.float32)
        scale = jnp.maximum(largest, 1e-12) / float(jnp.finfo(dtype).max)
        return (x.astype(jnp.float32) / scale).astype(dtype), scale

    def multiply(a: Any, b: Any) -> jax.Array:
        product = jnp.matmul(a[0], b[0], preferred_element_type=jnp.float32)
        return (product * (a[1] * b[1])).astype(jnp.bfloat16)

    def transposed(a: Any) -> Any:
        return a[0].T, a[1]

    @jax.custom_vjp
    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return forward(x, kernel)[0]

    def forward(x: jax.Array, kernel: jax.Array) -> Any:
        saved = cast(x, jnp.float8_e4m3fn), cast(kernel, jnp.float8_e4m3fn)
        return multiply(*saved), saved

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        x, kernel = saved
        grad = cast(cotangent, jnp.float8_e5m2)
        return multiply(grad, transposed(kernel)), multiply(transposed(x), grad)

    dot.defvjp(forward, backward)
    return dot(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)


# --- PyTorch ---


def pytorch(config: Any, options: dict[str, Any]) -> Trainer:
    """Makes PyTorch's step; JAX, which computes the rotary frequencies, stays on the CPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import torch
    import torch_models
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fsdp_jax.models.llama import rotary_frequencies
    from fsdp_jax.train.model_config import make_model_config

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options["toy"]:
        raise RuntimeError("this torch sees no GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = make_model_config(config.model, config.data)
    torch.set_float32_matmul_precision("high")
    with device:
        if config.model.family == "gpt":
            shape = (sizes.sequence_length, sizes.layers, sizes.width, sizes.heads)
            model: Any = torch_models.GPT(sizes.padded_vocab_size, *shape, torch.bfloat16)
        else:
            rope = (sizes.head_dim, sizes.rope_theta, sizes.rope_scaling)
            frequency = np.asarray(rotary_frequencies(*rope))
            model = torch_models.Llama(sizes, frequency, torch.bfloat16)
    if options["dtype"] == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        emulated = Float8LinearConfig(emulate=not on_gpu)
        convert_to_float8_training(model.blocks, config=emulated)
    parameters = list(model.parameters())
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    # on a CPU, at toy size, code that Inductor makes would take a minute to compile
    compiled: dict[str, Any] = {"dynamic": False, "backend": "inductor" if on_gpu else "aot_eager"}
    if options["whole"]:
        model.compile(**compiled)
    else:
        model.loss = torch.compile(model.loss, **compiled)
        for block in model.blocks:
            block.compile(**compiled)

    def step_of(rows: int) -> Step:
        tokens = tokens_of(rows, config, sizes.vocab_size).astype(np.int64)
        batch = torch.from_numpy(tokens).to(device)

        def step() -> float:
            with (
                torch.autocast(device.type, torch.bfloat16),
                sdpa_kernel(fast) if on_gpu else nullcontext(),
            ):
                loss = model(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            if on_gpu:
                torch.cuda.synchronize()
            return float(loss.detach())

        return step

    def peak() -> int:
        return int(torch.cuda.max_memory_allocated()) if on_gpu else 0

    return Trainer(step_of, sum(x.numel() for x in parameters), peak)


# --- a trial: one peer, one setting ---


def try_batches(trial: dict[str, Any]) -> None:
    """Times batches of `rows`, doubled until it does not help; prints a line of JSON for each."""
    from fsdp_jax.models.families import flops_per_token
    from fsdp_jax.train.model_config import make_model_config

    rows, words = trial["rows"], f"--model.attention {trial['attention']}"
    words += f" --model.scan_layers false {trial['words']}"
    if trial["peer"] == "ours" and trial["dtype"] == "float8":
        words += " --precision.matmul float8"
    config = load(trial["model"], trial["sequence"], rows, words, toy=trial["toy"])
    make = {"ours": ours, "by hand": by_hand, "PyTorch": pytorch}[trial["peer"]]
    trainer = make(config, trial)
    flops = flops_per_token(make_model_config(config.model, config.data))
    speed = 0.0
    for _ in range(trial["batches"]):
        try:
            step = trainer.step_of(rows)
            began = time.perf_counter()
            loss = step()
            first = time.perf_counter() - began
            seconds = step_seconds(step, steps=trial["steps"], warmup=1)
        except Exception as error:
            memory = ("RESOURCE_EXHAUSTED", "out of memory")
            if not any(text in str(error) for text in memory):
                raise
            print(json.dumps({"rows": rows, "fits": False}), flush=True)
            return
        row = {
            "rows": rows,
            "fits": True,
            "seconds": seconds,
            "first_step_s": first,
            "first_loss": loss,
            "peak_bytes": trainer.peak(),
            "parameters": trainer.parameters,
            "flops_per_token": flops,
        }
        print(json.dumps(row), flush=True)
        faster = rows * trial["sequence"] / statistics.median(seconds)
        if faster < speed * GROWTH:
            return
        speed, rows = faster, rows * 2


def speed_of(batch: dict[str, Any], sequence: int) -> float:
    """Computes the tokens per second of a batch by its median step."""
    return batch["rows"] * sequence / statistics.median(batch["seconds"])


def search(trial: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Runs a trial that finds the best batch; its row, with all batches that were tried."""
    deadline = time.monotonic() + seconds
    batches, failed = run_trials(__file__, trial, seconds)
    while [batch["fits"] for batch in batches] == [False] and trial["rows"] > 1:
        # a process that has run out of memory may have lost its state: another one
        trial = trial | {"rows": trial["rows"] // 2, "batches": 1}
        batches, failed = run_trials(__file__, trial, deadline - time.monotonic())
    fitting = [batch for batch in batches if batch["fits"]]
    row = {name: trial[name] for name in ("model", "sequence", "dtype", "peer")}
    if not fitting:
        return row | {"failed": failed or "out of memory"}
    best = max(fitting, key=lambda batch: speed_of(batch, trial["sequence"]))
    # a search that was cut off has a best batch all the same
    row |= best | {"first_loss": batches[0]["first_loss"], "rounds": 1}
    return row | {"batches": batches, "cut_off": failed}


def repeat(row: dict[str, Any], trial: dict[str, Any], seconds: float) -> None:
    """Times the best batch of a row in another process, and adds its steps to the row's."""
    batches, failed = run_trials(__file__, trial | {"rows": row["rows"], "batches": 1}, seconds)
    if failed:
        print(f"{title(row)}: second round: {failed}", file=sys.stderr)
        return
    row["seconds"] += batches[0]["seconds"]
    row["rounds"] += 1


def title(row: dict[str, Any]) -> str:
    """Names a row in messages."""
    return f"{row['peer']}, {row['model']} {row['sequence']} {row['dtype']}"


# --- all trials ---


def measure(options: dict[str, Any], settings: list[Any], seconds: float) -> list[dict[str, Any]]:
    """Runs the settings with every peer, and once more while there is time; the rows."""
    deadline = time.monotonic() + seconds
    turns = []
    for number, (model, sequence, rows, dtype) in enumerate(settings):
        turn = number % len(options["peers"])
        for peer in options["peers"][turn:] + options["peers"][:turn]:
            if peer == "PyTorch" and dtype == "float8" and find_spec("torchao") is None:
                print(f"{model} {sequence} {dtype}: no torchao, no PyTorch", file=sys.stderr)
                continue
            trial = {"model": model, "sequence": sequence, "rows": rows, "dtype": dtype}
            turns.append(options | trial | {"peer": peer})
    measured = []
    for trial in turns:
        row = search(trial, min(TRIAL_SECONDS, deadline - time.monotonic()))
        if why := row.get("failed") or row.get("cut_off"):
            print(f"{title(row)}: {why}", file=sys.stderr)
        # what there was no time for is no failure
        if "failed" not in row or time.monotonic() < deadline:
            measured.append((row, trial))
    for row, trial in reversed(measured[: options["again"]]):
        left = deadline - time.monotonic()
        if "failed" not in row and left > SECOND_ROUND_SECONDS:
            repeat(row, trial, left)
    return [row for row, _ in measured]


def summarize(rows: list[dict[str, Any]], device: str) -> list[tuple[Any, ...]]:
    """Adds the figures of the table to the rows; returns its cells."""
    import jax.numpy as jnp

    from fsdp_jax.planner import peak_flops

    peak, cells = peak_flops(device, jnp.bfloat16), []
    keys = ("model", "sequence", "dtype")
    speeds = {}
    for row in rows:
        if "failed" not in row:
            row["tokens_per_s"] = speed_of(row, row["sequence"])
            row["mfu"] = peak and row["tokens_per_s"] * row["flops_per_token"] / peak
            speeds[*(row[key] for key in keys), row["peer"]] = row["tokens_per_s"]
    for row in rows:
        setting = tuple(row[key] for key in keys)
        if "failed" in row:
            cells.append((*setting, row["peer"], row["failed"][:30], *"------"))
            continue
        row["of_pytorch"] = None
        if other := speeds.get((*setting, "PyTorch")):
            row["of_pytorch"] = row["tokens_per_s"] / other
        cells.append(
            (
                *setting,
                row["peer"],
                row["rows"],
                f"{row['tokens_per_s']:.0f}",
                "-" if row["of_pytorch"] is None else f"{row['of_pytorch']:.3f}",
                "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
                f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "-",
                f"{row['first_step_s']:.0f}",
                f"{row['first_loss']:.3f}",
            )
        )
    return cells


def differences(rows: list[dict[str, Any]]) -> list[str]:
    """Names rows that are not of the same model: other parameters, or another first loss."""
    found: list[str] = []
    first: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if "failed" in row:
            continue
        same = first.setdefault((row["model"], row["sequence"], row["dtype"]), row)
        if row["parameters"] != same["parameters"]:
            found.append(f"{title(row)}: {row['parameters']} parameters, not {same['parameters']}")
        if not math.isclose(row["first_loss"], same["first_loss"], rel_tol=0.02):
            found.append(f"{title(row)}: loss {row['first_loss']}, not {same['first_loss']}")
    return found


def main() -> int:
    """Runs the trials, prints the table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small models, for a CPU")
    parser.add_argument("--seconds", type=float, default=460, help="for all trials")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--attention", help="of JAX: cudnn, flash or blockwise")
    parser.add_argument("--words", default="", help="further keys of the configuration, for JAX")
    parser.add_argument("--whole", action="store_true", help="torch.compile of the whole model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial is not None:
        try_batches(json.loads(arguments.trial))
        return 0

    here = environment()
    settings = TOY_SETTINGS if arguments.toy else SETTINGS
    peers = [peer for peer in PEERS if peer in arguments.peers]
    if "PyTorch" in peers and find_spec("torch") is None:
        print("no torch: no rows of PyTorch", file=sys.stderr)
        peers.remove("PyTorch")
    if not arguments.toy and float(here["capability"] or 0) < 8.9:
        print("float8 needs compute capability 8.9: no rows of it", file=sys.stderr)
        settings = [setting for setting in settings if setting[3] != "float8"]
    settings = [setting for setting in settings if setting[0] in arguments.models]
    options = {
        "peers": peers,
        "toy": arguments.toy,
        "attention": arguments.attention or ("blockwise" if arguments.toy else "cudnn"),
        "words": arguments.words,
        "whole": arguments.whole,
        "steps": 2 if arguments.toy else 12,
        "batches": 1 if arguments.toy else 8,
        "again": 1 if arguments.toy else len(PEERS) * len(settings),  # rows of a second round
    }
    with tempfile.TemporaryDirectory(prefix="gpu_train_") as folder:
        # what a process has compiled its second round finds
        defaults = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        }
        if arguments.toy:  # XLA:CPU compiles sooner without LLVM's optimizations
            defaults |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        os.environ |= defaults | os.environ
        rows = measure(options, settings, arguments.seconds)
    names = ("rows", "tokens/s", "of PyTorch", "MFU", "peak GiB", "first s", "loss")
    columns = ("model", "T", "matmuls", "peer", *names)
    cells = summarize(rows, here["device"])
    wrong = differences(rows)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    finish("gpu_train", columns, cells, rows, arguments.json)
    return 3 if wrong or any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
