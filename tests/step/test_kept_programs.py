"""Compiled programs in files: taken bit for bit, and refused by name where anything differs.

One small program for eight devices is compiled; what is tested is who compiles it, and when.
"""

import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flip_byte
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.step import kept_programs
from fsdp_jax.step import program_files as of_files
from fsdp_jax.step.kept_programs import KeptPrograms, compile_kept, keeping
from fsdp_jax.step.program_files import (
    describe_file,
    describe_machine,
    parse_program,
    program_files,
    remove_old,
    write_program,
)

STEP = "the train step"
KEYS = {"model.layers": 2, "train.global_batch_size": 8}


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh()


def lowered_on(mesh, factor=3.0):
    """A program with a collective, lowered anew: jax remembers what it has compiled."""
    jax.clear_caches()
    rows = NamedSharding(mesh, P("data"))
    jitted = jax.jit(lambda x: jnp.sin(x * factor) / x.sum(), in_shardings=rows)
    return jitted.lower(jax.ShapeDtypeStruct((16,), jnp.float32))


def compile_in(programs, mesh, name=STEP, lowered=None, options=None):
    with keeping(programs):
        return compile_kept(name, lowered or lowered_on(mesh), mesh, options or {})


@pytest.fixture(scope="module")
def original(mesh, tmp_path_factory):
    """A folder with the program, and what it computes."""
    folder = tmp_path_factory.mktemp("programs")
    programs = KeptPrograms(folder, "write", KEYS)
    compiled = compile_in(programs, mesh)
    assert (programs.read, programs.compiled) == ([], [STEP])
    return folder, np.asarray(compiled(argument(mesh)))


def argument(mesh):
    return jax.device_put(np.arange(1.0, 17, dtype=np.float32), NamedSharding(mesh, P("data")))


@pytest.fixture
def copied(original, tmp_path):
    """The file of the program, in a folder of this test."""
    (file,) = program_files(original[0])
    copy = tmp_path / "programs" / file.parent.name / file.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(file.read_bytes())
    return copy


def required(copied):
    return KeptPrograms(copied.parents[1], "require", KEYS)


def test_a_program_is_read_in_place_of_being_compiled(mesh, original, copied, monkeypatch):
    events = []
    listen = lambda event, *_, **more: events.append((event, more.get("fun_name")))  # noqa: E731
    monkeypatch.setattr(kept_programs, "compile_and_take", None)  # called, it fails
    jax.monitoring.register_event_listener(listen)
    programs = required(copied)
    compiled = compile_in(programs, mesh)
    assert (programs.read, programs.compiled) == ([STEP], [])
    assert [event for event, _ in events if event.endswith("cache_hits")]
    assert np.asarray(compiled(argument(mesh))).tobytes() == original[1].tobytes()
    # The same in a run that keeps what it has; whether other keys have changed is all the same.
    kept = KeptPrograms(copied.parents[1], "keep", {"model.layers": 3})
    compile_in(kept, mesh)
    assert kept.read == [STEP]


def test_a_file_says_what_it_is(original):
    (file,) = program_files(original[0])
    assert file.parent.name == "processes-1"
    row = describe_file(file)
    assert (row["program"], row["processes"], row["devices"]) == ("train step", 1, 8)
    assert row["versions"]["jax"] == jax.__version__
    header, content = parse_program(file.read_bytes(), "")
    assert header["config"] == KEYS
    assert len(header["keys"]) == 1
    assert len(content) == row["bytes"]
    assert not content.startswith(b"\x80"), "no pickle"


MACHINES = {
    "version: jax": {"versions": {"jax": "0.1.0", "jaxlib": "0.10.2"}},
    "topology: processes": {"topology": {"processes": 2}},
    "topology: mesh": {"topology": {"mesh": {"replica": 2, "data": 4}}},
    "device: kind": {"device": {"kind": "NVIDIA H100 80GB HBM3"}},
    "device: instructions": {"device": {"instructions": "others"}},
    "topology: process and id of each device": {
        "topology": {"process and id of each device": [[0, number] for number in range(7, -1, -1)]}
    },
    "flag of XLA: --xla_cpu_enable_fast_math": {"flags": {"--xla_cpu_enable_fast_math": "true"}},
    "setting of jax: jax_optimization_level": {"settings": {"jax_optimization_level": "O0"}},
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_program_for_another_machine_is_refused_by_name(name, mesh, copied):
    header, content = parse_program(copied.read_bytes(), "")
    for field, values in MACHINES[name].items():
        header[field] = {**header[field], **values} if isinstance(values, dict) else values
    header.pop("digest")
    write_program(copied, header, content)
    what = f"is of another {name}"
    with refused(what, error=ConfigError, where=str(copied), fix="fsdp-jax compile"):
        compile_in(required(copied), mesh)


def test_of_flags_with_one_name_the_last_counts(mesh, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=/tmp --xla_b=2 --xla_a")
    assert describe_machine(mesh)["flags"] == {"--xla_b": "2", "--xla_a": ""}


def test_another_configuration_or_source_is_refused_by_name(mesh, copied):
    programs = KeptPrograms(copied.parents[1], "require", KEYS | {"model.layers": 4})
    with refused("another configuration", expected="model.layers 2", got="model.layers 4"):
        compile_in(programs, mesh, lowered=lowered_on(mesh, 5.0))
    with refused("another source", fix="flax"):
        compile_in(required(copied), mesh, lowered=lowered_on(mesh, 5.0))
    with refused("another option of XLA", expected="not set", got="1"):
        compile_in(required(copied), mesh, options={"xla_cpu_enable_fast_math": 1})


def test_a_damaged_file_is_refused_wherever_it_is_damaged(mesh, copied):
    whole = copied.read_bytes()
    for offset in (0, 200, whole.index(b"\0"), whole.index(b"\0") + 1, len(whole) - 1):
        flip_byte(copied, offset)
        with refused("is damaged", error=DamageError, where=str(copied)):
            compile_in(required(copied), mesh)
        copied.write_bytes(whole)
    cuts = {0: "an empty file", 100: "its header: ", len(whole) - 1: " bytes of "}
    for length, got in cuts.items():
        copied.write_bytes(whole[:length])
        with refused("is damaged", error=DamageError, where=str(copied), got=got):
            compile_in(required(copied), mesh)


def test_what_is_kept_by_default_is_compiled_anew_where_it_is_damaged(mesh, original, copied):
    copied.write_bytes(copied.read_bytes()[:500])
    said = []
    programs = KeptPrograms(copied.parents[1], "keep", KEYS, said.append)
    compile_in(programs, mesh)
    assert programs.compiled == [STEP]
    assert "is damaged" in said[0]
    programs = required(copied)  # it is whole again
    compile_in(programs, mesh)
    assert programs.read == [STEP]


def said_as_it_compiles_anew(file, mesh):
    """What a run that keeps its programs says of a file that it cannot use."""
    said = []
    programs = KeptPrograms(file.parents[1], "keep", KEYS, said.append)
    compile_in(programs, mesh)
    assert programs.compiled == [STEP]
    return said[0]


def test_a_file_that_cannot_be_read_is_compiled_anew_or_refused(mesh, copied, monkeypatch):
    def read(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(of_files, "read_regular", read)
    with refused("cannot be read", error=ConfigError, got="Permission denied"):
        compile_in(required(copied), mesh)
    assert "cannot be read" in said_as_it_compiles_anew(copied, mesh)


def test_a_program_that_xla_does_not_read_is_compiled_anew_or_refused(mesh, copied):
    header, content = parse_program(copied.read_bytes(), "")
    header.pop("digest")
    write_program(copied, header, content[: len(content) // 2])
    with refused("XLA does not read", error=DamageError):
        compile_in(required(copied), mesh)
    assert "XLA does not read" in said_as_it_compiles_anew(copied, mesh)


def test_another_key_of_jax_is_refused(mesh, copied, monkeypatch):
    monkeypatch.setattr(kept_programs, "key_of_program", lambda _: "another")
    with refused("hashed in jax's key", got=hashlib.sha256(b"another").hexdigest()):
        compile_in(required(copied), mesh)


def test_a_program_that_the_process_has_compiled_before_is_not_kept(mesh, copied):
    """Jax then looks for it nowhere, and tells no key."""
    lowered = lowered_on(mesh)
    lowered.compile()
    said = []
    compile_in(KeptPrograms(copied.parents[1], "keep", KEYS, said.append), mesh, lowered=lowered)
    assert "hashed in jax's key" in said[0]
    with refused("cannot be kept", got="has compiled before"):
        compile_in(KeptPrograms(copied.parents[1], "write", KEYS), mesh, lowered=lowered)


def test_a_missing_program_is_refused_at_the_start(mesh, copied, tmp_path):
    programs = required(copied)
    programs.require_any(1)
    with refused("for so many processes", expected="processes-3", got="processes-1"):
        programs.require_any(3)
    with refused("no compiled program of the eval step", where=str(copied.parent)):
        compile_in(programs, mesh, name="the eval step")
    with refused("no compiled program", got="no such folder"):
        KeptPrograms(tmp_path / "nothing", "require", KEYS).require_any(1)
    # Once the run trains it is not ended for a program.
    compile_in(programs, mesh)
    compile_in(programs, mesh, name="the eval step")
    assert programs.compiled == ["the eval step"]
    assert program_files(copied.parents[1]) == [copied]


def test_a_note_names_the_file_that_was_compared(mesh, copied):
    said = []
    programs = KeptPrograms(copied.parents[1], "require", KEYS, said.append)
    with keeping(programs):
        compile_kept(STEP, lowered_on(mesh, 5.0), mesh, {}, is_step=False)
    assert f"({copied})" in said[0]


def test_loops_on_several_cpus_are_refused_or_compiled(mesh, tmp_path):
    rows = NamedSharding(mesh, P("data"))
    looping = jax.jit(
        lambda x: jax.lax.scan(lambda c, _: (c / c.sum(), None), x, length=2)[0], in_shardings=rows
    )
    lowered = looping.lower(jax.ShapeDtypeStruct((16,), jnp.float32))
    with refused("cannot be kept", error=ConfigError, got="loops", fix="scan_layers"):
        compile_in(KeptPrograms(tmp_path, "write", KEYS), mesh, lowered=lowered)
    programs = KeptPrograms(tmp_path, "keep", KEYS)
    compile_in(programs, mesh, lowered=lowered)
    assert programs.compiled == [STEP]
    assert program_files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said_or_refused(mesh, tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    compile_in(KeptPrograms(tmp_path / "file", "keep", KEYS, said.append), mesh)
    assert "is not kept" in said[-1]
    with refused("cannot be written", error=ConfigError):
        compile_in(KeptPrograms(tmp_path / "file", "write", KEYS), mesh)


def test_what_a_killed_writer_left_is_no_program_and_is_removed(mesh, copied):
    whole = copied.read_bytes()
    copied.unlink()
    left, written = (copied.with_name(f"{copied.name}.{name}.unfinished") for name in "ab")
    left.write_bytes(whole[:300])
    written.write_bytes(whole[:300])  # by another run, now
    os.utime(left, (0, 0))
    programs = KeptPrograms(copied.parents[1], "keep", KEYS)
    compile_in(programs, mesh)
    assert programs.compiled == [STEP]
    assert program_files(copied.parents[1]) == [copied]
    assert sorted(copied.parent.iterdir()) == sorted([copied, written])
    assert describe_file(copied)["program"] == "train step"


def test_the_oldest_programs_of_a_folder_are_removed(tmp_path):
    for number in range(5):
        write_program(tmp_path / f"step-{number}.program", {"program": "x"}, b"")
    remove_old(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_on_other_machines_share_no_programs(mesh, tmp_path, monkeypatch):
    gather = lambda part: [part, part[:8] + b"another " + part[16:]]  # noqa: E731
    monkeypatch.setattr(kept_programs, "_gather", gather)
    said = []
    programs = KeptPrograms(tmp_path, "keep", KEYS, said.append)
    compile_in(programs, mesh)
    assert "the processes differ in device, and share no programs" in said[0]
    with refused("share no programs", error=ConfigError):
        compile_in(KeptPrograms(tmp_path, "require", KEYS), mesh)


def test_keys_in_a_header_are_values_of_json(tmp_path):
    programs = KeptPrograms(tmp_path, "keep", {"a": (1, 2), "b": tmp_path})
    assert json.dumps(programs._values) == json.dumps({"a": [1, 2], "b": str(tmp_path)})
