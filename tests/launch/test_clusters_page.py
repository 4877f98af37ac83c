"""docs/clusters.md: its script runs in two processes, and its recipes are whole."""

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


def test_a_script_of_ones_own_trains_in_two_processes_as_in_one(capsys):
    script = script_of_ones_own()
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [
        start(
            script, **shared, RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2", JAX_PLATFORMS="cpu"
        )
        for rank in "01"
    ]
    (first, _), (second, _) = finish(*both)
    assert "processes," not in second
    found = re.search(r"2 processes, 4 devices, loss ([\d.]+)", first)
    assert found is not None, first
    # this process has its 8 devices already
    exec(script.replace("use_virtual_devices(2)", ""), {})
    alone = re.search(r"1 processes, 8 devices, loss ([\d.]+)", capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(float(alone[1]), abs=2e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_linked_and_has_a_secret(recipe):
    assert f"(../scripts/clusters/{recipe.name})" in PAGE
    text = recipe.read_text()
    assert "cluster.secret" in text or "FSDP_JAX_CLUSTER_SECRET" in text
    if recipe.suffix == ".yaml":
        assert "fsdp-jax" in str(yaml.safe_load(text))
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
