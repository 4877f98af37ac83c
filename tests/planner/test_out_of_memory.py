"""A step that runs out of memory: what is named of it, and what is advised.

That libtpu writes its reports of a program that it refuses is asserted of a real one in
`tests/compat/test_error_texts.py`; `scripts/bench_oom.py` measures twenty.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused
from test_peak_memory import write

import fsdp_jax as fsdp
from fsdp_jax.errors import OutOfMemoryError, error_block, exit_code
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.hlo.source_frames import SourceFrames, without_frames
from fsdp_jax.planner import Topology, fixes, out_of_memory, parse_topology
from fsdp_jax.planner.compiled import program as compiling
from fsdp_jax.planner.compiled.buffer_assignment import read_memory_report
from fsdp_jax.planner.fixes import Advice
from fsdp_jax.planner.machines import topology as machine_topology
from fsdp_jax.planner.machines.topology import topology_of
from fsdp_jax.planner.out_of_memory import DeviceMemory, MemoryExplanation
from fsdp_jax.planner.remaking import Remaking, remaking_of_step
from fsdp_jax.planner.settings import StepSettings

TABLES = """FileNames
1 "/home/me/train.py"
2 "/home/me/model.py"
3 "/usr/lib/python3/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}
2 {file_name_id=2 function_name_id=1 line=21 end_line=21 column=1 end_column=1}
3 {file_name_id=3 function_name_id=1 line=99 end_line=99 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=%s}
2 {file_location_id=2 parent_frame_id=%s}
3 {file_location_id=3 parent_frame_id=%s}

"""
PROGRAM = """HloModule m, is_scheduled=true

%sENTRY %%main (x: f32[64]) -> f32[64] {
  %%x = f32[64]{0} parameter(0)
  ROOT %%sine = f32[64]{0} sine(%%x), metadata={op_name="jit(f)/sin" stack_frame_id=3}
}
"""
REFUSED = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
REFUSED += "temporaries (22.42G) exceeds available HBM (15.75G)."
RAN_OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes."


@pytest.mark.parametrize("parents", [("0", "1", "2"), ("1", "2", "3")])
def test_an_operation_has_the_innermost_line_of_the_users_own_code(parents):
    """Both numberings of callers: of this release of XLA, a caller's number is one more."""
    text = PROGRAM % (TABLES % parents)
    (sine,) = (one for one in parse_program(text)["main"].instructions if one.name == "sine")
    assert SourceFrames(text).line(sine) == "/home/me/model.py:21"
    assert SourceFrames(without_frames(text)).line(sine) == ""


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.sin(self.up(x)))


@pytest.fixture(scope="module")
def made():
    mesh = fsdp.make_mesh(data=8, devices=jax.devices()[:8])
    sharded = fsdp.fully_shard(lambda rngs: Net(rngs), optax.adam(1e-3), mesh=mesh, min_size=0)

    def loss_fn(model, batch):
        return (model(batch["x"]) ** 2).sum(), batch["x"].shape[0]

    return sharded.make_train_step(loss_fn, accumulation=2)


def test_a_step_of_ones_own_is_explained_on_its_exception(made):
    batch = {"x": jnp.ones((8 * 512, 64))}
    error = jax.errors.JaxRuntimeError(RAN_OUT)
    found = fsdp.explain_memory(made, batch, error)
    assert (found.when, found.requested_bytes, found.limit_bytes) == ("run", 2 << 30, None)
    assert found.peak_bytes == sum(found.breakdown.values())
    assert found.named_share > 0.9
    largest = found.buffers[0]
    assert (largest.kind, largest.array) == ("activations", "f32[256,1024]")
    file, _, number = largest.line.rpartition(":")
    assert (Path(file), Path(__file__).read_text().splitlines()[int(number) - 1]) == (
        Path(__file__),
        "        return self.down(jnp.sin(self.up(x)))",
    )
    fields = json.loads(json.dumps(found.to_json()))
    assert len(fields["buffers"]) <= 12
    assert fields["buffers"][0] | {"operation": "", "line": "", "paths": []} == {
        "bytes": fields["buffers"][0]["bytes"],
        "count": fields["buffers"][0]["count"],
        "kind": "activations",
        "shape": [256, 1024],
        "dtype": "f32",
        "paths": [],
        "line": "",
        "operation": "",
        "idle": False,
    }
    # the block that a command prints
    error = found.error()
    block = error_block(error)
    assert exit_code(error) == 71
    for part in ("error: out of memory: the step takes", "2147483648 bytes", "state: optimizer"):
        assert part in block
    assert repr(found).startswith("<MemoryExplanation: out of memory")


X = np.ones((16, 64), np.float32)


def test_what_is_no_step_is_refused(made):
    with refused(where="explain_memory", got="function"):
        fsdp.explain_memory(lambda state, batch: None, {})
    batch = {"x": X}
    for topology in ("h1:8", "cpu:4"):
        with refused(where="topology", got=topology):
            fsdp.explain_memory(made, batch, topology=topology)
    # as a call of the step refuses them, not as an unknown memory
    for wrong, where in ((None, "batch"), ({"x": 1.0}, "batch/x"), ({"x": X[1:]}, "batch")):
        with refused(where=where):
            fsdp.explain_memory(made, wrong)
    # an error of something else is not hidden behind an explanation of memory
    for error in (ValueError("INTERNAL: no"), "INTERNAL: no"):
        with refused(where="error", got="INTERNAL: no"):
            fsdp.explain_memory(made, batch, error)


def test_a_step_is_made_again_with_other_settings(made):
    """As the planner makes it: on other devices, and with the settings that it tries."""
    batch = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    remaking = remaking_of_step(*made.origin, batch)
    assert (remaking.settings.strategy, remaking.settings.accumulation) == ("full_shard", 2)
    changed = replace(remaking.settings, remat="full", accumulation=4)
    assert remaking.describe(changed, remaking.settings) == "remat='full', accumulation=4"
    step, shapes = remaking.make_step(changed, jax.devices()[:4])
    assert (step.plan.layout.mesh.size, step.plan.accumulation, shapes) == (4, 4, batch)
    # a batch as it is put on the devices, with a dim of microbatches
    placed = made.put({"x": jnp.ones((32, 64))})
    assert made.global_shapes(placed)["x"].shape == (32, 64)


def test_xlas_error_names_the_function_that_explains_it(made, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(REFUSED)

    monkeypatch.setattr("fsdp_jax.step.compiled_step.compile_overlapped", refuse)
    state = made.origin[0].init(0)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        made(state, {"x": jnp.ones((16, 64))})
    assert "fsdp_jax.explain_memory(step, batch, error)" in caught.value.__notes__[0]


def test_reports_of_a_refused_program_are_read(made, tmp_path, monkeypatch):
    """As libtpu writes them, before it raises."""
    text = PROGRAM % ""

    def refuse(lowered, plan, options):
        folder = Path(options["xla_dump_to"])
        write(folder)
        (folder / "module_0000.jit_run.oom_intermediate_module.txt").write_text(text)
        raise jax.errors.JaxRuntimeError(REFUSED)

    monkeypatch.setattr(compiling, "compile_overlapped", refuse)
    program = compiling.compile_reported(None, made.plan)
    assert (program.text, program.report.spaces["default"]) == (text, 1000)
    assert program.refused_bytes >= int(22.42 * 2**30)


MACHINE = parse_topology("h100:8")
# What the stubs below say of settings: (estimated bytes, compiled bytes, seconds of a step).
BYTES = {
    "as it is": (130, 130, 1.0),
    "--remat selective": (105, 112, 1.05),  # does not fit once it is compiled
    "--prefetch none": (118, 118, 1.1),  # an estimate above that of what did not fit: not tried
    "--remat full": (80, 85, 1.18),
    "--train.accumulation 2": (90, 95, 1.3),
}


def stub_step(settings, devices):
    change = " ".join(settings.flags(since=StepSettings("full_shard", prefetch="pre")))
    change = change or "as it is"
    if change not in BYTES:
        raise ValueError("cannot be built")
    plan = SimpleNamespace(prefetch=settings.prefetch)
    batch = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    return SimpleNamespace(plan=plan, change=change), batch


def stub_plan(index, compiled):
    def plan(step, *_):
        peak, time = BYTES[step.change][index], SimpleNamespace(step_s=BYTES[step.change][2])
        if index:
            compiled.append(step.change)
        return SimpleNamespace(peak_bytes=peak, time=time, basis={"time": "analytic"})

    return plan


def test_what_is_advised_was_compiled_and_fits(monkeypatch):
    compiled, said = [], []
    monkeypatch.setattr(Topology, "devices", lambda self: [])
    monkeypatch.setattr(fixes, "analytic_plan", stub_plan(0, compiled))
    monkeypatch.setattr(fixes, "compiled_plan", stub_plan(1, compiled))
    settings = StepSettings("full_shard", prefetch="pre")
    plan = SimpleNamespace(peak_bytes=130, time=None)
    advised = partial(fixes.compiled_fixes, plan, Remaking(settings, stub_step), MACHINE, limit=100)
    advice = advised(say=said.append)
    changes = ["--remat selective", "--remat full", "--train.accumulation 2"]
    assert compiled == changes
    assert said == [f"compiling with {change}" for change in changes]
    assert [(one.change, one.peak_bytes, round(one.slower, 2)) for one in advice] == [
        ("--remat full", 85, 0.18),
        ("--train.accumulation 2", 95, 0.3),
    ]
    # more than enough seconds for one advice: no second is sought
    monkeypatch.setattr(fixes, "ADVICE_SECONDS", 0.0)
    advice = advised()
    assert [one.change for one in advice] == ["--remat full"]
    # nothing fits on these devices: it is told of more of them
    monkeypatch.setitem(BYTES, "--remat full", (80, 180, 1.18))
    monkeypatch.setitem(BYTES, "as it is", (70, 70, 1.0))
    monkeypatch.setitem(BYTES, "--train.accumulation 2", (80, 195, 1.3))
    (only,) = advised()
    assert (only.change, only.costs) == ("16 devices (h100:2x8)", "more devices")


def test_the_machine_of_present_devices_is_named():
    tpu = parse_topology("v5e:4x4").hardware
    chips = [SimpleNamespace(coords=(x, y, 0), slice_index=0) for x in range(4) for y in range(4)]
    assert topology_of(tpu, chips, 4).name == "v5e:4x4"
    assert topology_of(tpu, chips[:3], 1) is None
    assert topology_of(tpu, [SimpleNamespace()], 1) is None
    assert topology_of(MACHINE.hardware, chips, 2).name == "h100:2x8"
    assert topology_of(MACHINE.hardware, chips[:3], 2) is None
    assert topology_of(parse_topology("cpu:8").hardware, chips, 1) is None


def test_the_text_of_an_error_without_tables():
    assert str(OutOfMemoryError("out of memory", fix="less")) == "out of memory\n  fix:      less"


def test_memory_that_is_kept_for_another_time_is_named(tmp_path):
    """Of 500 MiB two values take 400 at the peak, and one that has ended takes the rest."""
    mib = 2**20
    usage = f"Memory Space: default (color=0)\nTotal bytes: {500 * mib} (500MiB)\n"
    live = "    low{}:5-6\n    high{}:5-6\n    early{}:0-2\n"
    assignment = f"""allocation 1: size {500 * mib}, preallocated-temp:
 value: <2 low @0> (size={200 * mib},offset=0): f32[100]{{0}}
 value: <3 high @0> (size={200 * mib},offset={300 * mib}): f32[100]{{0}}
 value: <4 early @0> (size={250 * mib},offset={100 * mib}): f32[125]{{0}}
"""
    report = read_memory_report(write(tmp_path, usage, live, assignment))
    assert [one.name for one in report.live] == ["low", "high"]
    assert [(one.name, one.bytes) for one in report.idle] == [("early", 100 * mib)]


MADE = {"reason": "", "requested_bytes": None, "buffers": ()}
MADE |= {"breakdown": {"params": 2**30}, "device": {"kind": "H100", "bytes_in_use": 2**30}}


def test_what_an_explanation_advises():
    explained = partial(
        MemoryExplanation, peak_bytes=2**31, limit_bytes=2**30, elsewhere_bytes=0, **MADE
    )
    advised = explained(when="run", advice=(Advice("--remat full", 2**29, -0.16, "FLOPs"),))
    assert advised.error().fix == "--remat full, which takes 512 MiB, 16% faster"
    assert "the device: bytes in use 1 GiB" in str(advised)
    assert "no setting that was tried fits" in explained(when="compile").error().fix
    unknown = explained(when="run", limit_bytes=None)
    assert (unknown.fits, "fsdp-jax plan" in unknown.error().fix) == (False, True)
    nobody = explained(when="plan", limit_bytes=None).error().what
    assert nobody.startswith("whether it runs out of memory is not known")
    # where the step fits, something else has the memory; before a run nothing is wrong
    fits = partial(explained, limit_bytes=2**32)
    beside_others = fits(when="run", elsewhere_bytes=7).error()
    assert "free arrays" in beside_others.fix
    assert exit_code(beside_others) == 1  # a restart may help
    assert fits(when="plan").error().what.startswith("not out of memory: the step takes 2 GiB")


def test_the_share_that_jax_takes_of_a_gpu_costs_nothing():
    gib = 2**30
    reported = {"bytes_limit": 60 * gib}
    device = DeviceMemory("NVIDIA H100 80GB HBM3", 60 * gib, reported)
    (advice,) = out_of_memory.larger_share(70 * gib, device, MACHINE)
    assert (advice.change, advice.slower) == ("XLA_PYTHON_CLIENT_MEM_FRACTION=0.97", 0.0)
    assert out_of_memory.larger_share(90 * gib, device, MACHINE) == []
    # other arrays take what a larger share would give
    fuller = replace(device, elsewhere=10 * gib)
    assert out_of_memory.larger_share(70 * gib, fuller, MACHINE) == []
    # an absent one reports no share
    absent = replace(device, reported={})
    assert out_of_memory.larger_share(70 * gib, absent, MACHINE) == []


@pytest.fixture
def on_gpus(monkeypatch, made):
    """As if the step's devices were eight H100s, on which it takes `peak` bytes."""

    def explained(peak, error=None, live=0):
        tried = []

        def advise(plan, remaking, topology, *, limit, say):
            tried.append(limit)
            return (Advice("remat='full'", limit, 0.2, "FLOPs"),)

        plan = SimpleNamespace(
            peak_bytes=peak, breakdown={"activations": peak}, buffers=(), idle=()
        )
        state = made.plan.layout.per_device()
        for module in (out_of_memory, machine_topology):
            monkeypatch.setattr(module, "hardware_of", lambda kind: MACHINE.hardware)
        monkeypatch.setattr(out_of_memory, "_allocator_report", lambda one: {"bytes_limit": 1000})
        monkeypatch.setattr(out_of_memory, "_live_bytes", lambda one: state + live)
        monkeypatch.setattr(Topology, "devices", lambda self: jax.devices()[:8])
        monkeypatch.setattr(out_of_memory, "compiled_plan", lambda *_: plan)
        monkeypatch.setattr(out_of_memory, "compiled_fixes", advise)
        batch = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
        return fsdp.explain_memory(made, batch, error), tried

    return explained


def test_what_is_advised_fits_beside_live_arrays_and_takes_less_than_now(on_gpus):
    error = jax.errors.JaxRuntimeError(RAN_OUT)
    found, tried = on_gpus(1200)  # before a run
    assert (found.when, found.limit_bytes, tried) == ("plan", 1000, [1000])
    assert found.error().what.startswith("out of memory: the step takes 1.17 KiB of a cpu")
    # XLA's share of a GPU is enlarged where the GPU has enough
    assert [each.change.partition("=")[0] for each in found.advice] == [
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "remat",
    ]
    found, tried = on_gpus(1200, error, live=300)
    assert (found.elsewhere_bytes, tried) == (300, [700])
    # a step that fits: nothing is wrong before a run; after it something else took the memory
    found, tried = on_gpus(800)
    assert (found.fits, found.advice, tried) == (True, (), [])
    assert found.error().what.startswith("not out of memory")
    found, tried = on_gpus(800, error)
    assert tried == [799]
    assert "the step alone fits" in found.notes[0]


def test_a_step_that_cannot_be_planned_is_not_explained_by_another_machine(made, monkeypatch):
    batch = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}

    def refuse(*_):
        raise ValueError("cannot be split")

    remaking = Remaking(StepSettings("full_shard"), refuse)
    explained = partial(out_of_memory.explain_out_of_memory, made, batch, remaking=remaking)
    monkeypatch.setattr(Topology, "devices", lambda self: jax.devices()[:8])
    with pytest.raises(ValueError, match="cannot be split"):
        explained(topology=MACHINE)
    # of the step's own devices, as if they were GPUs, its program tells
    for module in (out_of_memory, machine_topology):
        monkeypatch.setattr(module, "hardware_of", lambda kind: MACHINE.hardware)
    found = explained()
    assert found.notes[0] == "not planned for h100:1x8: cannot be split"
    assert found.peak_bytes == sum(found.breakdown.values())


def test_a_machine_that_is_absent_has_no_live_arrays(made, monkeypatch):
    monkeypatch.setattr(out_of_memory, "hardware_of", lambda kind: MACHINE.hardware)
    other = parse_topology("v5e:2x4")
    assert out_of_memory._device_memory(made, other) == DeviceMemory(
        "v5e", other.hardware.usable_bytes
    )
