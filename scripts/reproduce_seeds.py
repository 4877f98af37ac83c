"""Compares our plans with the published claims that FSDP is known by.

    python scripts/reproduce_seeds.py [--only NAME ...] [--json FILE]

Every row is a step that our library compiles for the hardware named, which may be absent, beside
what others claim of the nearest to it. A row states its basis: `compiled` (memory and schedule are
XLA's, times are the planner's roofline over them) or `analytic` (the traced step).

Conventions
- Bytes are per device; GB is 1e9 as in the claims. Steady state: memory between steps. Peak: the
  most of a step.
- Llama rows: bfloat16 parameters, gradients and AdamW, no recomputation, flash attention, 1024
  tokens a sequence: the defaults of the guide that the numbers are from; its logits are float32.
- GPT rows: float32 parameters and AdamW, bfloat16 compute, every block recomputed, 2048 tokens a
  sequence, unless stated.
- Offload: parameters and optimizer state are in host memory between steps, read from the program.
  Staged: the most of them that is on the device at once while they are updated, beside the steady
  state. "falls by": the peak of the same step without offload less that with it, and how much less
  than the bytes in host memory that is.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_jax.planner import Plan, Time, cache_folder, parse_topology
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import plan_of

CONFIG = Path(__file__).parent.parent / "configs" / "llama2_7b.yaml"
GPT = "--model.family gpt --model.preset gpt2 --units.classes Block --data.sequence_length 2048"
FLASH = "--model.attention flash"
OFFLOAD = "--offload.params True --offload.optimizer 1.0"
GB = 1e9


@dataclass(frozen=True)
class Row:
    """One line: the claim, its hardware, their figure, ours, and the basis of ours."""

    what: str
    where: str
    theirs: str
    ours: str
    basis: str


def plan(topology: str, rows: int, overrides: str, *, analytic: bool = False) -> Plan:
    """Plans configs/llama2_7b.yaml with overrides and so many rows on each device."""
    machine = parse_topology(topology)
    batch_size = str(rows * machine.size)
    config = load_config(CONFIG, [*overrides.split(), "--train.global_batch_size", batch_size])
    result = plan_of(config, machine, analytic=analytic, cache=cache_folder())
    print(f"  {overrides}: {result.summary()}", file=sys.stderr, flush=True)
    return result


def _memory(result: Plan) -> str:
    sizes = f"{result.valley_bytes / GB:.2g} / {result.peak_bytes / GB:.3g} GB"
    return sizes if result.fits else f"{sizes}, does not fit"


def _time(result: Plan) -> Time:
    assert result.time is not None
    return result.time


def llama() -> list[Row]:
    """Compares steady state and peak of Llama 2 on eight A100s, with and without offload."""
    return _with_and_without_offload("a100-80gb:8")


def llama_tpu() -> list[Row]:
    """Gives the same on eight v5p chips."""
    return _with_and_without_offload("v5p:2x2x2")


def _with_and_without_offload(where: str) -> list[Row]:
    words = f"--precision.param bfloat16 --remat none --data.sequence_length 1024 {FLASH}"
    rows = []
    for name, batch, theirs, theirs_offloaded in (
        ("7B", 10, "8 / 74 GB", "1.4 / 68.7 GB"),
        ("70B", 2, "does not fit", "0.3 / 72.3 GB"),
    ):
        model = f"--model.preset llama2-{name.lower()} {words}"
        without, offloaded = plan(where, batch, model), plan(where, batch, f"{model} {OFFLOAD}")
        what, basis = f"Llama 2 {name}, batch {batch}", without.basis["peak_bytes"]
        rows.append(Row(what, where, theirs, _memory(without), basis))
        ours = f"{_memory(offloaded)}; {offloaded.host_bytes / GB:.3g} GB on the host"
        ours += f", {offloaded.staging_bytes / GB:.2g} GB staged"
        if without.basis["host_bytes"] == "compiled":
            fall = without.peak_bytes - offloaded.peak_bytes
            kept = offloaded.host_bytes - fall
            ours += f"; the peak falls by {fall / GB:.4g} GB, {kept / GB:.2g} GB less"
        basis = offloaded.basis["peak_bytes"]
        rows.append(Row("... with CPU offload", where, theirs_offloaded, ours, basis))
    return rows


def largest() -> list[Row]:
    """Compares the parameters an eight-GPU node can train, by depth, at width 6144."""
    sizes = {}
    for strategy in ("no_shard", "full_shard"):
        words = f"{GPT} {FLASH} --model.width 6144 --model.heads 48 --strategy {strategy}"
        words += " --prefetch none --model.layers"
        depth = _deepest(words)
        result = plan("h100:8", 1, f"{words} {depth}")
        while not result.fits:
            depth -= 1
            result = plan("h100:8", 1, f"{words} {depth}")
        sizes[strategy] = result.parameters / GB
    sharded, replicated = sizes["full_shard"], sizes["no_shard"]
    ours = f"{sharded:.1f} B to {replicated:.1f} B: {sharded / replicated:.2f}x"
    what = "largest GPT, full_shard to no_shard"
    return [Row(what, "h100:8", "3.33x", ours, "compiled; the depth found analytically")]


def _deepest(words: str) -> int:
    """Returns the most layers that are estimated to fit, by bisection."""

    def fits(layers: int) -> bool:
        return plan("h100:8", 1, f"{words} {layers}", analytic=True).fits

    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def stages() -> list[Row]:
    """Compares state and peak at 64 devices, by ZeRO stage."""
    where = "h100:8x8"
    plans = {}
    for strategy in ("no_shard", "zero1", "shard_grad_op", "full_shard"):
        words = f"--model.preset llama2-7b --strategy {strategy} --prefetch none {FLASH}"
        plans[strategy] = plan(where, 1, words)
    whole = plans["no_shard"]
    rows = []
    for stage, strategy, theirs in (
        ("1", "zero1", "4x"),
        ("2", "shard_grad_op", "8x"),
        ("3", "full_shard", "64x"),
    ):
        state = whole.valley_bytes / plans[strategy].valley_bytes
        peak = whole.peak_bytes / plans[strategy].peak_bytes
        ours = f"{state:.1f}x of the state, {peak:.1f}x of the peak"
        rows.append(Row(f"ZeRO-{stage}, Llama 2 7B", where, f"up to {theirs}", ours, "compiled"))
    return rows


def checkpointing() -> list[Row]:
    """Compares the memory that recomputing every block frees, and what it costs."""
    none, full = (
        plan("h100:8", 4, f"--model.preset llama2-7b --remat {remat} {FLASH}")
        for remat in ("none", "full")
    )
    assert none.hfu is not None
    assert full.hfu is not None
    freed = 1 - full.peak_bytes / none.peak_bytes
    slowdown = _time(full).step_s / _time(none).step_s
    flops = full.hfu / none.hfu * slowdown
    ours = f"{freed:.0%} freed, {flops - 1:.0%} more FLOPs, {slowdown - 1:.0%} more time"
    what = "activation checkpointing, Llama 2 7B, batch 4"
    return [Row(what, "h100:8", "33-38% freed, 20-25% more time", ours, "compiled")]


def prefetch() -> list[Row]:
    """Compares the speed with and without prefetch."""
    llama, gpt = "--model.preset llama2-7b", f"{GPT} --model.preset gpt3-175b"
    rows = []
    for what, where, batch, words, theirs in (
        ("Llama 2 7B, batch 2", "a100-80gb:8", 2, llama, "13% faster, 0.59% more memory"),
        ("GPT 175B, batch 1", "a100-80gb:16x8", 1, gpt, "about 18% faster"),
    ):
        none, pre = (
            plan(where, batch, f"{words} {FLASH} --prefetch {kind}") for kind in ("none", "pre")
        )
        faster = _time(none).step_s / _time(pre).step_s - 1
        memory = pre.peak_bytes / none.peak_bytes - 1
        before, after = 1000 * _time(none).exposed_s, 1000 * _time(pre).exposed_s
        ours = f"{faster:.0%} faster, {memory:+.1%} of the peak"
        ours += f" ({before:.0f} ms exposed, then {after:.0f} ms)"
        rows.append(Row(f"prefetch, {what}", where, theirs, ours, "compiled"))
    return rows


def scaling() -> list[Row]:
    """Compares tokens per second of one GPU, with 8 and with 512 of them."""
    words = f"{GPT} {FLASH} --model.layers 36 --model.width 5120 --model.heads 40"
    words += " --data.sequence_length 512"
    few, many = (plan(where, 8, words) for where in ("a100-80gb:8", "a100-80gb:64x8"))
    before, after = few.tokens_per_s_per_device, many.tokens_per_s_per_device
    assert before is not None
    assert after is not None
    ours = f"{after / before - 1:+.1%} ({before:.0f} to {after:.0f} tokens/s a GPU)"
    what = f"GPT {few.parameters / GB:.1f} B, batch 8 of 512 tokens, 8 to 512 GPUs"
    return [Row(what, "a100-80gb", "-7% (T5 11B)", ours, "compiled")]


def giants() -> list[Row]:
    """Plans models of 175B and 1T parameters."""
    gpt_175b = f"{GPT} --model.preset gpt3-175b {FLASH}"
    gpt_1t = f"{GPT} --model.preset gpt-1t"
    rows = []
    for what, where, words, theirs in (
        ("GPT 175B, batch 1", "a100-80gb:16x8", gpt_175b, "fits (batch 1), 55-60% of peak"),
        ("GPT 1T, batch 1", "h100:64x8", gpt_1t, "-"),
        ("GPT 1T, batch 1", "h100:128x8", gpt_1t, "84 TFLOP/s on 128 A100 with offload"),
    ):
        result = plan(where, 1, words)
        sent = f"{result.wire_bytes / 1e12:.2f} TB sent"
        speed = f"{_time(result).step_s:.1f} s a step, {(result.hfu or 0):.0%} of peak"
        ours = f"{_memory(result)}, {sent}, {speed}"
        rows.append(Row(what, where, theirs, ours, result.basis["peak_bytes"]))
    return rows


TABLES = {
    table.__name__: table
    for table in (llama, llama_tpu, largest, stages, checkpointing, prefetch, scaling, giants)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.only for row in TABLES[name]()]
    print("| claim | hardware | theirs | ours | basis |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join((row.what, row.where, row.theirs, row.ours, row.basis)) + " |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
