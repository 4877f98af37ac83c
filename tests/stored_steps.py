"""Steps of the library whose compiled programs are stored in the repository, by name.

The compilers for GPUs and TPUs are 1.4 GB. `scripts/store_programs.py` stores what they make of
these steps, in `programs/`, so that a test needs none: it reads the stored program with the plan of
a step that it makes itself, on devices that only have a name. A change of what the library
declares, of the contract or of the planner's readers thus meets a real program.

What a stale stored program could hide, and what catches it:

- The library asks for other collectives than those that were compiled, or compiles with other
  options. The operations of the trace that communicate and the options are stored too, and
  `test_stored_steps.py` compares them with those of today, in every run.
- The arithmetic of a step or its order changes, or the compiler of a newer release makes another
  program. CI compiles every step (`make test-long`; the same file) and compares the collectives and
  the memory with the stored ones.

Where one fails, store the programs again, by `STORE`: where what was compiled then is a fault, the
contract does not hold.
"""

import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import Contract, check_program
from fsdp_jax.hlo.partitioner_log import collect_rematerializations
from fsdp_jax.models import layers
from fsdp_jax.planner import Plan, Topology, Work, compiled_plan, fake_devices, parse_topology
from fsdp_jax.planner.compiled.buffer_assignment import LiveBuffer, MemoryReport
from fsdp_jax.planner.compiled.program import CompiledProgram, compile_step
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.traced_checks import params_read_outside
from fsdp_jax.step.xla_options import compiler_options
from fsdp_jax.units import collectives
from fsdp_jax.units.annotated import Annotated

PROGRAMS = Path(__file__).parent / "programs"
STORE = "python scripts/store_programs.py"  # with names of steps
LAYERS, VOCABULARY, TOKENS = 3, 512, 64

Made = tuple[CompiledStep, dict[str, jax.ShapeDtypeStruct]]
"""A step, and the shapes of a batch."""


class Layer(nnx.Module):
    """What is gathered of a transformer's layer but its attention: two kernels, a small array."""

    def __init__(self, width, *, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Stacked layers between an embedding and a head."""

    def __init__(self, width, rngs):
        self.embed = nnx.Embed(VOCABULARY, width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = layers.make_blocks(partial(Layer, width), LAYERS, True, rngs)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(layers.run_blocks(self.blocks, self.embed(tokens)))


def cross_entropy(model, batch):
    logits = model(batch["tokens"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return losses.sum(), losses.size


def layered(mesh: Mesh, *, width=128, accumulation=1, local_batch=True, precision=None, **settings):
    """Makes a step of the model above; each device has one row of tokens."""
    sharded = fsdp.fully_shard(
        lambda rngs: Model(width, rngs),
        optax.adam(1e-3),
        mesh,
        units=[Layer],
        min_size=64,
        precision=fsdp.Precision(compute="bfloat16", **precision or {}),
        **settings,
    )
    step = sharded.make_train_step(
        cross_entropy, accumulation=accumulation, local_batch=local_batch
    )
    tokens = jax.ShapeDtypeStruct((mesh.size * accumulation, TOKENS), jnp.int32)
    return step, {"tokens": tokens}


class Middle(nnx.Module):
    """The unit of `Net`."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """Three kernels, of which one is a unit."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.middle = Middle(rngs)
        self.head = nnx.Linear(256, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(self.middle(jnp.tanh(self.first(x))))


def sum_of_squares(model, batch):
    [x] = batch.values()
    return jnp.sum(model(x) ** 2), x.size if x.dtype == jnp.int32 else x.shape[0]


def net_step(
    mesh, *, model=Net, loss=sum_of_squares, accumulation=1, local_batch=True, **settings
) -> CompiledStep:
    """Makes a step of `Net` or a model like it."""
    settings = {"units": [Middle], "min_size": 1} | settings
    sharded = fsdp.fully_shard(lambda rngs: model(rngs), optax.sgd(0.1), mesh, **settings)
    return sharded.make_train_step(loss, accumulation=accumulation, local_batch=local_batch)


class Lookup(nnx.Module):
    """A table, a unit and a head; the table and the unit may have a dtype of their own."""

    def __init__(self, rngs, *, rows=512, dtype=None):
        self.embed = nnx.Embed(rows, 64, rngs=rngs)
        self.embed.dtype = dtype
        self.middle = Middle(rngs)
        self.middle.linear.dtype = dtype
        self.head = nnx.Linear(256, 512, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.middle(self.embed(ids)).astype(self.head.kernel[...].dtype))


class Tied(nnx.Module):
    """A table that is looked up and is the head too."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(4096, 64, rngs=rngs)
        self.linear = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.embed(ids)) @ self.embed.embedding[...].T


class Experts(nnx.Module):
    """Eight experts in one annotated stack, applied one by one; the last of all is a head."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        names = {"out_sharding": ("fsdp", None, None), "eager_sharding": False}
        self.stack = nnx.Param(init(rngs.params(), (8, 256, 128)), **names)
        self.head = nnx.Linear(128, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(sum(jnp.tanh(x @ self.stack[...][n]) for n in range(8)))


def ids_loss(model, batch):
    logits = model(batch["ids"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
    return losses.sum(), batch["ids"].size


def annotated(mesh: Mesh, name: str, shape: tuple[int, ...], **settings) -> Made:
    """Makes a step of a small model by sharding annotations; its batch is one array."""
    dtype = jnp.float32 if name == "x" else jnp.int32
    step = net_step(mesh, local_batch=False, **settings)
    return step, {name: jax.ShapeDtypeStruct(shape, dtype)}


def pinned(mesh: Mesh, dtype, *, local_batch=False) -> Made:
    """Makes a step that computes in bfloat16, but for two modules that have a dtype of theirs."""
    step = net_step(
        mesh,
        model=partial(Lookup, dtype=dtype),
        loss=ids_loss,
        local_batch=local_batch,
        precision=fsdp.Precision(compute="bfloat16"),
    )
    return step, {"ids": jax.ShapeDtypeStruct((64, 128), jnp.int32)}


@contextmanager
def unfenced() -> Iterator[None]:
    """Plants a fault: annotated gathers without the pin of the shard, and without the fence."""

    def gather(self, comm, shard, spec):
        return jax.lax.with_sharding_constraint(shard, NamedSharding(comm.mesh, PartitionSpec()))

    collectives._program_of.cache_clear()  # the same gathers were traced without the fault
    with mock.patch.object(Annotated, "gather", gather):
        yield
    collectives._program_of.cache_clear()


@dataclass(frozen=True)
class StoredStep:
    """How a step is made, and the machine that it is compiled for."""

    topology: str
    make: Callable[[Mesh], Made]
    replica: int = 1
    fault: Callable[[], AbstractContextManager[None]] = nullcontext  # while it is traced

    def machine(self) -> Topology:
        return parse_topology(self.topology)

    def on(self, devices: list[Any]) -> Made:
        return self.make(fsdp.make_mesh(-1, self.replica, devices=devices))


TIED = {"model": Tied, "units": "model"}
EXPERTS = {"model": Experts, "units": "model"}
FEATURES = {"rules": [("^embed/embedding$", (None, "data"))]}
COLUMNS = {"rules": [("^stack$", (None, "data"))]}
STEPS = {
    "annotated": StoredStep("h100:8", partial(layered, local_batch=False)),
    "unfenced": StoredStep("h100:8", partial(layered, local_batch=False), fault=unfenced),
    "hybrid": StoredStep(
        "h100:2x4", partial(layered, strategy="hybrid_shard", prefetch="pre"), replica=2
    ),
    "float8": StoredStep(
        "h100:8",
        partial(layered, prefetch="pre", remat="full", precision={"gather": "float8_e4m3fn"}),
    ),
    # TPUs pad smaller arrays to tiles
    "hybrid_v5p": StoredStep(
        "v5p:2x2x2",
        partial(
            layered,
            width=256,
            strategy="hybrid_shard",
            accumulation=2,
            precision={"reduce": "float32"},
        ),
        replica=2,
    ),
    "prefetch_v5e": StoredStep("v5e:4x2", partial(layered, width=256, prefetch="pre")),
    "pinned": StoredStep("h100:8", partial(pinned, dtype=jnp.float32)),
    "few_tokens": StoredStep(
        "h100:8", partial(annotated, name="ids", shape=(8, 8), model=partial(Lookup, rows=4096))
    ),
    "tied": StoredStep("h100:8", partial(annotated, name="ids", shape=(16, 128), **TIED)),
    "tied_by_features": StoredStep(
        "h100:8", partial(annotated, name="ids", shape=(16, 128), **TIED, **FEATURES)
    ),
    "experts": StoredStep("h100:8", partial(annotated, name="x", shape=(64, 256), **EXPERTS)),
    "experts_by_columns": StoredStep(
        "h100:8", partial(annotated, name="x", shape=(64, 256), **EXPERTS, **COLUMNS)
    ),
}


class Stored(NamedTuple):
    """What a file of `programs/` has of a step."""

    program: CompiledProgram
    asked: list[list[Any]]  # by `asked_collectives`
    options: dict[str, Any]  # of XLA


def compiled(name: str) -> Stored:
    """Compiles a step, for which the machine's compiler has to be installed."""
    step = STEPS[name]
    with step.fault(), collect_rematerializations() as repeated:
        made, batch = step.on(step.machine().devices())
        program = compile_step(made, batch, step.machine(), None)
        asked = asked_collectives(made.trace(batch))
        options = compiler_options(made.plan, made.report.prefetch)
    assert not repeated, f"{name}: a contract would need what XLA's partitioner reported"
    assert program.report is not None, f"{name}: it does not fit"
    return Stored(program, asked, options)


def write(name: str, stored: Stored, folder: Path = PROGRAMS) -> Path:
    """Writes a step's program to its file, without what no reader needs."""
    program = stored.program
    text = re.sub(
        r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", program.text
    )
    text = re.sub(r' ?(stack_frame_id=\d+|scheduling_name="[^"]*")', "", text)
    text = text.replace(", metadata={}", "")
    report = program.report
    content = {"text": text, "spaces": report.spaces, "live": report.live}
    content |= {"asked": stored.asked, "options": stored.options}
    file = folder / f"{name}.json.xz"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(json.dumps(content).encode(), preset=9))
    return file


@cache
def stored(name: str) -> Stored:
    """Reads a step's file."""
    content = json.loads(lzma.decompress((PROGRAMS / f"{name}.json.xz").read_bytes()))
    live = [LiveBuffer(name, tuple(element), *rest) for name, element, *rest in content["live"]]
    report = MemoryReport(content["spaces"], live)
    program = CompiledProgram(content["text"], report, None, 0.0)
    return Stored(program, content["asked"], content["options"])


@cache
def traced(name: str) -> tuple[CompiledStep, Any, Any]:
    """(step, batch, trace) of a step as the library makes it, without its fault."""
    step = STEPS[name]
    made, batch = step.on(fake_devices(step.machine()))
    return made, batch, made.trace(batch)


def asked_today(name: str) -> tuple[list[list[Any]], dict[str, Any]]:
    """(what a step asks for, the options that it is compiled with), with its fault if it has one.

    As a file of `programs/` has them.
    """
    made, batch, trace = traced(name)
    step = STEPS[name]
    if step.fault is not nullcontext:
        with step.fault():
            made, batch = step.on(fake_devices(step.machine()))
            trace = made.trace(batch)
    return asked_collectives(trace), compiler_options(made.plan, made.report.prefetch)


def contract_of(name: str, program: CompiledProgram | None = None) -> Contract:
    """Compares the stored program of a step, or another, with what the step declares."""
    step, batch, _ = traced(name)
    outside = params_read_outside(step.plan, step.microbatch(batch))
    return check_program(step.plan, (program or stored(name).program).text, (), outside)


def plan_of(name: str, work: Work) -> Plan:
    """Makes the plan that `compiled_plan` makes where the compiler returns the stored program."""
    step, batch, _ = traced(name)
    program = stored(name).program
    with mock.patch("fsdp_jax.planner.estimates.compile_step", return_value=program):
        return compiled_plan(step, batch, STEPS[name].machine(), work, None)


ASKS = ("all_gather", "reduce_scatter", "psum", "pmax", "pmin", "all_to_all", "ppermute")
CONSTRAINS = ("sharding_constraint", "optimization_barrier")


def asked_collectives(jaxpr: Any) -> list[list[Any]]:
    """Lists [operation, array, along or sharding, what made it, times a step] of a trace.

    Of operations that communicate or constrain. What made the array, a primitive or nothing in this
    part of the program, tells their order: a fence stands between a cast and a gather.
    """
    found: Counter[tuple[str, str, str, str]] = Counter()

    def visit(jaxpr: jex.Jaxpr, times: int) -> None:
        made: dict[Any, str] = {}
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in CONSTRAINS or name.startswith(ASKS):
                where = eqn.params.get("axis_name", eqn.params.get("axes", ""))
                if "sharding" in eqn.params:
                    where = eqn.params["sharding"].spec
                for var in eqn.invars:
                    maker = "" if isinstance(var, jex.Literal) else made.get(var, "")
                    found[name, var.aval.str_short(), str(where), maker] += times
            made |= dict.fromkeys(eqn.outvars, name)
            for inner in jex.jaxprs_in_params(eqn.params):
                visit(inner, times * eqn.params.get("length", 1))

    visit(jaxpr.jaxpr, 1)
    return sorted([*key, times] for key, times in found.items())
