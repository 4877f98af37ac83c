"""`config.json`: published ones are read, ours are read back, unsupported ones are refused."""

import dataclasses
import json

from collected import collected
from refusals import fields, refused
from test_tables import PRESETS

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.models.llama import LlamaConfig, RopeScaling
from fsdp_jax.models.vision import HALF, IMAGENET_MEAN, IMAGENET_STD
from fsdp_jax.weights import config_files, config_json, read_config

GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "encoder_stride": 16,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(at): f"label {at}" for at in range(1000)},
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
}
CAIT = {
    "architecture": "cait_xxs24_224",
    "num_classes": 1000,
    "num_features": 192,
    "global_pool": "token",
    "pretrained_cfg": {
        "tag": "fb_dist_in1k",
        "input_size": [3, 224, 224],
        "first_conv": "patch_embed.proj",
    },
}
LLAMA31 = "llama3.1-8b"


def without(found, *keys):
    return {key: value for key, value in found.items() if key not in keys}


def read(folder, found, **fields):
    (folder / "config.json").write_text(json.dumps(found))
    return read_config(folder, **fields)


def test_written_configs_are_read_back(tmp_path):
    with collected() as case:
        for name in PRESETS:
            with case(name):
                found = config_json(PRESETS[name], dtype="bfloat16")
                config = read(tmp_path, found)
                if hasattr(config, "initial_scale"):  # written as the number that it stands for
                    assert config.initial_scale == PRESETS[name].initial_scale
                    config = read(tmp_path, found, layer_scale=PRESETS[name].layer_scale)
                assert config == PRESETS[name]
                assert found.get("torch_dtype") == (None if "architecture" in found else "bfloat16")


def test_published_configs_are_the_presets(tmp_path):
    cases = [(GPT2, "gpt2"), (LLAMA, LLAMA31), (T5, "t5-v1_1-base"), (VIT, "vit-b16")]
    with collected() as case:
        for found, preset in cases:
            with case(preset):
                assert read(tmp_path, found) == PRESETS[preset]


def test_timm_names_an_architecture(tmp_path):
    normalised = dataclasses.replace(
        PRESETS["cait-xxs24-224"], mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    assert read(tmp_path, CAIT, layer_scale=None) == normalised
    more = {"num_classes": 10, "model_args": {"img_size": 96, "depth": 3, "drop_rate": 0.1}}
    config = read(tmp_path, CAIT | more)
    assert (config.image_size, config.layers, config.classes, config.layer_scale) == (
        96,
        3,
        10,
        1e-5,
    )


def test_a_vit_has_the_normalization_of_its_processor(tmp_path):
    cases = [
        (None, HALF, HALF),
        ({}, HALF, HALF),
        (
            {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)},
            IMAGENET_MEAN,
            IMAGENET_STD,
        ),
        (
            {"image_mean": [0, 0, 0], "rescale_factor": 0.00392156862745098, "do_rescale": True},
            (0.0,) * 3,
            HALF,
        ),
        ({"image_mean": [0.1, 0.1, 0.1], "do_normalize": False}, (0.0,) * 3, (1.0,) * 3),
    ]
    with collected() as case:
        for number, (processor, mean, std) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case(processor):
                if processor is not None:
                    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
                config = read(folder, VIT)
                assert (config.mean, config.std) == (mean, std)
                for name, content in config_files(config).items():
                    (folder / name).write_bytes(content)
                assert read_config(folder) == config


def test_unsupported_normalization_of_images_is_refused(tmp_path):
    cases = [
        (
            {"rescale_factor": 1 / 127.5},
            "rescale_factor: 0.00784313725490196 is not implemented, only 1 / 255",
        ),
        ({"do_rescale": False}, "do_rescale: false is not implemented"),
        ({"image_mean": 0.5}, "image_mean: 0.5 is not three numbers"),
        ({"image_std": [1, "2", 3]}, "image_std: [1, '2', 3] is not three numbers"),
        ({"image_std": [1, 0, 1]}, "std must be above 0"),
        (
            [],
            {
                "error": DamageError,
                "what": "no model configuration",
                "where": "./preprocessor_config.json",
            },
        ),
    ]
    with collected() as case:
        for processor, said in cases:
            with case(processor):
                (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
                with refused(**{"error": ConfigError} | fields(said, tmp_path)):
                    read(tmp_path, VIT)


def test_a_cait_has_the_normalization_of_its_config(tmp_path):
    config = read(
        tmp_path, CAIT | {"pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.1, 0.2, 0.3]}}
    )
    assert (config.mean, config.std) == (HALF, (0.1, 0.2, 0.3))
    with refused(error=ConfigError, got="mean: 3 is not three numbers"):
        read(tmp_path, CAIT | {"pretrained_cfg": {"mean": 3}})


def test_an_epsilon_that_timm_cannot_express_is_refused():
    with refused(error=ConfigError, where="CaiTConfig.norm_epsilon", expected="1e-06", got="1e-05"):
        config_json(dataclasses.replace(PRESETS["cait-tiny"], norm_epsilon=1e-5))


def test_ids_of_tokens_are_written_as_given_and_never_guessed():
    unknown = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    for name in ("gpt2", LLAMA31):
        assert unknown.items() <= config_json(PRESETS[name]).items()
        given = {"bos_token_id": 5, "eos_token_id": [6, 7]}
        assert (unknown | given).items() <= config_json(PRESETS[name], tokens=given).items()
    wanted = unknown | {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
    assert (
        wanted.items() <= config_json(PRESETS["t5-v1_1-base"], tokens={"eos_token_id": 1}).items()
    )
    for name, key, said in (
        (
            "t5-v1_1-base",
            "pad_token_id",
            {"where": "pad_token_id", "expected": "0"},
        ),  # which our loss computes with
        ("gpt2", "sep_token_id", {"expected": "bos_token_id or eos_token_id or pad_token_id"}),
        ("vit-b16", "eos_token_id", {"expected": "none, for vit"}),
        ("cait-tiny", "eos_token_id", {"expected": "none, for cait"}),
    ):
        with refused(error=ConfigError, **fields(said)):
            config_json(PRESETS[name], tokens={key: 3})


def test_a_config_is_written_like_another(tmp_path):
    """All its keys are kept but for those of what has changed, in the forms of any version."""

    def rewritten(found, dtype=None, tokens=None, **fields):
        config = read(tmp_path, found, **fields)
        return config_json(config, dtype=dtype, tokens=tokens, like=tmp_path)

    v5 = without(LLAMA, "rope_theta", "rope_scaling", "torch_dtype") | {
        "rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 5e5},
        "dtype": "bfloat16",
    }
    named = VIT | {"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}}
    with collected() as case:
        for found in (GPT2, LLAMA, T5, VIT, CAIT, v5, named, without(GPT2, "eos_token_id")):
            with case(found):
                assert rewritten(found) == found
                assert rewritten(found, scan_layers=False) == found
        for key, found in (("torch_dtype", LLAMA), ("dtype", v5), ("torch_dtype", GPT2)):
            with case(key):
                assert rewritten(found, dtype="float16") == found | {key: "float16"}
        with case("what has changed"):
            assert rewritten(T5, inputs_length=9, targets_length=7) == T5
            assert rewritten(GPT2, vocab_size=60000) == GPT2 | {"vocab_size": 60000}
            assert rewritten(GPT2, tokens={"eos_token_id": 9}) == GPT2 | {"eos_token_id": 9}
            labels = rewritten(named, classes=3)["label2id"]
            assert labels == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
            # the tensors of the whole model are written
            assert rewritten(GPT2 | {"architectures": ["GPT2Model"]}) == GPT2
        with case("another family"):
            config = read(tmp_path, LLAMA)
            read(tmp_path, GPT2)
            with refused("another family", error=ConfigError, expected="llama", got="gpt"):
                config_json(config, like=tmp_path)


def test_fields_are_replaced(tmp_path):
    config = read(tmp_path, GPT2, scan_layers=False, dropout=0.1, sequence_length=512)
    assert (config.scan_layers, config.dropout, config.sequence_length) == (False, 0.1, 512)


def test_rotary_keys_of_any_version(tmp_path):
    cases = [
        {"rope_theta": 2e4},
        {"rope_theta": 2e4, "rope_scaling": None},
        {"rope_theta": 2e4, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ]
    with collected() as case:
        for rope in cases:
            with case(rope):
                config = read(tmp_path, without(LLAMA, "rope_theta", "rope_scaling") | rope)
                assert (config.rope_theta, config.rope_scaling) == (2e4, None)


def test_rotary_keys_of_version_5_scale_too(tmp_path):
    rope = LLAMA["rope_scaling"] | {"rope_theta": 5e5}
    config = read(
        tmp_path, without(LLAMA, "rope_theta", "rope_scaling") | {"rope_parameters": rope}
    )
    assert config.rope_scaling == RopeScaling(factor=8.0)
    assert config.rope_theta == 5e5


def test_absent_keys_have_the_defaults_of_transformers(tmp_path):
    config = read(
        tmp_path,
        without(LLAMA, "num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings"),
    )
    assert isinstance(config, LlamaConfig)
    assert (config.kv_heads, config.rope_theta, config.tie_head) == (32, 10_000.0, False)
    config = read(
        tmp_path, without(T5, "tie_word_embeddings", "num_decoder_layers", "feed_forward_proj")
    )
    assert (config.tie_head, config.decoder_layers, config.gated) == (True, 12, False)
    config = read(tmp_path, without(T5, "tie_word_embeddings") | {"scale_decoder_outputs": False})
    assert not config.tie_head
    assert read(tmp_path, without(VIT, "id2label")).classes == 2


def test_unsupported_configs_are_refused(tmp_path):
    cases = [
        (
            GPT2 | {"activation_function": "relu"},
            'activation_function: "relu" is not implemented, only "gelu_new"',
        ),
        (
            GPT2 | {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: true is not",
        ),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights: false"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06"),
        (GPT2 | {"n_inner": 1000}, "n_inner: 1000 is not implemented, only 4 x n_embd, 3072"),
        (GPT2 | {"n_ctx": 512}, "n_ctx: 512 differs"),
        (
            GPT2 | {"quantization_config": {"bits": 4}},
            "is not known, and may change what is computed",
        ),
        (GPT2 | {"some_new_key": 3}, "some_new_key: 3 is not known"),
        (without(GPT2, "n_layer", "n_head"), "n_layer: missing\n            n_head: missing"),
        (GPT2 | {"n_head": 7}, "multiple of heads"),
        (GPT2 | {"n_head": "7"}, {"what": "not supported"}),
        (LLAMA | {"hidden_act": "gelu"}, 'hidden_act: "gelu"'),
        (LLAMA | {"attention_bias": True}, "attention_bias: true"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias: true"),
        (
            LLAMA | {"head_dim": 64},
            "head_dim: 64 is not implemented, only hidden_size / num_attention_heads, 128",
        ),
        (LLAMA | {"sliding_window": 4096}, "sliding_window: 4096 is not known"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type: 'linear' is not implemented",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "low_freq_factor: missing",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
            "factor: not known with rope_type",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta contradicts",
        ),
        (
            LLAMA
            | {
                "rope_parameters": LLAMA["rope_scaling"]
                | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
            },
            "partial_rotary_factor",
        ),
        (T5 | {"feed_forward_proj": "gated-silu"}, "feed_forward_proj: 'gated-silu'"),
        (
            T5 | {"scale_decoder_outputs": True},
            "scale_decoder_outputs: true is not implemented where",
        ),
        (T5 | {"pad_token_id": 1}, "pad_token_id: 1"),
        (T5 | {"is_encoder_decoder": False}, "is_encoder_decoder: false"),
        (VIT | {"hidden_act": "gelu_new"}, 'hidden_act: "gelu_new"'),
        (VIT | {"qkv_bias": False}, "qkv_bias: false"),
        (VIT | {"num_channels": 1}, "num_channels: 1"),
        (
            VIT | {"image_size": [224, 196]},
            "image_size: [224, 196] is not implemented, only squares",
        ),
        (CAIT | {"architecture": "cait_xxs24_225"}, {"fix": "did you mean 'cait_xxs24_224'"}),
        (CAIT | {"architecture": "vit_base_patch16_224"}, {"what": "an unknown architecture"}),
        (CAIT | {"global_pool": "avg"}, "global_pool: avg"),
        (CAIT | {"model_args": {"global_pool": "avg"}}, "global_pool: avg"),
        (CAIT | {"model_args": {"act_layer": "relu"}}, "model_args.act_layer: relu is not known"),
        (CAIT | {"model_args": {"mlp_ratio": 2.0}}, "mlp_ratio_token_only differs"),
        (CAIT | {"model_args": {"img_size": [224, 196]}}, "only squares"),
        (CAIT | {"other": 1}, "other is not known"),
        ({"model_type": "gpt3"}, {"fix": "did you mean 'gpt2'"}),
        (
            {"model_type": "cait"},
            {
                "what": "an unknown kind of model",
                "fix": "did you mean 'cait'? (cait: as timm saves it, by an `architecture`",
            },
        ),
        (
            {},
            {
                "what": "an unknown kind of model",
                "fix": "one of: cait, gpt2, llama, t5, vit (cait: as timm",
            },
        ),
        (
            GPT2 | {"auto_map": {"AutoModel": "modeling.GPT"}},
            {"what": "never run", "got": "modeling.GPT"},
        ),
        ([1], {"error": DamageError, "what": "no model configuration"}),
        (GPT2 | {"n_layer": 10**9}, "layers: 1000000000 is not a possible int"),
        (GPT2 | {"vocab_size": 2**40}, "vocab_size: 1099511627776 is not a possible int"),
        (GPT2 | {"vocab_size": 10**400}, "vocab_size: 1000000000000000000000"),
        (GPT2 | {"n_embd": "768"}, {"what": "not supported"}),
        (GPT2 | {"n_head": 0}, {"what": "not supported"}),
        (GPT2 | {"n_embd": 768.0}, "width: 768.0 is not a possible int"),
        (LLAMA | {"num_attention_heads": 0}, "ZeroDivisionError"),
        (LLAMA | {"rope_scaling": [1]}, "AttributeError"),
        (LLAMA | {"rms_norm_eps": "small"}, {"what": "not supported"}),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_head: 1 is not a possible bool"),
        (CAIT | {"model_args": [1]}, "AttributeError"),
    ]
    with collected() as case:
        for found, said in cases:
            with case(said), refused(**{"error": ConfigError} | fields(said)):
                read(tmp_path, found)


def test_a_config_that_readers_disagree_on_is_refused(tmp_path):
    cases = [
        '{"model_type": "gpt2", "model_type": "llama"}',
        '{"n_layer": NaN}',
        "[" * 10**5,
        "\xff",
    ]
    with collected() as case:
        for text in cases:
            with case(text[:50]):
                (tmp_path / "config.json").write_text(text, encoding="latin-1")
                with refused(
                    "no model configuration", error=DamageError, where=str(tmp_path / "config.json")
                ):
                    read_config(tmp_path)


def test_a_missing_or_broken_config_is_refused(tmp_path):
    with refused("no model configuration", error=ConfigError, where=str(tmp_path / "config.json")):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refused("no model configuration", error=DamageError):
        read_config(tmp_path)
    with refused("unknown kind", error=ConfigError, got="dict"):
        config_json({})


def test_the_name_of_a_model_on_the_hub_is_told_the_download():
    fix = "hf download openai/gpt2 --local-dir"
    with refused("nothing is downloaded", error=ConfigError, where="openai/gpt2", fix=fix):
        read_config("openai/gpt2")
