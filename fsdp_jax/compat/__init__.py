"""Knowledge of other libraries beyond their documentation; see docs/design/other-libraries.md.

A module for each library and subject. Every public name has a test in `tests/compat/` that meets
the real library.
"""
