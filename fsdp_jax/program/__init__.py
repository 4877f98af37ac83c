"""Traced programs (jaxprs): what jax's primitives do, reading equations, evaluating them again."""
