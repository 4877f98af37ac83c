"""`fsdp-jax plan`: its output and exit codes."""

import json
import os
import re

import pytest

from fsdp_jax.cli.main import main
from fsdp_jax.planner.settings import StepSettings
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import with_settings

TINY = """
model: {layers: 2, width: 64, heads: 2}
units: {classes: [Block]}
precision: {compute: bfloat16}
data: {sequence_length: 64}
train: {steps: 3, global_batch_size: 32}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_a_plan_says_what_was_planned_and_what_would_be_faster(tiny, capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = ["plan", tiny, "--topology", "h100:8", "--analytic", "--remat", "full"]
    words += ["--prefetch", "none"]
    assert main([*words, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "full_shard on h100:8" in shown
    assert "tokens/s per device, MFU" in shown
    planned = " ".join(shown.partition("planned: ")[2].partition("\n\n")[0].split())
    for each in ("model.family gpt", "train.global_batch_size 32", "data.sequence_length 64"):
        assert each in planned
    for each in ("precision.compute bfloat16", "remat full", "units.classes Block"):
        assert each in planned
    assert "learning_rate" not in planned
    assert "GiB are free" in shown
    text = page.read_text()
    assert "<td class=''>units.classes</td><td class=''>Block</td>" in text.replace("\n", "")
    assert "Faster, in memory that is free" in text
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["model.width"] == 64
    assert plan["fits"]
    assert plan["devices"] == 8
    assert plan["faster"]
    for each in plan["faster"]:
        assert each["change"].startswith("--")
        assert each["step_s"] < 0.97 * plan["time"]["step_s"]
        assert plan["peak_bytes"] <= each["peak_bytes"] < 0.9 * plan["usable_bytes"]


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        ("--strategy hfsdp --topology v5e:4x4*2", {"replica": 2, "data": 16}),
        ("--strategy hsdp --topology h100:2x8 --mesh.data 4", {"replica": 4, "data": 4}),
    ],
)
def test_hybrid_strategies_have_a_replica_on_each_host_or_slice(tiny, capsys, words, mesh):
    assert main(["plan", tiny, *words.split(), "--analytic", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == mesh


def test_a_loss_chunk_is_set_where_the_settings_have_one():
    config = with_settings(Config(), StepSettings("zero1", loss_chunk=9))
    assert config.train.loss_chunk == 9
    assert with_settings(config, StepSettings("zero1")).train.loss_chunk == 9


def test_two_configurations_side_by_side(tiny, capsys, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(TINY.replace("{sequence_length: 64}", "{}") + "strategy: zero1\n")
    page = tmp_path / "both.html"
    words = ["--topology", "h100:8", "--analytic", "--html", str(page)]
    assert main(["plan", "--compare", tiny, str(other), *words]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == [tiny, str(other)]
    assert re.search(r"data.sequence_length +64 +128\n", shown)
    assert len(re.findall(r"\nstrategy +full_shard +zero1\n", shown)) == 1
    for each in (tiny, str(other), "zero1", "data.sequence_length"):
        assert each in page.read_text()
    # one, with a key that is changed, and the same as it is
    assert main(["plan", tiny, "--strategy", "zero1", "--compare", tiny, *words]) == 0
    shown = capsys.readouterr().out
    assert re.match(rf" +{re.escape(tiny)}, changed +{re.escape(tiny)}\n", shown)
    assert len(re.findall(r"\nstrategy +zero1 +full_shard\n", shown)) == 1


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        ("", ["--topology is missing", "h100:8"]),
        ("--topology h100:9x9", ["h100 does not come in this shape", "at most 8 GPUs per host"]),
        ("--topology h100", ["not a topology", "a chip alone goes with plan --search"]),
        ("--topolgy h100:8", ["did you mean '--topology'?"]),
        ("--topology h100:8 --html no/such/page.html", ["no such folder"]),
        ("--topology v100:8 --analytic", ["v100 has no bfloat16"]),
        ("--topology cpu:8", ["no memory or speed of their own"]),
        ("--topology cpu:8 --analytic", ["no memory or speed of their own"]),
        ("--topology h100:5 --analytic", ["train.global_batch_size", "a multiple of 5"]),
        ("--topology h100:8 --devices 8", ["--devices goes with --search"]),
        ("--topology cpu --search", ["no memory or speed of their own"]),
        ("--topology h100:8 --search --analytic", ["--analytic does not go with --search"]),
        (
            "--topology h100:8 --analytic --model.attention flash --data.sequence_length 200",
            ["data.sequence_length", "a multiple of 128"],
        ),
        ("--topology h100:8 --to x.yaml", ["--to goes with --search"]),
        ("--topology h100 --search --devices x", ["expected: a whole number"]),
        ("--topology h100:8 --search --devices 8", ["the topology says how many devices"]),
        ("--topology h100 --search --devices 7", ["no machine for this batch"]),
    ],
)
def test_mistakes_are_one_block_and_end_with_2(tiny, words, blocks, capsys):
    assert main(["plan", tiny, *words.split()]) == 2
    error = capsys.readouterr().err
    assert [block for block in blocks if block not in error] == []
    assert "Traceback" not in error


@pytest.mark.parametrize("given", [("tiny", "--compare", "tiny"), ("--compare", "a", "b", "c")])
def test_compare_takes_two_configurations(tiny, capsys, given):
    words = [tiny if word == "tiny" else word for word in given]
    assert main(["plan", *words, "--topology", "h100:8"]) == 2
    assert "--compare takes two configurations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"), [("sequence", "data.sequence_length"), ("frozen", "model.frozen' or '--prec")]
)
def test_a_key_without_its_section_is_suggested(tiny, capsys, word, key):
    assert main(["plan", tiny, f"--{word}", "1"]) == 2
    assert f"did you mean '--{key}" in capsys.readouterr().err


def test_a_search_that_finds_nothing_ends_with_3(tiny, capsys):
    words = ["--model.width", "8192", "--model.layers", "200", "--model.heads", "64"]
    words += ["--train.global_batch_size", "8"]
    assert main(["plan", tiny, "--topology", "v5e", "--search", *words]) == 3
    assert "it fits no machine" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.needs_plugin
def test_a_search_writes_the_best_configuration(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_jax.planner.search.FINALISTS", 1)
    words = ["--topology", "h100", "--devices", "2", "--search", "--to", "best.yaml"]
    words += ["--train.global_batch_size", "2"]
    assert main(["plan", tiny, *words]) == 0
    shown = capsys.readouterr()
    assert "best: --strategy" in shown.out
    assert "estimated" in shown.err
    best = load_config(tmp_path / "best.yaml")
    assert f"--strategy {best.strategy} " in shown.out
    assert best.model == load_config(tiny).model


@pytest.mark.long
@pytest.mark.needs_plugin
def test_the_second_plan_is_not_compiled(tiny, capsys, monkeypatch):
    words = ["plan", tiny, "--topology", "h100:8", "--train.global_batch_size", "8", "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    plan = json.loads(first)
    assert plan["basis"]["peak_bytes"] == plan["basis"]["time"] == "compiled"
    assert sum(plan["breakdown"].values()) == plan["peak_bytes"] > plan["valley_bytes"]
    assert plan["wire_bytes"] <= 1.02 * plan["wire_bytes_limit"]
    assert plan["buffers"]
    # from the cache
    monkeypatch.setattr("fsdp_jax.planner.compiled.program.compile_reported", None)
    assert main(words) == 0
    assert capsys.readouterr().out == first
    # other flags may make another program
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_other")
    assert main(words) == 1


def test_a_plan_that_does_not_fit_names_what_to_try(tiny, capsys):
    words = ["--model.width", "1024", "--model.layers", "4096", "--remat", "full"]
    words += ["--topology", "v5e:4x4", "--analytic", "--json"]
    assert main(["plan", tiny, *words]) == 3
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert any("--search --topology v5e:4x4" in note for note in plan["notes"])
    changes = [fix["change"] for fix in plan["fixes"]]
    assert "more devices: --topology v5e:4x8" in changes
    assert plan["cliff"] is None
