"""Weights of transformers and timm in our models: the same logits, loss, gradients, and the same
weights back.

Ours run on 8 devices under full_shard. Gradients go through the same table as weights do, so that
one compares each with the tensor that it belongs to.
"""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from families import CAIT, FAMILIES, cait_like
from safetensors.torch import load_file, save_file

import fsdp_jax
from fsdp_jax.tree import flatten
from fsdp_jax.weights import export_weights, from_arrays, import_weights, read_config, table_of

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

LOGITS, LOSS, GRADIENT, TRAINED = 1e-4, 1e-3, 1e-3, 1e-3
# At three times this rate torch in float32 leaves torch in float64 by more than the tolerance
# (measured, T5).
STEPS, PEAK, WARM, CLIP = 20, 1e-3, 5, 1.0
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
NAMES = [*FAMILIES, "cait"]


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pair(name, request):
    return cait_like(request.getfixturevalue("timm")) if name == "cait" else FAMILIES[name]


@pytest.fixture(scope="module")
def saved(name, pair, tmp_path_factory):
    """(torch model, the folder that it saved)."""
    model, folder = pair.make(), tmp_path_factory.mktemp(name)
    if name == "cait":
        save_file(model.state_dict(), folder / "model.safetensors")
        found = {
            "architecture": "cait_xxs24_224",
            "num_classes": model.num_classes,
            "model_args": CAIT,
        }
        (folder / "config.json").write_text(json.dumps(found))
    else:
        model.save_pretrained(folder)
    return model, folder


def loaded(name, folder, timm=None):
    """The torch model that others make of a folder."""
    found = json.loads((folder / "config.json").read_text())
    if name == "cait":
        model = timm.create_model(
            found["architecture"], num_classes=found["num_classes"], **found["model_args"]
        )
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()
    kind = getattr(transformers, found["architectures"][0])
    model, info = kind.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def gradients_kept():
    """An optimizer that does nothing, and whose state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params: (jax.tree.map(jnp.zeros_like, params), grads),
    )


def laid_out(pair, folder, tx, **fields):
    """(config, layout, state with the folder's weights)."""
    config = read_config(folder, **fields)
    sharded = fsdp_jax.fully_shard(
        lambda rngs: pair.family.model(config, rngs=rngs),
        tx,
        fsdp_jax.make_mesh(data=8),
        "full_shard",
        list(pair.family.blocks),
        min_size=1,
    )
    params = import_weights(folder, sharded.checkpoint_target().params, config)
    for path, leaf in flatten(params).items():
        assert leaf.sharding == sharded.layout.by_path[path].sharding, path
    assert sum(not leaf.is_replicated for leaf in sharded.layout.by_path.values()) > 10
    return config, sharded, sharded.init(params=params)


def as_theirs(config, params):
    """Our arrays under their names, by the table."""
    flat = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    found = {}
    for path, mappings in table_of(config).mappings(flat).items():
        for mapping in mappings:
            found[mapping.name] = mapping.to_tensor(
                flat[path][tuple(slice(*each) for each in mapping.box)]
            )
    return found


def gradients_saved(name, model, folder):
    """A torch model's gradients by the names that a file has: transformers renames some of them as
    it saves.
    """
    named = copy.deepcopy(model)
    for value, other in zip(named.parameters(), model.parameters(), strict=True):
        value.data = other.grad
    if name == "cait":
        return {key: value.detach().numpy() for key, value in named.named_parameters()}
    named.save_pretrained(folder)
    return {key: value.numpy() for key, value in load_file(folder / "model.safetensors").items()}


def tensors(batch):
    arrays = {key: torch.from_numpy(value) for key, value in batch.items()}
    return {key: x.long() if x.dtype == torch.int32 else x for key, x in arrays.items()}


@pytest.mark.parametrize("scan_layers", [True, False])
def test_logits_loss_and_gradients(name, pair, saved, scan_layers, tmp_path):
    model, folder = saved
    batch = pair.batch(1)
    config, sharded, state = laid_out(pair, folder, gradients_kept(), scan_layers=scan_layers)
    with torch.no_grad():
        expected = pair.torch_logits(model, tensors(batch)).numpy()
    assert 1 < np.abs(expected).max() < 200, "logits that say something"
    found = np.asarray(sharded.apply(pair.logits)(state, batch))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)

    model.zero_grad()
    loss = pair.torch_loss(model, tensors(batch))
    loss.backward()
    state, metrics = sharded.make_train_step(pair.family.loss)(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), loss.item(), rtol=LOSS)
    found = as_theirs(config, sharded.to_checkpoint(state).opt_state)
    expected = gradients_saved(name, model, tmp_path / "gradients")
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(np.sum(value**2) for value in expected.values()))
    for key, value in expected.items():
        # the bias of a key changes no attention weight: its gradient is zero but for rounding
        floor = 1e-6 * whole
        assert np.linalg.norm(found[key] - value) <= GRADIENT * np.linalg.norm(value) + floor, key


def test_exports_are_loaded_by_transformers_and_timm(name, pair, saved, tmp_path, request):
    model, folder = saved
    config, sharded, state = laid_out(pair, folder, optax.identity())
    export_weights(from_arrays(sharded.to_checkpoint(state).params), config, tmp_path / "out")
    assert read_config(tmp_path / "out") == config
    timm = request.getfixturevalue("timm") if name == "cait" else None
    theirs = loaded(name, tmp_path / "out", timm)
    before, after = model.state_dict(), theirs.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    batch = tensors(pair.batch(2))
    with torch.no_grad():
        assert torch.equal(pair.torch_logits(model, batch), pair.torch_logits(theirs, batch))


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
COLOURS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def of_pixels(pair, folder, tmp_path):
    """(our logits of uint8 images, normalised as ImageNet's, and the folder that is exported)."""
    config, sharded, state = laid_out(pair, folder, optax.identity(), **COLOURS)
    export_weights(from_arrays(sharded.to_checkpoint(state).params), config, tmp_path / "out")
    return np.asarray(sharded.apply(lambda model, x: model(x))(state, PIXELS)), tmp_path / "out"


def test_transformers_normalises_images_as_we_do(tmp_path):
    pair = FAMILIES["vit"]
    pair.make().save_pretrained(tmp_path / "in")
    found, out = of_pixels(pair, tmp_path / "in", tmp_path)
    processor = (
        transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil.from_pretrained(out)
    )
    images = processor(list(PIXELS), return_tensors="pt", input_data_format="channels_last")
    with torch.no_grad():
        expected = loaded("vit", out)(**images).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)
    processor.save_pretrained(tmp_path / "again")  # in the words of this version
    again = tmp_path / "again" / "config.json"
    again.write_bytes((out / "config.json").read_bytes())
    assert read_config(tmp_path / "again") == read_config(out)


def test_timm_normalises_images_as_we_do(timm, tmp_path):
    pair = cait_like(timm)
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(pair.make().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"architecture": "cait_xxs24_224", "num_classes": 11, "model_args": CAIT})
    )
    assert read_config(folder).mean == COLOURS["mean"], "timm's own, where it does not say"
    found, out = of_pixels(pair, folder, tmp_path)
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    colours = timm.data.resolve_model_data_config(model)
    assert colours["input_size"] == (3, 32, 32)
    mean, std = (torch.tensor(colours[each])[:, None, None] for each in ("mean", "std"))
    with torch.no_grad():
        expected = model((torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255 - mean) / std)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


@pytest.mark.parametrize(
    ("name", "bos", "eos"),
    [("gpt2", None, None), ("llama", 3, 4), ("llama", None, [4, 5]), ("t5", None, 1)],
)
def test_exported_token_ids_are_read_by_transformers(name, bos, eos, tmp_path):
    """Where it is not known, no number of their own is taken."""
    pair = FAMILIES[name]
    pair.make().save_pretrained(tmp_path / "in")
    config, sharded, state = laid_out(pair, tmp_path / "in", optax.identity())
    tokens = {} if eos is None else {"bos_token_id": bos, "eos_token_id": eos}
    params = sharded.to_checkpoint(state).params
    export_weights(from_arrays(params), config, tmp_path / "out", tokens=tokens)
    model = loaded(name, tmp_path / "out")
    for found in (model.config, model.generation_config):
        assert (found.bos_token_id, found.eos_token_id) == (bos, eos)
    given = torch.ones(1, 3, dtype=torch.long)
    written = model.generate(
        given, attention_mask=given, max_new_tokens=4, pad_token_id=0, do_sample=False
    )
    assert written.shape[1] > 1


def test_training_has_the_losses_of_torch(pair, saved):
    _, folder = saved
    rate = lambda step: PEAK * jnp.minimum(1.0, (step + 1) / WARM)  # noqa: E731
    _, sharded, state = laid_out(pair, folder, optax.adamw(rate, **ADAM))
    step = sharded.make_train_step(pair.family.loss, clip=CLIP)
    found = []
    for at in range(STEPS):
        state, metrics = step(state, pair.batch(at % 4))
        found.append(float(metrics["loss"]))

    model = pair.make()  # the same weights, by the same seed
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=PEAK,
        betas=(ADAM["b1"], ADAM["b2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM)
    )
    expected = []
    for at in range(STEPS):
        optimizer.zero_grad()
        loss = pair.torch_loss(model, tensors(pair.batch(at % 4)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=TRAINED)
    assert found[-1] < 0.9 * found[0], "it learns"
