"""What of a traced program's form differs between releases of jax."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def scan_arguments(
    params: Mapping[str, Any], values: Sequence[T]
) -> tuple[list[T], list[T], list[T]]:
    """(constants, carry, slices) among the operands of a `scan` with these params, or among
    anything in their order.
    """
    if "ft_in" in params:  # since jax 0.12 a tree says which is which
        consts, carry, xs = map(list, params["ft_in"].update(values).unpack())
        assert len(list(params["ft_out"].unpack()[0])) == len(carry), (
            "a scan returns what it carries"
        )
        return consts, carry, xs
    start = params["num_consts"] + params["num_carry"]
    return (
        list(values[: params["num_consts"]]),
        list(values[params["num_consts"] : start]),
        list(values[start:]),
    )
