"""Keys from YAML and from the command line: the same names, one readable error for each mistake.

Steps are traced to see their units; nothing is compiled.
"""

import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from fsdp_jax.cli.main import main
from fsdp_jax.data.options import kinds_for
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import FAMILIES
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.train.build import build
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import KEYS, config_digest, dump_config, load_config
from fsdp_jax.train.typed_keys import aliases_of, field_comments, split_arguments
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


def misses(load, fields):
    """What the error of `load()` lacks of {field: a part of it}; all of it without an error."""
    try:
        load()
    except ConfigError as error:
        found = {name: part for name, part in fields.items() if part not in getattr(error, name)}
        return found and (found, str(error))
    return fields


def test_an_empty_file_is_the_defaults(written):
    assert load_config(written("")) == Config()


def test_shipped_configurations_by_name(written):
    assert load_config("llama2_7b") == load_config(CONFIGS[0].with_name("llama2_7b.yaml"))
    with refused("called 'lama2_7b'", error=ConfigError, fix="mean 'llama2_7b'?"):
        load_config("lama2_7b")
    with refused("cannot be read", error=ConfigError, where="configs/none.yaml"):
        load_config("configs/none.yaml")


def test_every_package_is_in_the_wheel():
    root = CONFIGS[0].parents[1]
    packages = {
        ".".join(file.relative_to(root).parts[:-1]) for file in root.glob("fsdp_jax/**/*.py")
    }
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages | {"fsdp_jax.configs"}
    assert settings["package-dir"]["fsdp_jax.configs"] == "configs"


def test_common_names_without_a_section_are_keys(written):
    assert set(aliases_of(KEYS).values()) <= set(KEYS)
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


def test_the_last_value_counts_in_any_spelling():
    words = (
        "a --train.log-every=2 --train.log_every 3 --remat-save mlp qkv --seed 1 --lora.alpha=-2 b"
    )
    positional, values = split_arguments(words.split(), KEYS)
    assert positional == ["a", "b"]
    assert values == {
        "train.log_every": 3,
        "remat_save": ("mlp", "qkv"),
        "train.seed": 1,
        "lora.alpha": -2.0,
    }


def test_two_hyphens_are_a_text_like_any_other():
    _, values = split_arguments(["--output=--"], KEYS)
    assert values == {"output": "--"}
    with refused("a value of the wrong type", where="--model.layers", got="'--'"):
        split_arguments(["--model.layers=--"], KEYS)


def test_numbers_without_a_point(written):
    config = load_config(written("optimizer: {learning_rate: 1e-3, clip: 1}"))
    assert (config.optimizer.learning_rate, config.optimizer.clip) == (1e-3, 1.0)


def test_dump_reads_back(written):
    config = load_config(
        QUICKSTART, ["--units.classes", "Block", "MLP", "--optimizer.learning_rate", "1e-05"]
    )
    assert load_config(written(dump_config(config))) == config
    assert config_digest(load_config(written(dump_config(config)))) == config_digest(config)


def test_configs_comment_every_key():
    for path in CONFIGS:
        lines = path.read_text().splitlines()
        lines = [line for line in lines if line.startswith(" ") and ":" in line]
        assert lines, path
        assert [line for line in lines if "#" not in line] == [], path
        config = load_config(path)
        assert config.train.steps >= 200, path
        assert config.train.global_batch_size % 8 == 0, path


def test_the_keys_of_recomputation_and_offload(written):
    assert load_config(written("remat: full")).remat == RematPolicy("full")
    config = load_config(written("remat: dots\nremat_save: attention\nremat_every: 2"))
    assert config.remat == RematPolicy("dots", ("attention",), every=2)
    with refused("remat none nothing is recomputed", error=ConfigError, where="remat_every"):
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
    with refused(error=ConfigError, expected="a number, true or false"):
        load_config(written("offload: {optimizer: most}"))
    config = load_config(written("offload: {activation_names: [mlp]}"))
    assert config.offload == Offload(activation_names=("mlp",))
    with refused("or activations by name", error=ConfigError) as caught:
        load_config(written("offload: {activation_names: [mlp], activations: true}"))
    assert "activation_names" in caught.value.where


UNITS = "units: {classes: [Block], "
MISTAKES = {
    "train: {step: 5}": {
        "what": "unknown key 'train.step'",
        "where": "run.yaml",
        "fix": "mean 'train.steps'?",
    },
    "lr: 1": {"what": "unknown key 'lr'", "fix": "mean 'optimizer.learning_rate'?"},
    "trian: {steps: 5}": {"what": "unknown key 'trian'", "fix": "did you mean 'train'?"},
    "offload: {parameters: true}": {"what": "unknown key 'offload.parameters'"},
    "offload: {optimizer: -1}": {"where": "offload.optimizer", "expected": "0 or more"},
    "train: 5": {"where": "run.yaml: train"},
    "- a": {"what": "keys were expected"},
    "a: [": {"what": "not YAML"},
    "remat: ful": {"what": "unknown value 'ful'", "where": "remat", "fix": "mean 'full'?"},
    "train: {steps: many}": {
        "where": "run.yaml: train.steps",
        "expected": "a whole number",
        "got": "'many'",
    },
    "train: {steps: true}": {"expected": "a whole number", "got": "True"},
    "optimizer: {clip: x}": {"where": "optimizer.clip", "expected": "a number"},
    "model: {scan_layers: 1}": {"expected": "true or false"},
    "model: {family: lama}": {
        "what": "unknown value 'lama'",
        "where": "model.family",
        "expected": "gpt, llama",
        "fix": "mean 'llama'?",
    },
    "output: 2024": {"expected": "text"},
    "units: {classes: 3}": {"expected": "a list of names"},
    "train: {steps: 0}": {"where": "train.steps", "expected": "1 or more", "got": "0"},
    "optimizer: {learning_rate: .nan}": {"where": "optimizer.learning_rate"},
    UNITS + "whole_model: true}": {
        "what": "units are set in more than one way",
        "got": "units.classes, units.whole_model",
    },
    "keep_gathered: {last: 2, budget: 2GiB}": {
        "where": "keep_gathered",
        "got": "keep_gathered.last, keep_gathered.budget",
    },
}


def test_mistakes_in_the_file_are_named(written):
    wrong = {
        text: missing
        for text, fields in MISTAKES.items()
        if (missing := misses(lambda text=text: load_config(written(text)), fields))
    }
    assert wrong == {}


def test_yaml_that_wants_to_run_code(written, tmp_path):
    mark = tmp_path / "created"
    for tag in (
        "!!python/object/apply:os.mkdir",
        "!!python/object/new:os.mkdir",
        "!!python/name:os.mkdir",
    ):
        with refused("not YAML", error=ConfigError, got="could not determine a constructor"):
            load_config(written(f"output: {tag} ['{mark}']"))
    assert not mark.exists()


NONSENSE = [
    ("train:\n  steps: 5\n  seed: 1\n  steps: 6", "'steps' is set twice", "2 and 4"),
    ("train: {seed: 1}\nremat: full\ntrain: {steps: 6}", "'train' is set twice", "1 and 3"),
    ("train.steps: 6\ntrain: {steps: 7}", "'train.steps' is set twice"),
    ("output: {a: {b: 1, 'b': 2}}", "'b' is set twice"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "unknown key 'a'"),
    ("a: &a [*a]", "unknown key 'a'"),
    ("[" * 50_000, "not YAML", "recursion"),
    ("a: 2001-99-99", "not YAML"),
    ("train:\n\tsteps: 3", "not YAML", "line 2, column 1", "found character"),
    ("a: !!int x", "not YAML"),
    ("a: !!bool x", "not YAML"),
    ("a: !!timestamp x", "not YAML"),
    ("a: " + "9" * 5000, "not YAML"),
    ("a: 1\n---\na: 2", "not YAML", "another document"),
    ("? [a]\n: b", "not YAML"),
    ("a: \0", "not YAML"),
    ("0", "keys were expected"),
    ("train: false", "keys were expected"),
    ("train: {steps: 0x" + "f" * 4999 + "}", "too large", "thousands of digits"),
    ("train: {steps: 2147483648}", "train.steps", "2,147,483,647 or less"),
    ("train: {sample: 100000}", "train.sample", "65,536 or less"),
    ("train: {devices: 100000}", "train.devices", "4,096 or less"),
    ("optimizer: {learning_rate: true}", "expected: a number", "True"),
    ("optimizer: {learning_rate: .inf}", "not finite in float32", "optimizer.learning_rate"),
    ("optimizer: {learning_rate: 1e39}", "in float32", "from -3.4e"),
    ("lora: {alpha: -.inf}", "not finite in float32", "lora.alpha"),
    ("output: ''", "an empty text", "output"),
    ('output: "a\\0b"', "control characters", "output"),
    ('model: {frozen: ["a\\nb"]}', "control characters", "model.frozen"),
]


def test_nonsense_in_the_file_is_refused(written):
    wrong = []
    for text, *parts in NONSENSE:
        with pytest.raises(ConfigError) as caught:
            load_config(written(text))
        wrong += [(text[:100], part) for part in parts if part not in str(caught.value)]
    assert wrong == []


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
        with refused(error=ConfigError, where=str(path)) as caught:
            load_config(path)
        assert what in caught.value.what + caught.value.got


def number_keys(wanted):
    return [name for name, key in KEYS.items() if key.type is wanted]


INFINITE = (".inf", "-.inf", ".nan", "'inf'", "'nan'", "1e400", "1" + "0" * 400)


def test_no_number_is_infinite(written):
    empty, wrong = written(""), []
    for key in number_keys(float):
        section, name = key.split(".")
        for value in INFINITE:
            file, text = empty.with_name("infinite.yaml"), value.strip("'").replace(".", "")
            file.write_text(f"{section}: {{{name}: {value}}}")
            of_line = [f"--{key}={text}"]
            if misses(lambda file=file: load_config(file), {"where": key}) or misses(
                lambda of_line=of_line: load_config(empty, of_line), {"where": f"--{key}"}
            ):
                wrong.append((key, value))
    assert wrong == []


def test_no_whole_number_is_without_limits(written):
    empty = written("")
    wrong = [
        (key, value)
        for key in number_keys(int)
        for value in (-2, 10**30, "True", "1.5")
        if misses(
            lambda words=(f"--{key}={value}",): load_config(empty, words),
            {"where": KEYS[key].option},
        )
    ]
    assert wrong == []


def test_no_such_file(tmp_path):
    with refused("cannot be read", error=ConfigError, where=str(tmp_path / "none.yaml")):
        load_config(tmp_path / "none.yaml")


ON_THE_LINE = {
    "--train.step 3": {
        "what": "unknown key 'train.step'",
        "where": "command line",
        "fix": "'--train.steps'?",
    },
    "--train.lr 1": {"what": "unknown key 'train.lr'", "fix": "mean '--optimizer.learning_rate'?"},
    "--model.eval_every 1": {"fix": "did you mean '--train.eval_every'?"},
    "--strateg zero1": {"what": "unknown key 'strateg'", "fix": "mean '--strategy'?"},
    "--train.steps many": {
        "where": "--train.steps",
        "expected": "a whole number",
        "got": "'many'",
    },
    "--train.steps 1.5": {"expected": "a whole number"},
    "--train.steps None": {"expected": "a whole number"},
    "--train.steps 0": {"expected": "1 or more"},
    "--train.local_batch maybe": {"where": "--train.local_batch", "expected": "true or false"},
    "--model.family lama": {"where": "--model.family", "fix": "mean 'llama'?"},
    "--train.steps": {"what": "--train.steps: expected one argument"},
    "--train.steps 3 4": {"what": "unexpected argument '4'"},
    "--offload.param true": {"fix": "did you mean '--offload.params'?"},
}


def test_mistakes_on_the_command_line(written):
    empty = written("")
    wrong = {
        words: missing
        for words, fields in ON_THE_LINE.items()
        if (missing := misses(lambda words=words: load_config(empty, words.split()), fields))
    }
    assert wrong == {}


def test_booleans_in_any_case(written):
    for value in ("true", "True", "TRUE"):
        config = load_config(written(""), ["--data.packing", value, "--train.local_batch=false"])
        assert config.data.packing is True
        assert config.train.local_batch is False


def test_help_shows_every_key_with_type_default_and_meaning(written, capsys):
    for command in ("train", "plan", "inspect", "certify"):
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


def test_keys_that_need_local_batches_are_refused_by_name():
    for key, value in {"train.deferred_reduction": True, "precision.reduce": "bfloat16"}.items():
        words = ["--train.local_batch", "False", f"--{key}", f"{value}", "--train.devices", "8"]
        config = load_config(QUICKSTART, words)
        what = f"{key.rpartition('.')[2]}={value!r}"
        with refused(what, error=ConfigError, fix=f"--{key} ") as caught:
            build(config)
        assert "needs local_batch=True" in caught.value.what
        assert "train.local_batch" in caught.value.where
        assert "--train.local_batch True, or" in caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "units"),
    [([], {"blocks"}), (["--units.whole_model", "True"], {""})],
    ids=["default", "whole_model"],
)
def test_the_repeated_blocks_are_the_units_unless_the_model_is(written, overrides, units):
    sharded = build(load_config(written("train: {devices: 8}"), overrides)).sharded
    assert {unit for unit in sharded.units.values() if unit is not None} == units


UNITS = {"t5": {"encoder/blocks", "decoder/blocks"}, "cait": {"blocks", "class_blocks"}}


@pytest.mark.parametrize(
    ("words", "units"),
    [
        ("--model.layers 2 --model.scan_layers False", {"blocks/0", "blocks/1"}),
        ("--lora.rank 2", {"blocks"}),
        *(
            (
                f"--model.family {name} --data.kind {kinds_for(family.task.name)[0]}",
                UNITS.get(name, {"blocks"}),
            )
            for name, family in FAMILIES.items()
        ),
    ],
    ids=["unrolled", "lora", *FAMILIES],
)
def test_every_family_runs_by_its_blocks(written, words, units):
    overrides = [*words.split(), "--train.devices", "8", "--train.global_batch_size", "8"]
    run = build(load_config(written(""), overrides))
    run.step.trace(run.batch)
    assert {comm.unit for comm in run.step.plan.comms.values()} == {*units, None}
