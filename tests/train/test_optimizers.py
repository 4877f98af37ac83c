"""Every optimizer of the registry updates parameters, or refuses a key that it does not apply."""

import jax
import jax.numpy as jnp
import optax
from collected import collected
from refusals import refused

from fsdp_jax.errors import ConfigError
from fsdp_jax.train.optimizers import OPTIMIZERS, OptimizerConfig, make_optimizer


def test_an_optimizer_applies_a_key_or_refuses_it():
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    gradients = jax.tree.map(jnp.ones_like, params)
    with collected() as case:
        for name, row in OPTIMIZERS.items():
            for key, value, applied in (
                ("clip", None, True),
                ("weight_decay", 0.1, not row.with_decay),
                ("moments", "bfloat16", row.moments),
            ):
                with case((name, key)):
                    settings = OptimizerConfig(name=name, **{key: value})
                    if not applied:
                        where = f"optimizer.{key}"
                        with refused(error=ConfigError, where=where, got=f"{value} with {name}"):
                            make_optimizer(settings, lambda count: 0.1)
                        continue
                    tx = make_optimizer(settings, lambda count: 0.1)
                    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
                    assert max(jax.tree.leaves(jax.tree.map(jnp.max, updates))) < 0
                    assert optax.tree.norm(updates) < 10


def test_where_there_is_no_decay_one_with_it_is_named():
    named = [row.with_decay for row in OPTIMIZERS.values() if row.with_decay]
    assert all(not OPTIMIZERS[name].with_decay for name in named)
