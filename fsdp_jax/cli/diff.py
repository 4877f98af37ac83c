"""Reads what `fsdp-jax diff` compares: configurations, runs, layouts and plans in JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.sharding.layout_diff import LayoutDiff, diff_layouts
from fsdp_jax.tables import text_table
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import key_values, load_config
from fsdp_jax.train.run_files import CONFIG, LAYOUT

_PLAN = ("peak_bytes", "valley_bytes")  # keys that every plan has


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared; what it does not have is None."""

    name: str
    config: Config | None = None
    layout: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Difference:
    """The differences of two sides; `print` it. `keys` and `figures`: {name: both values}."""

    names: tuple[str, str]
    keys: Mapping[str, tuple[Any, Any]]
    figures: Mapping[str, tuple[Any, Any]]
    layout: LayoutDiff | None

    def to_json(self) -> dict[str, Any]:
        """Converts the differences to JSON."""
        layout = self.layout.to_json() if self.layout else None
        return {"of": self.names, "keys": self.keys, "figures": self.figures, "layout": layout}

    def __str__(self) -> str:
        blocks = [f"first:  {self.names[0]}\nsecond: {self.names[1]}"]
        for column, values in (("key", self.keys), ("figure", self.figures)):
            if values:
                rows = [(name, *map(_text, pair)) for name, pair in values.items()]
                blocks.append(text_table((column, "first", "second"), rows))
        if self.layout is not None:
            blocks.append(str(self.layout))
        if len(blocks) == 1:
            blocks.append("no difference")
        return "\n\n".join(blocks)


def difference(first: str, second: str, topology: str | None) -> Difference:
    """Compares two configurations, runs, or files of `inspect --json` or `plan --json`.

    `topology`: the machine that configurations are laid out on.

    Raises ConfigError for what is neither, and for a plan beside a layout.
    """
    sides = _read(first, topology), _read(second, topology)
    layouts = [side.layout for side in sides if side.layout is not None]
    plans = [side.plan for side in sides if side.plan is not None]
    if len(layouts) == 1:
        raise ConfigError(
            "a plan and a layout have nothing to compare",
            where="command line",
            got=f"{first} {second}",
            fix="two plans, or two of a configuration, a run and `inspect --json`",
        )
    configs = [key_values(side.config) for side in sides if side.config is not None]
    return Difference(
        names=(first, second),
        keys=_differing(*configs) if len(configs) == 2 else {},
        figures=_differing(*plans) if plans else {},
        layout=diff_layouts(*layouts) if layouts else None,
    )


def _read(path: str, topology: str | None) -> Side:
    """Reads one side."""
    folder = Path(path)
    if folder.is_dir():
        what, fix = "the layout of the run cannot be read", "the output directory of a run"
        layout = read_json_object(folder / LAYOUT, what, fix=fix)
        return Side(path, config=load_config(str(folder / CONFIG)), layout=layout)
    if folder.suffix != ".json":
        return _of_config(path, topology)
    fields = read_json_object(folder, "the file cannot be read")
    if "leaves" in fields:
        return Side(path, layout=fields)
    if all(name in fields for name in _PLAN):
        return Side(path, plan=fields)
    raise ConfigError(
        "neither a layout nor a plan",
        where=path,
        expected="the output of `inspect --json` or `plan --json`",
        got=f"the keys {', '.join(sorted(fields)[:5])}",
    )


def _of_config(path: str, topology: str | None) -> Side:
    """Lays out the state of a configuration."""
    from fsdp_jax.sharding.report import layout_json
    from fsdp_jax.train.build import build, topology_devices

    config = load_config(path)
    run = build(config, None if topology is None else topology_devices(topology))
    return Side(path, config=config, layout=layout_json(run.sharded.layout))


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Finds the names whose values differ, and both values; None where one has none."""
    return {
        name: (first.get(name), second.get(name))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    }


def _text(value: Any) -> str:
    """Formats a value in a line."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
