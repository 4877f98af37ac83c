"""Measures the overhead of fsdp_jax over a train step written by hand.

    python scripts/bench_overhead.py [--strategy full_shard|shard_grad_op|no_shard] [--pairs 40]
                                     [--compute float32]
    python scripts/bench_overhead.py --host [--pairs 9] [--layers 12]
    python scripts/bench_overhead.py --leaves 250 1000

Compares collectives, losses and step time. Both sides train the same scanned GPT with AdamW on the
same mesh of 8 virtual CPU devices, from the same parameters, on the same batches. The side written
by hand is plain JAX and optax: it uses the model for the shapes of its parameters and for its
initialisation, and nothing else of fsdp_jax. Both skip steps whose loss, gradients or new state are
not finite.

Conventions
- Collectives are counted in the text of the compiled programs, each once, whatever the trip count
  of its loop. Bytes are those of a collective's result on one device.
- A step is timed from the NumPy batch on the host to the last array of the new state,
  `block_until_ready`.
- Runs are interleaved in rounds of three: ours, by hand, and by hand once more as a control, in
  rotating order. The ratio is the median of ours over the median by hand; its interval is a 95 %
  bootstrap over rounds. The control's ratio, of a program to itself, is the noise of this process.
  From one process to the next the ratio of the same two programs moves by several percent more,
  which no interval here shows: run it several times before believing a small difference.
- Page faults are the process's minor ones: temporary buffers that the allocator returned to the
  system and requests again. `--hold-memory` restarts with glibc set never to return memory, for
  both sides.
- CPU seconds are those of all threads of the process during a step; other programs affect them
  less than the clock.
- Exit code 1 if collectives or losses differ. The ratio is reported, with its target, and does not
  fail the run.

With `--host`, what the host does before a step runs, with unrolled layers and `full_shard`:
- Tracing and lowering: `jit(step).lower(shapes)` of a new function object each time, in CPU seconds
  of this process after a garbage collection, ours and by hand in turns; medians. By hand is the
  same NNX model class: a merge for each layer under a `jax.checkpoint` that drops what was
  gathered, constraints at each parameter, value_and_grad, optax, and the same guard against steps
  whose loss, gradients or new state are not finite.
- `put` of a batch of three NumPy arrays against `jax.device_put(batch, shardings)`, in microseconds
  by the clock, and of arrays that are on the devices already.
- `fully_shard` for increasing numbers of layers, in CPU seconds; once each, after one run of two
  layers.

With `--leaves`, a model of so many kernels [8, 8] and biases, which adds them, on one device: CPU
seconds to trace, lower and compile a step, once each, after one of eight leaves. Plain JAX has no
guard against steps that are not finite, and no norm of the gradients.
"""

import argparse
import collections
import functools
import gc
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.models import GPT, GPTConfig, next_token_loss, parameter_count
from fsdp_jax.models.gpt import Block, preset
from fsdp_jax.models.losses import cross_entropy

DEVICES = 8
TARGET, TRACE_TARGET = 1.02, 1.3
GATHERING = ("convert_element_type", "sharding_constraint", "optimization_barrier")
Tree = Any


# --- by hand ---


def all_finite(tree: Tree) -> jax.Array:
    """Returns whether every floating-point number of a tree is finite."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floating]))


def by_hand(
    config: GPTConfig, mesh: Mesh, tx: optax.GradientTransformation, strategy: str, compute: Any
) -> Any:
    """Returns (init, step, sharding of a batch) of this one model, written without a library.

    B batch, T sequence, D width, H heads.
    """
    devices, small = mesh.shape["data"], 2**14
    replicated, batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def make(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(key)), nnx.Param))

    def spec(path: Any, leaf: Any) -> P:
        """Shards the largest divisible dim, never the layer dim."""
        first = 1 if path[0].key == "blocks" else 0
        dims = [i for i in range(first, leaf.ndim) if leaf.shape[i] % devices == 0]
        if strategy == "no_shard" or not dims or np.prod(leaf.shape[first:]) < small:
            return P()
        best = max(dims, key=lambda i: leaf.shape[i])
        return P(*[None] * best, "data")

    abstract = jax.eval_shape(make, jax.random.key(0))
    specs = jax.tree.map_with_path(spec, abstract)
    param_shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs["blocks"])
    opt_shardings = jax.tree.map(  # moments are trees like the parameters
        lambda part: param_shardings if isinstance(part, dict) else replicated,
        jax.eval_shape(tx.init, abstract),
        is_leaf=lambda part: isinstance(part, dict),
    )
    shardings = {"params": param_shardings, "opt": opt_shardings}
    shardings |= {"step": replicated, "skipped": replicated}

    def put(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def gather(tree: Tree, specs: Tree) -> Tree:
        def one(path: Any, x: jax.Array, spec: P) -> jax.Array:
            norm = any(str(entry.key).startswith("ln_") for entry in path)
            x = x.astype(jnp.float32 if norm else compute)
            return put(lax.optimization_barrier(put(x, spec)), P()) if any(spec) else x

        return jax.tree.map_with_path(one, tree, specs)

    def norm(p: Tree, x_BTD: jax.Array) -> jax.Array:
        y = x_BTD.astype(jnp.float32)
        mean = y.mean(-1, keepdims=True)
        var = jnp.maximum(0.0, (y * y).mean(-1, keepdims=True) - mean * mean)
        return ((y - mean) * (lax.rsqrt(var + 1e-5) * p["scale"]) + p["bias"]).astype(compute)

    def linear(p: Tree, x_BTD: jax.Array) -> jax.Array:
        return x_BTD @ p["kernel"] + p["bias"]

    def block(p: Tree, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        qkv = jnp.split(linear(p["attn"]["qkv"], norm(p["ln_1"], x_BTD)), 3, axis=-1)
        q, k, v = (part.reshape(B, T, config.heads, D // config.heads) for part in qkv)
        x_BTD += linear(
            p["attn"]["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, D)
        )
        hidden = jax.nn.gelu(linear(p["mlp"]["up"], norm(p["ln_2"], x_BTD)), approximate=True)
        return x_BTD + linear(p["mlp"]["down"], hidden)

    def keep(primitive: Any, *_: Any, **__: Any) -> bool:
        """Saves activations, not gathered parameters: the backward pass gathers again."""
        return primitive.name not in GATHERING

    def layer(x_BTD: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        return block(gather(p, layer_specs), x_BTD), None

    if strategy == "full_shard":
        layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)

    def loss_sum(params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        top = params  # gathered already, or never sharded
        if strategy == "full_shard":
            outer = [name for name in params if name != "blocks"]
            top = gather({n: params[n] for n in outer}, {n: specs[n] for n in outer})
        x_BTD = jnp.take(top["embed"]["embedding"], inputs, axis=0)
        x_BTD += jnp.take(top["positions"]["embedding"], jnp.arange(inputs.shape[1])[None], axis=0)
        if strategy == "full_shard":
            x_BTD, _ = lax.scan(layer, x_BTD, params["blocks"])
        else:
            x_BTD, _ = lax.scan(lambda x, p: (block(p, x), None), x_BTD, params["blocks"])
        logits = (norm(top["ln_f"], x_BTD) @ top["embed"]["embedding"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).sum(), jnp.float32(targets.size)

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        params = state["params"]
        inputs = params if strategy == "full_shard" else gather(params, specs)
        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(inputs, tokens)
        grads = jax.tree.map(
            lambda g, p, s: put(g, s).astype(p.dtype) / count, grads, params, specs
        )
        loss, size = total / count, optax.tree.norm(grads)
        updates, opt = tx.update(grads, state["opt"], params)
        new = {"params": optax.apply_updates(params, updates), "opt": opt}
        fine = jnp.isfinite(loss) & jnp.isfinite(size) & all_finite(new)
        new = jax.tree.map(
            lambda a, b: jnp.where(fine, a, b), new, {name: state[name] for name in new}
        )
        new |= {"step": state["step"] + 1, "skipped": state["skipped"] + jnp.where(fine, 0, 1)}
        return new, {"loss": loss, "grad_norm": size, "skipped": new["skipped"]}

    def init(seed: int) -> Tree:
        key = jax.random.split(jax.random.key(seed))[0]  # as fsdp_jax does, for the same parameters
        params = jax.jit(make, out_shardings=param_shardings)(key)
        opt = jax.jit(tx.init, out_shardings=opt_shardings)(params)
        counters = jax.jit(
            lambda: (jnp.int32(0), jnp.int32(0)), out_shardings=(replicated, replicated)
        )()
        return {"params": params, "opt": opt, "step": counters[0], "skipped": counters[1]}

    compiled = jax.jit(
        step,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )
    return init, compiled, batch


def unrolled_by_hand(
    config: GPTConfig, mesh: Mesh, tx: optax.GradientTransformation
) -> tuple[Callable[..., Any], Any]:
    """Returns (function that makes the jitted step, shapes of its state), unrolled full_shard."""
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    graphdef, params = jax.eval_shape(lambda: nnx.split(GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
    block_def, _ = nnx.split(nnx.merge(graphdef, params).blocks[0])

    def sharding(leaf: Any) -> NamedSharding:
        dims = [i for i in range(leaf.ndim) if leaf.shape[i] % mesh.size == 0]
        if not dims or leaf.size < 2**14:
            return replicated
        return NamedSharding(mesh, P(*[None] * max(dims, key=lambda i: leaf.shape[i]), "data"))

    def gather(x: jax.Array, at: NamedSharding) -> jax.Array:
        pin = lax.with_sharding_constraint
        if at is replicated:
            return x
        return pin(lax.optimization_barrier(pin(x, at)), replicated)

    def keep(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name not in GATHERING

    specs = jax.tree.map(sharding, params)

    def loss_sum(params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = {
            name: jax.tree.map(gather, params[name], specs[name])
            for name in params
            if name != "blocks"
        }
        model = nnx.merge(graphdef, nnx.State({**top, "blocks": params["blocks"]}))
        x_BTD = model.embed(tokens[:, :-1]) + model.positions(jnp.arange(tokens.shape[1] - 1)[None])
        for number, block in params["blocks"].items():

            def layer(block: Tree, x_BTD: jax.Array, number: int = number) -> jax.Array:
                return nnx.merge(block_def, jax.tree.map(gather, block, specs["blocks"][number]))(
                    x_BTD
                )

            x_BTD = jax.checkpoint(layer, policy=keep)(block, x_BTD)
        losses = cross_entropy(model.embed.attend(model.ln_f(x_BTD)), tokens[:, 1:])
        return losses.sum(), jnp.float32(losses.size)

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        params = state["params"]
        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, tokens)
        grads = jax.tree.map(
            lambda g, at: lax.with_sharding_constraint(g, at) / count, grads, specs
        )
        loss, size = total / count, optax.tree.norm(grads)
        updates, opt = tx.update(grads, state["opt"], params)
        new = {"params": optax.apply_updates(params, updates), "opt": opt}
        fine = jnp.isfinite(loss) & jnp.isfinite(size) & all_finite(new)
        new = jax.tree.map(
            lambda a, b: jnp.where(fine, a, b), new, {name: state[name] for name in new}
        )
        new |= {"step": state["step"] + 1, "skipped": state["skipped"] + jnp.where(fine, 0, 1)}
        return new, {"loss": loss, "grad_norm": size, "skipped": new["skipped"]}

    def is_params(part: Any) -> bool:
        return isinstance(part, nnx.State)

    counter = jax.ShapeDtypeStruct((), jnp.int32)
    state = {
        "params": params,
        "opt": jax.eval_shape(tx.init, params),
        "step": counter,
        "skipped": counter,
    }
    placed = jax.tree.map(
        lambda part: specs if is_params(part) else replicated, state, is_leaf=is_params
    )

    def make() -> Any:
        return jax.jit(
            lambda state, tokens: step(state, tokens),
            in_shardings=(placed, rows),
            out_shardings=(placed, replicated),
            donate_argnums=0,
        )

    return make, state


def host_cost(layers: int, pairs: int) -> dict[str, Any]:
    """Measures what the host does before a step runs; see the conventions."""
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    flat, tx = Mesh(mesh.devices.reshape(-1), ("data",)), optax.adamw(1e-3)

    def shard(count: int) -> fsdp_jax.Sharded:
        config = preset("tiny", scan_layers=False, layers=count)
        return fsdp_jax.fully_shard(lambda rngs: GPT(config, rngs=rngs), tx, mesh, units=[Block])

    sharded, tokens = shard(layers), jax.ShapeDtypeStruct((16, 129), jnp.int32)
    make, state = unrolled_by_hand(preset("tiny", scan_layers=False, layers=layers), flat, tx)

    def cpu(run: Callable[[], Any]) -> float:
        gc.collect()
        began = time.process_time()
        run()
        return time.process_time() - began

    lowering: dict[str, list[float]] = {"ours": [], "hand": []}
    for number in range(pairs + 1):
        step, by_hand = sharded.make_train_step(next_token_loss), make()
        sides = {
            "ours": functools.partial(step.lower, {"tokens": tokens}),
            "hand": functools.partial(by_hand.lower, state, tokens),
        }
        for side in sorted(sides, reverse=bool(number % 2)):
            spent = cpu(sides[side])
            if number:  # the first round warms up
                lowering[side].append(spent)
    ratio, low, high = ratio_of(np.array(lowering["ours"]), np.array(lowering["hand"]))
    ours, hand = (np.median(lowering[side]) for side in ("ours", "hand"))
    print(f"trace and lower, {layers} unrolled layers (CPU s): ours {ours:.3f}, by hand {hand:.3f}")
    print(f"ratio {ratio:.2f} [{low:.2f}, {high:.2f}], target {TRACE_TARGET}")

    batch = {name: np.ones((64, 129), np.int32) for name in ("tokens", "segments", "positions")}
    shardings = {name: NamedSharding(flat, P("data")) for name in batch}
    placed, step = jax.device_put(batch, shardings), sharded.make_train_step(next_token_loss)
    puts = {
        "device_put": lambda: jax.device_put(batch, shardings),
        "put": lambda: step.put(batch),
        "put of placed arrays": lambda: step.put(placed),
    }
    clocks: dict[str, list[float]] = {name: [] for name in puts}
    for _ in range(400):
        for name, run in puts.items():
            clocks[name].append(timed(run)[0])
    micro = {name: float(np.median(times)) * 1e6 for name, times in clocks.items()}
    shown = ", ".join(f"{name} {value:.0f}" for name, value in micro.items())
    print(f"a batch to the devices (us): {shown}")

    shard(2)
    growth = {count: cpu(functools.partial(shard, count)) for count in (12, 24, 48, 96)}
    shown = ", ".join(f"{count} layers {value:.2f}" for count, value in growth.items())
    print(f"fully_shard (CPU s): {shown}")
    return {
        "bench": "host",
        "layers": layers,
        "pairs": pairs,
        "lower_cpu_seconds": lowering,
        "lower_ratio_with_95_percent_interval": [ratio, low, high],
        "target": TRACE_TARGET,
        "put_us": micro,
        "fully_shard_cpu_seconds": growth,
        "jax": jax.__version__,
    }


# --- comparison ---

_OPS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (.*?) ({_OPS})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")


def collectives(text: str) -> collections.Counter[tuple[str, str]]:
    """Returns {(op, array): count}; a collective of several arrays counts once for each."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for arrays, op, _ in _COLLECTIVE.findall(text):
        counts.update((op, f"{dtype}[{dims}]") for dtype, dims in _ARRAY.findall(arrays))
    return counts


def array_bytes(array: str) -> int:
    dtype, dims = array.rstrip("]").split("[")
    bits = int("".join(c for c in dtype if c.isdigit()))
    return int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64)) * bits // 8


def totals(counts: collections.Counter[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Returns {op: (arrays, bytes)}."""
    sums: dict[str, tuple[int, int]] = {}
    for (op, array), count in sorted(counts.items()):
        arrays, size = sums.get(op, (0, 0))
        sums[op] = (arrays + count, size + count * array_bytes(array))
    return sums


def timed(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Returns (seconds by the clock, CPU seconds of this process, its page faults)."""
    wall, cpu, faults = time.perf_counter(), time.process_time(), page_faults()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu, float(page_faults() - faults)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def ratio_of(above: np.ndarray, below: np.ndarray) -> tuple[float, float, float]:
    """Returns (ratio of medians, the ends of its 95 % bootstrap interval)."""
    picks = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    spread = np.median(above[picks], axis=1) / np.median(below[picks], axis=1)
    low, high = np.quantile(spread, (0.025, 0.975))
    return float(np.median(above) / np.median(below)), float(low), float(high)


class Leaves(nnx.Module):
    """Many small layers beside one another."""

    def __init__(self, count: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(count // 2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the sum of the layers, [rows, 8] to [rows, 8]."""
        kernels: list[Any] = [layer.kernel for layer in self.layers]
        biases: list[Any] = [layer.bias for layer in self.layers]
        return jnp.tanh(x @ sum(each[...] for each in kernels) + sum(each[...] for each in biases))


def leaves_cost(counts: list[int]) -> dict[str, Any]:
    """Measures what a step of many small parameters costs the host; see the conventions."""
    tx, x = optax.adamw(1e-3), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu")[:1], data=1)

    def loss(model: Any, x: jax.Array) -> tuple[jax.Array, int]:
        return jnp.square(model(x)).sum(), len(x)

    def ours(count: int) -> Callable[[], Any]:
        sharded = fsdp_jax.fully_shard(lambda rngs: Leaves(count, rngs), tx, mesh)
        return lambda: sharded.make_train_step(loss).compile(x)

    def plain(count: int) -> Callable[[], Any]:
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Leaves(count, nnx.Rngs(0))))

        def step(params: Tree, opt: Tree, x: jax.Array) -> Tree:
            def mean(params: Tree) -> jax.Array:
                total, size = loss(nnx.merge(graphdef, params), x)
                return total / size

            value, gradients = jax.value_and_grad(mean)(params)
            updates, opt = tx.update(gradients, opt, params)
            return optax.apply_updates(params, updates), opt, value

        opt = jax.eval_shape(tx.init, params)
        return lambda: jax.jit(step, donate_argnums=(0, 1)).lower(params, opt, x).compile()

    seconds: dict[str, dict[int, float]] = {"ours": {}, "plain": {}}
    for count in (8, *counts):
        for side, make in (("ours", ours), ("plain", plain)):
            run = make(count)
            gc.collect()
            began = time.process_time()
            run()
            seconds[side][count] = time.process_time() - began
        found = seconds["ours"][count], seconds["plain"][count]
        print(f"{count} leaves (CPU s): ours {found[0]:.1f}, plain JAX {found[1]:.1f}")
    return {"bench": "leaves", "cpu_seconds": seconds, "jax": jax.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy", default="full_shard", choices=("full_shard", "shard_grad_op", "no_shard")
    )
    parser.add_argument("--compute", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--host", action="store_true", help="what the host does before a step runs")
    parser.add_argument("--leaves", type=int, nargs="+", help="numbers of small parameters")
    parser.add_argument(
        "--pairs", type=int, help="timed rounds, after warm-up; 40, or 9 with --host"
    )
    parser.add_argument("--layers", type=int, help="4, or 12 with --host")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--hold-memory", action="store_true", help="no page faults for temporary buffers; see above"
    )
    parser.add_argument(
        "--dump", help="write both compiled programs to DUMP.ours.txt and DUMP.hand.txt"
    )
    args = parser.parse_args()

    malloc = {
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**28),
    }
    if args.hold_memory and any(os.environ.get(name) != value for name, value in malloc.items()):
        # glibc reads them when the process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **malloc})

    use_virtual_devices(DEVICES)
    args.pairs = args.pairs or (9 if args.host else 40)
    args.layers = args.layers or (12 if args.host else 4)
    if args.leaves:
        print(json.dumps(leaves_cost(args.leaves)))
        return 0
    if args.host:
        print(json.dumps(host_cost(args.layers, args.pairs)))
        return 0
    config = GPTConfig(
        vocab_size=256,
        sequence_length=args.sequence,
        layers=args.layers,
        width=args.width,
        heads=args.width // 32,
    )
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    flat = Mesh(mesh.devices.reshape(-1), ("data",))
    tx = optax.adamw(1e-3)

    precision = fsdp_jax.Precision(compute=args.compute)
    sharded = fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), tx, mesh, args.strategy, "scan", precision=precision
    )
    # With sharding annotations, as the other side: with local batches the collectives differ (fewer
    # bytes).
    ours = sharded.make_train_step(next_token_loss)
    init, hand, hand_batch = by_hand(config, flat, tx, args.strategy, jnp.dtype(args.compute))
    states = {"ours": sharded.init(0), "hand": init(0)}
    rows = np.random.default_rng(0).integers(
        0, 256, (5, args.batch, args.sequence + 1), dtype=np.int32
    )
    hand_compiled = hand.lower(states["hand"], jax.device_put(rows[0], hand_batch)).compile()
    texts = {
        "ours": ours.lower({"tokens": rows[0]}).compile().as_text(),
        "hand": hand_compiled.as_text(),
    }
    if args.dump:
        for side, text in texts.items():
            with open(f"{args.dump}.{side}.txt", "w") as file:
                file.write(text)

    def step_ours(tokens: np.ndarray) -> Any:
        states["ours"], metrics = ours(states["ours"], {"tokens": tokens})
        return states["ours"], metrics

    def step_hand(tokens: np.ndarray) -> Any:
        states["hand"], metrics = hand_compiled(states["hand"], jax.device_put(tokens, hand_batch))
        return states["hand"], metrics

    sides = {"ours": step_ours, "hand": step_hand, "control": step_hand}
    losses = {side: [float(sides[side](r)[1]["loss"]) for r in rows] for side in ("ours", "hand")}
    times: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    names = list(sides)
    for number in range(args.pairs):
        tokens = rows[number % len(rows)]
        turn = number % len(names)
        for side in names[turn:] + names[:turn]:
            times[side].append(timed(functools.partial(sides[side], tokens)))

    counts = {side: collectives(text) for side, text in texts.items()}
    same = counts["ours"] == counts["hand"]
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["hand"], strict=True))
    tolerance = 1e-5 if args.compute == "float32" else 2e-2
    measured = {side: np.array(values) for side, values in times.items()}
    medians = {
        side: [float(x) for x in np.median(values, axis=0)] for side, values in measured.items()
    }
    ratios = {
        f"{name}_{clock}": ratio_of(measured[above][:, i], measured["hand"][:, i])
        for name, above in (("ours", "ours"), ("control", "control"))
        for i, clock in enumerate(("wall", "cpu"))
    }

    size = f"{parameter_count(config):,} parameters, {args.layers} layers x {args.width}"
    print(f"GPT {size}, batch {args.batch} x {args.sequence}, {args.strategy}")
    print(f"compute {args.compute}, {DEVICES} virtual CPU devices\n")
    print(f"{'':<34}{'ours':>20}{'by hand':>20}")
    by_op = {side: totals(counted) for side, counted in counts.items()}
    for op in sorted({*by_op["ours"], *by_op["hand"]}):
        cells = [
            f"{n} ({size:,} B)"
            for n, size in (by_op[side].get(op, (0, 0)) for side in ("ours", "hand"))
        ]
        print(f"{op + ', arrays (bytes)':<34}{cells[0]:>20}{cells[1]:>20}")
    for i in range(len(rows)):
        print(f"{f'loss, step {i + 1}':<34}{losses['ours'][i]:>20.7f}{losses['hand'][i]:>20.7f}")
    for i, clock in enumerate(("step, median (ms)", "step, median (CPU ms)")):
        print(f"{clock:<34}{medians['ours'][i] * 1e3:>20.2f}{medians['hand'][i] * 1e3:>20.2f}")
    print(
        f"{'step, median page faults':<34}{medians['ours'][2]:>20,.0f}{medians['hand'][2]:>20,.0f}"
    )
    print(f"\ncollectives the same: {same}; losses at most {apart:.1e} apart")
    labels = {
        "ours / by hand, clock": "ours_wall",
        "ours / by hand, CPU": "ours_cpu",
        "control, clock": "control_wall",
        "control, CPU": "control_cpu",
    }
    for label, key in labels.items():
        middle, low, high = ratios[key]
        print(f"{label:<34}{middle:>8.3f}  [{low:.3f}, {high:.3f}]  {args.pairs} rounds")
    print(f"target: ours / by hand at most {TARGET}")
    for side, other in (("ours", "hand"), ("hand", "ours")):
        for (op, array), n in sorted((counts[side] - counts[other]).items()):
            print(f"only {side}: {n} x {op} {array}")
    record = {
        "bench": "overhead",
        "strategy": args.strategy,
        "compute": args.compute,
        "pairs": args.pairs,
        "hold_memory": args.hold_memory,
        "collectives": by_op,
        "collectives_same": same,
        "loss_difference": apart,
        "step_wall_and_cpu_seconds_and_page_faults": medians,
        "ratios_with_95_percent_interval": ratios,
        "target": TARGET,
        "jax": jax.__version__,
    }
    print(json.dumps(record))
    return 0 if same and apart <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
