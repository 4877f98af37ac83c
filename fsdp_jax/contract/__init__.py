"""The communication contract: the collectives that a strategy declares, checked on the program."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jax.contract.contract import Contract as Contract
    from fsdp_jax.contract.contract import check_contract as check_contract
    from fsdp_jax.contract.running import RunningContract as RunningContract
    from fsdp_jax.contract.running import read_communication as read_communication

_MODULES = {"Contract": "contract", "check_contract": "contract"}
_MODULES |= {"RunningContract": "running", "read_communication": "running"}

__all__ = ["Contract", "RunningContract", "check_contract", "read_communication"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is used: a module of this package needs few of the others."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
