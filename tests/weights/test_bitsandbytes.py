"""Weights that bitsandbytes stored in 4 bits: codes are copied, or dequantized as it does.

The files are written here by NumPy, from the format alone: blocks along rows of [out, in].
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny import saved, theirs

import fsdp_jax as fsdp
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.lora import split_lora, with_lora
from fsdp_jax.models import GPT, GPTConfig, Llama, LlamaConfig
from fsdp_jax.sharding.quantized import NF4
from fsdp_jax.tree import flatten
from fsdp_jax.weights import config_json, import_weights, read_config, table_of

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

SIZES = {"vocab_size": 96, "layers": 2, "width": 64, "heads": 4, "sequence_length": 16}
LLAMA = LlamaConfig(**SIZES, kv_heads=2, hidden=192)
GPT2 = GPTConfig(**SIZES)
# bitsandbytes' map of 8 bits, for scales: any 256 values in order show the arithmetic.
MAP = np.sort(np.random.default_rng(1).uniform(-1, 1, 256)).astype(np.float32)


def quantized(weight, *, nested=True, block=64, storage=np.uint8):
    """(the parts of a weight [out, in] in a file, its values in float32)."""
    flat = weight.astype(np.float32).reshape(-1)
    count = -(-flat.size // block)
    padded = np.zeros(count * block, np.float32)
    padded[: flat.size] = flat
    absmax = np.abs(padded.reshape(count, block)).max(1)
    scaled = padded.reshape(count, block) / np.maximum(absmax, 1e-38)[:, None]
    table = np.array(NF4, np.float32)
    codes = np.abs(scaled[..., None] - table).argmin(-1).astype(np.uint8)
    packed = codes.reshape(-1)[: flat.size]
    packed = (packed[0::2] << 4 | packed[1::2]).astype(np.uint8)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = list(weight.shape)
    parts = {"absmax": absmax, "quant_map": table}
    scales = absmax
    if nested:
        offset = np.float32(absmax.mean())
        outer_count = -(-count // 256)
        outer = np.zeros(outer_count * 256, np.float32)
        outer[:count] = absmax - offset
        outer_absmax = np.abs(outer.reshape(outer_count, 256)).max(1)
        scaled = outer.reshape(outer_count, 256) / outer_absmax[:, None]
        stored = np.abs(scaled[..., None] - MAP).argmin(-1).astype(np.uint8).reshape(-1)[:count]
        parts = {"absmax": stored, "quant_map": table, "nested_quant_map": MAP}
        parts["nested_absmax"] = outer_absmax
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(offset)
        scales = MAP[stored] * np.repeat(outer_absmax, 256)[:count] + offset
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {"": packed.view(storage)[:, None]} | {f".{k}": v for k, v in parts.items()}
    tensors[".quant_state.bitsandbytes__nf4"] = text
    values = table[codes] * scales[:, None]
    return tensors, values.reshape(-1)[: flat.size].reshape(weight.shape)


def folder_of(config, folder, *, skip=(), **more):
    """(folder, {name of a weight: its values}): linear weights of blocks in 4 bits, as saved."""
    model = {LlamaConfig: Llama, GPTConfig: GPT}[type(config)]
    sharded = fsdp.fully_shard(
        lambda rngs: model(config, rngs=rngs), optax.sgd(0.1), fsdp.make_mesh(), units="model"
    )
    tensors = theirs(config, flatten(sharded.checkpoint_target().params), dtype="bfloat16")
    values, stored = {}, {}
    for name, tensor in tensors.items():
        is_linear = tensor.ndim == 2 and (".h." in name or ".layers." in name)
        if not is_linear or any(part in name for part in skip):
            stored[name] = tensor
            continue
        # GPT-2's Conv1D is transposed before it is quantized.
        weight = tensor.T if isinstance(config, GPTConfig) else tensor
        parts, found = quantized(weight, **more)
        values[name] = found.T if isinstance(config, GPTConfig) else found
        stored |= {name + end: np.ascontiguousarray(part) for end, part in parts.items()}
    saved(folder, config, stored)
    content = config_json(config) | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    (folder / "config.json").write_text(json.dumps(content))
    return values


def adapted(config, devices, base, *, scanned=True):
    """The model with adapters over a base, on some devices."""
    config = dataclasses.replace(config, scan_layers=scanned)
    model = {LlamaConfig: Llama, GPTConfig: GPT}[type(config)]
    make = with_lora(lambda rngs: model(config, rngs=rngs), rank=2, targets=("attn/",))
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    return fsdp.fully_shard(
        make,
        optax.sgd(0.1),
        mesh,
        units=["LlamaBlock" if model is Llama else "Block"],
        frozen=make.frozen,
        base=base,
        min_size=1,
    )


def read(folder, config, sharded, **more):
    """{path: values of the parameter, as the model has it}."""
    target, _ = split_lora(sharded.checkpoint_target().params)
    params = flatten(import_weights(folder, target, config, **more))
    found = {}
    for path, leaf in flatten(target).items():
        array = np.asarray(getattr(params[path], "array", params[path]))
        blocks = getattr(leaf, "blocks", None)
        found[path] = array if blocks is None else (blocks, array)
    return found


def check(found, config, values, dtype):
    """Compares parameters, dequantized where they are in codes, with values by name."""
    count = 0
    for path, each in found.items():
        leaf = each[0] if isinstance(each, tuple) else each
        for mapping in table_of(config).mappings({path: leaf})[path]:
            if mapping.name not in values:
                continue
            array = each
            if isinstance(each, tuple):
                blocks, stored = each
                array = blocks.to_host(stored)
            box = array[tuple(slice(*bounds) for bounds in mapping.box)]
            expected = values[mapping.name].astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(mapping.to_tensor(box), expected)
            count += 1
    assert count == len(values)


@pytest.mark.parametrize(
    ("config", "nested"),
    [
        pytest.param(LLAMA, True, id="llama-nested"),
        pytest.param(GPT2, False, id="gpt2"),
        pytest.param(LLAMA, False, id="llama", marks=pytest.mark.long),
        pytest.param(GPT2, True, id="gpt2-nested", marks=pytest.mark.long),
    ],
)
def test_codes_are_copied_bit_for_bit(tmp_path, config, nested):
    """On any devices and with any budget: values of nf4 in float32, scales as they were."""
    values = folder_of(config, tmp_path, nested=nested)
    assert read_config(tmp_path) == config
    stored = []
    for devices, budget in ((8, 2**28), (7, 60_000)):
        base = fsdp.QuantizedBase("nf4")
        sharded = adapted(config, devices, base, scanned=devices == 8)
        found = read(tmp_path, config, sharded, budget=budget)
        assert sum(isinstance(each, tuple) for each in found.values()) >= 4
        check(found, config, values, np.float32)
        stored.append(found)
    # A block's bytes are its codes, and its scale in float32.
    path = "blocks/attn/q/kernel" if config is LLAMA else "blocks/attn/qkv/kernel"
    blocks, array = stored[0][path]
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(m.name for m in table_of(config).mappings({path: blocks})[path])
    of_blocks = array[0, : 36 * (blocks.shape[1] // 64)]  # padding follows
    if not nested:
        scales = np.ascontiguousarray(of_blocks.T).reshape(blocks.shape[2], -1, 36)[..., 32:]
        np.testing.assert_array_equal(
            scales.view(np.float32).reshape(-1), tensors[f"{name}.absmax"]
        )


def test_codes_of_a_scale_that_is_not_their_largest_value(tmp_path):
    """A scale that was quantized may be negative or 0: it is copied, not computed again."""
    values = folder_of(LLAMA, tmp_path, nested=False)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in values:
        tensors[f"{name}.absmax"][::3] *= -1
        tensors[f"{name}.absmax"][::5] = 0
        scale = tensors[f"{name}.absmax"]
        packed = tensors[name].reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1, 64)
        values[name] = (np.array(NF4, np.float32)[codes] * scale[:, None]).reshape(
            values[name].shape
        )
    save_file(tensors, tmp_path / "model.safetensors")
    sharded = adapted(LLAMA, 8, fsdp.QuantizedBase("nf4"))
    check(read(tmp_path, LLAMA, sharded), LLAMA, values, np.float32)


@pytest.mark.parametrize("storage", [np.uint8, np.float32, jnp.bfloat16])
def test_weights_in_floating_point_are_dequantized(tmp_path, storage):
    """As bitsandbytes dequantizes: float32, rounded to the dtype that they were quantized from."""
    for config in (LLAMA, GPT2):
        folder = tmp_path / type(config).__name__
        values = folder_of(config, folder, storage=storage)
        found = read(folder, config, adapted(config, 8, None), budget=20_000)
        check(found, config, values, jnp.bfloat16)


def test_blocks_that_go_on_from_row_to_row(tmp_path):
    """With 48 inputs; they cannot be copied, and are quantized again, which a warning says."""
    config = LlamaConfig(**SIZES | {"width": 48}, kv_heads=2, hidden=192)
    values = folder_of(config, tmp_path)
    check(
        read(tmp_path, config, adapted(config, 8, None), budget=5_000), config, values, jnp.bfloat16
    )
    with pytest.warns(UserWarning, match="dequantized and quantized again") as caught:
        found = read(tmp_path, config, adapted(config, 8, fsdp.QuantizedBase("nf4")))
    assert "blocks/attn/q/kernel: nf4" in str(caught[0].message)
    assert "blocks/mlp/down/kernel" not in str(caught[0].message)  # of 192 inputs
    down = {name: value for name, value in values.items() if "down_proj" in name}
    check({"blocks/mlp/down/kernel": found["blocks/mlp/down/kernel"]}, config, down, np.float32)


def test_other_formats_of_the_base_are_quantized_again(tmp_path):
    values = folder_of(LLAMA, tmp_path, skip=["layers.1.self_attn.q_proj"])
    theirs = "blocks/attn/k/kernel: nf4 in blocks of 64, scales in float32 -> "
    for base, ours in (
        (fsdp.QuantizedBase("int8", block=32), "int8 in blocks of 32, scales in float32"),
        (fsdp.QuantizedBase("nf4", scales="bfloat16"), "nf4 in blocks of 64, scales in bfloat16"),
    ):
        with pytest.warns(UserWarning, match=theirs + ours) as caught:
            read(tmp_path, LLAMA, adapted(LLAMA, 8, base))
        assert 'fix:      QuantizedBase("nf4", block=64) copies' in str(caught[0].message)
        assert caught[0].filename == __file__
    # A layer that was left out has no codes: those beside it in the stack are quantized again.
    with pytest.warns(UserWarning, match="blocks/attn/q/kernel") as caught:
        found = read(tmp_path, LLAMA, adapted(LLAMA, 8, fsdp.QuantizedBase("nf4")))
    assert "blocks/attn/k/kernel" not in str(caught[0].message)
    del found["blocks/attn/q/kernel"]
    rest = {name: value for name, value in values.items() if "q_proj" not in name}
    check(found, LLAMA, rest, np.float32)


def test_what_cannot_be_read_is_refused(tmp_path):
    values = folder_of(LLAMA, tmp_path)
    name = next(iter(values))
    file = tmp_path / "model.safetensors"
    kept = load_file(file)
    target = split_lora(adapted(LLAMA, 8, None).checkpoint_target().params)[0]
    state = ".quant_state.bitsandbytes__"

    def refuse(change, what, error, got):
        tensors = change(dict(kept))
        save_file(tensors, file)
        with refused(what, error=error, got=got):
            import_weights(tmp_path, target, LLAMA)

    def renamed(tensors, old, new):
        tensors[f"{name}{new}"] = tensors.pop(f"{name}{old}")
        return tensors

    other = "codes that are not supported"
    refuse(lambda t: renamed(t, f"{state}nf4", f"{state}fp4"), other, ConfigError, f"{name}: fp4")
    eight = {f"{name[:-7]}.SCB": np.ones(3, np.float32)}
    refuse(lambda t: t | eight, other, ConfigError, "bitsandbytes' 8 bits")
    damaged = "a weight in 4 bits cannot be read"
    table = {f"{name}.quant_map": np.linspace(-1, 1, 16, dtype=np.float32)}
    refuse(lambda t: t | table, damaged, DamageError, "values of codes that are not nf4's")
    short = {f"{name}.absmax": kept[f"{name}.absmax"][1:].copy()}
    refuse(lambda t: t | short, damaged, DamageError, "absmax: U8[31], not uint8[32]")
    cut = {name: kept[name][1:].copy()}
    refuse(lambda t: t | cut, damaged, DamageError, "bytes of codes")
    missing = f"{name}.absmax"
    refuse(lambda t: {k: v for k, v in t.items() if k != missing}, damaged, DamageError, missing)
    refuse(lambda t: {k: v for k, v in t.items() if k != name}, damaged, DamageError, f"no {name}")

    def with_state(text):
        return lambda t: t | {f"{name}{state}nf4": np.frombuffer(text.encode(), np.uint8)}

    refuse(with_state("{"), damaged, DamageError, "")
    refuse(with_state("[]"), damaged, DamageError, "a state that is a list")
    said = json.loads(kept[f"{name}{state}nf4"].tobytes())
    for key, value in {
        "blocksize": 0,
        "nested_blocksize": 0,
        "nested_offset": "0",
        "shape": [2, 32, 64],
        "dtype": "junk",
    }.items():
        change = with_state(json.dumps(said | {key: value}))
        refuse(change, damaged, DamageError, f"{key}: {json.dumps(value)}")
        change = with_state(json.dumps({k: v for k, v in said.items() if k != key}))
        refuse(change, damaged, DamageError, "U8" if key == "nested_offset" else f"{key}: null")
    with refused(damaged, error=DamageError, fix="download the file again"):
        import_weights(tmp_path, target, LLAMA)
    odd = with_state(json.dumps(said | {"shape": [64, 63]}))
    refuse(odd, other, ConfigError, f"{name}: 63 inputs, an odd number")
    # Another library's codes.
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with refused(error=ConfigError, got="quantization_config"):
        read_config(tmp_path)


def test_a_config_of_codes_is_not_written_again(tmp_path):
    """What is exported has no codes."""
    folder_of(LLAMA, tmp_path)
    assert "quantization_config" not in config_json(LLAMA, like=tmp_path)
