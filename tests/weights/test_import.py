"""Foreign weights into shards: every family, any sharding, any dtype, within a budget, and every
way not to fit.

jax compiles the slices and copies of arrays, and a program that is donated what was imported: the
numbers are compared, which a trace does not have.
"""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused
from safetensors.numpy import save_file
from tiny import SCANNED_OR_NOT, assert_bits, expected, folder_of, laid_out, spec, target_of, theirs

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io import sharded_read
from fsdp_jax.io.boxes import box_of_index, split_box
from fsdp_jax.io.safetensors import INDEX, SafetensorsFolder
from fsdp_jax.io.sharded_read import HostBuffer, ShardReader
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.sharding.padding import stored_array
from fsdp_jax.tree import flatten
from fsdp_jax.weights import import_weights
from fsdp_jax.weights.importer import read_mapped

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")


@pytest.mark.parametrize(("name", "scan_layers"), SCANNED_OR_NOT)
def test_every_family_is_read_into_its_shards(tmp_path, name, scan_layers):
    folder, tensors = folder_of(name, tmp_path / "model")
    config, sharded = laid_out(name, scan_layers=scan_layers)
    target = sharded.checkpoint_target().params
    params = import_weights(folder, target, config)
    assert jax.tree.structure(params) == jax.tree.structure(target)
    assert_bits(flatten(params), expected(config, flatten(target), tensors))
    for path, leaf in flatten(params).items():
        assert leaf.sharding == sharded.layout.by_path[path].sharding
        stored = stored_array(leaf)
        for shard in stored.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), np.asarray(stored)[shard.index])
    assert any(not leaf.is_replicated for leaf in sharded.layout.by_path.values())


def test_any_floating_dtype_into_any(tmp_path):
    config, _ = laid_out("llama")
    with collected() as case:
        for source in ("float64", "float32", "bfloat16", "float16"):
            folder, tensors = folder_of("llama", tmp_path / source, dtype=source)
            for target in ("float32", "bfloat16", "float16"):
                with case(f"{source} to {target}"):
                    params = import_weights(folder, target_of("llama", dtype=target), config)
                    wanted = expected(config, flatten(params), tensors)
                    dtype = jnp.dtype(target)
                    cast = {path: value.astype(dtype) for path, value in wanted.items()}
                    assert_bits(flatten(params), cast)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5"])
def test_prefixes_are_optional_and_buffers_are_ignored(tmp_path, name):
    prefixes = {"gpt2": "transformer.", "llama": "model.", "vit": "vit.", "t5": ""}
    extra = {
        "gpt2": {
            "h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8),
            "h.2.attn.masked_bias": np.float32([-1e4]),
        },
        "llama": {"layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)},
        "vit": {"pooler.dense.bias": np.ones(32, np.float32)},
        "t5": {
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones(
                (8, 4), np.float32
            )
        },
    }

    def bare(tensors):
        return {key.removeprefix(prefixes[name]): value for key, value in tensors.items()} | extra[
            name
        ]

    folder, tensors = folder_of(name, tmp_path / "model", change=bare)
    config, _ = laid_out(name)
    params = flatten(import_weights(folder, target_of(name), config))
    full = theirs(config, params)
    assert not prefixes[name] or not full.keys() & tensors.keys() - {
        "lm_head.weight",
        "classifier.weight",
        "classifier.bias",
    }
    assert_bits(params, expected(config, params, full))


@pytest.mark.parametrize("name", ["t5", "llama-tied"])
def test_one_tensor_under_several_names(tmp_path, name):
    first, *others = {
        "t5": [
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        ],
        "llama-tied": ["model.embed_tokens.weight", "lm_head.weight"],
    }[name]
    config, _ = laid_out(name)

    def twice(tensors):
        return tensors | {other: tensors[first].copy() for other in others}

    folder, tensors = folder_of(name, tmp_path / "same", change=twice)
    params = flatten(import_weights(folder, target_of(name), config))
    assert_bits(params, expected(config, params, tensors))

    def alias_alone(tensors):
        return {others[0] if key == first else key: value for key, value in tensors.items()}

    folder, _ = folder_of(name, tmp_path / "alias", change=alias_alone)
    assert_bits(
        flatten(import_weights(folder, target_of(name), config)), expected(config, params, tensors)
    )

    def differing(tensors):
        return tensors | {others[-1]: tensors[first] + 1}

    folder, _ = folder_of(name, tmp_path / "differing", change=differing)
    got = f"one of ours, embed/embedding, with {others[-1]}, but they differ"
    with refused(error=ConfigError, got=got):
        import_weights(folder, target_of(name), config)


def test_several_files_and_an_index(tmp_path):
    folder, tensors = folder_of("gpt2", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    where = {name: list(parts)[at % 2] for at, name in enumerate(tensors)}
    for name, file in where.items():
        parts[file][name] = tensors[name]
    for file, part in parts.items():
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config, _ = laid_out("gpt2")
    params = flatten(import_weights(folder, target_of("gpt2"), config))
    assert_bits(params, expected(config, params, tensors))
    save_file(
        parts["model-00001-of-00002.safetensors"], folder / "model-00002-of-00002.safetensors"
    )
    second = str(folder / "model-00002-of-00002.safetensors")
    missing = min(parts["model-00002-of-00002.safetensors"])
    with refused("is not in its file", error=DamageError, where=second, expected=missing):
        import_weights(folder, target_of("gpt2"), config)
    name = next(iter(parts["model-00001-of-00002.safetensors"]))
    weight_map = {name: "model-00001-of-00002.safetensors", "x": list(parts)[1]}
    for file in parts:
        save_file({name: tensors[name], "x": tensors[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with refused("a tensor in two files", error=DamageError):
        import_weights(folder, target_of("gpt2"), config)


def test_a_part_of_the_model_is_read(tmp_path):
    """As for a new classifier, or with adapters that no file has."""
    folder, tensors = folder_of("vit", tmp_path / "model")
    config, _ = laid_out("vit")
    target = flatten(target_of("vit"))
    part = {path: leaf for path, leaf in target.items() if not path.startswith("head/")}
    with refused(
        error=ConfigError, got="theirs classifier.bias, F32[7]: ours head/bias is not in the target"
    ):
        import_weights(folder, part, config)
    params = import_weights(folder, part, config, ignore=("classifier.*",))
    assert_bits(
        params,
        {path: value for path, value in expected(config, target, tensors).items() if path in part},
    )


def test_all_that_does_not_fit_is_named_at_once(tmp_path):
    def spoilt(tensors):
        changed = {
            key: value for key, value in tensors.items() if key != "transformer.h.1.ln_1.bias"
        }
        changed["transformer.h.0.mlp.c_fc.weight"] = tensors[
            "transformer.h.0.mlp.c_fc.weight"
        ].T.copy()
        changed["transformer.ln_f.bias"] = np.ones(32, np.int32)
        return changed | {
            "transformer.h.3.ln_1.bias": np.ones(32, np.float32),
            "extra": np.ones(2, np.float32),
        }

    folder, _ = folder_of("gpt2", tmp_path / "model", change=spoilt)
    config, _ = laid_out("gpt2")
    target = flatten(target_of("gpt2")) | {
        "blocks/attn/qkv/lora_a": spec((3, 32, 8), "float32", ())
    }
    with pytest.raises(ConfigError) as refused:
        import_weights(folder, target, config)
    for line in (
        "theirs transformer.h.1.ln_1.bias, ours blocks/ln_1/bias, float32[3,32]: "
        "missing in the files",
        "theirs transformer.h.0.mlp.c_fc.weight, ours blocks/mlp/up/kernel, float32[3,32,128]: "
        "expected [32, 128], "
        "got F32[128, 32]",
        "theirs transformer.ln_f.bias, ours ln_f/bias, float32[32]: cannot be cast from I32[32]",
        "theirs transformer.h.3.ln_1.bias, F32[32]: no parameter of ours is known for it",
        "theirs extra, F32[2]: no parameter of ours is known for it",
        "ours blocks/attn/qkv/lora_a, float32[3,32,8]: no tensor is known for it",
    ):
        assert line in str(refused.value)


def test_many_that_do_not_fit_are_counted(tmp_path):
    folder, _ = folder_of(
        "gpt2", tmp_path / "model", change=lambda tensors: {"extra": np.ones(2, np.float32)}
    )
    config, _ = laid_out("gpt2")
    with refused(error=ConfigError, got="and 21 more"):
        import_weights(folder, target_of("gpt2"), config)


def test_weights_of_another_size_are_refused(tmp_path):
    """By the table's shapes, which padding does not hide."""
    folder, _ = folder_of("gpt2", tmp_path / "model")
    config, _ = laid_out("gpt2")
    other = dataclasses.replace(config, vocab_size=92)
    with refused(
        error=ConfigError,
        got="wte.weight, ours embed/embedding, float32[128,32]: expected [92, 32], got F32[93, 32]",
    ):
        import_weights(folder, target_of("gpt2"), other)
    with refused(error=ConfigError, got="embed/embedding, float32[128,32]: no tensor"):
        import_weights(folder, target_of("gpt2"), dataclasses.replace(config, vocab_size=129))


def test_unusable_targets_and_configs_are_refused(tmp_path):
    folder, _ = folder_of("gpt2", tmp_path / "model")
    config, _ = laid_out("gpt2")
    bare = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), target_of("gpt2")
    )
    with refused("without shardings", got="embed/embedding"):
        import_weights(folder, bare, config)
    with refused("unknown kind", error=ConfigError, got="dict"):
        import_weights(folder, target_of("gpt2"), {})
    with pytest.raises(ValueError, match="at least 1 byte"):
        import_weights(folder, target_of("gpt2"), config, budget=0)


def header(entries, data=b"\0" * 8, length=None):
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
COMPLEX = {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}


def test_files_that_are_not_weights_are_refused(tmp_path):
    cases = [
        ({}, {"what": "no weights there", "expected": "model.safetensors"}),
        (
            {"pytorch_model.bin": b""},
            {"what": "only pickled weights", "got": "pytorch_model.bin", "fix": "save_pretrained"},
        ),
        (
            {"pytorch_model-00001-of-00002.bin": b"", "pytorch_model.bin.index.json": b"{}"},
            {"what": "only pickled weights"},
        ),
        ({"consolidated.00.pth": b""}, {"what": "only pickled weights"}),
        (
            {INDEX: b'{"weight_map": {"w": "../secret"}}'},
            {"error": DamageError, "what": "outside the directory", "got": "../secret"},
        ),
        (
            {INDEX: b'{"weight_map": {"w": "/etc/passwd"}}'},
            {"error": DamageError, "what": "outside the directory"},
        ),
        ({"model.safetensors": b"1234"}, {"error": DamageError, "what": "cannot be read"}),
        (
            {"model.safetensors": header({"w": ONE}, length=10**9)},
            {"error": DamageError, "got": "header too large"},
        ),
        (
            {"model.safetensors": header({"w": ONE}, length=0)},
            {"error": DamageError, "what": "cannot be read"},
        ),
        ({"model.safetensors": header([1])}, {"error": DamageError, "what": "cannot be read"}),
        (
            {"model.safetensors": header({"w": ONE}, b"1234567")},
            {"error": DamageError, "got": "not fully covered"},
        ),
        (
            {"model.safetensors": header({"w": ONE}, b"123456789")},
            {"error": DamageError, "got": "not fully covered"},
        ),
        (
            {"model.safetensors": header({"w": ONE | {"shape": [3]}})},
            {"error": DamageError, "got": "invalid shape"},
        ),
        (
            {"model.safetensors": header({"w": ONE | {"shape": [-2]}})},
            {"error": DamageError, "got": "integer `-2`"},
        ),
        (
            {"model.safetensors": header({"w": ONE | {"dtype": "F6"}})},
            {"error": DamageError, "got": "unknown variant `F6`"},
        ),
        (
            {"model.safetensors": header({"w": COMPLEX})},
            {"error": DamageError, "got": "tensor 'w' of dtype C64; known: BOOL"},
        ),
        (
            {"model.safetensors": header({"w": ONE, "v": ONE})},
            {"error": DamageError, "got": "invalid offset for tensor"},
        ),
        (
            {"model.safetensors": header({"w": ONE | {"data_offsets": [8, 16]}}, b"0" * 16)},
            {"error": DamageError, "got": "invalid offset for tensor `w`"},
        ),
    ]
    with collected() as case:
        config, _ = laid_out("gpt2")
        for number, (files, said) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case(files):
                for name, content in files.items():
                    (folder / name).write_bytes(content)
                with refused(**{"error": ConfigError} | fields(said)):
                    import_weights(folder, target_of("gpt2"), config)


def test_a_file_that_is_cut_short_while_it_is_read_is_damage(tmp_path, monkeypatch):
    folder, _ = folder_of("gpt2", tmp_path / "model")
    config, _ = laid_out("gpt2")
    file = folder / "model.safetensors"
    size = file.stat().st_size

    def cut_and_read(*arguments):
        os.truncate(file, size // 2)
        return read_mapped(*arguments)

    monkeypatch.setattr("fsdp_jax.weights.importer.read_mapped", cut_and_read)
    with refused("cannot be read", error=DamageError) as damage:
        import_weights(folder, target_of("gpt2"), config)
    assert damage.value.where.startswith(f"{file}, tensor ")
    assert damage.value.got.startswith(f"{size // 2:,} bytes")
    assert size // 2 < int(damage.value.expected.split()[0].replace(",", "")) <= size


# --- slices, budgets and devices ---


@st.composite
def arrays(draw):
    """(mapping, shape of ours, sharding axes per dim): one tensor in a larger sharded array."""
    rank = draw(st.integers(1, 4))
    order = draw(st.permutations(range(rank)))
    theirs = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, 8, 17])) for _ in range(rank))
    size = tuple(theirs[dim] for dim in order)
    start = tuple(draw(st.integers(0, 2)) for _ in range(rank))
    axes, left = [], ["a", "b"]
    shape = []
    for begin, extent in zip(start, size, strict=True):
        axis = draw(st.sampled_from([None, *left]))
        if axis:
            left.remove(axis)
        parts = {None: 1, "a": 2, "b": 4}[axis]
        axes.append(axis)
        shape.append(-(-(begin + extent + draw(st.integers(0, 2))) // parts) * parts)
    return TensorMapping("t", start, size, tuple(order), theirs), tuple(shape), tuple(axes)


@settings(max_examples=15, deadline=None)
@given(
    case=arrays(),
    budget=st.sampled_from([1, 200, 4000, 1 << 20]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    on_device=st.booleans(),
    run=st.sampled_from([1, 16, 16 << 10]),
)
def test_any_tensor_is_read_into_any_sharding(
    tmp_path_factory, case, budget, dtype, on_device, run
):
    mapping, shape, axes = case
    folder = tmp_path_factory.mktemp("slices")
    value = np.random.default_rng(0).normal(size=mapping.shape).astype(np.float32)
    save_file({"t": value, "before": np.ones(3, np.float32)}, folder / "model.safetensors")
    leaf = spec(shape, dtype, axes)
    whole = np.zeros(shape, np.float32)
    whole[tuple(slice(*each) for each in mapping.box)] = value.transpose(mapping.dims)
    with (
        pytest.MonkeyPatch.context() as patch,
        SafetensorsFolder(folder) as tensors,
        ShardReader(tensors, budget) as staging,
    ):
        patch.setattr(sharded_read, "MIN_READ", run)
        patch.setattr(sharded_read, "in_host_memory", lambda sharding: not on_device)
        array = staging.read_array(leaf, [mapping])
    assert_bits({"": array}, {"": whole.astype(jnp.dtype(dtype))})
    assert array.sharding == leaf.sharding
    np.testing.assert_array_equal(
        mapping.to_tensor(whole[tuple(slice(*each) for each in mapping.box)]), value
    )


@settings(max_examples=100, deadline=None)
@given(
    box=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9)).map(lambda ends: (ends[0], sum(ends))),
        max_size=4,
    ),
    limit=st.integers(1, 200),
)
def test_blocks_cover_the_box_in_order(box, limit):
    shape = [hi for _, hi in box]
    seen = np.zeros(shape, int)
    for part in split_box(tuple(box), limit):
        view = seen[(*(slice(*each) for each in part), ...)]
        assert 0 < view.size <= limit
        view += 1
    wanted = np.zeros(shape, int)
    wanted[(*(slice(*each) for each in box), ...)] = 1
    assert (seen == wanted).all()


@pytest.fixture
def reads(monkeypatch):
    """Every read of a file: (file, start, bytes)."""
    import os

    found = []
    preadv = os.preadv

    def counted(file, views, start):
        done = preadv(file, views, start)
        found.append((file, start, done))
        return done

    monkeypatch.setattr("fsdp_jax.io.safetensors.os.preadv", counted)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("budget", [1 << 28, 1 << 16])
def test_every_byte_is_read_once(tmp_path, name, budget, reads):
    """Also what is transposed on its way, and what several devices hold."""
    folder, tensors = folder_of(name, tmp_path / "model")
    config, _ = laid_out(name)
    import_weights(folder, target_of(name), config, budget=budget)
    assert sum(done for *_, done in reads) == sum(value.nbytes for value in tensors.values())
    assert len({start for _, start, _ in reads}) == len(reads)
    if budget < 1 << 20:
        assert max(done for *_, done in reads) <= budget // 8


def test_a_process_reads_what_its_own_devices_need(tmp_path, reads):
    """A shard of rows is read alone; one of columns too, where they are long enough."""
    value = np.random.default_rng(0).normal(size=(64, 64 << 10)).astype(np.float32)
    save_file({"t": value}, tmp_path / "model.safetensors")
    mapping = TensorMapping("t", (0, 0), value.shape, (0, 1), value.shape)
    for rows, columns in (
        ((8, 16), (0, 64 << 10)),
        ((0, 64), (16 << 10, 32 << 10)),
        ((8, 9), (0, 100)),
    ):
        box = (rows, columns)
        sink = HostBuffer(np.zeros([hi - lo for lo, hi in box], value.dtype), [])
        reads.clear()
        with SafetensorsFolder(tmp_path) as tensors, ShardReader(tensors) as staging:
            staging.fill_buffers({box: sink}, [mapping])
        assert (sink.values == value[tuple(slice(*each) for each in box)]).all()
        worth_it = (columns[1] - columns[0]) * 4 >= sharded_read.MIN_READ
        wide = columns if worth_it else (0, 64 << 10)
        assert sum(done for *_, done in reads) == (rows[1] - rows[0]) * (wide[1] - wide[0]) * 4


def test_the_budget_bounds_what_is_staged(tmp_path, monkeypatch, reads):
    """On devices with their own memory, for an array above the budget, transposed and cast."""
    import tracemalloc

    budget = 4 << 20
    value = np.arange(1 << 22, dtype=np.float32).reshape(1024, 4096)  # 16 MiB
    save_file({"t": value}, tmp_path / "model.safetensors")
    mapping = TensorMapping("t", (0, 0), value.shape[::-1], (1, 0), value.shape)
    leaf = spec(value.shape[::-1], "bfloat16", ("a", "b"))
    monkeypatch.setattr(sharded_read, "in_host_memory", lambda sharding: False)
    with SafetensorsFolder(tmp_path) as tensors:
        with ShardReader(tensors, budget) as staging:  # imports what jax needs for it
            staging.read_array(leaf, [mapping])
        reads.clear()
        tracemalloc.start()
        with ShardReader(tensors, budget) as staging:
            array = staging.read_array(leaf, [mapping])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (np.asarray(array) == value.T.astype(jnp.bfloat16)).all()
    assert sum(done for *_, done in reads) == value.nbytes
    assert most < budget + (1 << 20), "numpy's memory, and what Python itself takes"


def test_imported_arrays_can_be_donated(tmp_path):
    """Though a CPU device may use the host memory that they were assembled in."""
    folder, tensors = folder_of("gpt2", tmp_path / "model")
    config, _ = laid_out("gpt2")
    params = import_weights(folder, target_of("gpt2"), config)
    wanted = {path: value + 1 for path, value in expected(config, flatten(params), tensors).items()}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    add = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0, out_shardings=shardings
    )
    assert_bits(flatten(add(params)), wanted)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_boxes_of_indices():
    assert box_of_index((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
