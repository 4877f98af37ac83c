"""The order of the packages, and the habits of the code that a reader of one file cannot see."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fsdp_jax
from fsdp_jax.errors import UNUSABLE

ROOT = Path(fsdp_jax.__file__).parent
PACKAGE = ROOT.name
# A package or a top-level module imports only from the lines above its own.
ORDER = [
    {"errors", "tables", "processes", "tree", "jaxprs"},
    {"hlo", "io", "sharding"},
    {"local_rows"},
    {"models", "units", "optim", "lora"},
    {"prefetch"},
    {"step", "validation"},
    {"certify", "checkpoint", "contract"},
    {"data", "planner", "weights"},
    {"api", "launch"},
    {"train", "public"},
    {"__init__"},
    {"cli", "testing"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def name_of(path: Path) -> str:
    """`fsdp_jax.checkpoint.store`; a package by its own name."""
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
SOURCES = {name: path.read_text() for name, path in FILES.items()}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def place_of(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


IMPORTS = {name: set(imports(tree)) for name, tree in TREES.items()}


def own(module: str) -> set[str]:
    return {name for name in IMPORTS[module] if name.split(".")[0] == PACKAGE}


def users_of(package: str) -> set[str]:
    """The places that import a package that is not ours."""
    return {
        place_of(module)
        for module, names in IMPORTS.items()
        if any(name == package or name.startswith(package + ".") for name in names)
    }


def test_imports_inside_functions_and_of_submodules_are_counted():
    assert set(imports(ast.parse("def f():\n    import a.b\n    from c import d"))) == {"a.b", "c"}
    assert f"{PACKAGE}.models.layers" in own(f"{PACKAGE}.models.gpt")


def test_packages_import_only_from_packages_before_them():
    assert {place_of(module) for module in FILES} == set(LEVEL), (
        "every package has its place in ORDER"
    )
    upward = [
        f"{module} imports {name}"
        for module in FILES
        for name in own(module)
        if place_of(name) != place_of(module) and LEVEL[place_of(name)] >= LEVEL[place_of(module)]
    ]
    assert upward == []


def test_modules_have_no_import_cycle():
    order = list(TopologicalSorter({module: own(module) for module in FILES}).static_order())
    assert set(order) == set(FILES)
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_a_foreign_library_is_used_where_it_belongs():
    assert users_of("orbax") == {"checkpoint"}
    assert users_of("flax") <= {
        "lora",
        "models",
        "units",
        "validation",
        "api",
        "train",
        "certify",
        "cli",
    }
    models = {
        place_of(name) for module in FILES if place_of(module) == "models" for name in own(module)
    }
    assert models <= {"models", "errors", "io", "local_rows"}, "models know nothing of sharding"
    assert [name for name, source in SOURCES.items() if "jax._src" in source] == []


def loaded_by(module: str) -> set[str]:
    """All modules that are loaded once this one has been imported."""
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_the_library_loads_no_planner():
    loaded = {place_of(name) for name in loaded_by(f"{PACKAGE}.public") & set(FILES)}
    assert "api" in loaded
    assert not loaded & {"planner", "contract", "hlo"}


def test_the_package_itself_and_the_help_of_the_command_load_no_jax():
    assert "jax" not in loaded_by(PACKAGE)
    code = f"import sys; from {PACKAGE}.cli.main import main; main(['--help']); "
    code += "assert not {'jax', 'numpy'} & {*sys.modules}, 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_public_name_and_package_is_an_attribute():
    for name in [*fsdp_jax.__all__, *fsdp_jax.PACKAGES]:
        assert name in dir(fsdp_jax)
        assert getattr(fsdp_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fsdp_jax.nothing  # noqa: B018


PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
MODULE_OF = {"PyYAML": "yaml", "orbax-checkpoint": "orbax", "Jinja2": "jinja2"}


def modules_of(requirements: list[str]) -> set[str]:
    """The modules of requirements such as `jax>=0.10.2`."""
    names = [re.split(r"[<>=;\[]", each)[0] for each in requirements]
    return {MODULE_OF.get(name, name) for name in names}


def guarded_imports(tree: ast.AST) -> dict[str, str]:
    """{module: extra} of the imports in a `with extra(...)`."""
    return {
        name.partition(".")[0]: ast.literal_eval(node.items[0].context_expr.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("extra(")
        for name in imports(node)
    }


def test_what_an_extra_brings_is_imported_with_its_name():
    """Without the extra, the error says which `pip install` brings the package."""
    base = modules_of(PROJECT["dependencies"]) | {"jaxlib", PACKAGE} | set(sys.stdlib_module_names)
    used = set()
    for name, tree in TREES.items():
        foreign = {each.partition(".")[0] for each in IMPORTS[name]} - base
        extras = guarded_imports(tree)
        if place_of(name) == "testing":  # for who tests with it
            foreign -= {"pytest"}
        assert foreign == set(extras), name
        for module, extra in extras.items():
            assert module in modules_of(PROJECT["optional-dependencies"][extra]), (name, module)
        used |= set(extras)
    declared = [PROJECT["optional-dependencies"][extra] for extra in ("train", "plan", "hf")]
    assert used == set.union(*map(modules_of, declared)), "an extra that nobody imports"


BLOCK = """
import sys
for name in {names!r}:
    sys.modules[name] = None
"""


def test_the_library_works_without_the_extras():
    """As `pip install fsdp_jax` leaves it. Flax imports rich and yaml itself."""
    names = ("grain", "tyro", "safetensors", "jinja2", "tokenizers", "datasets")
    code = BLOCK.format(names=names) + f"import {PACKAGE}\nfrom {PACKAGE}.public import *\n"
    packages = fsdp_jax.PACKAGES - {"data"}
    code += "\n".join(f"{PACKAGE}.{name}" for name in sorted(packages))
    subprocess.run([sys.executable, "-c", code], check=True)
    code = BLOCK.format(names=names) + f"from {PACKAGE}.cli.main import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == UNUSABLE
    assert result.stderr.startswith("error: the package 'tyro' is not installed\n")
    assert f"pip install '{PACKAGE}[train]'" in result.stderr


def test_reading_a_command_line_loads_neither_data_nor_models():
    """A command imports what is heavy when it runs, after its arguments have been checked."""
    modules = loaded_by(f"{PACKAGE}.cli.commands")
    places = {place_of(name) for name in modules & set(FILES)}
    assert {"cli", "train"} <= places
    assert not places & {
        "data",
        "models",
        "weights",
        "planner",
        "contract",
        "checkpoint",
        "certify",
    }
    assert not modules & {"grain", "orbax", "datasets", "tokenizers", "transformers"}


# House style, over the whole package: what ruff cannot be asked to check


def test_no_line_is_longer_than_a_hundred_columns():
    lines = [(name, line) for name, source in SOURCES.items() for line in source.splitlines()]
    assert [f"{name}: {line}" for name, line in lines if len(line) > 100] == []


def test_conditional_expressions_are_not_nested():
    def conditionals(tree: ast.AST) -> list[ast.IfExp]:
        return [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]

    nested = [
        f"{name}:{outer.lineno}"
        for name, tree in TREES.items()
        for outer in conditionals(tree)
        if len(conditionals(outer)) > 1
    ]
    assert nested == []


def test_tables_of_data_alone_skip_the_formatter():
    assert sum(source.count("# fmt: skip") for source in SOURCES.values()) <= 20


def test_no_two_classes_have_the_same_name():
    modules: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_the_top_level_is_short():
    """Users look for `api` and `errors` there; mechanism belongs into a package."""
    files = [path.name for path in ROOT.iterdir() if path.is_file()]
    assert len(files) <= 15, sorted(files)
