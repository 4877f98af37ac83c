"""Keys from YAML and from the command line: the same names, one readable error for each mistake."""

import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fsdp_jax.cli.main import main
from fsdp_jax.errors import ConfigError
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.train.build import build
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import KEYS, config_digest, dump_config, load_config
from fsdp_jax.train.renamed_keys import ALIASES
from fsdp_jax.train.typed_keys import field_comments, split_arguments
from fsdp_jax.units.remat import RematPolicy

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
QUICKSTART = next(path for path in CONFIGS if path.stem == "quickstart")


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_an_empty_file_is_the_defaults(written):
    assert load_config(written("")) == Config()


def test_shipped_configurations_by_name(written):
    assert load_config("llama2_7b") == load_config(CONFIGS[0].with_name("llama2_7b.yaml"))
    with pytest.raises(ConfigError, match=r"called 'lama2_7b'(?s:.*)mean 'llama2_7b'\?"):
        load_config("lama2_7b")
    with pytest.raises(ConfigError, match=r"cannot be read\n  where:    configs/none\.yaml"):
        load_config("configs/none.yaml")


def test_every_package_is_in_the_wheel():
    root = CONFIGS[0].parents[1]
    packages = {
        ".".join(file.relative_to(root).parts[:-1]) for file in root.glob("fsdp_jax/**/*.py")
    }
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages | {"fsdp_jax.configs"}
    assert settings["package-dir"]["fsdp_jax.configs"] == "configs"


def test_common_names_without_a_section_are_keys_on_the_command_line(written):
    assert set(ALIASES.values()) <= set(KEYS)
    words = "--lr 1e-5 --batch-size 64 --steps=7 --seq_len 32"
    config = load_config(written(""), words.split())
    assert (config.optimizer.learning_rate, config.train.global_batch_size) == (1e-5, 64)
    assert (config.train.steps, config.data.sequence_length) == (7, 32)


def test_overrides_win_over_the_file(written):
    path = written("train: {steps: 5, seed: 3}\nunits: {classes: [Block]}\n")
    overrides = "--train.steps 20 --mesh.replica=2 --mesh.data -1 --units.classes Block MLP"
    overrides += " --optimizer.clip None --model.scan-layers False --train.global_batch_size 8"
    config = load_config(path, overrides.split())
    assert (config.train.steps, config.train.seed, config.train.global_batch_size) == (20, 3, 8)
    assert (config.mesh.replica, config.mesh.data) == (2, -1)
    assert config.units.classes == ("Block", "MLP")
    assert config.optimizer.clip is None
    assert config.model.scan_layers is False


def test_numbers_without_a_point(written):
    config = load_config(written("optimizer: {learning_rate: 1e-3, clip: 1}"))
    assert (config.optimizer.learning_rate, config.optimizer.clip) == (1e-3, 1.0)


def test_dump_reads_back(written):
    config = load_config(
        QUICKSTART, ["--units.classes", "Block", "MLP", "--optimizer.learning_rate", "1e-05"]
    )
    assert load_config(written(dump_config(config))) == config
    assert config_digest(load_config(written(dump_config(config)))) == config_digest(config)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_comment_every_key(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith(" ") and ":" in line]
    assert lines
    assert [line for line in lines if "#" not in line] == []
    config = load_config(path)
    assert config.train.steps >= 200
    assert config.train.global_batch_size % 8 == 0


def test_the_keys_of_recomputation_and_offload(written):
    assert load_config(written("remat: full")).remat == RematPolicy("full")
    config = load_config(written("remat: dots\nremat_save: attention\nremat_every: 2"))
    assert config.remat == RematPolicy("dots", ("attention",), every=2)
    with pytest.raises(
        ConfigError, match="remat none nothing is recomputed\n  where:    remat_every"
    ):
        load_config(written("remat_every: 2"))
    assert Config().offload == Offload()
    config = load_config(written("offload: {params: true, optimizer: 0.5, activations: true}"))
    assert config.offload == Offload(True, 0.5, activations=True)
    for text, fraction in {"true": 1.0, "True": 1.0, "false": 0.0}.items():
        of_file = load_config(written(f"offload: {{optimizer: {text}}}"))
        _, of_line = split_arguments(["--offload.optimizer", text], KEYS)
        assert (of_file.offload, of_line) == (
            Offload(optimizer=fraction),
            {"offload.optimizer": fraction},
        )
    assert Offload(optimizer=np.True_) == Offload(optimizer=True)
    with pytest.raises(ConfigError, match="expected: a number, true or false"):
        load_config(written("offload: {optimizer: most}"))
    config = load_config(written("offload: {activation_names: [mlp], in_flight: 3}"))
    assert config.offload == Offload(activation_names=("mlp",), in_flight=3)
    with pytest.raises(ConfigError, match=r"or activations by name\n.*activation_names"):
        load_config(written("offload: {activation_names: [mlp], activations: true}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {step: 5}",
            r"unknown key 'train\.step'\n  where: +\S+run\.yaml\n  fix: .* mean 'train\.steps'\?",
        ),
        ("lr: 1", r"unknown key 'lr'[^$]*mean 'optimizer\.learning_rate'\?"),
        ("trian: {steps: 5}", r"unknown key 'trian'[^$]*did you mean 'train'\?"),
        ("offload: {parameters: true}", r"unknown key 'offload\.parameters'"),
        ("offload: {optimizer: -1}", r"offload\.optimizer\n  expected: 0 or more"),
        ("train: 5", r"run\.yaml: train\n"),
        ("- a", "keys were expected"),
        ("a: [", "not YAML"),
        ("remat: ful", r"unknown value 'ful'[^$]*remat[^$]*did you mean 'full'\?"),
        (
            "train: {steps: many}",
            r"where: +\S+: train\.steps\n  expected: a whole number\n  got: +'many'",
        ),
        ("train: {steps: true}", r"expected: a whole number\n  got: +True"),
        ("optimizer: {clip: x}", r"optimizer\.clip\n  expected: a number"),
        ("model: {scan_layers: 1}", r"expected: true or false"),
        (
            "model: {family: lama}",
            r"unknown value 'lama'[^$]*model\.family\n  expected: gpt, llama[^$]*mean 'llama'\?",
        ),
        ("output: 2024", r"expected: text"),
        ("units: {classes: 3}", r"expected: a list of names"),
        ("train: {steps: 0}", r"train\.steps\n  expected: 1 or more\n  got: +0"),
        ("optimizer: {learning_rate: .nan}", r"optimizer\.learning_rate"),
        ("units: {classes: [Block], scan: true}", r"units are set in more than one way"),
        (
            "units: {classes: [Block], whole_model: true}",
            r"units.classes, units.whole_model(.*\n)+",
        ),
    ],
)
def test_mistakes_in_the_file(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(text))


def test_yaml_that_wants_to_run_code(written, tmp_path):
    mark = tmp_path / "created"
    for tag in (
        "!!python/object/apply:os.mkdir",
        "!!python/object/new:os.mkdir",
        "!!python/name:os.mkdir",
    ):
        with pytest.raises(
            ConfigError, match=r"not YAML[^$]*could not determine a constructor for the tag"
        ):
            load_config(written(f"output: {tag} ['{mark}']"))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train:\n  steps: 5\n  seed: 1\n  steps: 6", "'train.steps' is set twice(.*\n)+.*2 and 4"),
        (
            "train: {seed: 1}\nremat: full\ntrain: {steps: 6}",
            "'train' is set twice(.*\n)+.*1 and 3",
        ),
        ("train.steps: 6\ntrain: {steps: 7}", "'train.steps' is set twice(.*\n)+.*1 and 2"),
        ("output: {a: {b: 1, 'b': 2}}", "'output.a.b' is set twice"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "unknown key 'a'"),
        (
            "a0: &a0 [x, x, x, x, x, x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 6)}]\n" for n in range(1, 6)),
            "nested too deeply, or too large",
        ),
        ("a: &a [*a]", "nested too deeply"),
        ("<<: &a {<<: *a}", "nested too deeply"),
        ("[" * 50_000, "nested too deeply"),
        ("{a: " * 50_000, "nested too deeply"),
        ("#" * 300_000, "too large\n.*\n  expected: 262,144 bytes at most"),
        ("a: 2001-99-99", "not YAML"),
        ("train:\n\tsteps: 3", r"not YAML\n.*, line 2, column 1\n.*found character .*cannot"),
        ("a: !!int x", "not YAML"),
        ("a: !!bool x", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("a: " + "9" * 5000, "not YAML"),
        ("a: 1\n---\na: 2", "not YAML(.*\n)+.*another document"),
        ("? [a]\n: b", "not YAML"),
        ("a: \0", "not YAML"),
        ("0", "keys were expected"),
        ("train: false", "keys were expected"),
        ("train: {steps: 0x" + "f" * 4999 + "}", "too large\n.*\n.*\n.*thousands of digits"),
        ("train: {steps: 2147483648}", "train.steps\n  expected: 2,147,483,647 or less"),
        ("train: {sample: 100000}", "train.sample\n  expected: 65,536 or less"),
        ("train: {devices: 100000}", "train.devices\n  expected: 4,096 or less"),
        ("optimizer: {learning_rate: true}", "expected: a number\n  got: +True"),
        (
            "optimizer: {learning_rate: .inf}",
            "not finite in float32\n  where: .*optimizer.learning_rate",
        ),
        ("optimizer: {learning_rate: 1e39}", "in float32\n.*\n  expected: from -3.4e.38 to"),
        ("lora: {alpha: -.inf}", "not finite in float32\n  where: .*lora.alpha"),
        ("output: ''", "an empty text\n  where: .*output"),
        ('output: "a\\0b"', "control characters, .*\n  where: .*output\n  got: +'a.x00b'"),
        ('model: {frozen: ["a\\nb"]}', "control characters, .*\n  where: .*model.frozen"),
        ("data: {path: " + "a" * 5000 + "}", "more than 4096 characters"),
    ],
)
def test_nonsense_in_the_file_is_refused(written, text, what):
    with pytest.raises(ConfigError, match=what):
        load_config(written(text))


def test_anchors_and_merges_that_are_small_are_read(written):
    config = load_config(written("train: &t {steps: 5}\ndata: {split: &s a, field: *s}"))
    assert (config.train.steps, config.data.split, config.data.field) == (5, "a", "a")
    config = load_config(written("train:\n  <<: {steps: 5, seed: 3}\n  steps: 6"))
    assert (config.train.steps, config.train.seed) == (6, 3)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9")
    for path, what in {
        tmp_path / "pipe": "a pipe, not a file",
        tmp_path: "a folder, not a file",
        Path("/dev/zero"): "a device, not a file",
        tmp_path / "latin.yaml": "not YAML",
    }.items():
        with pytest.raises(ConfigError, match=rf"{path}\n  got: .*{what}|{what}\n  where: +{path}"):
            load_config(path)


def number_keys(wanted):
    return [name for name, key in KEYS.items() if key.type is wanted]


@pytest.mark.parametrize("key", number_keys(float))
def test_no_number_is_infinite(written, key):
    section, name = key.split(".")
    for value in (".inf", "-.inf", ".nan", "'inf'", "'nan'", "1e400", "1" + "0" * 400):
        with pytest.raises(ConfigError, match=key):
            load_config(written(f"{section}: {{{name}: {value}}}"))
        text = value.strip("'").replace(".", "")
        with pytest.raises(ConfigError, match=rf"where: +--{key}"):
            load_config(written(""), [f"--{key}={text}"])


@pytest.mark.parametrize("key", number_keys(int))
def test_no_whole_number_is_without_limits(written, key):
    for value in (-2, 10**30, "True", "1.5"):
        with pytest.raises(ConfigError, match=rf"where: +{KEYS[key].option}"):
            load_config(written(""), [f"--{key}={value}"])


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read\n  where: +\S+none\.yaml"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "--train.step 3",
            r"unknown key 'train\.step'\n  where: +command line\n[^$]*'train\.steps'\?",
        ),
        ("--train.lr 1", r"unknown key 'train\.lr'[^$]*mean 'optimizer\.learning_rate'\?"),
        ("--model.eval_every 1", r"did you mean 'train\.eval_every'\?"),
        ("--strateg zero1", r"unknown key 'strateg'[^$]*mean '--strategy'\?"),
        (
            "--train.steps many",
            r"where: +--train\.steps\n  expected: a whole number\n  got: +'many'",
        ),
        ("--train.steps 1.5", "expected: a whole number"),
        ("--train.steps None", "expected: a whole number"),
        ("--train.steps 0", "expected: 1 or more"),
        ("--train.local_batch maybe", r"--train\.local_batch\n  expected: true or false"),
        ("--model.family lama", r"where: +--model\.family[^$]*mean 'llama'\?"),
        ("--train.steps", "--train.steps needs a value"),
        ("--train.steps 3 4", "unexpected argument '4'"),
        ("--offload.param true", r"did you mean 'offload\.params'\?"),
        ("--train.steps many --train.steps 3", r"where: +--train\.steps\n  expected: a whole"),
    ],
)
def test_mistakes_on_the_command_line(written, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(""), overrides.split())


@pytest.mark.parametrize("value", ["true", "True", "TRUE"])
def test_booleans_in_any_case(written, value):
    config = load_config(written(""), ["--data.packing", value, "--train.local_batch=false"])
    assert config.data.packing is True
    assert config.train.local_batch is False


@pytest.mark.parametrize("command", ["train", "plan", "inspect", "certify"])
def test_help_shows_every_key_with_its_type_default_and_meaning(written, capsys, command):
    assert main([command, str(written("train: {steps: 77}")), "--help"]) == 0
    shown = capsys.readouterr()
    assert [key for key in KEYS if f"--{key} " not in shown.out] == []
    assert "Optimizer steps. (default: 77)" in shown.out
    assert "{none,full,dots,selective}" in shown.out
    assert shown.err == ""


def test_every_key_has_a_comment_that_says_what_it_means():
    texts = {
        name: field_comments(key.owner).get(key.field.split(".")[-1]) for name, key in KEYS.items()
    }
    assert [name for name, text in texts.items() if not text] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.deferred_reduction", "True"), ("precision.reduce", "bfloat16")],
)
def test_keys_that_need_local_batches_are_refused_by_name(key, value):
    config = load_config(
        QUICKSTART, ["--train.local_batch", "False", f"--{key}", value, "--train.devices", "8"]
    )
    with pytest.raises(
        ConfigError,
        match=rf"{key.rpartition('.')[2]}='?{value}.* needs local_batch=True.*\n"
        rf".*train.local_batch\n.*--train.local_batch True, or(.*\n)?.*--{key} ",
    ):
        build(config)


@pytest.mark.parametrize(
    ("overrides", "units"),
    [([], {"blocks"}), (["--units.whole_model", "True"], {""})],
    ids=["default", "whole_model"],
)
def test_the_repeated_blocks_are_the_units_unless_the_model_is(written, overrides, units):
    sharded = build(load_config(written("train: {devices: 8}"), overrides)).sharded
    assert {unit for unit in sharded.units.values() if unit is not None} == units


@pytest.mark.parametrize(
    ("words", "units"),
    [
        ("--model.layers 2 --model.scan_layers False", {"blocks/0", "blocks/1"}),
        ("--model.family t5", {"encoder/blocks", "decoder/blocks"}),
        ("--model.family vit --data.kind images", {"blocks"}),
        ("--model.family cait --data.kind images", {"blocks", "class_blocks"}),
        ("--lora.rank 2", {"blocks"}),
    ],
    ids=["unrolled", "t5", "vit", "cait", "lora"],
)
def test_every_family_runs_by_its_blocks(written, words, units):
    overrides = [*words.split(), "--train.devices", "8", "--train.global_batch_size", "8"]
    run = build(load_config(written(""), overrides))
    run.step.trace(run.batch)
    assert {comm.unit for comm in run.step.plan.comms.values()} == {*units, None}
