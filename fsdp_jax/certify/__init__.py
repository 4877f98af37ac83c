"""Compares a user's own model, loss and optimizer with the unsharded step, setting by setting."""

from fsdp_jax.certify.certificate import (
    Certificate,
    CertifyError,
    Failure,
    Row,
    Setting,
    Tolerance,
    tolerance_of,
)
from fsdp_jax.certify.comparison import certify

__all__ = [
    "Certificate",
    "CertifyError",
    "Failure",
    "Row",
    "Setting",
    "Tolerance",
    "certify",
    "tolerance_of",
]
