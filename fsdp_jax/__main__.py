"""`python -m fsdp_jax` is `fsdp-jax`."""

import sys

from fsdp_jax.cli.main import main

sys.exit(main())
