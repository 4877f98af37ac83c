"""`python -m fsdp_jax` is `fsdp-jax`."""

import sys

from fsdp_jax.cli import main

sys.exit(main())
