"""What a user writes: the configuration and the command line."""

import dataclasses
import json
import math
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from hypothesis import strategies as st

from fsdp_jax.cli.commands import COMMANDS
from fsdp_jax.errors import FitError
from fsdp_jax.limits import Range
from fsdp_jax.train import config_file
from fsdp_jax.train.build import build
from fsdp_jax.train.config import Config
from fsdp_jax.train.renamed_keys import KEY_OF
from fuzz import mutations
from fuzz.harness import Case, RefusedError, Running, Target

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {
    "strategy": "zero2",
    "output": "output/fuzz",
    "remat": "full",
    "remat_save": ["qkv", "mlp"],
    "model": {"family": "gpt", "layers": 2, "dropout": 0.1},
    "lora": {"rank": 4, "alpha": 8},
    "mesh": {"replica": 1, "data": -1},
    "units": {"min_params": 1000},
    "precision": {"compute": "bfloat16", "loss_scale": None},
    "offload": {"optimizer": 0.5},
    "optimizer": {"name": "adamw", "learning_rate": "3e-4", "clip": 1.0},
    "data": {"kind": "text", "path": "corpus", "packing": True, "held_out": 0.1},
    "train": {"steps": 20, "global_batch_size": 8, "seed": 7, "abort_after": None},
    "checkpoint": {"every": 5, "keep": 2, "every_minutes": 1.5},
}


EXTREMES = {
    int: [0, 1, -1, 2, 3, 7, 8, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, 10**30],
    float: [0.0, -1.0, 1e-320, 1e-9, 0.1, 0.5, 1, 1.5, 1e9, 1e308, float("inf"), float("nan")],
    bool: [False, True],
    str: [
        "", " ", "bytes", "gpt2", "llama-tiny", "t5-tiny", "vit-tiny", "float16", "bfloat16",
        "float8_e4m3fn", "int8", "zero1", "ddp", "fsdp", "hybrid_shard", "output/a", "../sentinel",
        "/dev/zero", "nothing", "a:1", "train[:10%]",
    ],
}  # fmt: skip
"""Values of the right type."""


def keys_of(kind: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Returns {dotted key: type}."""
    keys = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        key = KEY_OF.get(prefix + name, prefix + name)
        if dataclasses.is_dataclass(hint):
            keys |= keys_of(hint, f"{prefix}{name}.")
        elif key is not None:
            keys[key] = hint
    return keys


KEYS = keys_of()
DEFAULTS = config_file.key_values(Config())


def typed(kind: Any, value: Any) -> Any:
    """Returns a YAML value as a key of type `kind`. Raises RefusedError for one of another type."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        result = typed(inner, value)
        limits = [note for note in notes if isinstance(note, Range)]
        if result is not None and any(result < limit.least for limit in limits):
            raise RefusedError(f"{result} is below the limit")
        return result
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else typed(_written(kind), value)
    if get_origin(kind) is Literal:
        fits = type(value) is str and value in get_args(kind)
    elif get_origin(kind) is tuple:
        value = [value] if type(value) is str else value
        fits = type(value) is list and all(type(item) is str for item in value)
        value = tuple(value) if fits else value
    elif kind is float:
        fits = type(value) in (int, float, str)
        try:
            value = float(value) if fits else value
        except (ValueError, OverflowError) as error:
            raise RefusedError(str(error)) from error
        fits = fits and math.isfinite(value)
    else:
        fits = type(value) is kind
    if not fits:
        raise RefusedError(f"{value!r:.80} is no {kind}")
    return value


class ConfigTarget(Target):
    """A configuration in YAML."""

    name = "config"

    def make(self, case: Case) -> None:
        path = case.folder / "config.yaml"
        shipped = [path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))]
        own = [yaml.safe_dump(SETTINGS), config_file.dump_config(Config())]
        path.write_text(case.pick([*shipped, *own * len(shipped)]))
        case.damage(
            (8, lambda: mutations.damage_file(case, path, lines=True)),
            (9, lambda: self._damage_values(case, path)),
            (1, lambda: mutations.replace_file(case, path)),
        )

    def _damage_values(self, case: Case, path: Path) -> str:
        tree, names = yaml.safe_load(path.read_text()), []
        for _ in range(case.pick([1, 1, 2])):
            name = "another root"
            if isinstance(tree, dict) and case.chance(60):
                name = self._set_a_key(case, tree)
            elif isinstance(tree, dict):
                tree, name = mutations.damage_tree(case, tree)
            names.append(name)
        path.write_text(mutations.dumps(tree), errors="surrogatepass")
        return "; ".join(names)

    @staticmethod
    def _set_a_key(case: Case, tree: Any) -> str:
        """Gives any key a hostile value, by its dotted path."""
        key = case.pick(list(KEYS))
        section, _, name = key.rpartition(".")
        holder = tree.setdefault(section, {}) if section else tree
        if not isinstance(holder, dict):
            return f"a key in {section}"
        plain = _plain(KEYS[key])
        typical = EXTREMES.get(plain) or list(get_args(plain)) or [None]
        if get_origin(plain) is tuple:
            typical = [[], ["kernel"], ["Block"], ["qkv", "mlp"], ["("], ["(a+)+$"], "mlp"]
        typical = st.sampled_from(typical)
        holder[name] = case.draw(st.one_of(typical, typical, mutations.HOSTILE))
        return f"{key} {holder[name]!r:.60}"

    def read(self, case: Case) -> Any:
        config = config_file.load_config(case.folder / "config.yaml")
        if case.done:  # what it describes too, up to compilation
            build(
                dataclasses.replace(config, train=dataclasses.replace(config.train, devices=None))
            )
        return config_file.key_values(config)

    def reference(self, case: Case) -> Any:
        try:
            text = (case.folder / "config.yaml").read_text()
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            _refuse_twice(node, set())
            content = {} if node is None else loader.construct_document(node) or {}
        except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise RefusedError(str(error)) from error
        values = {}
        for name, value in content.items():
            is_section = any(key.startswith(f"{name}.") for key in KEYS)
            keys = {f"{name}.{k}": v for k, v in (value or {}).items()} if is_section else {}
            for key, each in keys.items() if is_section else [(name, value)]:
                if key not in KEYS:
                    raise RefusedError(f"unknown key {key!r}")
                values[key] = typed(KEYS[key], each)
        if not values.get("output", "x").strip():
            raise RefusedError("an empty output")
        if (
            sum(map(bool, (values.get(f"units.{k}") for k in ("classes", "min_params", "scan"))))
            > 1
        ):
            raise RefusedError("units in two ways")
        return DEFAULTS | values


def _refuse_twice(node: Any, seen: set[int]) -> None:
    """Raises RefusedError if a key stands twice in a mapping."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            raise RefusedError("a key stands twice")
        for pair in node.value:
            for each in pair:
                _refuse_twice(each, seen)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _refuse_twice(each, seen)


TEXTS = [
    "", " ", "0", "1", "-1", "+3", "007", "1_000", "\uff11\uff12", "1e3", "1.5", "nan", "-inf",
    "1e999", "inf", "None", "null", "true", "False", "yes", "9" * 30, "9" * 5000, "0x10", "[1]",
    "{}", "a,b", "(", "(a+)+$", "*", "[", "../sentinel/file", "/dev/zero", "/", ".", "~", "%s",
    "{}", "é", "日本", "\udcff", "\x1b[2J", "\n", "error: x", "-", "--", "---", "=", "x" * 3000,
    "gpt", "cosine", "cpu:8", "h100:8", "cpu:0", "h100:999999999x9", "v5e:0x0", "v5p:2x2x2*-1",
    "bytes", "out/a", "train",
]  # fmt: skip
# What the first positional argument of a subcommand is called, and what it is in a valid call.
POSITIONAL = {
    "config": ["config.yaml"],
    "corpus": ["corpus.txt"],
    "folder": ["run"],
    "output": ["run"],
    "of": ["config.yaml", "run"],
}
OPTIONS = {
    "topology": "cpu:8",
    "tokenizer": "bytes",
    "devices": "8",
    "vocab_size": "300",
    "step": "1",
}
# Sections whose values must go together.
TOGETHER = ("units.", "lora.", "precision.", "remat", "offload.activation")
GOOD = {int: "8", float: "0.25", bool: "true", str: "text"}


def _plain(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else _written(kind)
    return kind


def _written(union: Any) -> Any:
    """The part of a union that a file can hold."""
    plain = (bool, int, float, str)
    return next(part for part in get_args(union) if part in plain or get_origin(part))


class CommandLineTarget(Target):
    """Subcommands, their options, and dotted overrides; a command stops where its work begins."""

    name = "command"
    may_write = ("out",)

    def prepare(self, seeds: Path) -> None:
        (seeds / "config.yaml").write_text(yaml.safe_dump({"train": {"steps": 5}}))
        (seeds / "corpus.txt").write_text("A river is long.\n" * 40)
        (seeds / "run").mkdir()

    def start(self) -> None:
        from fsdp_jax.checkpoint import verify
        from fsdp_jax.cli import certify
        from fsdp_jax.train import build, compile_ahead, huggingface, main, planning

        def reached(*args: Any, **kwargs: Any) -> int:
            Running.result = config_file.key_values(args[0]) if isinstance(args[0], Config) else {}
            raise FitError("the work begins here")

        for module, name in (
            (main, "train"), (build, "build"), (planning, "plan_of"), (planning, "search_fastest"),
            (certify, "certify_small"), (huggingface, "import_huggingface"),
            (huggingface, "export_huggingface"), (verify, "export_run"),
            (compile_ahead, "Ahead"),
        ):  # fmt: skip
            setattr(module, name, reached)

    def make(self, case: Case) -> None:
        (case.folder / "out").mkdir()
        for name in ("config.yaml", "corpus.txt"):
            (case.folder / name).write_bytes((case.seeds / name).read_bytes())
        (case.folder / "run").mkdir()
        if case.chance(90):
            argv = self._hostile(case)
            case.done.append(repr(argv)[:400])
        else:
            name = case.pick(["train", "certify", "inspect", "plan"])
            argv = [name, "config.yaml"] + ["--topology", "cpu:8"] * (name == "plan")
            argv += self._overrides(case, good=True)
        (case.folder / "argv.json").write_text(json.dumps(argv))

    def _hostile(self, case: Case) -> list[str]:
        # `launch` would start whatever follows it.
        names = ["train", "certify"] * 3 + sorted(COMMANDS.keys() - {"probe", "launch"})
        argv = [case.pick(names)]
        kinds = get_type_hints(COMMANDS[argv[0]], include_extras=True)
        argv += POSITIONAL[next(iter(kinds))]
        argv += self._options(case, kinds) + self._overrides(case, good=False)
        if case.chance(10):
            argv[case.pick([0, 1])] = case.pick(["-h", "--help", "trian", "nothing", *TEXTS])
        if case.chance(10):
            argv.insert(case.pick(range(len(argv) + 1)), case.pick(TEXTS))
        return argv

    @staticmethod
    def _overrides(case: Case, *, good: bool) -> list[str]:
        """Returns overrides of some keys; with `good`, each of the right type."""
        argv = []
        for _ in range(case.pick([0, 1, 1, 2, 5])):
            key = case.pick([key for key in KEYS if not key.startswith(TOGETHER)])
            kind = _plain(KEYS[key])
            text = GOOD.get(kind) or (get_args(kind)[0] if get_origin(kind) is Literal else "name")
            if not good and case.chance(50):
                text = case.pick([text, *TEXTS])
                key += case.pick(["s", ".", "\n", "="]) if case.chance(5) else ""
                key = key.replace("_", "-") if case.chance(30) else key
            argv += case.pick([[f"--{key}={text}"], [f"--{key}", text]])
        return argv

    @staticmethod
    def _options(case: Case, kinds: dict[str, Any]) -> list[str]:
        """Returns options of a command; what it writes is in `out`."""
        argv = []
        for option in list(kinds)[1:]:
            needed = option in ("to", "topology", "tokenizer")
            if not case.chance(90 if needed else 10):
                continue
            argv.append(f"--{option.replace('_', '-')}")
            if option in ("to", "html"):
                argv.append(f"out/{case.pick(['a', 'b/c', 'é', '[x]', ' ', 'x' * 250, 'x' * 300])}")
            elif option in OPTIONS and case.chance(70):
                argv.append(OPTIONS[option])
            elif _plain(kinds[option]) is not bool or case.chance(5):
                argv.append(case.pick(TEXTS))
        return argv

    def argv(self, case: Case) -> list[str]:
        return json.loads((case.folder / "argv.json").read_text())

    def read(self, case: Case) -> Any:
        raise AssertionError("the command itself reads")

    def reference(self, case: Case) -> Any:
        argv = self.argv(case)
        if not isinstance(Running.result, dict) or not Running.result:
            return Running.result  # help, or a command without a configuration
        given: dict[str, list[str]] = {}
        own = get_type_hints(COMMANDS[argv[0]], include_extras=True)
        rest = argv[1:]
        while rest:
            name, equals, text = rest.pop(0).partition("=")
            key = name[2:].replace("-", "_")
            if not name.startswith("--") or key in own:
                continue
            texts = [text] if equals else []
            is_list = get_origin(_plain(KEYS[key])) is tuple
            while rest and not rest[0].startswith("--") and (is_list or not texts) and not equals:
                texts.append(rest.pop(0))
            given[key] = texts
        values = {key: self._value(KEYS[key], texts) for key, texts in given.items()}
        return DEFAULTS | {"train.steps": 5} | values

    @staticmethod
    def _value(kind: Any, texts: list[str]) -> Any:
        plain = _plain(kind)
        if get_origin(plain) is tuple:
            return tuple(texts)
        text = texts[0]
        if plain is not kind and type(None) in get_args(kind) and text in ("None", "null"):
            return None
        try:
            value = int(text) if plain is int else text
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if plain is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        return typed(kind, value)
