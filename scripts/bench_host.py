"""Measures what the host does beside the devices, each figure in ratio to its reference.

    python scripts/bench_host.py [--characters 8000000] [--json FILE]

Needs `pip install -e '.[train,hf]'`. CPU seconds of this process, all threads; each pair runs in
turns, and the median of the rounds counts, since other programs may use the machine.

Conventions
- Loader: batches of 64 rows of 1024 tokens from token shards, shuffled, read by its thread, against
  rows at random places of a memory map, as int32, stacked: nanoGPT's loader. Both files are in the
  page cache.
- `tokenize`: the command's work, from text files to shards on disk, survey included, against the
  tokenizers library's `encode_batch_fast` and `ids` of the same documents in memory. A BPE
  of 4096 tokens, trained on them before; one thread.
- Step: a call of the compiled step less what its program takes. The program is replaced by a
  function that returns at once, since here a program would fill the caches of the cores that call
  it; metrics are new arrays each time. The reference is the goal of 50 microseconds.
- Start: the first call of a step that an earlier process has compiled, with jax's persistent cache
  as the command sets it, against one without: each a process of its own, by the clock.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, ROUNDS = 64, 1024, 5
STEP_GOAL = 50e-6  # seconds


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Runs a function; returns the CPU seconds of all threads."""
    began = time.process_time()
    run()
    return time.process_time() - began


def in_turns(ours: Callable[[], Any], reference: Callable[[], Any]) -> tuple[float, float]:
    """Runs both `ROUNDS` times in turns after a warm-up; returns the medians of CPU seconds."""
    ours()
    reference()
    pairs = [(cpu_seconds(ours), cpu_seconds(reference)) for _ in range(ROUNDS)]
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def loader(folder: Path, batches: int = 50) -> dict[str, Any]:
    """Nanoseconds of CPU a token: the loader, and a memory map."""
    from fsdp_jax.data.loader import make_loader
    from fsdp_jax.data.shards import TokenShards
    from fsdp_jax.data.windows import Windows

    tokens = TokenShards.open(folder).tokens("train")
    windows = Windows(tokens, sequence_length=LENGTH)
    mapped = np.memmap(folder / "train-00000.tokens", dtype=np.uint16, mode="r")
    random = np.random.default_rng(0)

    def from_map() -> None:
        for _ in range(batches):
            starts = random.integers(0, len(mapped) - LENGTH - 1, ROWS)
            np.stack([mapped[start : start + LENGTH + 1].astype(np.int32) for start in starts])

    with make_loader(windows, global_batch_size=ROWS, seed=0) as batches_of_rows:

        def from_loader() -> None:
            for _ in range(batches):
                next(batches_of_rows)

        ours, reference = in_turns(from_loader, from_map)
    count = batches * ROWS * LENGTH
    return figure("loader, ns a token", ours / count * 1e9, reference / count * 1e9, goal=2.0)


def tokenizing(texts: list[str], work: Path) -> dict[str, Any]:
    """CPU seconds: the library alone over `tokenize`."""
    import tokenizers

    from fsdp_jax.data import load_tokenizer, open_documents, split_documents, tokenize, train_bpe

    corpus = work / "texts"
    corpus.mkdir()
    for number, text in enumerate(texts):
        (corpus / f"{number:05}.txt").write_text(text)
    file = work / "tokenizer.json"
    file.write_bytes(train_bpe(texts, 4096).files["tokenizer.json"])
    tokenizer = load_tokenizer(file)
    plain = tokenizers.Tokenizer.from_file(str(file))

    def ours() -> None:
        shutil.rmtree(work / "shards", ignore_errors=True)
        tokenize(split_documents(open_documents(corpus)), tokenizer, work / "shards")

    def reference() -> None:
        for first in range(0, len(texts), 64):
            for each in plain.encode_batch_fast(
                texts[first : first + 64], add_special_tokens=False
            ):
                _ = each.ids

    seconds, alone = in_turns(ours, reference)
    return figure("tokenize, CPU s", seconds, alone, goal=1 / 0.9)


def own_python(calls: int = 300) -> dict[str, Any]:
    """Seconds of a call of the step beside its program, and the goal."""
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.models import GPT, next_token_loss
    from fsdp_jax.models.gpt import preset

    config = preset("tiny", scan_layers=False)
    mesh = fsdp_jax.make_mesh(data=1, allow_fewer=True)
    sharded = fsdp_jax.fully_shard(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh)
    step = sharded.make_train_step(next_token_loss)
    batch = step.put({"tokens": np.zeros((2, config.sequence_length + 1), np.int32)})
    state, metrics = step(sharded.init(0), batch)
    fresh = iter(
        [
            {name: jax.device_put(np.asarray(x), x.sharding) for name, x in metrics.items()}
            for _ in range(calls)
        ]
    )
    step.compiled = lambda state, batch: ((state, next(fresh)), None)
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        step(state, batch)
        seconds.append(time.perf_counter() - began)
    own = statistics.median(seconds)
    return figure("step's own Python, us", own * 1e6, STEP_GOAL * 1e6, goal=1.0)


def start(folder: Path) -> dict[str, Any]:
    """Seconds of a first call with the cache filled, and without a cache."""

    def first_call(keep: str) -> float:
        command = [sys.executable, __file__, "--start", keep]
        environment = os.environ | {"XDG_CACHE_HOME": str(folder), "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    first_call("auto")
    return figure("first call, s", first_call("auto"), first_call("never"), goal=1.0)


def first_call(keep: Any) -> float:
    """Times the first call of a step in this process."""
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.train.compiled_programs import keep_compiled_programs
    from fsdp_jax.train.config import TrainConfig

    use_virtual_devices(8)
    keep_compiled_programs(TrainConfig(keep_programs=keep), "output", {}, "cpu")
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.models import GPT, next_token_loss
    from fsdp_jax.models.gpt import preset

    config = preset("tiny")
    sharded = fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), fsdp_jax.make_mesh()
    )
    step = sharded.make_train_step(next_token_loss)
    state = sharded.init(0)
    began = time.perf_counter()
    batch = {"tokens": np.zeros((8, config.sequence_length + 1), np.int32)}
    jax.block_until_ready(step(state, batch))
    return time.perf_counter() - began


def figure(name: str, ours: float, reference: float, *, goal: float) -> dict[str, Any]:
    """Makes a row; `goal` is the largest ratio wanted."""
    return {
        "figure": name,
        "ours": ours,
        "reference": reference,
        "ratio": ours / reference,
        "goal": goal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--characters", type=int, default=8_000_000, help="characters of the corpus"
    )
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        print(first_call(arguments.start))
        return 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    from fsdp_jax.data import embedded_documents, load_tokenizer, split_documents, tokenize
    from fsdp_jax.data.files import Skipped
    from fsdp_jax.tables import text_table

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        documents = embedded_documents()
        tokenize(split_documents(documents), load_tokenizer("bytes"), work / "bytes")
        texts, size = [], 0
        for text in documents.read(Skipped()):
            if size + len(text) > arguments.characters:
                break
            texts.append(text)
            size += len(text)
        rows = [
            loader(work / "bytes"),
            tokenizing(texts, work),
            own_python(),
            start(work / "cache"),
        ]
    columns = ("figure", "ours", "reference", "ratio", "goal")
    cells = [
        (row["figure"], *(f"{row[name]:.3g}" for name in columns[1:4]), f"{row['goal']:.2f}")
        for row in rows
    ]
    print(text_table(columns, cells, right=columns[1:]))
    record = {
        "bench": "host",
        "rows": rows,
        "environment": {
            "versions": {name: version(name) for name in ("jax", "grain", "tokenizers", "numpy")},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
