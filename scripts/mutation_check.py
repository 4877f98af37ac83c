"""Plants faults in a copy of the repository, one at a time, and runs the tests that should fail.

    python scripts/mutation_check.py [--only NAME ...] [--json FILE]

A fault is a line of the core as someone might break it. Its old text must occur exactly once in its
file, or nothing runs. A fault is caught if a test fails with it and passes without it. A run of the
tests that ends in another way (nothing collected, an interrupted run) is an error.

Exit code 1 if a fault was not caught.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("fsdp_jax", "tests", "configs", "scripts", "docs", "notebooks", "benchmarks", ".ci"),
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"),
    *(".gitignore", ".pre-commit-config.yaml"),
)
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Fault:
    """A fault to plant, and the test files that should catch it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What the tests said about one fault."""

    name: str
    file: str
    caught: bool
    failed_test: str
    seconds: float


FAULTS = (
    Fault(
        name="numbers that are infinite or NaN are written",
        file="fsdp_jax/step/finite.py",
        old="            kept[n] = lax.select(stays, after[n], before[n])\n",
        new="            kept[n] = after[n]\n",
        tests=("tests/step/test_finite.py",),
    ),
    Fault(
        name="what is kept of a parameter's moments is not reported",
        file="fsdp_jax/step/finite.py",
        old="[_zero_if_finite(after[n]) for n in numbers]",
        new="[_zero_if_finite(after[n]) for n in numbers[:1]]",
        tests=("tests/step/test_finite.py",),
    ),
    Fault(
        name="no optimization barrier before an annotated gather",
        file="fsdp_jax/units/annotated.py",
        old="        shard = lax.optimization_barrier(shard)  # the cast stays before the gather\n",
        new="",
        tests=("tests/units/test_units.py",),
    ),
    Fault(
        name="the barrier stands after an annotated gather",
        file="fsdp_jax/units/annotated.py",
        old="        return constrain(shard, NamedSharding(comm.mesh, "
        "comm.axes.model_spec(spec)))\n",
        new="        gathered = NamedSharding(comm.mesh, comm.axes.model_spec(spec))\n"
        "        return lax.optimization_barrier(constrain(shard, gathered))\n",
        tests=("tests/contract/test_stored_steps.py",),
    ),
    Fault(
        name="each microbatch weighs the same, however many tokens it has",
        file="fsdp_jax/step/train_step.py",
        old="        total = sums.total\n",
        new="        total = sums.total / sums.counted\n",
        tests=("tests/test_parity.py",),
    ),
    Fault(
        name="optimizer state is replicated",
        file="fsdp_jax/sharding/optimizer_state.py",
        old='            return Placement(traced[path], "optimizer", ',
        new='            return Placement(PartitionSpec(), "optimizer", ',
        tests=("tests/sharding/test_optimizer_state.py",),
    ),
    Fault(
        name="parameters are gathered in float32",
        file="fsdp_jax/units/collectives.py",
        old="            value = COLLECTIVES[comm.mode].gather(comm, value, spec)\n",
        new="            gather = COLLECTIVES[comm.mode].gather\n"
        '            value = gather(comm, value.astype("float32"), spec).astype(value.dtype)\n',
        tests=("tests/units/test_units.py", "tests/contract/test_stored_steps.py"),
    ),
    Fault(
        name="prefetch gathers from the stored shard what the model computed",
        file="fsdp_jax/units/collectives.py",
        old='own_operand(eqn) == "stored" and not own_batched(eqn)',
        new='own_operand(eqn) in ("stored", "whole")',
        tests=("tests/units/test_gathers_in_losses.py",),
    ),
    Fault(
        name="gradients are not reduced over the replicas",
        file="fsdp_jax/units/explicit.py",
        old="return lax.psum(shard, comm.other_axes) if comm.other_axes else shard",
        new="return shard",
        tests=("tests/contract/test_contract.py", "tests/test_parity.py"),
    ),
    Fault(
        name="a checkpoint's files are accepted without their digest",
        file="fsdp_jax/checkpoint/manifest.py",
        old=" or digest_file(root / name, follow_link=False) == expected[name]\n",
        new=" or True\n",
        tests=("tests/checkpoint/test_manifest.py",),
    ),
    Fault(
        name="a collective in a loop is counted once",
        file="fsdp_jax/hlo/collectives.py",
        old="        inside = _Context(context.executions * trips, ",
        new="        inside = _Context(context.executions, ",
        tests=("tests/hlo/test_collectives.py",),
    ),
    Fault(
        name="BatchNorm runs on local batches",
        file="fsdp_jax/step/device_varying.py",
        old="        if axes:\n            raise ArgumentError(",
        new="        if axes and not path:\n            raise ArgumentError(",
        tests=("tests/step/test_device_varying.py", "tests/step/test_local_batch.py"),
    ),
    Fault(
        name="matmuls in a wider dtype than was asked for are silent",
        file="fsdp_jax/step/compute_dtype.py",
        old="        if dtype.itemsize > plan.comms[path].transform.compute.itemsize\n",
        new="        if dtype.itemsize > 8\n",
        tests=("tests/step/test_compute_dtype.py",),
    ),
    Fault(
        name="a parameter is a stand-in without its dims outside its unit",
        file="fsdp_jax/units/shard_reads.py",
        old="return jax.ShapeDtypeStruct(self.comm.shape, self.comm.transform.param)",
        new="return jax.ShapeDtypeStruct((1, *self.comm.shape), self.comm.transform.param)",
        tests=("tests/units/test_reads_outside_units.py",),
    ),
    Fault(
        name="with local batches, uses of a shard outside its unit are not looked for",
        file="fsdp_jax/units/shard_reads.py",
        old="    for path in filter(local.__contains__, outside):\n",
        new="    for path in ():\n",
        tests=("tests/units/test_reads_outside_units.py",),
    ),
    Fault(
        name="a parameter that is fetched outside its unit has no gradient",
        file="fsdp_jax/units/shard_reads.py",
        old="            return None, cotangent.astype(slot_dtype)\n",
        new="            return None, 0 * cotangent.astype(slot_dtype)\n",
        tests=("tests/units/test_reads_outside_units.py",),
    ),
    Fault(
        name="example inputs of a Linen model are zeros",
        file="fsdp_jax/units/linen.py",
        old="                return inputs.get(number, leaf)\n",
        new="                return jax.tree.map(lambda x: 0 * x, inputs.get(number, leaf))\n",
        tests=("tests/units/test_linen_inputs.py",),
    ),
    Fault(
        name="rotary positions are misplaced",
        file="fsdp_jax/models/llama.py",
        old="        positions_BT = jnp.arange(x_BTHK.shape[1])[None]\n",
        new="        positions_BT = jnp.arange(x_BTHK.shape[1])[None] // 2\n",
        tests=("tests/models/test_llama.py",),
    ),
    Fault(
        name="a restored run starts its data again",
        file="fsdp_jax/data/loader.py",
        old="        self._position = position\n",
        new="        self._position = 0\n",
        tests=("tests/data/test_loader.py",),
    ),
    Fault(
        name="padding of a gathered parameter reaches the model",
        file="fsdp_jax/units/collectives.py",
        old="results = [unpad(each, comm.own_shape(each.ndim)) for each in results]",
        new="pass",
        tests=("tests/test_padding.py",),
    ),
    Fault(
        name="kernels that are mapped over are multiplied with all of their scales",
        file="fsdp_jax/step/float8_matmuls.py",
        old="Kernel(path, None if scale.ndim else (values, scale))",
        new="Kernel(path, (values, scale))",
        tests=("tests/units/test_float8.py",),
    ),
    Fault(
        name="optimizer state is computed on padded arrays",
        file="fsdp_jax/step/state.py",
        old="return jax.tree.map(Leaf.pad, layout.optimizer, tx.init(own_params(layout, params)))",
        new="return tx.init(params)",
        tests=("tests/test_padding.py",),
    ),
    Fault(
        name="a padded layer dim",
        file="fsdp_jax/sharding/rules.py",
        old="        padded = range(leaf.stacked, len(leaf.shape)) if self.pads else ()\n",
        new="        padded = range(len(leaf.shape)) if self.pads else ()\n",
        tests=("tests/test_padding.py",),
    ),
    Fault(
        name="a checkpoint has the padding",
        file="fsdp_jax/sharding/padding.py",
        old="if array.shape == tuple(leaf.shape) and not stored_as:",
        new="if array.ndim and not stored_as:",
        tests=("tests/checkpoint/test_padded.py",),
    ),
    Fault(
        name="the heuristic shards the smallest divisible dim",
        file="fsdp_jax/sharding/rules.py",
        old="            dim = max(divisible, key=",
        new="            dim = min(divisible, key=",
        tests=("tests/sharding/test_rules.py",),
    ),
    Fault(
        name="the layout replicates all gradients",
        file="fsdp_jax/sharding/layout.py",
        old="            grad_spec=strategy.grad_placement(placements[path], axes).spec,\n",
        new="            grad_spec=PartitionSpec(),\n",
        tests=("tests/sharding/test_layout.py", "tests/contract/test_contract.py"),
    ),
    Fault(
        name="shards are not cast to the compute dtype before their gather",
        file="fsdp_jax/units/gather_transform.py",
        old="        return shard.astype(self.compute)\n",
        new="        return shard\n",
        tests=("tests/units/test_units.py", "tests/contract/test_stored_steps.py"),
    ),
    Fault(
        name="gradients are not cast to the reduce dtype",
        file="fsdp_jax/units/gather_transform.py",
        old="        return gradient.astype(self.reduce)\n",
        new="        return gradient\n",
        tests=("tests/units/test_unit_collectives.py", "tests/contract/test_stored_steps.py"),
    ),
    Fault(
        name="the loss and the count of an accumulated step are those of its last microbatch",
        file="fsdp_jax/step/train_step.py",
        old="    sums = jax.tree.map(lambda x: x.sum(0), each)\n",
        new="    sums = jax.tree.map(lambda x: x[-1], each)\n",
        tests=("tests/test_parity.py",),
    ),
    Fault(
        name="clipping lengthens gradients below the limit",
        file="fsdp_jax/step/update.py",
        old="jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))",
        new="limit / jnp.maximum(norm, 1e-12)",
        tests=("tests/test_parity.py", "tests/step/test_train_step.py"),
    ),
    Fault(
        name="padding is cut off the wrong end",
        file="fsdp_jax/sharding/padding.py",
        old="    return lax.slice(array, (0,) * len(shape), shape)\n",
        new="    behind = [size - own for size, own in zip(array.shape, shape)]\n"
        "    return lax.slice(array, behind, array.shape)\n",
        tests=("tests/test_padding.py",),
    ),
    Fault(
        name="a manifest is accepted without its own digest",
        file="fsdp_jax/io/digests.py",
        old="    if not isinstance(body, dict) or sealed_text(body) != text:\n",
        new="    if not isinstance(body, dict):\n",
        tests=("tests/io/test_digests.py", "tests/checkpoint/test_manifest.py"),
    ),
    Fault(
        name="the saved position of the data is one batch too far",
        file="fsdp_jax/data/loader.py",
        old='{"next_index": self._position}, "settings"',
        new='{"next_index": self._position + 1}, "settings"',
        tests=("tests/data/test_loader.py",),
    ),
    Fault(
        name="masked targets count",
        file="fsdp_jax/models/losses.py",
        old="losses * weight).sum(), weight.sum()\n",
        new="losses * weight).sum(), jnp.float32(weight.size)\n",
        tests=("tests/models/test_gpt.py",),
    ),
)


def check_texts(faults: tuple[Fault, ...], root: Path) -> None:
    """Raises ValueError naming each fault whose old text is not in its file exactly once."""
    wrong = []
    for fault in faults:
        path = root / fault.file
        times = path.read_text().count(fault.old) if path.exists() else 0
        if times != 1:
            wrong.append(f"{fault.name}: found {times} times in {fault.file}: {fault.old!r}")
        missing = [name for name in fault.tests if not (root / name).exists()]
        wrong += [f"{fault.name}: no test file {name}" for name in missing]
    if wrong:
        raise ValueError("faults that do not fit the code:\n" + "\n".join(wrong))


def run_tests(root: Path, tests: tuple[str, ...]) -> str:
    """Runs test files in `root` until the first failure; returns that test, "" if all pass."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    words += ["-m", "not long", *tests]  # what `make test` runs
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    environment = cache | os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        words, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == PASSED:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != FAILED or not lines:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return lines[0].partition(" ")[2].partition(" - ")[0]


def copy_repository(folder: Path) -> Path:
    """Copies what the tests need; returns the root of the copy."""
    root = folder / "repository"
    for name in COPIED:
        source = ROOT / name
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    return root


def plant(fault: Fault, root: Path) -> Result:
    """Runs a fault's tests with the fault in place, and the one that failed without it."""
    path, started = root / fault.file, time.monotonic()
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        failed_test = run_tests(root, fault.tests)
    finally:
        path.write_text(text)
    if failed_test and run_tests(root, (failed_test,)):
        raise RuntimeError(f"{failed_test} fails without a fault too")
    seconds = round(time.monotonic() - started, 1)
    return Result(fault.name, fault.file, bool(failed_test), failed_test, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="faults whose names hold these words")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    faults = tuple(fault for fault in FAULTS if all(word in fault.name for word in arguments.only))
    check_texts(faults, ROOT)

    with tempfile.TemporaryDirectory() as folder:
        root = copy_repository(Path(folder))
        results = []
        for fault in faults:
            results.append(plant(fault, root))
            result = results[-1]
            verdict = "caught" if result.caught else "NOT CAUGHT"
            print(f"{verdict:10}  {result.seconds:6.1f} s  {result.name}", flush=True)
            print(f"{'':22}{result.failed_test or ', '.join(fault.tests)}", flush=True)

    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    caught = sum(result.caught for result in results)
    print(f"{caught} of {len(results)} faults caught")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
