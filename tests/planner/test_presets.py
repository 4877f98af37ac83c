"""Every shipped configuration, every preset and every family, planned for absent machines."""

import re
from pathlib import Path

import pytest

from fsdp_jax.contract.contract import check_contract, check_program
from fsdp_jax.data.options import kinds_for
from fsdp_jax.hlo.partitioner_log import collect_rematerializations
from fsdp_jax.models import FAMILIES, parameter_count
from fsdp_jax.planner import compiled_plan, parse_topology
from fsdp_jax.planner.compiled.program import compile_step
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import plan_of

ROOT = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
PLANNED = {
    name: match[1]
    for name, path in CONFIGS.items()
    if (match := re.search(r"fsdp-jax plan \S+ --topology (\S+)", path.read_text()))
    and "weights:" not in path.read_text()
}
IN_CONFIGS = {load_config(path).model.preset for path in CONFIGS.values()}
OTHERS = [
    (name, preset)
    for name, each in FAMILIES.items()
    for preset in each.presets
    if preset not in IN_CONFIGS
]


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_a_configuration_fits_the_machine_it_names(name):
    plan = plan_of(load_config(CONFIGS[name]), parse_topology(PLANNED[name]), analytic=True)
    assert plan.fits
    assert plan.mfu > 0


def test_every_size_has_a_configuration():
    """Except the tiny ones, Llama 3.1 (3 with longer sequences), and T5 11B's other name."""
    left = {preset for _, preset in OTHERS}
    tiny = {next(iter(family.presets)) for family in FAMILIES.values()} | {"small"}
    assert left == tiny - IN_CONFIGS | {"llama3.1-8b", "llama3.1-70b", "t5-11.3b"}
    assert {path.stem for path in CONFIGS.values() if path.stem.startswith("finetune_")} == {
        "finetune_alpaca_gpt2",
        "finetune_alpaca_t5",
        "finetune_head_vit_b16",
        "finetune_lora_llama3_8b",
    }


@pytest.mark.long
@pytest.mark.parametrize(("family", "preset"), OTHERS)
def test_other_presets_are_planned(family, preset, tmp_path):
    kind = kinds_for(FAMILIES[family].task.name)[0]
    (tmp_path / "run.yaml").write_text(
        f"model: {{family: {family}, preset: {preset}}}\ndata: {{kind: {kind}}}\n"
        "train: {global_batch_size: 64}\n"
    )
    plan = plan_of(load_config(tmp_path / "run.yaml"), parse_topology("h100:8x8"), analytic=True)
    assert plan.parameters == pytest.approx(
        parameter_count(FAMILIES[family].presets[preset]), rel=0.01
    )


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama3_2_1b", marks=pytest.mark.long),
        pytest.param("vit_g14", marks=pytest.mark.long),
    ],
)
def test_contract_and_plan_hold_for_every_family(name, tmp_path):
    """At real width and small depth: the traffic is as declared, and the figures add up."""
    topology = parse_topology("h100:8")
    config = load_config(CONFIGS[name], ["--model.layers", "3", "--train.global_batch_size", "16"])
    run = build(config, topology.devices())
    with collect_rematerializations() as repeated:
        plan = compiled_plan(run.step, run.batch, topology, run.work, tmp_path)
    program = compile_step(run.step, run.batch, topology, tmp_path)
    assert program.seconds == plan.compile_s, "it is cached"
    contract = check_program(run.step.plan, program.text, repeated)
    assert contract.holds, str(contract)
    assert plan.fits
    assert plan.mfu > 0.02
    analytic = plan_of(config, topology, analytic=True)
    assert analytic.parameters == plan.parameters


@pytest.mark.long
@pytest.mark.needs_plugin
def test_adapters_on_frozen_weights_hold_their_contract():
    """Llama 3 8B's width with LoRA: only the adapters' gradients are reduced."""
    overrides = ["--model.weights", "None", "--model.preset", "llama3-8b", "--model.layers", "3"]
    overrides += ["--train.local_batch", "True"]  # or XLA joins gradients, which then have no name
    config = load_config(CONFIGS["finetune_lora_llama3_8b"], overrides)
    run = build(config, parse_topology("h100:8").devices())
    contract = check_contract(run.step, run.batch)
    assert contract.holds, str(contract)
    reduced = [each for each in contract.to_json()["collectives"] if each["op"] == "reduce-scatter"]
    assert reduced
    assert all("lora" in each["where"] for each in reduced), reduced
