"""docs/clusters.md: its script trains, and its recipes are whole.

The step of the script is compiled and run: that it trains is what the page promises.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from processes import finish, free_port, start

from fsdp_jax.launch.schedulers import find_placement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
CLUSTERS = ROOT / "scripts" / "clusters"
RECIPES = sorted(path for path in CLUSTERS.iterdir())


def script_of_ones_own():
    scripts = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (script,) = [each for each in scripts if "join_cluster(" in each]
    return script


def run_alone(capsys):
    """Runs the script in this process, which has its devices already; returns its loss."""
    exec(script_of_ones_own().replace("use_virtual_devices(2)", "pass"), {"__name__": "__main__"})
    alone = re.search(r"1 processes, 8 devices, loss ([\d.]+)", capsys.readouterr().out)
    return float(alone[1])


def test_the_script_of_the_page_trains(capsys):
    lines = script_of_ones_own().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
    assert run_alone(capsys) > 0


@pytest.mark.long
def test_the_script_of_the_page_trains_in_two_processes(capsys):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "JAX_PLATFORMS": "cpu"}
    both = [start(script_of_ones_own(), **shared, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    (first, _), (second, _) = finish(*both)
    assert "processes," not in second
    found = re.search(r"2 processes, 4 devices, loss ([\d.]+)", first)
    assert found is not None, first
    assert float(found[1]) == pytest.approx(run_alone(capsys), abs=2e-4)


def test_every_recipe_is_linked_and_has_a_secret():
    assert len(RECIPES) > 2
    for recipe in RECIPES:
        assert f"(../scripts/clusters/{recipe.name})" in PAGE
        text = recipe.read_text()
        assert "cluster.secret" in text or "FSDP_JAX_CLUSTER_SECRET" in text, recipe
        if recipe.suffix == ".yaml":
            assert "fsdp-jax" in str(yaml.safe_load(text)), recipe
        else:
            subprocess.run(["bash", "-n", recipe], check=True)


def test_the_pods_of_our_jobset_find_their_places():
    name = ROOT / "scripts" / "try_schedulers.py"
    spec = importlib.util.spec_from_file_location("try_schedulers", name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    job = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]
    pods = job["template"]["spec"]["parallelism"]
    assert pods == job["template"]["spec"]["completions"]
    for pod in range(pods):
        placement = find_placement(module.jobset("8476")(pod, pods))
        assert (placement.processes, placement.process) == (pods, pod)
        assert placement.coordinator == "localhost:8476"
