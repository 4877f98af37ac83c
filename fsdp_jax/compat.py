"""Differences between releases of jax in the form of a traced program."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def scan_arguments(
    params: Mapping[str, Any], values: Sequence[T]
) -> tuple[list[T], list[T], list[T]]:
    """Returns (constants, carry, slices) of a `scan`'s operands, or of anything in their order."""
    if "ft_in" in params:  # since jax 0.12 a tree says which operand is which
        consts, carry, xs = map(list, params["ft_in"].update(values).unpack())
        carry_out = params["ft_out"].unpack()[0]
        assert len(list(carry_out)) == len(carry), "a scan returns its carry"
        return consts, carry, xs
    end_consts = params["num_consts"]
    end_carry = end_consts + params["num_carry"]
    return list(values[:end_consts]), list(values[end_consts:end_carry]), list(values[end_carry:])
