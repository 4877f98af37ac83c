"""The tables that FSDP is known by, with our plans beside them.

    python scripts/reproduce_seeds.py [--only NAME ...] [--json FILE]

Every row is a step that our library compiles for the hardware named, which need not be there, and
what others claim of the nearest to it. A row says what it rests on: `compiled` (memory and schedule
are XLA's, times are the planner's roofline over them), `analytic` (the traced step) or
`arithmetic`.

Conventions
- Bytes are per device; GB is 1e9 as the claims have it. Valley: held between steps. Peak: the most
  of a step.
- Llama rows: bfloat16 parameters, gradients and AdamW, nothing recomputed, flash attention, 1024
  tokens a sequence: so trains, by default, the guide that the figures are from; its logits are
  float32 too.
- GPT rows: float32 parameters and AdamW, bfloat16 compute, every block recomputed, 2048 tokens a
  sequence, unless said.
- Offload is not in this release: its rows are arithmetic on a step without it and are marked.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_jax.planner import Plan, cache_folder, parse_topology
from fsdp_jax.train.config_file import load
from fsdp_jax.train.planning import plan_of

CONFIG = Path(__file__).parent.parent / "configs" / "llama2_7b.yaml"
GPT = "--model.family gpt --model.preset gpt2 --units.classes Block --data.sequence_length 2048"
FLASH = "--model.attention flash"
GB = 1e9


@dataclass(frozen=True)
class Row:
    """One line: what, where, their figure, ours, and what ours rests on."""

    what: str
    where: str
    theirs: str
    ours: str
    basis: str


def plan(topology: str, rows: int, words: str, *, analytic: bool = False) -> Plan:
    """The plan of configs/llama2_7b.yaml with overrides and so many rows on each device."""
    machine = parse_topology(topology)
    config = load(CONFIG, [*words.split(), "--train.global_batch_size", str(rows * machine.size)])
    found = plan_of(config, machine, analytic=analytic, cache=cache_folder())
    print(f"  {words}: {found.summary()}", file=sys.stderr, flush=True)
    return found


def _held(found: Plan) -> str:
    return f"{found.valley_bytes / GB:.2g} / {found.peak_bytes / GB:.3g} GB" + (
        "" if found.fits else ", does not fit"
    )


def _seconds(found: Plan) -> float:
    assert found.time is not None
    return found.time.step_s


def llama() -> list[Row]:
    """Valley and peak of Llama 2 on eight A100s."""
    words = f"--precision.param bfloat16 --remat none --data.sequence_length 1024 {FLASH}"
    small = plan("a100-80gb:8", 10, f"--model.preset llama2-7b {words}")
    large = plan("a100-80gb:8", 2, f"--model.preset llama2-70b {words}")
    return [
        Row(
            "Llama 2 7B, batch 10",
            small.topology,
            "8 / 74 GB",
            _held(small),
            small.basis["peak_bytes"],
        ),
        Row(
            "... with CPU offload",
            small.topology,
            "1.4 / 68.7 GB",
            _offloaded(small),
            "arithmetic, no offload yet",
        ),
        Row(
            "Llama 2 70B, batch 2",
            large.topology,
            "does not fit",
            _held(large),
            large.basis["peak_bytes"],
        ),
        Row(
            "... with CPU offload",
            large.topology,
            "0.3 / 72.3 GB",
            _offloaded(large),
            "arithmetic, no offload yet",
        ),
    ]


def _offloaded(found: Plan) -> str:
    """Without parameters and optimizer state on the device; a unit's shards on their way are not in
    it.
    """
    away = found.breakdown["params"] + found.breakdown["optimizer"]
    valley, peak = max(0, found.valley_bytes - away), found.peak_bytes - away
    return f"{valley / GB:.1f} / {peak / GB:.3g} GB"


def largest() -> list[Row]:
    """How many parameters an eight-GPU node can train, by depth, at width 6144."""
    sizes = {}
    for strategy in ("no_shard", "full_shard"):
        words = f"{GPT} {FLASH} --model.width 6144 --model.heads 48 --strategy {strategy} --prefetch none --model.layers"
        depth = _deepest(words)
        found = plan("h100:8", 1, f"{words} {depth}")
        while not found.fits:
            depth -= 1
            found = plan("h100:8", 1, f"{words} {depth}")
        sizes[strategy] = found.parameters
    ratio = sizes["full_shard"] / sizes["no_shard"]
    ours = f"{sizes['full_shard'] / GB:.1f} B to {sizes['no_shard'] / GB:.1f} B: {ratio:.2f}x"
    return [
        Row(
            "largest GPT, full_shard to no_shard",
            "h100:8",
            "3.33x",
            ours,
            "compiled; the depth found analytically",
        )
    ]


def _deepest(words: str) -> int:
    """The most layers that are estimated to fit."""

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
    """State and gradients at 64 devices, by ZeRO stage."""
    held = {}
    for strategy in ("no_shard", "zero1", "shard_grad_op", "full_shard"):
        found = plan(
            "h100:8x8", 1, f"--model.preset llama2-7b --strategy {strategy} --prefetch none {FLASH}"
        )
        held[strategy] = (found.valley_bytes, found.peak_bytes)
    rows = []
    for name, strategy, theirs in (
        ("1", "zero1", "4x"),
        ("2", "shard_grad_op", "8x"),
        ("3", "full_shard", "64x"),
    ):
        valley, peak = (held["no_shard"][i] / held[strategy][i] for i in (0, 1))
        ours = f"{valley:.1f}x of the state, {peak:.1f}x of the peak"
        rows.append(
            Row(f"ZeRO-{name}, Llama 2 7B", "h100:8x8", f"up to {theirs}", ours, "compiled")
        )
    return rows


def checkpointing() -> list[Row]:
    """Memory that recomputing every block frees, and what it costs."""
    none, full = (
        plan("h100:8", 4, f"--model.preset llama2-7b --remat {remat} {FLASH}")
        for remat in ("none", "full")
    )
    assert none.hfu is not None
    assert full.hfu is not None
    freed = 1 - full.peak_bytes / none.peak_bytes
    slower = _seconds(full) / _seconds(none) - 1
    flops = full.hfu * _seconds(full) / (none.hfu * _seconds(none)) - 1
    ours = f"{freed:.0%} freed, {flops:.0%} more FLOPs, {slower:.0%} more time"
    return [
        Row(
            "activation checkpointing, Llama 2 7B, batch 4",
            "h100:8",
            "33-38% freed, 20-25% more time",
            ours,
            "compiled",
        )
    ]


def prefetch() -> list[Row]:
    """What gathering ahead buys."""
    rows = []
    for what, where, words in (
        ("Llama 2 7B, batch 2", "a100-80gb:8", f"--model.preset llama2-7b {FLASH}"),
        ("GPT 175B, batch 1", "a100-80gb:16x8", f"{GPT} --model.preset gpt3-175b {FLASH}"),
    ):
        batch = int(what[-1])
        without, ahead = (
            plan(where, batch, f"{words} --prefetch {kind}") for kind in ("none", "pre")
        )
        faster = _seconds(without) / _seconds(ahead) - 1
        more = ahead.peak_bytes / without.peak_bytes - 1
        assert without.time is not None
        assert ahead.time is not None
        waits = f"{1000 * without.time.exposed_s:.0f} ms waited, then {1000 * ahead.time.exposed_s:.0f} ms"
        theirs = "13% faster, 0.59% more memory" if "Llama" in what else "about 18% faster"
        ours = f"{faster:.0%} faster, {more:+.1%} of the peak ({waits})"
        rows.append(Row(f"prefetch, {what}", where, theirs, ours, "compiled"))
    return rows


def scaling() -> list[Row]:
    """Tokens per second of one GPU, as there are more of them."""
    words = f"{GPT} {FLASH} --model.layers 36 --model.width 5120 --model.heads 40 --data.sequence_length 512"
    few, many = (plan(where, 8, words) for where in ("a100-80gb:8", "a100-80gb:64x8"))
    assert few.tokens_per_s_per_device is not None
    assert many.tokens_per_s_per_device is not None
    change = many.tokens_per_s_per_device / few.tokens_per_s_per_device - 1
    ours = f"{change:+.1%} ({few.tokens_per_s_per_device:.0f} to {many.tokens_per_s_per_device:.0f} tokens/s a GPU)"
    what = f"GPT {few.parameters / GB:.1f} B, batch 8 of 512 tokens, 8 to 512 GPUs"
    return [Row(what, "a100-80gb", "-7% (T5 11B)", ours, "compiled")]


def giants() -> list[Row]:
    """Models of 175B and 1T parameters."""
    rows = []
    for what, where, words, theirs in (
        (
            "GPT 175B, batch 1",
            "a100-80gb:16x8",
            f"{GPT} --model.preset gpt3-175b {FLASH}",
            "fits (batch 1), 55-60% of peak",
        ),
        ("GPT 1T, batch 1", "h100:64x8", f"{GPT} --model.preset gpt-1t", "-"),
        (
            "GPT 1T, batch 1",
            "h100:128x8",
            f"{GPT} --model.preset gpt-1t",
            "84 TFLOP/s on 128 A100 with offload",
        ),
    ):
        found = plan(where, 1, words)
        sent = f"{found.wire_bytes / 1e12:.2f} TB sent, {_seconds(found):.1f} s a step, {(found.hfu or 0):.0%} of peak"
        rows.append(Row(what, where, theirs, f"{_held(found)}, {sent}", found.basis["peak_bytes"]))
    return rows


TABLES = {
    "llama": llama, "largest": largest, "stages": stages, "checkpointing": checkpointing, "prefetch": prefetch,
    "scaling": scaling, "giants": giants,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.only for row in TABLES[name]()]
    print("| claim | hardware | theirs | ours | ours rests on |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join((row.what, row.where, row.theirs, row.ours, row.basis)) + " |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
