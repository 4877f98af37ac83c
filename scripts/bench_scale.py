"""Scales a training step along one axis at a time: devices, parameters, leaves, layers.

    python scripts/bench_scale.py [--only AXIS ...] [--json FILE] [--picture FILE]
    python scripts/bench_scale.py --read FILE [--picture FILE]       a table of kept results

No accelerator is needed: each step is lowered, compiled for H100s that are absent, and planned,
in a process of its own. What is not run again is kept from FILE, where it exists.

Conventions
- devices: Llama 2 7B, one sequence of 2048 a device, 8 GPUs a host, `hybrid_shard` with one replica
  per 64 devices (per 8 for one host), explicit collectives, prefetch, full recomputation.
- parameters: GPTs of 10^8 to 10^12 parameters, `full_shard` over 1,024 devices, otherwise the same.
- leaves: a chain of kernels of 64 x 64, each a leaf, `full_shard` over 8 devices: what the library
  and XLA do for each leaf.
- layers: a GPT of width 1024, scanned and unrolled, on 8 devices.
- sent, exposed: GiB that a device sends in a step, and that it waits for; peak: GiB of XLA's
  allocations on a device; step: planned; compile: CPU seconds of all threads of lowering and of
  XLA, without any cache; build: CPU seconds of the model's shapes, the layout and the step.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

CONFIGS = Path(__file__).parents[1] / "configs"
GIB = 2**30
AXES = ("devices", "parameters", "leaves", "layers")
_OPTIONS = "--prefetch pre --remat full --data.sequence_length 2048"


class Point(NamedTuple):
    """A step to compile: `value` along `axis`, of one `kind`."""

    axis: str
    kind: str
    value: int
    topology: str
    config: str  # a configuration's name; "" for a chain of `value` kernels
    overrides: str


def _devices(hosts: int) -> Point:
    """Returns a point of the devices."""
    devices = 8 * hosts
    topology = f"h100:{hosts}x8" if hosts > 1 else "h100:8"
    shard = f"--strategy hybrid_shard --mesh.replica {max(1, hosts // 8)}"
    return Point("devices", "hybrid_shard", devices, topology, "llama2_7b", shard)


def _parameters(power: int, layers: int, width: int) -> Point:
    """Returns a point of the parameters; heads are of 128, or of 64 for the smallest."""
    shape = f"--model.layers {layers} --model.width {width} --model.heads {width // 128}"
    return Point("parameters", "full_shard", 10**power, "h100:128x8", "gpt_1t", shape)


def _layers(layers: int, scan: bool) -> Point:
    """Returns a point of the layers."""
    shape = f"--model.layers {layers} --model.width 1024 --model.heads 8"
    shape += f" --model.scan_layers {scan}"
    return Point("layers", "scanned" if scan else "unrolled", layers, "h100:8", "gpt_1t", shape)


POINTS = (
    *(_devices(hosts) for hosts in (1, 8, 64, 512, 2048)),
    _parameters(8, 8, 1024),
    _parameters(9, 20, 2048),
    _parameters(10, 32, 5120),
    _parameters(11, 80, 10240),
    _parameters(12, 128, 25600),
    *(Point("leaves", "chain", leaves, "h100:8", "", "") for leaves in (100, 1000, 10_000)),
    *(_layers(layers, True) for layers in (12, 32, 64, 128)),
    *(_layers(layers, False) for layers in (12, 32, 64, 128)),
)
_TINY = "--model.preset tiny --model.layers 2 --model.width 64 --model.heads 2"
TOY = (
    Point("devices", "toy", 2, "h100:2", "gpt_1t", f"{_TINY} --data.sequence_length 32"),
    Point("leaves", "toy", 3, "h100:2", "", ""),
)
"""Two steps that compile in seconds, in this process."""


def measure(point: Point) -> dict[str, Any]:
    """Compiles a step, and returns its figures."""
    from fsdp_jax.planner import Work, choose_platforms, compiled_plan, parse_topology

    choose_platforms()
    topology = parse_topology(point.topology)
    started = time.process_time()
    if point.config:
        step, batch, work = _configured(point, topology.size)
    else:
        step, batch = _chain(point.value, topology.devices())
        work = Work()
    built = time.process_time()
    plan = compiled_plan(step, batch, topology, work, None)
    compiled = time.process_time()
    assert plan.time is not None
    return {
        **point._asdict(),
        "parameters": plan.parameters,
        "leaves": len(step.plan.layout.by_path),
        "sent_bytes": plan.wire_bytes,
        "ratio": plan.wire_bytes / plan.wire_bytes_limit,
        "exposed_bytes": plan.exposed_bytes,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "step_s": plan.time.step_s,
        "build_cpu_s": built - started,
        "compile_cpu_s": compiled - built,
    }


def _configured(point: Point, devices: int) -> tuple[Any, Any, Any]:
    """Builds a configured step; returns (step, batch, work)."""
    from fsdp_jax.train.build import build, topology_devices
    from fsdp_jax.train.config_file import load_config

    overrides = [*_OPTIONS.split(), *point.overrides.split()]
    overrides += ["--train.global_batch_size", str(devices)]
    config = load_config(CONFIGS / f"{point.config}.yaml", overrides)
    run = build(config, topology_devices(point.topology))
    return run.step, run.batch, run.work


def _chain(length: int, devices: Any) -> tuple[Any, Any]:
    """Builds the step of a chain of kernels; returns (step, batch)."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import fsdp_jax as fsdp

    class Chain(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            linears = [nnx.Linear(64, 64, use_bias=False, rngs=rngs) for _ in range(length)]
            self.linears = nnx.List(linears)

        def __call__(self, x: jax.Array) -> jax.Array:
            for linear in self.linears:
                x = jnp.tanh(linear(x))
            return x

    def loss(model: Chain, batch: dict[str, jax.Array]) -> tuple[jax.Array, int]:
        y = model(batch["x"])
        return jnp.sum(y**2), y.size

    mesh = fsdp.make_mesh(devices=devices)
    sharded = fsdp.fully_shard(lambda rngs: Chain(rngs=rngs), optax.adamw(1e-3), mesh)
    batch = {"x": jax.ShapeDtypeStruct((8 * len(devices), 64), "float32")}
    return sharded.make_train_step(loss), batch


def in_child(point: Point, limit_s: float) -> dict[str, Any]:
    """Measures in a process of its own, so that none has what another one cached."""
    command = [sys.executable, __file__, "--one", json.dumps(point)]
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return point._asdict() | {"error": f"more than {limit_s:.0f} s by the clock"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return point._asdict() | {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as a Markdown table."""
    from fsdp_jax.planner.html import seconds_text

    lines = [
        "| axis | | value | parameters | sent GiB (ratio) | exposed GiB | peak GiB | step "
        "| build, compile CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        where = f"| {r['axis']} | {r['kind']} | {r['value']:,} "
        if "error" in r:
            lines.append(f"{where}| {r['error'][:90]} | | | | | |")
            continue
        sent, exposed, peak = (
            _digits(r[name] / GIB) for name in ("sent_bytes", "exposed_bytes", "peak_bytes")
        )
        if not r["fits"]:
            peak += " (does not fit)"
        lines.append(
            f"{where}| {_digits(r['parameters'] / 1e9)} B | {sent} ({r['ratio']:.3f}) | {exposed} "
            f"| {peak} | {seconds_text(r['step_s'])} "
            f"| {r['build_cpu_s']:.1f}, {r['compile_cpu_s']:.1f} |"
        )
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Formats a number in three digits, without an exponent: `5,610`."""
    return f"{float(f'{value:.3g}'):,g}"


def picture(records: list[dict[str, Any]]) -> str:
    """Draws compile CPU seconds along each axis, both on a logarithmic scale, as SVG."""
    from draw_pictures import box, render, text

    items, width, height = [], 300, 190
    measured = [r for r in records if "error" not in r]
    for number, axis in enumerate(AXES):
        points = [r for r in measured if r["axis"] == axis]
        x0, y0 = 50 + (number % 2) * (width + 70), 30 + (number // 2) * (height + 70)
        items.append(text(x0, y0 - 8, f"{axis}: compile, CPU seconds", "head"))
        for seconds in (1, 10, 100, 1000):
            y = y0 + height * (1 - log10(seconds) / 3)
            items.append({"kind": "line", "x": x0, "y": y, "x2": x0 + width, "y2": y})
            items.append(text(x0 - 36, y + 4, f"{seconds}", "dim"))
        if not points:
            continue
        low, high = (log10(limit([r["value"] for r in points])) for limit in (min, max))
        kinds = list(dict.fromkeys(r["kind"] for r in points))
        colors = ("compute", "reduce")
        for r in points:
            x = x0 + 10 + (width - 30) * (log10(r["value"]) - low) / max(high - low, 1e-9)
            y = y0 + height * (1 - log10(max(r["compile_cpu_s"], 1)) / 3)
            items.append(box(x - 5, y - 5, 10, 10, "", colors[kinds.index(r["kind"]) % 2]))
            items.append(text(x, y0 + height + 18, _short(r["value"]), "dim", middle=True))
        for index, kind in enumerate(kinds):
            items.append(box(x0 + 90 * index, y0 + height + 28, 10, 10, "", colors[index % 2]))
            items.append(text(x0 + 90 * index + 15, y0 + height + 38, kind, "dim"))
    return render("CPU seconds to compile a step", 2 * width + 150, 2 * height + 150, items)


def _short(value: int) -> str:
    """Formats a number of few digits."""
    for power, name in ((12, "T"), (9, "B"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:g}{name}"
    return f"{value:,}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--toy", action="store_true", help="two tiny steps, in this process")
    parser.add_argument("--limit", type=float, default=1800, help="seconds by the clock for each")
    parser.add_argument("--read", type=Path, help="show kept results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(Point(*json.loads(options.one)))))
        return 0
    records = read(options.read) if options.read else _run(options)
    print(table(records))
    if options.picture:
        options.picture.write_text(picture(records), encoding="utf-8")
    return 1 if any("error" in record for record in records) else 0


def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the points; each is kept as soon as it is measured."""
    from bench_results import save

    points = [p for p in (TOY if options.toy else POINTS) if p.axis in options.only]
    kept = read(options.json) if options.json and options.json.exists() else []
    records = {tuple(r[name] for name in Point._fields[:3]): r for r in kept}
    for point in points:
        record = measure(point) if options.toy else in_child(point, options.limit)
        records[point[:3]] = record
        print(table([record]).splitlines()[-1], file=sys.stderr, flush=True)
        if options.json:
            save(options.json, _ordered(records))
    return _ordered(records)


def read(path: Path) -> list[dict[str, Any]]:
    """Reads kept records."""
    return json.loads(path.read_text(encoding="utf-8"))["records"]


def _ordered(records: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """Orders records by axis, kind and value."""
    return [records[key] for key in sorted(records, key=lambda key: (AXES.index(key[0]), *key[1:]))]


if __name__ == "__main__":
    sys.exit(main())
