"""Figures estimated by arithmetic alone, without compiling for the target."""
