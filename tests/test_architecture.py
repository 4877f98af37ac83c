"""The order of the packages, and the habits of the code that a reader of one file cannot see."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fsdp_jax
from fsdp_jax.errors import UNUSABLE
from fsdp_jax.program.primitives import PRIMITIVES
from fsdp_jax.train.config_file import KEYS

ROOT = Path(fsdp_jax.__file__).parent
PACKAGE = ROOT.name
# A package or a top-level module imports only from the lines above its own.
ORDER = [
    {"errors", "host_memory", "tables", "tree"},
    {"processes"},
    {"compat", "limits", "program", "views"},
    {"hlo", "io", "sharding"},
    {"local_rows", "trackers"},
    {"models", "units", "optim", "lora"},
    {"prefetch"},
    {"step"},
    {"arguments", "certify", "checkpoint", "contract"},
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
NODES = {name: list(ast.walk(ast.parse(source))) for name, source in SOURCES.items()}
CLASSES = [
    (name, node)
    for name, nodes in NODES.items()
    for node in nodes
    if isinstance(node, ast.ClassDef)
]


def place_of(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module that is imported, wherever the statement stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


IMPORTS = {name: set(imports(nodes)) for name, nodes in NODES.items()}


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
    tree = ast.parse("def f():\n    import a.b\n    from c import d")
    assert set(imports(ast.walk(tree))) == {"a.b", "c"}
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
    assert users_of("orbax") == {"checkpoint", "compat"}
    assert users_of("flax") <= {
        "compat",
        "lora",
        "models",
        "optim",
        "units",
        "api",
        "arguments",
        "train",
        "certify",
        "cli",
    }
    models = {
        place_of(name) for module in FILES if place_of(module) == "models" for name in own(module)
    }
    assert models <= {"models", "errors", "io", "local_rows"}, "models know nothing of sharding"
    assert [name for name, source in SOURCES.items() if "jax._src" in source] == []


def modules_after(*steps: str) -> list[set[str]]:
    """The modules that are loaded after each of some lines of code, in a process of its own."""
    code = "import sys, contextlib, io\n"
    code += "".join(f"{step}\nprint(*sys.modules, file=sys.__stdout__)\n" for step in steps)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = [set(line.split()) for line in result.stdout.splitlines()]
    assert len(loaded) == len(steps)
    return loaded


HELP = f"""
from {PACKAGE}.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
"""


def test_a_command_loads_what_is_heavy_as_it_runs():
    """After its arguments have been checked; its help loads no jax."""
    alone, help_, command = modules_after(
        f"import {PACKAGE}", HELP, f"import {PACKAGE}.cli.commands, {PACKAGE}.train.config_file"
    )
    assert "jax" not in alone
    assert not {"jax", "numpy"} & help_
    assert {"jax", f"{PACKAGE}.train.config_file"} <= command
    modules = command - {f"{PACKAGE}.data{name}" for name in ("", ".options", ".checks")}
    places = {place_of(name) for name in modules & set(FILES)}
    assert {"cli", "train"} <= places
    unused = {"data", "weights", "planner", "contract", "checkpoint", "certify"}
    assert not places & unused
    assert not modules & {"grain", "orbax", "datasets", "tokenizers", "transformers"}


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


def guarded_imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """{module: extra} of the imports in a `with extra(...)`."""
    return {
        name.partition(".")[0]: ast.literal_eval(node.items[0].context_expr.args[0])
        for node in nodes
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("extra(")
        for name in imports(ast.walk(node))
    }


def test_what_an_extra_brings_is_imported_with_its_name():
    """Without the extra, the error says which `pip install` brings the package."""
    base = modules_of(PROJECT["dependencies"]) | {"jaxlib", PACKAGE} | set(sys.stdlib_module_names)
    used = set()
    for name, nodes in NODES.items():
        foreign = {each.partition(".")[0] for each in IMPORTS[name]} - base
        extras = guarded_imports(nodes)
        if place_of(name) == "testing":  # for who tests with it
            foreign -= {"pytest"}
        assert foreign == set(extras), name
        for module, extra in extras.items():
            assert module in modules_of(PROJECT["optional-dependencies"][extra]), (name, module)
        used |= set(extras)
    extras = ("train", "plan", "hf", "ray", "tensorboard", "wandb", "trackio")
    declared = [PROJECT["optional-dependencies"][extra] for extra in extras]
    assert used == set.union(*map(modules_of, declared)), "an extra that nobody imports"


BLOCK = """
for name in {names!r}:
    sys.modules[name] = None
"""
WITHOUT_EXTRAS = f"""
from {PACKAGE}.cli.main import main
with contextlib.redirect_stderr(io.StringIO()) as error:
    assert main(["train", "quickstart"]) == {UNUSABLE}
assert error.getvalue().startswith("error: the package 'grain' is not installed\\n")
assert "pip install '{PACKAGE}[train]'" in error.getvalue()
"""


def test_the_library_works_without_extras_and_loads_no_planner():
    """As `pip install fsdp_jax` leaves it. Flax imports rich and yaml itself."""
    names = ("grain", "safetensors", "jinja2", "tokenizers", "datasets")
    packages = sorted(fsdp_jax.PACKAGES - {"data"})
    _, library, _, _ = modules_after(
        BLOCK.format(names=names),
        f"import {PACKAGE}\nfrom {PACKAGE}.public import *",
        "\n".join(f"{PACKAGE}.{name}" for name in packages),
        WITHOUT_EXTRAS,
    )
    loaded = {place_of(name) for name in library & set(FILES)}
    assert "api" in loaded
    assert not loaded & {"planner", "contract", "hlo"}


# What other libraries do not document is in one place: `fsdp_jax/compat/`

WHERE = (
    "outside of fsdp_jax/compat/ the package relies on what another library does not document: "
    "give it a function or a constant there, a test in tests/compat/ that meets the library, and a "
    "row of docs/design/other-libraries.md"
)
DOCUMENTED = {"_replace", "_fields", "_asdict", "_exit"}  # of named tuples; of os
SEARCHES = {"search", "match", "fullmatch", "sub", "findall", "finditer", "split"}
PARTS = {"startswith", "endswith", "partition", "rpartition", "find", "removeprefix", "replace"}
FLAG = re.compile(r"(--)?xla_(?!dump)\w|(XLA_FLAGS|LIBTPU_INIT_ARGS|NPROC)$")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(kind: ast.ClassDef) -> Iterator[str]:
    """Names with an underscore that a class defines: fields, methods, and attributes of `self`."""
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if ast.unparse(node.value) == "self" else []
            yield from names


def caught_errors(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """(name, code that may read it) of the errors of others: caught ones, and parameters."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler) and node.name:
            kinds = {kind.id for kind in ast.walk(node.type) if isinstance(kind, ast.Name)}
            if not kinds <= OUR_ERRORS:
                yield node.name, node
        elif isinstance(node, ast.FunctionDef):
            for each in node.args.args:
                kinds = ast.walk(each.annotation) if each.annotation else ()
                names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
                if any(name.endswith(("Error", "Exception")) for name in names - OUR_ERRORS):
                    yield each.arg, node


def matched_texts(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Where the text of an error of others is compared, searched or cut in parts."""
    for error, code in caught_errors(nodes):
        texts = {f"str({error})"}
        for node in ast.walk(code):
            if isinstance(node, ast.Assign) and ast.unparse(node.value) in texts:
                texts |= {ast.unparse(target) for target in node.targets}
        for node in ast.walk(code):
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                parts = node.args if node.func.attr in SEARCHES else []
                parts = [*parts, *[node.func.value] * (node.func.attr in SEARCHES | PARTS)]
            elif isinstance(node, ast.Call):  # a function of ours gets the error itself
                parts = node.args if ast.unparse(node.func) not in ("str", "len", "print") else []
            else:
                continue
            if any(ast.unparse(part) in texts for part in parts):
                yield node


def undocumented(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Where code relies on what another library does not document, as far as it can be seen."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name) and name not in OUR_PRIVATE_NAMES:
                yield node
            case ast.Attribute(attr="DATA_REGISTRY" | "__subclasses__"):
                yield node
            case ast.Attribute(attr="__class__", ctx=ast.Store()):
                yield node
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr")):
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if any(is_private(str(name)) for name in names):
                    yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id="object"), attr="__setattr__")):
                if ast.unparse(node.args[0]) != "self":  # a frozen dataclass of ours
                    yield node
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="vars")))):
                if node.func.attr in ("update", "pop", "setdefault"):
                    yield node
            case ast.keyword(arg=str(name)) if is_private(name) and name not in OUR_PRIVATE_NAMES:
                yield node.value
            case ast.Import(names=names) if any("._" in each.name for each in names):
                yield node
            case ast.ImportFrom(module=name) if "._" in f"{name}":
                yield node
            case ast.Constant(value=str(text)) if id(node) not in docstrings and FLAG.match(text):
                yield node
    yield from matched_texts(nodes)


OUR_ERRORS = {node.name for _, node in CLASSES if node.name.endswith("Error")}
OUR_PRIVATE_NAMES = {name for _, node in CLASSES for name in private_names(node)}
OUR_PRIVATE_NAMES |= DOCUMENTED


def test_what_is_undocumented_is_relied_on_in_compat_alone():
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, nodes in NODES.items()
        if place_of(name) not in {"compat", "hlo", "program"}
        for node in undocumented(nodes)
    ]
    assert found == [], WHERE


UNDOCUMENTED = [
    "scope._variables",
    "node.__class__ = kind",
    "object.__setattr__(node, '__class__', kind)",
    "nnx.pytreelib.DATA_REGISTRY",
    "getattr(tx, '_inner')",
    "vars(scope).update(has_rng=has_rng)",
    "module.clone(_deep_clone=True)",
    "from jax._src import core",
    "options = {'xla_gpu_enable_triton_gemm': False}",
    "os.environ.get('XLA_FLAGS')",
    "try: f()\nexcept ValueError as error:\n    if 'mesh' in str(error): raise",
    "try: f()\nexcept ValueError as error:\n    text = str(error)\n    re.search('mesh', text)",
    "try: f()\nexcept ValueError as error:\n    str(error).startswith('mesh')",
    "try: f()\nexcept ValueError as error:\n    refusal(str(error))",
    "def is_full(error: OSError):\n    return PATTERN.search(str(error))",
]
DOCUMENTED_CODE = [
    "self._private",
    "point._replace(x=1)",
    "object.__setattr__(self, 'save', ())",
    "try: f()\nexcept ValueError as error:\n    raise Wrong(got=str(error)) from error",
    "try: f()\nexcept ValueError as error:\n    messages.append(str(error).splitlines()[0])",
    "try: f()\nexcept DamageError as error:\n    'bytes' in str(error)",
    "'''Sets XLA_FLAGS.'''",
]


def test_such_code_is_found_and_other_code_is_not():
    def is_found(code: str) -> bool:
        return any(undocumented(list(ast.walk(ast.parse(code)))))

    assert [code for code in UNDOCUMENTED if not is_found(code)] == []
    assert [code for code in DOCUMENTED_CODE if is_found(code)] == []


def equations_read_in(nodes: Iterable[ast.AST], primitives: set[str]) -> Iterator[str]:
    """What a module outside of `program` reads of equations, or spells of primitives, itself."""
    for node in nodes:
        match node:
            case ast.Attribute(attr="primitive" | "jaxprs_in_params"):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Attribute(value=ast.Name(id=owner), attr="params"):
                if owner not in ("self", "call", "state"):  # those have parameters of a model
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Constant(value=str(text)) if text in primitives:
                yield f"{node.lineno}: '{text}'"


def test_equations_of_traced_programs_are_read_in_one_place():
    primitives = set(PRIMITIVES)
    reading = [
        module
        for module in FILES
        if place_of(module) != "program"
        and not IMPORTS[module].isdisjoint((f"{PACKAGE}.program.equations", "jax.extend.core"))
    ]
    assert len(reading) > 10
    found = [
        f"{module}:{line}"
        for module in reading
        for line in equations_read_in(NODES[module], primitives)
    ]
    assert found == [], (
        "ask fsdp_jax/program: what a primitive is, of `primitive_of(eqn)`, a row of "
        "program/primitives.py; what an equation was traced with, of a function in "
        "program/equations.py; new ones have a test in tests/program"
    )
    others = [module for module in FILES if module not in reading and place_of(module) != "program"]
    assert [module for module in others if re.search(r"\.primitive\b", SOURCES[module])] == []


def test_reading_equations_elsewhere_is_found():
    source = "eqn.primitive.name == 'scan' or x.params['a'] or self.params"
    found = set(equations_read_in(ast.walk(ast.parse(source)), {"scan"}))
    assert found == {"1: eqn.primitive", "1: 'scan'", "1: x.params"}


# Settings: each is declared once, and handed to those whose it is


def fields_of(node: ast.ClassDef) -> set[str]:
    return {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}


def test_no_setting_is_declared_twice():
    """The configuration holds the library's own dataclasses; none repeats another's fields."""
    classes = {f"{module}.{node.name}": fields_of(node) for module, node in CLASSES}
    owners = {f"{key.owner.__module__}.{key.owner.__name__}" for key in KEYS.values()}
    assert {
        f"{PACKAGE}.sharding.precision.Precision",
        f"{PACKAGE}.data.options.DataOptions",
    } < owners
    twice = [
        f"{other} has {sorted(both)} of {owner}"
        for owner in owners - {f"{PACKAGE}.train.config.Config"}
        for other, fields in classes.items()
        if other != owner
        and len(both := fields & classes[owner]) > 2
        and 2 * len(both) >= len(classes[owner])
    ]
    assert twice == []
    names = {key.owner.__name__ for key in KEYS.values()}
    assert names == {
        *("Adapters", "DataOptions", "LossSpikes", "Offload", "Precision", "RematPolicy"),
        *("CheckpointConfig", "ClusterConfig", "Config", "MeshConfig", "ModelConfig"),
        *("OptimizerConfig", "ProfileConfig", "TrackerOptions", "TrainConfig", "UnitsConfig"),
        "KeepGatheredConfig",
    }, "a section of its own is for what the library has no dataclass for"


def takes_config(node: ast.AST) -> bool:
    """Whether a function has a parameter of the type `Config`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    hints = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)]
    return "Config" in [ast.unparse(hint).strip("'") for hint in hints if hint is not None]


def test_only_who_assembles_a_run_takes_its_whole_configuration():
    takers = [
        module.removeprefix(f"{PACKAGE}.")
        for module, nodes in NODES.items()
        for node in nodes
        if takes_config(node)
    ]
    rooms = {"cli.certify", "train.build", "train.config_file", "train.main", "train.planning"}
    assert set(takers) == rooms
    assert len(takers) <= 20, "hand a function the sections that it reads"


# House style, over the whole package: what ruff cannot be asked to check


def test_no_line_is_longer_than_a_hundred_columns():
    lines = [(name, line) for name, source in SOURCES.items() for line in source.splitlines()]
    assert [f"{name}: {line}" for name, line in lines if len(line) > 100] == []


def test_conditional_expressions_are_not_nested():
    def conditionals(nodes: Iterable[ast.AST]) -> list[ast.IfExp]:
        return [node for node in nodes if isinstance(node, ast.IfExp)]

    nested = [
        f"{name}:{outer.lineno}"
        for name, nodes in NODES.items()
        for outer in conditionals(nodes)
        if len(conditionals(ast.walk(outer))) > 1
    ]
    assert nested == []


def test_tables_of_data_alone_skip_the_formatter():
    assert sum(source.count("# fmt: skip") for source in SOURCES.values()) <= 20


def test_no_two_classes_have_the_same_name():
    modules: dict[str, list[str]] = {}
    for module, node in CLASSES:
        modules.setdefault(node.name, []).append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_the_top_level_is_short():
    """Users look for `api` and `errors` there; mechanism belongs into a package."""
    files = [path.name for path in ROOT.iterdir() if path.is_file()]
    assert len(files) <= 16, sorted(files)
