"""Measures a GPT on the CPU beside PyTorch's FSDP2 and DDP, and plain JAX, in one run.

    python scripts/bench_peers_cpu.py [--model 14m] [--compute float32] [--ranks 2 4 8]
                                      [--rounds 3] [--steps 3] [--checked 20] [--json FILE]
                                      [--only NAME ...]

Needs `pip install -e '.[train]'` and torch; without torch its rows are left out, and named.

Conventions
- Every peer trains the same GPT with AdamW (1e-3, decay 1e-4), from the same float32 weights, on
  the same batches of 16 x 256 tokens in all, over 2, 4 or 8 ranks.
- `ours, devices`: full_shard, one process of as many virtual devices. `ours, processes`: as many
  processes of one device. `by hand`: the step of bench_overhead.py, plain JAX with annotations, on
  virtual devices. `FSDP2`, `DDP`: Gloo, one process and one thread a rank, each block a unit.
- bfloat16: FSDP2 by MixedPrecisionPolicy with float32 reductions, DDP by autocast.
- All peers of a number of ranks are alive at once and take turns, `--steps` steps at a time,
  for `--rounds` rounds, so that a busy machine slows all of them. Tokens per CPU-second count all
  threads of all its processes; tokens per second are by the clock. Medians over rounds.
- Memory: the largest resident set of a process, the Python packages included, over the ranks in it.
- First step: from the first call to its loss, compilation included, jax's cache off.
- 14m takes some 10 CPU seconds a step and peer: all of it 40 minutes on two idle cores.
- Losses: of `--checked` steps; the largest difference to the first peer's, relative.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "gpu"))
from trials import environment

SEQUENCE, ROWS = 256, 16
MODELS = {
    "toy": {"vocab_size": 512, "layers": 2, "width": 64, "heads": 2},
    "14m": {"vocab_size": 8192, "layers": 6, "width": 384, "heads": 6},
    "50m": {"vocab_size": 16384, "layers": 8, "width": 640, "heads": 10},
}
PEERS = ("FSDP2", "DDP", "by hand", "ours, devices", "ours, processes")
IN_PROCESSES = ("FSDP2", "DDP", "ours, processes")
Step = Callable[[np.ndarray], float]


def batch(number: int, vocab_size: int) -> np.ndarray:
    """Draws the tokens of a step, int32 [rows, sequence + 1]; easy enough that losses fall."""
    random = np.random.default_rng(number)
    return random.integers(0, vocab_size // 8, (ROWS, SEQUENCE + 1)).astype(np.int32)


# --- PyTorch ---


def torch_step(peer: str, model: str, compute: str, rank: int, ranks: int, port: int) -> Step:
    """Makes the step of FSDP2 or DDP, with the weights of `weights.npz` in this folder."""
    import torch
    import torch.distributed as dist
    import torch_models

    sizes = MODELS[model]
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)

    whole = torch_models.GPT(
        sizes["vocab_size"], SEQUENCE, sizes["layers"], sizes["width"], sizes["heads"]
    )
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(torch.from_numpy(torch_weight(np.load("weights.npz"), name)))
    autocast = False
    trained: Any = whole
    if peer == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if compute == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in whole.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(whole, mesh=mesh, mp_policy=policy)
    else:
        trained = torch.nn.parallel.DistributedDataParallel(whole)
        autocast = compute == "bfloat16"
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(tokens: np.ndarray) -> float:
        rows = torch.from_numpy(tokens[rank::ranks].astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = trained(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        return float(mean) / ranks

    return step


def torch_weight(weights: Any, name: str) -> np.ndarray:
    """Finds a parameter of PyTorch's model among the stacked ones of ours."""
    *path, kind = name.replace("last_norm", "ln_f").split(".")
    layer = None
    if path[0] == "blocks":
        layer, path = int(path[1]), ["blocks", *path[2:]]
        group = {"qkv": "attn", "out": "attn", "up": "mlp", "down": "mlp"}.get(path[1])
        path = [path[0], *filter(None, [group]), *path[1:]]
    leaf = {"bias": "bias", "weight": "kernel"}[kind]
    if path[-1].startswith("ln_") and kind == "weight":
        leaf = "scale"
    if path[-1] in ("embed", "positions"):
        leaf = "embedding"
    value = weights["/".join([*path, leaf])]
    if layer is not None:
        value = value[layer]
    if leaf == "kernel":
        value = value.T
    return np.ascontiguousarray(value)


# --- JAX ---


def jax_step(peer: str, model: str, compute: str, rank: int, ranks: int, port: int) -> Step:
    """Makes our step, or the one by hand; rank 0 of `weights` writes `weights.npz` and ends."""
    import fsdp_jax
    from fsdp_jax.launch import join_cluster, use_virtual_devices

    processes = peer == "ours, processes"
    use_virtual_devices(1 if processes else ranks)
    if processes:
        join_cluster(f"127.0.0.1:{port}", ranks, rank)
    import jax
    import optax

    from fsdp_jax.models import GPT, GPTConfig, next_token_loss
    from fsdp_jax.tree import flatten

    sizes: dict[str, Any] = {**MODELS[model]}
    config = GPTConfig(sequence_length=SEQUENCE, **sizes)
    tx = optax.adamw(1e-3, weight_decay=1e-4)
    mesh = fsdp_jax.make_mesh()
    if peer == "by hand":
        from bench_overhead import by_hand

        flat = jax.sharding.Mesh(mesh.devices.reshape(-1), ("data",))
        init, hand, rows = by_hand(config, flat, tx, "full_shard", jax.numpy.dtype(compute))
        hand_state = init(0)

        def step_by_hand(tokens: np.ndarray) -> float:
            nonlocal hand_state
            hand_state, metrics = hand(hand_state, jax.device_put(tokens, rows))
            return float(metrics["loss"])

        return step_by_hand
    sharded = fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs),
        tx,
        mesh,
        units="scan",
        precision=fsdp_jax.Precision(compute=compute),
    )
    state = sharded.init(0)
    if peer == "weights":
        weights: dict[str, Any] = {p: np.asarray(x) for p, x in flatten(state.params).items()}
        np.savez("weights.npz", **weights)
        sys.exit(0)
    step = sharded.make_train_step(next_token_loss, local_batch=True)

    def ours(tokens: np.ndarray) -> float:
        nonlocal state
        own = tokens[rank::ranks] if processes else tokens
        state, metrics = step(state, {"tokens": own})
        return float(metrics["loss"])

    return ours


# --- the processes of a peer ---


def serve(peer: str, model: str, compute: str, rank: int, ranks: int, port: int) -> None:
    """Runs steps as stdin asks, `N` of them a line, and answers with a line of JSON each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    make = torch_step if peer in ("FSDP2", "DDP") else jax_step
    step = make(peer, model, compute, rank, ranks, port)
    number = 0
    for line in sys.stdin:
        cpu, began, losses = time.process_time(), time.perf_counter(), []
        for _ in range(int(line)):
            losses.append(step(batch(number, MODELS[model]["vocab_size"])))
            number += 1
        status = Path("/proc/self/status").read_text()
        resident = int(status.split("VmHWM:")[1].split()[0]) * 1024
        answer = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - began,
            "losses": losses,
            "resident_bytes": resident,
        }
        print(json.dumps(answer), file=out, flush=True)


class Peer:
    """The processes of one peer."""

    def __init__(self, name: str, model: str, compute: str, ranks: int, folder: Path) -> None:
        self.name, self.ranks = name, ranks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        count = ranks if name in IN_PROCESSES else 1
        environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "OMP_NUM_THREADS": "1"}
        self._processes = []
        for rank in range(count):
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", name]
            command += [model, compute, str(rank), str(ranks), port]
            with open(folder / f"{name}-{ranks}-{rank}.log", "w") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=folder,
                    env=environment,
                )
            self._processes.append(process)

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Runs steps in all processes; returns the answer of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name} with {self.ranks} ranks has ended; see its log")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def measure(
    names: list[str], ranks: int, arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Measures the peers with so many ranks; returns a row for each that runs."""
    rounds, steps = arguments.rounds, arguments.steps
    rows: dict[str, dict[str, Any]] = {}
    peers: dict[str, Peer] = {}
    try:
        for name in names:
            print(f"{ranks} ranks: {name}, {arguments.checked} steps", file=sys.stderr)
            peer = Peer(name, arguments.model, arguments.compute, ranks, folder)
            try:
                first = peer.steps(1)
                checked = peer.steps(arguments.checked - 1)
            except RuntimeError as error:
                print(f"{error} ({folder})", file=sys.stderr)
                peer.end()
                continue
            peers[name] = peer
            losses = first[0]["losses"] + checked[0]["losses"]
            rows[name] = {"peer": name, "ranks": ranks, "first_step_s": first[0]["wall_s"]}
            rows[name] |= {"losses": losses, "cpu_s": [], "wall_s": []}
        for number in range(rounds):
            print(f"{ranks} ranks: round {number + 1} of {rounds}", file=sys.stderr)
            order = list(peers)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                answers = peers[name].steps(steps)
                rows[name]["cpu_s"].append(sum(each["cpu_s"] for each in answers))
                rows[name]["wall_s"].append(max(each["wall_s"] for each in answers))
                resident = sum(each["resident_bytes"] for each in answers)
                rows[name]["resident_bytes_per_rank"] = resident / ranks
    finally:
        for peer in peers.values():
            peer.end()
    tokens = steps * ROWS * SEQUENCE
    for row in rows.values():
        row["tokens_per_cpu_s"] = tokens / statistics.median(row["cpu_s"])
        row["tokens_per_s"] = tokens / statistics.median(row["wall_s"])
        reference = next(iter(rows.values()))["losses"]
        row["loss_difference"] = max(
            abs(a - b) / b for a, b in zip(row["losses"], reference, strict=True)
        )
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="14m", choices=MODELS)
    parser.add_argument("--compute", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="in which peers take turns (3)")
    parser.add_argument("--steps", type=int, default=3, help="of a peer in a round")
    parser.add_argument("--checked", type=int, default=20, help="steps before the rounds")
    which = ", ".join(f"'{name}'" for name in PEERS)
    parser.add_argument("--only", nargs="+", metavar="PEER", default=list(PEERS), help=which)
    parser.add_argument("--json", type=Path, help="add the record to this file")
    parser.add_argument("--serve", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        peer, model, compute, *numbers = arguments.serve
        serve(peer, model, compute, *map(int, numbers))
        return 0

    from fsdp_jax.tables import text_table

    unknown = set(arguments.only) - set(PEERS)
    if unknown:
        parser.error(f"--only: expected: {which}; got: {', '.join(sorted(unknown))}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    names = [name for name in PEERS if name in arguments.only]
    if find_spec("torch") is None:
        print("no torch: no rows of FSDP2 and DDP", file=sys.stderr)
        names = [name for name in names if name not in ("FSDP2", "DDP")]
    load = os.getloadavg()
    folder = Path(tempfile.mkdtemp(prefix="bench_peers_"))
    model, compute = arguments.model, arguments.compute
    writer = Peer("weights", model, compute, 1, folder)
    writer._processes[0].wait()
    rows = []
    for ranks in arguments.ranks:
        rows += measure(names, ranks, arguments, folder)

    columns = ("ranks", "peer", "tok/CPU-s", "of FSDP2", "tok/s", "MiB/rank", "first s", "loss")
    cells = []
    for row in rows:
        same = [r for r in rows if r["ranks"] == row["ranks"] and r["peer"] == "FSDP2"]
        row["of_fsdp2"] = row["tokens_per_cpu_s"] / same[0]["tokens_per_cpu_s"] if same else None
        cells.append(
            (
                row["ranks"],
                row["peer"],
                f"{row['tokens_per_cpu_s']:.0f}",
                f"{row['of_fsdp2']:.2f}" if same else "-",
                f"{row['tokens_per_s']:.0f}",
                f"{row['resident_bytes_per_rank'] / 2**20:.0f}",
                f"{row['first_step_s']:.1f}",
                f"{row['loss_difference']:.1e}",
            )
        )
    print(f"GPT {model}, {compute}, {ROWS} x {SEQUENCE} tokens a step, AdamW")
    print(text_table(columns, cells, right=columns[:1] + columns[2:]))
    record = {
        "bench": "peers_cpu",
        "model": model,
        "compute": compute,
        "environment": environment() | {"load_before": load},
        "rows": rows,
    }
    if arguments.json:
        records = []
        if arguments.json.exists():
            records = json.loads(arguments.json.read_text())
        arguments.json.write_text(json.dumps([*records, record], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
