"""Reads what `fsdp-jax diff` compares: configurations, runs, layouts and plans in JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ArgumentError, ConfigError, human_bytes
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.sharding.layout_diff import LayoutDiff, diff_layouts, layout_as_json
from fsdp_jax.tables import shortened, text_table
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import key_values, load_config
from fsdp_jax.train.run_files import CONFIG, LAYOUT

_PLAN = ("peak_bytes", "valley_bytes")  # keys that every plan has
_OF_BYTES = ("breakdown.", "valley.", "collectives.")
_WHAT = "a configuration, a run, or what `inspect --json` or `plan --json` wrote"
_LAID_OUT = "--topology h100:8 lays both out for a machine that need not be present"


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared; what it does not have is None."""

    name: str
    config: Config | None = None
    layout: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Difference:
    """The differences of two sides; `print` it.

    Attributes:
        names: of the sides, as they were given.
        keys: of configurations, {key: both values}.
        figures: of plans, {name: both values}; `breakdown.params` is a part of `breakdown`.
        layout: what is placed otherwise; None of plans.

    """

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
        if self.keys:
            rows = [(name, *map(_shortened, pair)) for name, pair in self.keys.items()]
            blocks.append(text_table(("key", "first", "second"), rows))
        lists = [
            name
            for name, pair in self.figures.items()
            if any(isinstance(value, list) for value in pair)
        ]
        rows = [
            (name, *(_figure_text(name, value) for value in pair))
            for name, pair in self.figures.items()
            if name not in lists
        ]
        if rows:
            blocks.append(text_table(("figure", "first", "second"), rows))
        if lists:
            blocks.append(f"these differ too, see --json: {', '.join(lists)}")
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
    sides = _read_side(first, topology), _read_side(second, topology)
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
        figures=_differing(*map(_by_name, plans)) if plans else {},
        layout=diff_layouts(*layouts) if layouts else None,
    )


def _read_side(path: str, topology: str | None) -> Side:
    """Reads one side; its errors name the path."""
    folder = Path(path)
    if folder.is_dir():
        what, fix = "the layout of the run cannot be read", "the output directory of a run"
        fields = read_json_object(folder / LAYOUT, what, fix=fix)
        layout = layout_as_json(fields, where=str(folder / LAYOUT))
        return Side(path, config=load_config(str(folder / CONFIG)), layout=layout)
    if folder.suffix != ".json":
        with _naming(path, "" if topology else _LAID_OUT):
            return _of_config(path, topology)
    if not folder.exists():
        raise ConfigError("there is no such file", where=path, expected=_WHAT)
    fields = read_json_object(folder, "the file cannot be read")
    if "leaves" in fields:
        return Side(path, layout=layout_as_json(fields, where=path))
    if all(name in fields for name in _PLAN):
        return Side(path, plan=fields)
    raise ConfigError(
        "neither a layout nor a plan",
        where=path,
        expected=_WHAT,
        got=f"the keys {', '.join(sorted(fields)[:5])}",
    )


@contextmanager
def _naming(path: str, fix: str) -> Iterator[None]:
    """Adds to the error of one side which it is, and a fix where it has none."""
    try:
        yield
    except ArgumentError as error:
        where = path if error.where == "CONFIG" else f"{path}: {error.where}"
        raise ConfigError(
            error.what,
            where=where,
            expected=error.expected,
            got=error.got,
            fix=error.fix or fix,
        ) from error


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


def _by_name(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Names the figures of a plan one by one: `time.step_s`, and bytes sent by kind and axis."""
    figures: dict[str, Any] = {}
    for name, value in plan.items():
        if isinstance(value, Mapping):
            figures |= {f"{name}.{part}": each for part, each in value.items()}
        elif name == "collectives":
            sent: Counter[str] = Counter()
            for row in value:
                sent[f"{name}.{row['op']} {row['dtype']} along {row['axis']}"] += row["bytes"]
            figures |= sent
        else:
            figures[name] = value
    return figures


def _figure_text(name: str, value: Any) -> str:
    """Formats a figure of a plan: bytes in binary units, a fraction of four digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _shortened(value)
    if name.endswith("_bytes") or name.startswith(_OF_BYTES):
        return human_bytes(value)
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"


def _shortened(value: Any) -> str:
    """Formats a value in a line; "-" stands for none."""
    return "-" if value is None else shortened(str(value), 60)
