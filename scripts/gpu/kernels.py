"""Measures what share of the chip's peak matmuls and attention kernels reach.

    python scripts/gpu/kernels.py [--toy] [--json FILE]

One GPU; on a CPU with --toy. The last rows are what the planner's table of chips
(fsdp_jax/planner/machines/chips.toml) would state by these measurements.

Conventions
- A matmul [M, K] x [K, N] has 2 M K N FLOPs. The shapes are those of GPT-2 124M with 16 sequences
  of 1024, of a 1B and a 7B Llama with 8192 tokens, forward and of the weights' gradients.
- Attention is causal and counted in full: 4 B H T T K FLOPs forward, 2.5 times that backward, of
  which a kernel that skips the masked half computes half. B T is 16,384, 16 heads of 128.
- Peak: that of the dtype in the planner's table; unknown for a chip that it lacks. Each time is the
  median of 10 calls of 10 kernels in one program, one input depending on the last output.
- A share of one kernel alone is an upper limit: in a step, power limits the chip.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from trials import finish, median_seconds

REPEATS = 10
SHAPES = [
    *((16384, 768, 2304), (16384, 768, 3072), (16384, 3072, 768), (16384, 768, 50304)),
    *((768, 16384, 3072), (8192, 2048, 8192), (8192, 8192, 2048), (2048, 8192, 8192)),
    *((8192, 2048, 128256), (8192, 4096, 11008), (8192, 11008, 4096), (4096, 8192, 11008)),
    *((4096, 4096, 4096), (8192, 8192, 8192)),
]
LENGTHS = (512, 1024, 2048, 4096, 8192)
TOKENS, HEADS, HEAD = 16384, 16, 128


def matmul_seconds(m: int, k: int, n: int, dtype: Any) -> float:
    """Times one matmul of a chain."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16).astype(dtype)

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        def once(_: Any, carry: jax.Array) -> jax.Array:
            out = jnp.matmul(carry.astype(dtype), b, preferred_element_type=jnp.bfloat16)
            return carry + out[:, :1] * 0

        return jax.lax.fori_loop(0, REPEATS, once, a)

    run = chain.lower(a, b).compile()
    return median_seconds(lambda: jax.block_until_ready(run(a, b)), steps=10) / REPEATS


def attention_seconds(kind: Any, length: int, tokens: int) -> float:
    """Times one attention, forward and backward."""
    import jax
    import jax.numpy as jnp

    from fsdp_jax.models.attention import make_attention

    attention = make_attention(kind, jax.devices()[0].platform)
    query = jnp.ones((tokens // length, length, HEADS, HEAD), jnp.bfloat16)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    @jax.jit
    def chain(query: jax.Array) -> jax.Array:
        def once(_: Any, q: jax.Array) -> jax.Array:
            grads = jax.grad(loss, argnums=(0, 1, 2))(q, q, q)
            return q + sum(grads) * 0

        return jax.lax.fori_loop(0, REPEATS, once, query)

    run = chain.lower(query).compile()
    return median_seconds(lambda: jax.block_until_ready(run(query)), steps=10) / REPEATS


def bandwidth(numbers: int) -> float:
    """Measures bytes a second that a sum of two arrays reads and writes."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones(numbers), jnp.ones(numbers)
    add = jax.jit(lambda a, b: a + 2 * b)
    seconds = median_seconds(lambda: jax.block_until_ready(add(a, b)), steps=10)
    return 3 * 4 * numbers / seconds


def main() -> int:
    """Measures, and prints the table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import jax
    import jax.numpy as jnp

    from fsdp_jax.planner import hardware_of, peak_flops

    device = jax.devices()[0].device_kind
    lengths: tuple[int, ...] = LENGTHS
    shapes, tokens, numbers = SHAPES, TOKENS, 1 << 28
    kinds, dtypes = ["cudnn", "flash", "blockwise"], ["bfloat16", "float8_e4m3fn"]
    if arguments.toy:
        shapes, lengths, tokens, numbers = [(64, 32, 64)], (64,), 128, 1 << 16
        kinds, dtypes = ["blockwise"], ["bfloat16"]
    rows: list[dict[str, Any]] = []

    def add(kernel: str, shape: Any, dtype: str, flops: float, run: Any) -> None:
        """Adds a row, with why a kernel does not run in place of its figures."""
        row: dict[str, Any] = {"kernel": kernel, "shape": list(shape), "dtype": dtype}
        try:
            seconds = run()
        except Exception as error:
            rows.append(row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]})
            return
        peak = peak_flops(device, jnp.dtype(dtype))
        row |= {"seconds": seconds, "tflops": flops / seconds / 1e12}
        row["share"] = None if peak is None else flops / seconds / peak
        rows.append(row)

    for dtype in dtypes:
        for m, k, n in shapes:
            run = functools.partial(matmul_seconds, m, k, n, jnp.dtype(dtype))
            add("matmul", (m, k, n), dtype, 2.0 * m * k * n, run)
    for kind in kinds:
        for length in lengths:
            flops = 3.5 * 4 * tokens * length * HEADS * HEAD
            run = functools.partial(attention_seconds, kind, length, tokens)
            add(
                f"{kind} attention", (tokens // length, length, HEADS, HEAD), "bfloat16", flops, run
            )

    # what the planner's table would state
    def shares(kernel: str) -> list[float]:
        return [r["share"] for r in rows if r["kernel"] == kernel and r.get("share")]

    constants: dict[str, Any] = {}
    for name, kernel in (("matmul", "matmul"), ("attention", f"{kinds[0]} attention")):
        if found := shares(kernel):
            constants[name] = statistics.median(found)
    chip = hardware_of(device)
    if chip is not None and chip.memory_bandwidth:
        constants["memory"] = bandwidth(numbers) / chip.memory_bandwidth
    else:
        constants["bytes_per_s"] = bandwidth(numbers)

    columns = ("kernel", "shape", "dtype", "us", "TFLOP/s", "of peak")
    cells = []
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        figures: tuple[str, ...] = (row.get("failed", "")[:40], "-", "-")
        if "failed" not in row:
            share = "-" if row["share"] is None else f"{row['share']:.0%}"
            figures = (f"{row['seconds'] * 1e6:.0f}", f"{row['tflops']:.3g}", share)
        cells.append((row["kernel"], shape, row["dtype"], *figures))
    for name, value in constants.items():
        cells.append((f"constant: {name}", "-", "-", "-", "-", f"{value:.3g}"))
    finish("gpu_kernels", columns, cells, {"kernels": rows, "constants": constants}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
