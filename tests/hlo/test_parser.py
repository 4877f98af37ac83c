"""Reads programs that scripts/store_programs.py compiled for an H100, TPUs and a CPU.

Expectations are arithmetic on the traced program, not earlier output of the reader. The MLP has
three layers of two weights, W bytes each in bfloat16: 1024 x 4096, but 4096 x 16384 in
`v5p_windowed`.
"""

import gzip
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from refusals import refused

from fsdp_jax.hlo.collectives import ProgramTraffic, read_collectives
from fsdp_jax.hlo.parser import parse_program

LAYERS = 3
W = 1024 * 4096 * 2
UP, DOWN = "blocks/mlp/up/kernel", "blocks/mlp/down/kernel"
MESHES = {
    "cpu_mapped": {"data": 8},
    "cpu_exchanges": {"replica": 2, "data": 4},
    "h100_mapped": {"data": 8},
    "h100_hybrid": {"replica": 2, "data": 4},
    "h100_annotated": {"data": 8},
    "h100_exchanges": {"replica": 2, "data": 4},
    "v5e_mapped": {"data": 16},
    "v5e_torus": {"a": 4, "b": 4},
    "v5e_pod": {"a": 16, "b": 16},
    "v5e_slices": {"replica": 2, "data": 16},
    "v5p_mapped": {"data": 8},
    "v5p_hybrid": {"replica": 2, "data": 4},
    "v5p_windowed": {"data": 8},
    "v6e_sparse_core": {"data": 8},
}
# The mean loss: an all-reduce of one float32 over 8, 16 or 256 devices sends 2 * 4 * (n-1)/n.
LOSS = 7


@cache
def text_of(name: str) -> str:
    return gzip.decompress(
        (Path(__file__).parent / "programs" / f"{name}.txt.gz").read_bytes()
    ).decode()


@cache
def stored(name: str) -> ProgramTraffic:
    return read_collectives(text_of(name), MESHES[name])


def sent(program: ProgramTraffic) -> dict[tuple[str, str, str], int]:
    """Bytes by operation, dtype and axis."""
    total: Counter[tuple[str, str, str]] = Counter()
    for one in program.collectives:
        total[one.op, one.dtype, one.axis] += one.bytes
    return dict(total)


def served(program: ProgramTraffic, op: str) -> Counter[tuple[str, tuple[int, ...]]]:
    """How often an operation ran for each path and shape."""
    total: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one in program.collectives:
        for path, shape in zip(one.paths, one.shapes, strict=True):
            total[path, shape] += one.count if one.op == op else 0
    return +total


@pytest.mark.parametrize("name", MESHES)
def test_every_stored_program_is_read_completely(name):
    program = stored(name)
    assert program.unread == ()
    assert all(set(one.axis.split("+")) <= set(MESHES[name]) for one in program.collectives)
    assert all(0 <= one.hidden <= one.bytes for one in program.collectives)


# The MLP by hand: each weight is gathered forward and again backward, its gradient scattered.


def test_cpu_computes_in_float32_what_was_asked_in_bfloat16():
    assert sent(stored("cpu_mapped")) == {
        ("all-gather", "float32", "data"): 2 * LAYERS * 2 * (2 * W) * 7 // 8,
        ("reduce-scatter", "float32", "data"): LAYERS * 2 * (2 * W) * 7 // 8,
        ("all-reduce", "float32", "data"): LOSS,
    }


def test_h100_combines_the_weights_of_a_layer():
    program = stored("h100_mapped")
    assert sent(program) == {
        ("all-gather", "bfloat16", "data"): 2 * LAYERS * 2 * W * 7 // 8,
        ("reduce-scatter", "bfloat16", "data"): LAYERS * 2 * W * 7 // 8,
        ("all-reduce", "float32", "data"): LOSS,
    }
    weights = {(UP, (1024, 4096)), (DOWN, (4096, 1024))}
    assert served(program, "all-gather") == Counter(dict.fromkeys(weights, 2 * LAYERS))
    assert served(program, "reduce-scatter") == Counter(dict.fromkeys(weights, LAYERS))
    assert all(len(one.shapes) == 2 for one in program.collectives if one.op != "all-reduce")
    # XLA peels one gather and one scatter off the backward loop, which leaves two of each in it
    assert sorted((one.count, one.loop) for one in program.collectives) == [(1, 0)] * 3 + [
        (2, 1)
    ] * 2 + [(3, 1)]


def test_h100_hybrid_scatters_inside_and_reduces_across():
    program = stored("h100_hybrid")
    assert sent(program) == {
        ("all-gather", "bfloat16", "data"): 2 * LAYERS * 2 * W * 3 // 4,
        ("reduce-scatter", "bfloat16", "data"): LAYERS * 2 * W * 3 // 4,
        ("all-reduce", "bfloat16", "replica"): LAYERS
        * 2
        * (2 * W // 4)
        // 2,  # a quarter of each, twice 1/2
        ("all-reduce", "float32", "replica+data"): LOSS,
    }
    # laid end to end before they travel, a quarter of each
    shards = {(UP, (256, 4096)), (DOWN, (1024, 1024))}
    assert {
        key: count for key, count in served(program, "all-reduce").items() if key in shards
    } == dict.fromkeys(shards, LAYERS)


def test_h100_annotated_gathers_by_names_of_a_mesh():
    assert "replica_groups=mesh[" in text_of("h100_annotated")
    assert sent(stored("h100_annotated")) == {
        # forward both weights; backward the partitioner gathers half of one and exchanges [8, 256,
        # 512] activations
        ("all-gather", "bfloat16", "data"): LAYERS * (2 * W + W + W // 2) * 7 // 8,
        ("all-to-all", "bfloat16", "data"): LAYERS * (8 * 256 * 512 * 2) * 7 // 8,
        ("reduce-scatter", "bfloat16", "data"): LAYERS * 2 * W * 7 // 8,
        ("all-reduce", "float32", "data"): LOSS,
    }


@pytest.mark.parametrize(("name", "devices"), [("v5e_mapped", 16), ("v5p_mapped", 8)])
def test_a_tpu_scatters_by_an_all_reduce_and_a_slice(name, devices):
    program, part = stored(name), (devices - 1) / devices
    assert sent(program) == {
        ("all-gather", "bfloat16", "data"): 2 * LAYERS * 2 * W * part,
        ("all-reduce", "bfloat16", "data"): LAYERS * 2 * W * 2 * part,
        ("all-reduce", "float32", "data"): LOSS,
    }
    [sliced] = [one for one in program.collectives if one.sliced]
    # the combiner keeps the name of the first alone, and what is not known is not guessed
    assert (sliced.paths, sliced.shapes) == ((DOWN, ""), ((4096, 1024), (1024, 4096)))


def test_a_torus_is_scattered_one_dim_at_a_time():
    program = stored("v5e_torus")
    assert "all-reduce-scatter" in text_of("v5e_torus")
    assert sent(program) == {
        ("all-gather", "bfloat16", "b"): 2
        * LAYERS
        * 2
        * (W // 4)
        * 3
        // 4,  # a sixteenth becomes a quarter
        ("all-gather", "bfloat16", "a"): 2 * LAYERS * 2 * W * 3 // 4,
        # `pad` in the fusions: 4096 -> 4128 and 1024 -> 1056 rows, so that a part is whole tiles
        ("reduce-scatter", "bfloat16", "a"): LAYERS * (4128 * 1024 + 1056 * 4096) * 2 * 3 // 4,
        ("permute", "bfloat16", "a"): LAYERS
        * (24 * 1024 + 24 * 4096)
        * 2,  # the rows that padding moved, sent back
        ("reduce-scatter", "bfloat16", "b"): LAYERS * 2 * (W // 4) * 3 // 4,
        ("all-reduce", "float32", "a+b"): LOSS,
    }
    assert not any(one.sliced for one in program.collectives)
    assert {
        one.paths for one in program.collectives if one.op in ("reduce-scatter", "permute")
    } == {(UP,), (DOWN,)}


def test_a_pod_scatters_one_weight_and_reduces_the_other():
    program = stored("v5e_pod")
    assert sent(program) == {
        ("all-gather", "bfloat16", "b"): 2 * LAYERS * 2 * (W // 16) * 15 // 16,
        ("all-gather", "bfloat16", "a"): 2 * LAYERS * 2 * W * 15 // 16,
        ("reduce-scatter", "bfloat16", "a"): LAYERS * 2 * W * 15 // 16,
        ("reduce-scatter", "bfloat16", "b"): LAYERS * (W // 16) * 15 // 16,
        # up: 4 rows a device are less than a tile, so its 64 rows are reduced whole
        ("all-reduce", "bfloat16", "b"): LAYERS * 2 * (W // 16) * 15 // 16,
        ("all-reduce", "float32", "a+b"): LOSS,
    }
    assert [(one.paths, one.shapes) for one in program.collectives if one.sliced] == [
        ((UP,), ((64, 4096),))
    ]


def test_slices_exchange_the_shards_through_their_hosts():
    """`send` and `recv` of the megascale runtime; a slice's program has its own 16 devices only."""
    program = stored("v5e_slices")
    assert "num_partitions=16" in text_of("v5e_slices")
    loss = 128 * 4  # padded to a row of a tile
    assert sent(program) == {
        ("all-gather", "bfloat16", "data"): 2 * LAYERS * 2 * W * 15 // 16,
        ("reduce-scatter", "bfloat16", "data"): LAYERS * 2 * W * 15 // 16,
        ("all-reduce", "bfloat16", "replica"): LAYERS * 2 * (2 * W // 16) // 2,
        ("all-reduce", "float32", "data"): 2 * loss * 15 // 16,
        ("all-reduce", "float32", "replica"): 2 * loss // 2,
    }
    # the peeled last layer's have nothing to hide behind; the other two's stand around the next
    # layer's matmuls
    hidden = sum(
        one.hidden
        for one in program.collectives
        if (one.dtype, one.axis) == ("bfloat16", "replica")
    )
    assert hidden == (LAYERS - 1) * 2 * (2 * W // 16) // 2


def test_a_program_of_slices_is_refused_for_a_mesh_of_one():
    with refused(expected="16 devices in each of several slices", got="a mesh of"):
        read_collectives(text_of("v5e_slices"), {"data": 16})


def test_windowed_matmuls_permute_parts_round_a_ring():
    program, part = stored("v5p_windowed"), 4096 * 16384 * 2 // 8
    # forward and backward each weight, and each gradient: one hop, then a loop of two trips with
    # four
    assert sent(program) == {
        ("permute", "bfloat16", "data"): LAYERS * 6 * 9 * part,
        ("all-reduce", "float32", "data"): LOSS,
    }
    assert Counter(one.loop for one in program.collectives if one.op == "permute") == {1: 6, 2: 24}
    # every permute of a window runs beside a matmul; of the six first hops four do
    assert sum(one.hidden for one in program.collectives) == LAYERS * (6 * 8 + 4) * part


# Overlap: the kernels between a start and its done


@pytest.mark.parametrize("name", ["h100_mapped", "h100_hybrid", "h100_annotated"])
def test_kernels_are_counted_between_start_and_done(name):
    """Against a search of the text: XLA calls every matmul of these programs `gemm_fusion_...`."""
    for one in stored(name).collectives:
        inside = re.search(rf"%{one.name} = (.*?)-done\(%{one.name}\)", text_of(name), re.DOTALL)
        assert inside is not None
        kernels = len(re.findall(r"^ +%gemm_fusion_[\w.]* = ", inside.group(1), re.MULTILINE))
        synchronous = '"is_sync":true' in inside.group(1).splitlines()[0]
        assert (one.asynchronous, one.kernels) == (not synchronous, kernels)
        assert one.hidden == (one.bytes if kernels else 0)


def test_some_collectives_are_hidden():
    assert {one.op for one in stored("h100_mapped").collectives if one.hidden} == {"reduce-scatter"}
    assert {one.op for one in stored("h100_annotated").collectives if one.hidden} == {
        "all-to-all",
        "reduce-scatter",
    }


def test_a_tpu_collective_continued_inside_fusions_counts_once():
    """A start, two `async_collective_fusion`s with a convolution, and a done are one collective."""
    [gather] = [one for one in stored("v5e_mapped").collectives if one.asynchronous]
    assert (gather.op, gather.paths, gather.count, gather.kernels) == (
        "all-gather",
        (DOWN,),
        LAYERS,
        2,
    )
    assert gather.hidden == gather.bytes == LAYERS * W * 15 // 16


def test_a_sparse_core_scatters_beside_the_matmuls():
    """`call-start ... async_execution_thread="sparsecore"`, and its `call-done`."""
    program = stored("v6e_sparse_core")
    assert sent(program) == {
        ("all-gather", "bfloat16", "data"): 2 * LAYERS * 2 * W * 7 // 8,
        ("reduce-scatter", "bfloat16", "data"): LAYERS * 2 * W * 7 // 8,
        ("all-reduce", "float32", "data"): LOSS,
    }
    down, up = [one for one in program.collectives if one.op == "reduce-scatter"]
    assert (down.paths, down.shapes, up.paths, up.shapes) == (
        (DOWN,),
        ((4096, 1024),),
        (UP,),
        ((1024, 4096),),
    )
    # beside the first stand the product for the other weight's gradient and the one that goes
    # through the relu; beside the second the one for x's
    assert (down.kernels, up.kernels) == (2, 1)
    assert (down.hidden, up.hidden) == (down.bytes, up.bytes)
    assert all(
        one.begins.endswith("call-start") and one.ends.endswith("call-done") for one in (down, up)
    )


# A computation that the reader does not enter is reported.


@pytest.mark.parametrize("key", ["to_apply", "some_computations"])
def test_an_unknown_caller_of_a_collective_is_reported(key):
    """The SparseCore's calls by a name invented here."""
    text = (
        text_of("v6e_sparse_core")
        .replace(" call-start(", " offload-begin(")
        .replace("call-done(", "offload-end(")
    )
    text = text.replace("to_apply=%called_computation", f"{key}=%called_computation")
    program = read_collectives(text, MESHES["v6e_sparse_core"])
    told = [
        line for line in program.unread if line.startswith("what offload-begin 'reduce-scatter.")
    ]
    assert len(told) == len(program.unread) == 2
    assert told[0].endswith("sends by 'called_computation'")


def test_an_unknown_second_caller_of_a_collective_is_reported():
    text, start = text_of("v6e_sparse_core"), "  %reduce-scatter.3.cloned.1.call-start = "
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    again = line.replace(start, "  %again = ").replace(" call-start(", " call-again(")
    [told] = read_collectives(
        text.replace(line, f"{line}\n{again}"), MESHES["v6e_sparse_core"]
    ).unread
    assert told.startswith("what call-again 'again' in ")


@pytest.mark.parametrize(
    "body",
    [
        "all-gather(%p), replica_groups={}, dimensions={0}",
        'custom-call(%p), custom_call_target="exchange"',
    ],
)
def test_a_collective_in_an_unnamed_computation_is_reported(body):
    planted = "\n\n%planted (p: f32[8]) -> f32[64] {\n  %p = f32[8] parameter(0)\n"
    planted += f"  ROOT %x = f32[64] {body}\n}}\n"
    program = read_collectives(text_of("h100_mapped") + planted, MESHES["h100_mapped"])
    assert program.collectives == stored("h100_mapped").collectives
    opcode = body.partition("(")[0]
    assert program.unread == (
        f"{opcode} 'x' in 'planted', which is not run by an instruction that is understood",
    )


def test_a_pallas_kernel_that_communicates_is_reported():
    """As an `async_remote_copy` on a v5e:4x2 is printed."""
    text = text_of("h100_mapped") + (
        "\n%f (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        '  ROOT %k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"has_communication":true}}\n}\n'
    )
    [told] = read_collectives(text, MESHES["h100_mapped"]).unread
    assert told.startswith("custom-call 'k' in 'f'")
    assert read_collectives(text.replace(":true}}", ":false}}"), MESHES["h100_mapped"]).unread == ()


# Nested loops, branches, two dtypes at once: x is float32 [64, 128] on each of 4, ids int32 [64].


def test_exchanges_of_an_h100():
    x = 64 * 128 * 4
    program = stored("h100_exchanges")
    assert sent(program) == {
        ("all-to-all", "float32", "data"): 2 * 5 * x * 3 // 4,
        ("permute", "float32", "data"): 2 * 5 * x,
        ("all-reduce", "float32", "data"): 2 * x * 3 // 4,  # in the branch that sends more
        ("all-gather", "bfloat16", "data"): 4 * (x // 2) * 3 // 4,
        ("all-gather", "int32", "data"): 4 * (64 * 4) * 3 // 4,
    }
    gathers = [one for one in program.collectives if one.op == "all-gather"]
    assert len({one.name for one in gathers}) == 1  # one instruction, two dtypes
    assert {(one.dtype, one.shapes) for one in gathers} == {
        ("bfloat16", ((256, 128),)),
        ("int32", ((256,),)),
    }
    assert {one.loop for one in program.collectives if one.op in ("all-to-all", "permute")} == {2}


def test_exchanges_of_a_cpu():
    x = 64 * 128 * 4
    assert sent(stored("cpu_exchanges")) == {
        ("all-to-all", "float32", "data"): 2 * 5 * x * 3 // 4,  # as a tuple of four parts
        ("permute", "float32", "data"): 2 * 5 * x,
        ("all-reduce", "float32", "data"): 2 * x * 3 // 4,
        ("all-gather", "float32", "data"): 4 * x * 3 // 4,
        ("all-gather", "int32", "data"): 4 * (64 * 4) * 3 // 4,
    }


@pytest.mark.parametrize("name", ["cpu_mapped", "cpu_exchanges", "h100_mapped", "h100_exchanges"])
def test_a_loop_of_unstated_length_is_evaluated(name):
    untold = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text_of(name))
    assert untold != text_of(name)
    assert read_collectives(untold, MESHES[name]) == stored(name)


def test_a_text_that_is_cut_short_is_refused():
    with pytest.raises(ValueError, match="ends inside"):
        read_collectives(text_of("h100_mapped").rstrip()[:-2], MESHES["h100_mapped"])


def test_another_mesh_is_refused():
    with refused(got="a mesh of"):
        read_collectives(text_of("h100_mapped"), {"data": 16})


def test_an_instruction_may_run_over_several_lines():
    """A Pallas kernel's metadata has lines of its own; the last begins with the closing brace."""
    target = 'custom_call_target="tpu_custom_call"'
    text = f"""HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %k = f32[8]{{0}} custom-call(%p), {target}, frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512}}"
}}}}, metadata={{op_name="jit(f)/splash_mha_fwd"}}
}}
"""
    entry = parse_program(text)["main"]
    assert [one.name for one in entry.instructions] == ["p", "k"]
    assert entry.root.op_name == "jit(f)/splash_mha_fwd"
    assert entry.root.attribute("custom_call_target") == '"tpu_custom_call"'


def with_short_elements(text):
    """Writes `%x#1` where a `get-tuple-element` is read, as the XLA of jax 0.12 does."""
    element = re.compile(
        r"^  (%\S+) = [^\n]*? get-tuple-element\((%\S+)\), index=(\d+).*\n", re.MULTILINE
    )
    short = {name: f"{source}#{index}" for name, source, index in element.findall(text)}

    def replaced(match):
        name = match.group()
        while name in short:  # an element of an element too
            name = short[name]
            source, mark, index = name.partition("#")
            name = f"{short.get(source, source)}{mark}{index}"
        return name

    return re.sub(r"%[^\s,()]+", replaced, element.sub("", text))


@pytest.mark.parametrize("name", ["h100_mapped", "v6e_sparse_core"])
def test_elements_of_tuples_may_be_written_short(name):
    text = with_short_elements(text_of(name))
    assert re.search(r"\(%\S+#\d", text)
    assert read_collectives(text, MESHES[name]).collectives == stored(name).collectives
    for computation in parse_program(text).computations.values():
        for each in computation.instructions:
            assert all(operand in computation.by_name for operand in each.operands), each.name


def test_an_element_that_a_tuple_has_not_is_refused():
    text = with_short_elements(text_of("h100_mapped"))
    operand = re.search(r"\((%\S+#)\d+", text).group(1)
    with refused("has no element 99"):
        parse_program(re.sub(rf"{re.escape(operand)}\d+", f"{operand}99", text))
