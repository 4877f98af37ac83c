"""Makes the batches that a model is certified on: the user's, and rearranged rows of one of them.

[Note: which rearrangements] With local batches a loss runs on the rows of each device. A loss that
depends on all rows at once (`(targets == 0).any()`, a mean, whether a mask has a one) equals the
sum of its parts if every device gets the same answer, which is likely on one batch of mixed rows.
It differs where devices hold rows that are as unlike as possible:

- sorted: as many rows as there are devices, at even distances in the order of their values, each
  repeated until it fills a device. The order is by the mean of a leaf, and of another leaf each
  time: first of leaves with few different means (labels, masks), on which most conditions depend.
- drawn: as sorted, but of rows at random, for differences that no order shows.
- permuted: all rows in another order, so that each device has others, of the same mixture.
- rolled: all rows in their order, but split at other places.

The control gets the same rows in the same order, so that any loss is comparable. All have the shape
of the given batch: no step is compiled twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import jax
import numpy as np

from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import PyTree, array_texts, flatten


@dataclass(frozen=True)
class Trial:
    """A batch to compare a step on.

    Attributes:
        name: describes it in the verdict.
        batch: arrays [rows, ...].
        order: indices of its rows.
        fills: each device has copies of one row; these are far apart in the order.
        given: the user passed it; others are made of its rows.

    """

    name: str
    batch: PyTree
    order: np.ndarray
    fills: bool = False
    given: bool = True

    def taken(self, rows: int, shards: int, accumulation: int) -> PyTree:
        """Takes the batch of a step: arrays [rows, ...].

        `shards`: of a microbatch; each shard has rows / (shards x accumulation) of its own.
        """
        order = self.order[:rows]
        if self.fills:
            parts = shards * accumulation
            places = np.linspace(0, len(self.order) - 1, parts).round().astype(int)
            # Each microbatch gets rows of the whole order, and not a stretch of it.
            places = places.reshape(shards, accumulation).T.ravel()
            order = np.repeat(self.order[places], rows // parts)
        return jax.tree.map(lambda leaf: leaf[order], self.batch)


def make_trials(
    batch: PyTree, others: Sequence[PyTree], number: int, seed: int, shards: int
) -> tuple[Trial, ...]:
    """Makes trials: the given batch, the user's others, and `number` rearrangements; see the note.

    `batch`: NumPy arrays [rows, ...]; `others`: of the same shapes, or it is a ValueError.
    """
    # The user's own first: a failure on these is the plainest to reproduce.
    rows = np.arange(len(jax.tree.leaves(batch)[0]))
    trials = [Trial("the given one", batch, rows)]
    for index, other in enumerate(others):
        arrays = jax.tree.map(np.asarray, other)
        _check_like(batch, arrays, f"batches[{index}]")
        trials.append(Trial(f"batches[{index}]", arrays, rows))
    return (*trials, *islice(_rearrangements(batch, rows, seed, shards), number))


def _rearrangements(batch: PyTree, rows: np.ndarray, seed: int, shards: int) -> Iterator[Trial]:
    """Yields rearrangements of a batch without end; see the note. Sorted ones come in between."""
    random = np.random.default_rng(seed)
    sorted_by = iter(_sorted_rows(batch, rows))
    for turn in count(1):
        which = ""
        if turn > 1:
            which = f" ({turn})"
        # Half a device's rows, and one more in each turn.
        shift = max(len(rows) // shards // 2, 1) + turn - 1
        for name, order, fills in (
            (f"its rows permuted{which}", random.permutation(rows), False),
            (f"its rows drawn, one for each device{which}", random.permutation(rows), True),
            (f"its rows rolled by {shift}", np.roll(rows, shift), False),
        ):
            # The next sorted order, while there is one.
            for leaf, by_value in islice(sorted_by, 1):
                filled = f"its rows sorted by {leaf}, one for each device"
                yield Trial(filled, batch, by_value, fills=True, given=False)
            yield Trial(name, batch, order, fills=fills, given=False)


def _sorted_rows(batch: PyTree, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Sorts the rows by each leaf in turn: (path of the leaf, indices of the rows in its order).

    First is the order of the leaf with the fewest different means over a row; the others decide
    between rows that have the same mean.
    """
    # The mean of each row, for leaves whose rows differ.
    keys = []
    for path, leaf in flatten(batch).items():
        if not leaf.size:
            continue
        with np.errstate(all="ignore"):
            means = np.real(leaf).reshape(len(leaf), -1).astype(np.float64).mean(1)
        different = len(np.unique(means))
        if different > 1:
            keys.append((different, path or "value", means))
    keys.sort(key=lambda key: key[:2])
    if not keys:
        return [("value", rows)]
    # One order by each leaf, with the others as further keys.
    orders = []
    for first in range(len(keys)):
        turned = keys[first:] + keys[:first]
        order = np.lexsort([means for *_, means in reversed(turned)])  # the last is the first key
        orders.append((turned[0][1], order))
    return orders


def _check_like(batch: PyTree, other: PyTree, where: str) -> None:
    """Checks a batch against the first; raises ValueError for other names, shapes or dtypes."""
    expected, got = array_texts(batch), array_texts(other)
    structures = {jax.tree.structure(tree) for tree in (batch, other)}
    if expected != got or len(structures) > 1:
        raise ArgumentError(
            "a batch unlike the first",
            where=where,
            expected=expected,
            got=got,
            fix="pass batches of the same names, shapes and dtypes",
        )
