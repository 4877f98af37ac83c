"""Runs of several processes that take their programs from files; the processes are real.

Each Python that starts counts what XLA compiles in it, by name.
"""

import json
import os
from pathlib import Path

import pytest
from processes import PATIENCE, run_cluster, start
from runs import losses

from fsdp_jax.errors import UNUSABLE

pytestmark = pytest.mark.long

CONFIG = """
model: {layers: 1, width: 32, heads: 2, scan_layers: false}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {sequence_length: 16}
train: {steps: 3, global_batch_size: 8, devices: 2, sample: 0, eval_batches: 1}
"""
COUNT = """
import atexit, json, os
if "JAX_PROCESS_ID" in os.environ:
    from jax._src import compiler
    compile_it, names = compiler.backend_compile_and_load, []
    def count(backend, module, *more):
        names.append(str(module.operation.attributes["sym_name"]).strip('"'))
        return compile_it(backend, module, *more)
    compiler.backend_compile_and_load = count
    file = f"FOLDER/compiled-{os.environ['JAX_PROCESS_ID']}.json"
    atexit.register(lambda: open(file, "w").write(json.dumps(names)))
"""
LARGE = {"jit_run", "jit_params_and_model_state", "jit_optimizer_state", "jit__are_finite"}


@pytest.fixture
def command(tmp_path):
    """Runs `fsdp-jax` on the tiny configuration; returns its exit code and output."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "sitecustomize.py").write_text(COUNT.replace("FOLDER", str(tmp_path)))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code = "import sys; from fsdp_jax.cli.main import main; sys.exit(main())"
    flags = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": paths,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": "",  # as if there were none
    }

    def run(*words):
        process = start(code, *words, **environment)
        try:
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        return process.returncode, out + err

    return run


def train(command, tmp_path, count, name, *words):
    launch = ("launch", "--nproc", count, "--", "train", tmp_path / "tiny.yaml")
    return command(*launch, "--output", tmp_path / name, *words)


def compiled(tmp_path, count):
    """The names of what XLA compiled, in each process of the last start."""
    files = [tmp_path / f"compiled-{number}.json" for number in range(count)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("count", [2, 4])
def test_a_start_from_compiled_programs_compiles_none_of_them(command, tmp_path, count):
    words = ("compile", tmp_path / "tiny.yaml", "--to", tmp_path / "programs", "--json")
    code, said = command(*words, "--processes", count)
    assert code == 0, said
    if count == 4:
        assert "not for 3 processes: the batch cannot be split evenly" in said
    code, said = train(command, tmp_path, count, "normal", "--train.keep_programs", "never")
    assert code == 0, said
    assert "compiled in" in said
    assert all(set(names) >= LARGE for names in compiled(tmp_path, count))
    assert not (tmp_path / "normal" / "programs").exists()
    # Every process takes them, and all bits are those of the normal start.
    code, said = train(command, tmp_path, count, "ahead", "--programs", tmp_path / "programs")
    assert code == 0, said
    assert "read its compiled program in" in said
    assert [LARGE & set(names) for names in compiled(tmp_path, count)] == [set()] * count
    assert losses(tmp_path / "ahead") == losses(tmp_path / "normal")
    # A folder for this number and one less does not serve another.
    if count == 2:
        alone = ("train", tmp_path / "tiny.yaml", "--output", tmp_path / "alone")
        code, said = command(*alone, "--programs", tmp_path / "programs")
        assert code == 0, said
        assert "read its compiled program in" in said
        code, said = train(command, tmp_path, 4, "more", "--programs", tmp_path / "programs")
        assert code == UNUSABLE
        assert "no compiled program of the train step for so many processes" in said
        assert "got:      processes-1, processes-2" in said


def test_a_restart_takes_the_programs_that_the_run_has_kept(command, tmp_path):
    constant = ("--optimizer.schedule", "constant", "--checkpoint.every", 1)
    for steps, damaged, told in ((1, False, "compiled in"), (2, False, "read its"), (3, True, "")):
        kept = tmp_path / "run" / "programs" / "processes-2"
        if damaged:  # by a kill, or a disk
            (file,) = kept.glob("train-step-*")
            file.write_bytes(file.read_bytes()[:-7])
            told = "a compiled program is damaged"
        code, said = train(command, tmp_path, 2, "run", "--train.steps", steps, *constant)
        assert code == 0, said
        assert told in said
    # It is whole again.
    code, said = train(command, tmp_path, 2, "run", "--train.steps", 4, *constant)
    assert "read its compiled program in" in said
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4]


def test_one_process_compiles_ahead_and_refuses_loops(command, tmp_path):
    config, programs = tmp_path / "tiny.yaml", tmp_path / "programs"
    code, said = command("compile", config, "--to", programs, "--model.scan_layers", "true")
    assert code == UNUSABLE
    assert "the program of the train step cannot be kept" in said
    assert "model.scan_layers False" in said
    code, said = command("compile", config, "--to", programs)
    assert code == 0, said
    assert f"next: fsdp-jax train CONFIG --programs {programs}" in said
    words = ("train", config, "--output", tmp_path / "run", "--programs", programs)
    code, said = command(*words, "--train.global_batch_size", 16)
    assert code == UNUSABLE
    assert "is of another configuration" in said
    assert "expected: train.global_batch_size 8" in said
    code, said = command(*words)
    assert code == 0, said
    assert "read its compiled program in" in said


SENT = """
import json
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import fsdp_jax as fsdp
from fsdp_jax.step import kept_programs
from fsdp_jax.step.kept_programs import THE_STEP, KeptPrograms
from fsdp_jax.step.program_files import program_files

mesh, folders = fsdp.make_mesh(), [Path(sys.argv[4]) / name for name in "01"]
rows = NamedSharding(mesh, P("data"))
take = kept_programs.compile_and_take

def start(use, compiles):
    jax.clear_caches()  # as in a process that has just started
    kept_programs.compile_and_take = take if compiles else None  # None: fails if it is called
    step = jax.jit(lambda x: jnp.sin(x) / x.sum(), in_shardings=rows, donate_argnums=0)
    lowered = step.lower(jax.ShapeDtypeStruct((4,), jnp.float32))
    said = []
    programs = KeptPrograms(folders[process], use, {}, said.append)
    compiled = programs.compile(THE_STEP, lowered, mesh, {}, is_step=True)
    x = jax.make_array_from_callback((4,), rows, lambda index: np.arange(1.0, 5)[index])
    shards = [shard.data.tolist() for shard in compiled(x).addressable_shards]
    return {"read": programs.read, "shards": shards, "donated": x.is_deleted(), "said": said}

found = {"first": start("write", True)}
files = program_files(folders[process])
assert len(files) == (1, 0)[process], files
found["missing"] = start("require", False)
if process == 1:
    (whole,) = program_files(folders[0])
    own = folders[1] / whole.relative_to(folders[0])
    own.parent.mkdir(parents=True)
    own.write_bytes(whole.read_bytes()[:-7])
found["damaged"] = start("keep", False)
if process == 1:
    whole.rename(own)
barrier("process 1 alone has the file")
found["only in process 1"] = start("keep", True)
print(json.dumps(found))
leave_cluster()
"""


def test_a_process_that_does_not_see_a_program_is_sent_it(tmp_path):
    """Two hosts with a folder each, of which process 0 alone writes its own."""
    for out in run_cluster(SENT, tmp_path, devices=2):
        found = json.loads(out.splitlines()[-1])
        read = {name: bool(each["read"]) for name, each in found.items()}
        assert read == {
            "first": False,
            "missing": True,
            "damaged": True,
            "only in process 1": False,
        }
        for each in found.values():
            assert each["shards"] == found["first"]["shards"]
            assert each["donated"]
            assert each["said"] == []
