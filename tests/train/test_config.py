"""Keys from YAML and from the command line: the same names, one readable error for each mistake."""

from pathlib import Path

import pytest

from fsdp_jax.cli.main import main
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import FAMILIES
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.train.build import build, make_model, make_offload, make_remat
from fsdp_jax.train.config import Config, LoraConfig, ModelConfig
from fsdp_jax.train.config_file import KEY_TYPES, digest, dump, load
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
    assert load(written("")) == Config()


def test_overrides_win_over_the_file(written):
    path = written("train: {steps: 5, seed: 3}\nunits: {classes: [Block]}\n")
    overrides = "--train.steps 20 --mesh.replica=2 --mesh.data -1 --units.classes Block MLP"
    overrides += " --optimizer.clip None --model.scan-layers False --train.global_batch_size 8"
    config = load(path, overrides.split())
    assert (config.train.steps, config.train.seed, config.train.global_batch_size) == (20, 3, 8)
    assert (config.mesh.replica, config.mesh.data) == (2, -1)
    assert config.units.classes == ("Block", "MLP")
    assert config.optimizer.clip is None
    assert config.model.scan_layers is False


def test_numbers_without_a_point(written):
    config = load(written("optimizer: {learning_rate: 1e-3, clip: 1}"))
    assert (config.optimizer.learning_rate, config.optimizer.clip) == (1e-3, 1.0)


def test_dump_reads_back(written):
    config = load(
        QUICKSTART, ["--units.classes", "Block", "MLP", "--optimizer.learning_rate", "1e-05"]
    )
    assert load(written(dump(config))) == config
    assert digest(load(written(dump(config)))) == digest(config)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_comment_every_key(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith(" ") and ":" in line]
    assert lines
    assert [line for line in lines if "#" not in line] == []
    config = load(path)
    assert config.train.steps >= 200
    assert config.train.global_batch_size % 8 == 0


def test_the_keys_of_recomputation_and_offload(written):
    assert make_remat(load(written("remat: full"))) == "full"
    config = load(written("remat: dots\nremat_save: attention\nremat_every: 2"))
    assert make_remat(config) == RematPolicy("dots", ("attention",), every=2)
    with pytest.raises(
        ConfigError, match="remat none nothing is recomputed\n  where:    remat_every"
    ):
        make_remat(load(written("remat_every: 2")))
    assert make_offload(Config().offload) == Offload()
    config = load(written("offload: {params: true, optimizer: 0.5, activations: true}"))
    assert make_offload(config.offload) == Offload(True, 0.5, activations=True)
    config = load(written("offload: {activation_names: [mlp], in_flight: 3}"))
    assert make_offload(config.offload) == Offload(activations=("mlp",), in_flight=3)
    both = load(written("offload: {activation_names: [mlp], activations: true}"))
    with pytest.raises(ConfigError, match=r"or activations by name\n.*activation_names"):
        make_offload(both.offload)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {step: 5}",
            r"unknown key 'train\.step'\n  where: +\S+run\.yaml\n  fix: .* mean 'train\.steps'\?",
        ),
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
    ],
)
def test_mistakes_in_the_file(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load(written(text))


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
            load(written(f"output: {tag} ['{mark}']"))
    assert not mark.exists()


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read\n  where: +\S+none\.yaml"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "--train.step 3",
            r"unknown key 'train\.step'\n  where: +command line\n[^$]*'train\.steps'\?",
        ),
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
    ],
)
def test_mistakes_on_the_command_line(written, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(written(""), overrides.split())


@pytest.mark.parametrize("value", ["true", "True", "TRUE"])
def test_booleans_in_any_case(written, value):
    config = load(written(""), ["--data.packing", value, "--train.local_batch=false"])
    assert config.data.packing is True
    assert config.train.local_batch is False


@pytest.mark.parametrize("command", ["train", "plan", "inspect", "certify"])
def test_help_shows_every_key_with_its_type_default_and_meaning(written, capsys, command):
    assert main([command, str(written("train: {steps: 77}")), "--help"]) == 0
    shown = capsys.readouterr()
    assert [key for key in KEY_TYPES if f"--{key} " not in shown.out] == []
    assert "Optimizer steps. (default: 77)" in shown.out
    assert "{none,full,dots,selective}" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [("prefetch", "pre"), ("train.deferred_reduction", "True"), ("precision.reduce", "bfloat16")],
)
def test_keys_that_need_local_batches_are_refused_by_name(key, value):
    config = load(
        QUICKSTART, ["--train.local_batch", "False", f"--{key}", value, "--train.devices", "8"]
    )
    with pytest.raises(
        ConfigError,
        match=rf"{key} needs train.local_batch\n.*{key}(.*\n)+.*--train.local_batch True, or",
    ):
        build(config)


def test_a_configuration_that_an_earlier_run_wrote_is_still_accepted():
    """`lora.targets` had the targets of all families as its default."""
    targets = ("(attn|cross)/(qkv|q|k|v|o|out)$",)
    family, model = FAMILIES["gpt"], ModelConfig(frozen=("embed",))
    lora = LoraConfig(targets=targets)
    _, frozen = make_model(model, lora, family, family.preset("tiny"), "cpu")
    assert frozen == ("embed",)
