"""Checkpoints that other programs wrote by orbax, read into shards of another layout.

The other program is plain jax, optax and orbax, with the names and the layout of MaxText: layers
are stacked along dim 1, and heads have a dim of their own.
"""

import functools
import json
import os
import random
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore, import_orbax
from fsdp_jax.checkpoint.chunked_tree import open_orbax
from fsdp_jax.checkpoint.saved_array import SavedArray, with_tensors
from fsdp_jax.errors import ArgumentError, ConfigError, DamageError, ReadableError
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.tree import flatten

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCAB = 3, 14, 2, 5, 21, 28
TX = optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(0.01))


def their_params():
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape) * 0.1, jnp.float32)

    layers = {
        "attn": {"value": {"kernel": normal(WIDTH, LAYERS, HEADS, HEAD)}},
        "mlp": {
            "wi_0": {"kernel": normal(WIDTH, LAYERS, HIDDEN)},
            "wi_1": {"kernel": normal(WIDTH, LAYERS, HIDDEN)},
            "wo": {"kernel": normal(HIDDEN, LAYERS, WIDTH)},
        },
    }
    decoder = {"layers": layers, "logits_dense": {"kernel": normal(WIDTH, VOCAB)}}
    decoder |= {f"out_{i}": {"kernel": normal(HEADS, HEAD, WIDTH)} for i in range(LAYERS)}
    return {"params": {"token_embedder": {"embedding": normal(VOCAB, WIDTH)}, "decoder": decoder}}


def their_loss(params, tokens):
    """The model of the other program."""
    tree = params["params"]
    decoder = tree["decoder"]
    attn, mlp = decoder["layers"]["attn"], decoder["layers"]["mlp"]
    x = tree["token_embedder"]["embedding"][tokens]
    for i in range(LAYERS):
        heads = jnp.einsum("...d,dhk->...hk", x, attn["value"]["kernel"][:, i])
        x = x + jnp.einsum("...hk,hkd->...d", heads, decoder[f"out_{i}"]["kernel"])
        gate = jnp.tanh(x @ mlp["wi_0"]["kernel"][:, i]) * (x @ mlp["wi_1"]["kernel"][:, i])
        x = x + gate @ mlp["wo"]["kernel"][:, i]
    logits = x @ decoder["logits_dense"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@functools.cache
def their_step():
    @jax.jit
    def step(state, tokens):
        loss, grads = jax.value_and_grad(their_loss)(state["params"], tokens)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    return step


class Ours(nnx.Module):
    """The same model with layers first, heads joined, and both halves of the gate in one kernel."""

    def __init__(self, rngs):
        def normal(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.1)

        self.embedding = normal(VOCAB, WIDTH)
        self.value = normal(LAYERS, WIDTH, HEADS * HEAD)
        self.out = normal(LAYERS, HEADS * HEAD, WIDTH)
        self.gate = normal(LAYERS, WIDTH, 2 * HIDDEN)
        self.down = normal(LAYERS, HIDDEN, WIDTH)
        self.head = normal(WIDTH, VOCAB)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)


def our_loss(model, batch):
    tokens = batch["tokens"]
    x = model.embedding[...][tokens]
    for i in range(LAYERS):
        x = x + x @ model.value[...][i] @ model.out[...][i]
        first, second = jnp.split(x @ model.gate[...][i], 2, axis=-1)
        x = x + (jnp.tanh(first) * second) @ model.down[...][i]
    each = optax.softmax_cross_entropy_with_integer_labels(x @ model.head[...], tokens)
    return each.sum(), each.size


# The page's own examples: without names, the names of MaxText, and a whole state.
PAGE = Path(__file__).parents[2] / "docs" / "bring-your-checkpoints.md"
SECTION = PAGE.read_text().partition("### From PyTorch")[0]
*_, NAMES, STATE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
EXAMPLE: dict = {"import_orbax": import_orbax}
exec(NAMES, EXAMPLE)
names = EXAMPLE["rename"]


def as_ours(tree):
    """Converts the other program's arrays to ours, by NumPy."""
    whole = {path.replace("params/", ""): np.asarray(x) for path, x in flatten(tree).items()}
    paths = ("embedding", "value", "out", "gate", "down", "head")
    found = {path: names(path, whole) for path in paths}
    return {path: whole[x] if isinstance(x, str) else x for path, x in found.items()}


@functools.cache
def sharded(devices=7, strategy="full_shard"):
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    return fsdp.fully_shard(lambda rngs: Ours(rngs), TX, mesh, strategy, min_size=8)


TOKENS = np.arange(7 * 4, dtype=np.int32).reshape(7, 4) * 5 % VOCAB


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A trained state of the other program, its checkpoint, and the losses of its next steps."""
    params = their_params()
    state = {"params": params, "opt_state": TX.init(params), "step": 0}
    step = their_step()
    for _ in range(2):
        state, _ = step(state, TOKENS)
    folder = tmp_path_factory.mktemp("maxtext")
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(2, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    later, losses = state, []
    for _ in range(3):
        later, loss = step(later, TOKENS)
        losses.append(float(loss))
    return folder / "2", state, losses


@pytest.fixture
def copied(theirs, tmp_path):
    shutil.copytree(theirs[0], tmp_path / "copy")
    return tmp_path / "copy"


def host(tree):
    return {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path, strict=True)


def test_a_state_of_another_program_trains_on(theirs):
    """Layers along another dim, heads of their own, halves apart: all bitwise."""
    folder, state, losses = theirs
    fresh = sharded().to_checkpoint(sharded().init(seed=3))
    key = np.asarray(jax.random.key_data(fresh.rng))
    read = import_orbax(folder, fresh, rename=names)
    # And as the page does it.
    found = EXAMPLE | {"sharded": sharded()}
    exec(STATE.replace("maxtext/2", str(folder)), found)
    same(host(found["state"].params), {x: np.asarray(y) for x, y in host(read.params).items()})
    assert fresh.params["head"].is_deleted()
    same(host(read.params), as_ours(state["params"]))
    adam, theirs_adam = read.opt_state[1][0], state["opt_state"][1][0]
    same(host(adam.mu), as_ours(theirs_adam.mu))
    same(host(adam.nu), as_ours(theirs_adam.nu))
    assert (int(adam.count), int(read.step), int(read.skipped)) == (2, 2, 0)
    np.testing.assert_array_equal(jax.random.key_data(read.rng), key)

    ours = sharded().from_checkpoint(read)
    step = sharded().make_train_step(our_loss)
    found = []
    for _ in losses:
        ours, metrics = step(ours, {"tokens": TOKENS})
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_parameters_alone_go_into_any_layout(theirs):
    """Into shards that do not divide, of several strategies; another head is left for `init`."""
    folder, state, _ = theirs
    expected = as_ours(state["params"])
    for devices, strategy in ((8, "full_shard"), (4, "zero1"), (1, "full_shard")):
        target = sharded(devices, strategy).checkpoint_target().params
        read = import_orbax(folder / "items", target, rename=names, budget=1 << 12)
        same(host(read), expected)
        for path, leaf in flatten(target).items():
            assert flatten(read)[path].sharding == leaf.sharding
    assert any(
        isinstance(x, Padded)
        for x in flatten(
            import_orbax(folder, sharded(8).checkpoint_target().params, rename=names)
        ).values()
    )
    target = sharded(8).checkpoint_target().params
    read = import_orbax(folder, target, rename=names, skip=["he*"])
    assert read.keys() == expected.keys() - {"head"}
    # A name that the function does not find is of no matter where it is skipped.
    read = import_orbax(
        folder,
        target,
        rename=lambda path, saved: "nothing" if path == "head" else names(path, saved),
        skip=["head"],
        ignore=["*/logits_dense/*"],
    )
    assert "head" not in read


def plain_tree():
    numbers = np.arange(6.0, dtype=np.float32)
    layer = {"kernel": jnp.asarray(numbers.reshape(2, 3)), "bias": jnp.ones(3, jnp.bfloat16)}
    params = {"a.b": layer, "0": {"kernel": jnp.asarray(numbers)}}
    return params


def writers():
    def v0(**options):
        def write(path, tree):
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(path, tree)

        return write

    def standard(path, tree):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    def manager(path, tree):
        with ocp.CheckpointManager(path.parent) as checkpoints:
            checkpoints.save(int(path.name), args=ocp.args.StandardSave(tree))

    return {
        **{
            f"v0 {ocdbt} {zarr3}": v0(use_ocdbt=ocdbt, use_zarr3=zarr3)
            for ocdbt in (True, False)
            for zarr3 in (True, False)
        },
        "standard": standard,
        "manager": manager,
        "v1": v1.save,
        "v1 checkpointables": lambda path, tree: v1.save_checkpointables(path, {"model": tree}),
    }


def test_any_format_of_orbax_is_read(tmp_path):
    """Both versions, with a database and with a folder an array, names as they are or wrapped."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = plain_tree()
    target = {
        "a.b": {
            "kernel": jax.ShapeDtypeStruct((2, 3), "float32", sharding=device),
            "bias": jax.ShapeDtypeStruct((3,), "float32", sharding=device),  # cast
        },
        "0": {"kernel": jax.ShapeDtypeStruct((6,), "float32", sharding=device)},
    }
    expected = host(jax.tree.map(lambda x: x.astype("float32"), params))
    state = {"opt_state": {"mu": params}, "step": 3, "none": None}
    trees = [params, {"params": params, **state}, {"params": {"params": params}, **state}]
    for number, (name, write) in enumerate(writers().items()):
        path = tmp_path / str(number)
        write(path, trees[number % 3])
        same(host(import_orbax(path, target)) | {"writer": name}, expected | {"writer": name})
    # The state of NNX has the value of each parameter in a box.
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    v1.save(tmp_path / "nnx", nnx.to_pure_dict(nnx.state(module)))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        nnx.to_pure_dict(nnx.state(module)),
    )
    v1.save(tmp_path / "boxes", {"model": nnx.state(module)})
    assert set(open_orbax(tmp_path / "boxes").tensors) == {
        "model/kernel/value",
        "model/bias/value",
    }
    expected = host(nnx.to_pure_dict(nnx.state(module)))
    for name, rename in (
        ("nnx", None),
        ("boxes", None),
        ("boxes", lambda path, saved: path),
        ("boxes", lambda path, saved: f"model/{path}"),
    ):
        same(host(import_orbax(tmp_path / name, wanted, rename=rename)), expected)
    # A model of ours that has its own `model`, of the same paths as theirs.
    read = import_orbax(tmp_path / "boxes", {"model": wanted})
    same(host(read["model"]), expected)


def test_a_model_and_its_nnx_optimizer_are_a_state(tmp_path):
    """Below keys of the user's, with the step of the optimizer or one beside it."""
    mesh = fsdp.make_mesh(data=7, devices=jax.devices()[:7])
    ours = fsdp.fully_shard(lambda rngs: nnx.Linear(4, 3, rngs=rngs), TX, mesh, min_size=1)
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(1))
    theirs = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)  # not in a chain
    theirs.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    boxed = {"model": nnx.state(model), "optimizer": nnx.state(theirs)}
    pure = {"net": nnx.state(model), "opt": {"tx": nnx.to_pure_dict(nnx.state(theirs))}, "step": 1}
    bare = {"weights": nnx.state(model), "opt": nnx.state(theirs)["opt_state"], "step": 1}
    for name, tree in (("boxed", boxed), ("pure", pure), ("bare", bare)):
        v1.save(tmp_path / name, tree)
        target = ours.to_checkpoint(ours.init(seed=0))
        state = ours.from_checkpoint(import_orbax(tmp_path / name, target))
        adam = state.opt_state[1][0]
        assert (int(state.step), int(adam.count)) == (1, 1)
        expected = nnx.to_pure_dict(nnx.state(theirs))["opt_state"][0]["nu"]
        same(host(ours.to_checkpoint(state).opt_state[1][0].nu), host(expected))
    v1.save(tmp_path / "less", {"params": {"kernel": model.kernel[...]}})
    target = ours.to_checkpoint(ours.init(seed=0))  # with padded arrays
    with refused(error=ConfigError, got="opt_state/1/0/mu/bias: missing in the checkpoint"):
        import_orbax(tmp_path / "less", target)


def test_views_are_those_of_numpy(tmp_path):
    """Each view of an array, and of views, has NumPy's values, whole and box by box."""
    values = np.arange(4 * 6 * 10, dtype=np.float32).reshape(4, 6, 10)
    v1.save(tmp_path / "one", {"x": jnp.asarray(values), "y": jnp.asarray(-values)})
    tree = open_orbax(tmp_path / "one")
    x, y = (SavedArray.of_tensor(tree.tensors[name]) for name in "xy")
    for a, b in ((x, y), (values, -values)):
        views = [
            a[1],
            a[..., 2:5],
            a[-1, :, 3],
            a.transpose(2, 0, 1),
            a.transpose(),
            a.reshape(24, 10),
            a.reshape(4, 2, 3, -1),
            a.reshape(-1),
            a.reshape(8, 3, 2, 5)[1:3, :, 1].transpose(2, 0, 1),
            a.transpose(1, 0, 2).reshape(6, 40)[2:4].reshape(2, 8, 5),
            np.stack([a, b], axis=1).reshape(4, 12, 10),
            np.concatenate([a[:, :2], b[:, 1:]], axis=1).transpose(1, 2, 0),
            np.swapaxes(np.moveaxis(a, 0, -1), 0, 1)[3:7, 1:, 2:],
            np.concatenate([np.stack([a[0], b[0]], -1), np.stack([a[1], b[1]], -1)])[5:9],
        ]
        if a is x:
            lazy = views
    opened = tree.reopened(["x", "y"], 1 << 10, keeps_chunks=True)
    draw = random.Random(0)
    for number, (view, expected) in enumerate(zip(lazy, views, strict=True)):
        assert view.shape == expected.shape, number
        np.testing.assert_array_equal(np.asarray(view), expected, err_msg=str(number))
        again = with_tensors(view, opened)
        for _ in range(8):
            pairs = [sorted(draw.sample(range(size + 1), 2)) for size in view.shape]
            cut = tuple(slice(*pair) for pair in pairs)
            read = again.read(tuple(map(tuple, pairs)))
            np.testing.assert_array_equal(read, expected[cut], err_msg=f"{number} {pairs}")
    for wrong in (
        lambda: x.reshape(7, 7),
        lambda: x[5],
        lambda: x[::2],
        lambda: x[0, 0, 0, 0],
        lambda: x.transpose(0, 1),
        lambda: np.sum(x),
        lambda: np.stack([x, values]),
        lambda: np.concatenate([x, y[0]]),
    ):
        with pytest.raises(ArgumentError):
            wrong()


def test_all_that_does_not_fit_is_named_at_once(theirs):
    folder, _, _ = theirs
    target = sharded(8).checkpoint_target().params
    with refused(error=ArgumentError, where="rename", got="dict"):
        import_orbax(folder, target, rename={"head": "head"})
    with refused(error=ConfigError, got="embedding: missing in the checkpoint") as caught:
        import_orbax(folder, target)
    assert "theirs params/params/decoder/logits_dense/kernel: of no parameter" in caught.value.got

    def wrong(path, saved):
        return saved["decoder/out_0/kernel"] if path == "out" else names(path, saved)

    with refused(error=ConfigError, got="expected [3, 10, 14], got float32[2, 5, 14]") as caught:
        import_orbax(folder, target, rename=wrong)
    assert "params/params/decoder/out_1/kernel: of no parameter" in caught.value.got
    with refused(error=ConfigError, got="decoder/none", fix="did you mean"):
        import_orbax(folder, target, rename=lambda path, saved: "decoder/none")
    saved_by_full_path = {}

    def full(path, saved):
        saved_by_full_path[path] = saved["params/params/token_embedder/embedding"]
        return names(path, saved)

    import_orbax(folder, target, rename=full)
    assert saved_by_full_path["head"].shape == (VOCAB, WIDTH)
    with refused(error=ConfigError, got="int"):
        import_orbax(folder, target, rename=lambda path, saved: 3)
    with refused(error=ConfigError, where="skip, or --except", got="hed"):
        import_orbax(folder, target, rename=names, skip=["hed"])
    with refused(where="target", fix="sharded.to_checkpoint(sharded.init())"):
        import_orbax(folder, sharded().checkpoint_target(), rename=names)


def test_a_folder_of_something_else_is_called_what_it_is(theirs, tmp_path):
    folder, _, _ = theirs
    target = sharded(8).checkpoint_target().params
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / ".metadata").touch()
    (torch / "__0_0.distcp").touch()
    tensors = tmp_path / "tensors"
    tensors.mkdir()
    (tensors / "model.safetensors").touch()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "__0_0.distcp").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").touch()
    many = tmp_path / "many"
    for name in ("a", "b"):
        shutil.copytree(folder / "items", many / name)
    run = tmp_path / "run"  # of MaxText
    run.mkdir()
    (run / "checkpoints").symlink_to(folder.parent)
    with refused(error=ConfigError, got="gs://bucket/2", fix="a mount such as gcsfuse"):
        import_orbax("gs://bucket/2", target)
    kinds = {
        torch: "PyTorch's distributed checkpoint",
        tensors: "safetensors",
        tmp_path: "a folder of something else",
        tmp_path / "unfinished": "PyTorch's distributed checkpoint without its .metadata",
        tmp_path / "empty": "an empty folder",
        tmp_path / "a file": "a file",
        tmp_path / "nowhere": "no such folder",
        folder.parent: "2",  # steps
        run: "checkpoints/2",
        many: "a\nb",
    }
    for path, kind in kinds.items():
        with refused(error=ConfigError, where=str(path), got=kind.split("\n")[0]):
            import_orbax(path, target, rename=names)
    # As a step of ours.
    with CheckpointStore(folder.parent) as store:
        with refused(
            "not a checkpoint of fsdp_jax",
            error=DamageError,
            got="an orbax checkpoint of another program",
            fix="import_orbax",
        ):
            store.record(2)
        with refused(error=DamageError, got="an orbax checkpoint of another program"):
            store.require_good(2)


def test_damage_below_a_view_names_the_array(tmp_path):
    """A chunk that is cut short, and metadata that would overflow a parser, under any view."""
    values = jnp.arange(64.0 * 32).reshape(64, 32)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "x", {"a": values})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"a": jax.ShapeDtypeStruct((32, 64), "float32", sharding=device)}
    views = (
        lambda _, saved: saved["a"].transpose(),
        lambda _, saved: saved["a"].reshape(64, 2, 16).transpose(1, 2, 0).reshape(32, 64),
        lambda _, saved: saved["a"].transpose() * 2.0,
    )
    expected = (np.asarray(values).T, np.asarray(values).T, np.asarray(values).T * 2)
    chunk, metadata = (tmp_path / "x" / "a" / name for name in ("0.0", ".zarray"))
    for view, value in zip(views, expected, strict=True):
        read = import_orbax(tmp_path / "x", target, rename=view)["a"]
        np.testing.assert_array_equal(np.asarray(read), value)
    content, nested = metadata.read_text(), "[" * 100_000 + "]" * 100_000
    chunk.write_bytes(chunk.read_bytes()[:50])
    for view in views:
        with refused(error=DamageError, where=f"{tmp_path / 'x'}, array a", got="0.0"):
            import_orbax(tmp_path / "x", target, rename=view)
    metadata.write_text(content.replace('"chunks":', f'"x":{nested},"chunks":'))
    with refused(error=DamageError, got="a: metadata of an array that is nested too deep"):
        import_orbax(tmp_path / "x", target, rename=views[0])


def read_or_refusal(folder, target):
    """The arrays, or the error; anything but an error of ours fails."""
    try:
        return host(import_orbax(folder, target, rename=names))
    except ReadableError as error:
        return error


def test_damaged_files_are_one_error(theirs, copied):
    """Truncated, missing and flipped files, pipes, and metadata of other types and numbers."""
    _, state, _ = theirs
    target = sharded(8).checkpoint_target().params
    draw = random.Random(0)
    files = [path for path in sorted(copied.rglob("*")) if path.is_file()]
    files = [path for path in files if path.stat().st_size and "ocdbt.process" not in str(path)]
    data = max(files, key=lambda path: path.stat().st_size)
    metadata = copied / "items" / "_METADATA"
    tried = {}
    for path in (data, metadata, copied / "items" / "manifest.ocdbt"):
        content = path.read_bytes()
        broken = [content[: len(content) // 2], b"", b"\0" * len(content)]
        for _ in range(4):
            at = draw.randrange(len(content))
            broken.append(
                content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
            )
        for number, each in enumerate(broken):
            path.write_bytes(each)
            tried[path.name, number] = read_or_refusal(copied, target)
        path.write_bytes(content)
    entry = {"key_metadata": [{"key": "x", "key_type": 2}], "value_metadata": {"value_type": "s"}}
    for number, other in enumerate(
        (
            [],
            {},
            {"tree_metadata": []},
            {"tree_metadata": {"x": 3}},
            {"tree_metadata": {"x": {**entry, "key_metadata": [{"key": 3}]}}},
            {"tree_metadata": {"x": {**entry, "key_metadata": [{"key": "../../x"}]}}},
            {"tree_metadata": {"x": {**entry, "key_metadata": [{"key": "a\0b"}]}}},
            {"tree_metadata": {"x": entry}},
        )
    ):
        content = metadata.read_bytes()
        metadata.write_text(json.dumps(other))
        tried["json", number] = read_or_refusal(copied, target)
        assert isinstance(tried["json", number], ReadableError), other
        metadata.write_bytes(content)
    data.unlink()
    tried["missing", 0] = read_or_refusal(copied, target)
    os.mkfifo(data)
    tried["pipe", 0] = read_or_refusal(copied, target)
    for name in (("missing", 0), ("pipe", 0), (data.name, 0), ("_METADATA", 0)):
        assert isinstance(tried[name], DamageError), name
    # A flipped bit of the numbers themselves is no error: orbax has no digest of them.
    whole = as_ours(state["params"])
    for found in tried.values():
        assert isinstance(found, ReadableError) or found.keys() == whole.keys()
