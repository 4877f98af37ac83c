"""One array on the devices: which slice each device holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import ClassVar

from fsdp_jax.errors import human_bytes
from fsdp_jax.tables import counted, text_table
from fsdp_jax.views.page import COLORS, REPLICATED_COLOR, View, axes_color, number_ranges

Range = tuple[int, int]  # start and stop, of one dim
Slice = tuple[Range, ...]  # a range for each dim
SHOWN = 32  # slices that `print` lists; `text()` and files have all
LINE = 16  # cells in a line of the picture; more are wrapped


@dataclass(frozen=True, repr=False)
class Grid:
    """A part of the picture: cells by row and column, each (slice, devices).

    `rows` and `columns` are the ranges at its sides, of the dims `row_dim` and `column_dim`.
    `is_flow`: one line of cells, to be wrapped.
    """

    caption: str
    row_dim: int | None
    column_dim: int | None
    rows: list[str]
    columns: list[str]
    cells: list[list[tuple[Slice, tuple[int, ...]]]]
    is_flow: bool

    @property
    def corner(self) -> str:
        """What the ranges at the sides are of: `dim 0 ↓`, `dim 1 →`."""
        sides = ((self.row_dim, "↓"), (self.column_dim, "→"))
        return "\n".join(f"dim {dim} {arrow}" for dim, arrow in sides if dim is not None)


@dataclass(frozen=True, repr=False)
class ArraySlices(View):
    """Which slice of an array each device holds; devices with the same slice are together.

    Attributes:
        name: path of the array, or empty.
        shape: of the array as it is stored.
        dtype: empty where only a shape is known.
        item_bytes: of one element; zero where only a shape is known.
        spec: the PartitionSpec as text, or the kind of another sharding.
        axes: {mesh axis: size}.
        dim_axes: for each dim, the mesh axes that it is split along.
        slices: {slice: ids of the devices that hold it}, in the array's order.
        processes: {device id: its process}; empty for devices that are not there.
        note: a further line, or empty.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    spec: str
    axes: Mapping[str, int]
    dim_axes: tuple[tuple[str, ...], ...]
    slices: Mapping[Slice, tuple[int, ...]]
    processes: Mapping[int, int] = field(default_factory=dict)
    note: str = ""

    template: ClassVar[str] = "array_slices.html.jinja"

    @property
    def title(self) -> str:
        """The array in one line: path, dtype and shape, spec, mesh."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.axes.items())
        array = f"{self.dtype}{shape_text(self.shape)}"
        return f"{self.name} {array}, {self.spec}".lstrip() + f" on {mesh}" * bool(mesh)

    @cached_property
    def parts(self) -> tuple[list[Range], ...]:
        """The ranges that each dim is cut into."""
        return tuple(sorted(set(ranges)) for ranges in zip(*self.slices, strict=True))

    @property
    def cut(self) -> list[int]:
        """The dims that are cut into several parts."""
        return [dim for dim, parts in enumerate(self.parts) if len(parts) > 1]

    @property
    def replicas(self) -> int:
        """How many devices hold the same slice; the most, where that differs."""
        return max(map(len, self.slices.values()))

    @property
    def several_processes(self) -> bool:
        """Whether the devices belong to several processes."""
        return len(set(self.processes.values())) > 1

    def notes(self) -> list[str]:
        """Lists in words: how many slices, how each dim is cut, what is replicated."""
        devices = sum(map(len, self.slices.values()))
        each = [stop - start for start, stop in next(iter(self.slices))]
        lines = [
            f"{counted(len(self.slices), 'slice')} of {shape_text(each)} on "
            f"{counted(devices, 'device')}, each slice on {self.replicas}"
        ]
        if self.item_bytes:
            lines[0] += f"; {human_bytes(prod(each) * self.item_bytes)} a device"
        for dim in self.cut:
            along = " and ".join(f"'{axis}'" for axis in self.dim_axes[dim])
            parts = f"dim {dim}: {len(self.parts[dim])} parts of {each[dim]}"
            lines.append(parts + f" along {along}" * bool(along))
        used = {axis for axes in self.dim_axes for axis in axes}
        copies = [axis for axis, size in self.axes.items() if size > 1 and axis not in used]
        if copies:
            lines.append("replicated along " + ", ".join(f"'{axis}'" for axis in copies))
        if self.note:
            lines.append(self.note)
        return lines

    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats the slices with their devices; of many, if not `whole`, the first and last."""
        columns = ["slice", "devices"] + ["processes"] * self.several_processes
        rows = []
        for index, devices in self.slices.items():
            cells = [self.slice_text(index), number_ranges(devices)]
            if self.several_processes:
                cells.append(number_ranges(self.processes_of(devices)))
            rows.append(cells)
        left_out = len(rows) - SHOWN
        if left_out > 0 and not whole:
            between = [f"… {left_out} more", *[""] * (len(columns) - 1)]
            rows = [*rows[: SHOWN // 2], between, *rows[-(SHOWN // 2) :]]
        return [self.title, *self.notes()], text_table(columns, rows), []

    def slice_text(self, index: Slice) -> str:
        """Formats a slice as it is written in Python; a dim that is not cut is `:`."""
        cells = [
            ":" if len(parts) == 1 else f"{start}:{stop}"
            for (start, stop), parts in zip(index, self.parts, strict=True)
        ]
        return f"[{', '.join(cells) or '...'}]"

    # The picture: the last two dims that are cut are its rows and columns.

    def grids(self) -> list[Grid]:
        """Arranges the cells of the picture; a grid for each part of the dims before the last two.

        An array that is cut along one dim is one line: stacked, or side by side for the last dim.
        """
        cut = list(self.cut)
        if len(cut) == 1 and cut[0] < len(self.shape) - 1:
            cut.append(len(self.shape) - 1)
        outer = cut[:-2]
        row_dim, column_dim = [None, None, *cut][-2:]
        grids = []
        for chosen in product(*(self.parts[dim] for dim in outer)):
            fixed = dict(zip(outer, chosen, strict=True))
            cells = [
                [self._cell(fixed | row | column) for column in self._choices(column_dim)]
                for row in self._choices(row_dim)
            ]
            sizes = len(cells), len(cells[0])
            caption = ", ".join(
                f"dim {dim}, {start}:{stop}" for dim, (start, stop) in fixed.items()
            )
            is_flow = 1 in sizes and max(sizes) > LINE
            if is_flow:
                caption = f"ranges of dim {cut[0]}"
            sides = self._side(row_dim), self._side(column_dim)
            grids.append(Grid(caption, row_dim, column_dim, *sides, cells, is_flow))
        return grids

    def _choices(self, dim: int | None) -> list[dict[int, Range]]:
        """Lists the parts of a dim, as {dim: range}; without a dim one empty choice."""
        if dim is None:
            return [{}]
        return [{dim: part} for part in self.parts[dim]]

    def _side(self, dim: int | None) -> list[str]:
        """Lists the labels at a side of the picture."""
        if dim is None:
            return [""]
        return [f"{start}:{stop}" for start, stop in self.parts[dim]]

    def _cell(self, fixed: Mapping[int, Range]) -> tuple[Slice, tuple[int, ...]]:
        """Finds the slice with these ranges, and its devices; none where no device holds it."""
        index = tuple(fixed.get(dim, parts[0]) for dim, parts in enumerate(self.parts))
        return index, self.slices.get(index, ())

    def dim_color(self, dim: int) -> str:
        """Chooses the colour of a dim's ranges: of the mesh axes that it is split along."""
        return axes_color(self.dim_axes[dim], self.axes)

    def processes_of(self, devices: Iterable[int]) -> set[int]:
        """Finds the processes of devices."""
        return {self.processes[device] for device in devices}

    def process_color(self, devices: Iterable[int]) -> str:
        """Chooses the colour of a cell by its process; grey for several."""
        processes = self.processes_of(devices)
        if len(processes) != 1:
            return REPLICATED_COLOR
        return COLORS[processes.pop() % len(COLORS)]


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape as JAX does after a dtype: `[4,8]`."""
    return f"[{','.join(map(str, shape))}]"
