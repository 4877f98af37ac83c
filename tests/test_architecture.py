"""Imports point down, the graph has no cycle, and what is foreign stays in the one room that adapts it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fsdp_jax

pytestmark = pytest.mark.core

ROOT = Path(fsdp_jax.__file__).parent
PACKAGE = ROOT.name
ROOMS = [
    {
        "errors",
        "tree",
        "jaxprs",
        "rows",
        "varying",
        "processes",
        "table",
        "mesh",
        "strategy",
        "precision",
        "rules",
        "models",
    },
    {"optimizer", "layout", "offload", "remat"},
    {
        "travel",
        "sites",
        "units",
        "pipeline",
        "layerscan",
        "chain",
        "prefetch",
        "model",
        "nnx",
        "linen",
        "lora",
        "state",
    },
    {"arguments", "step", "overlap", "compiled", "checkpoint", "inspect"},
    {"planner", "weights", "data"},
    {"api"},
    {"certify"},
    {"train", "launch", "testing"},
    {"words", "commands", "cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def name_of(path: Path) -> str:
    """`fsdp_jax.checkpoint.store`; a package by its own name."""
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
MODULES = [name for name in FILES if name != PACKAGE]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "api"  # the facade is as high as what it shows


def imports(source: str) -> Iterator[str]:
    """Every module that this source imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


def own_imports(module: str) -> set[str]:
    return {name for name in imports(FILES[module].read_text()) if name.split(".")[0] == PACKAGE}


def uses(module: str, package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in imports(FILES[module].read_text()))


def test_the_reader_sees_imports_inside_functions_and_of_submodules():
    assert set(imports("def f():\n    import a.b\n    from c import d")) == {"a.b", "c"}
    assert f"{PACKAGE}.models.layers" in own_imports(f"{PACKAGE}.models.gpt")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_room(module):
    assert room_of(module) in LEVEL, "give the new room a level here and in the design notes"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    level = LEVEL[room_of(module)]
    above = {name for name in own_imports(module) if LEVEL[room_of(name)] > level}
    assert not above, f"{module} (level {level}) imports from above"


def test_imports_have_no_cycle():
    assert cycle({module: own_imports(module) for module in FILES}) == []
    assert cycle({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import cycle in their order; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) == "models"])
def test_models_know_nothing_of_sharding(module):
    assert {room_of(name) for name in own_imports(module)} <= {"models", "rows"}


@pytest.mark.parametrize("module", MODULES)
def test_orbax_is_imported_by_the_checkpoint_room_alone(module):
    assert room_of(module) == "checkpoint" or not uses(module, "orbax")


@pytest.mark.parametrize("module", [m for m in MODULES if LEVEL.get(room_of(m), 9) < 2 and room_of(m) != "models"])
def test_the_ground_knows_no_flax(module):
    assert not uses(module, "flax")


@pytest.mark.parametrize("module", FILES)
def test_private_jax_is_not_used(module):
    assert not uses(module, "jax._src")
    assert "jax._src" not in FILES[module].read_text()
