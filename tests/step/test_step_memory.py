"""The memory of compiled programs, the user's own and the library's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp


def test_of_a_program_of_the_users_own():
    def step(state, batch):
        return jax.tree.map(lambda x: x + batch.sum(), state), batch @ batch.T

    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower({"w": jnp.ones((64, 64))}, jnp.ones((32, 64))).compile()
    shown = fsdp.step_memory(compiled)
    (bar,) = shown.bars
    sizes = {"donated arguments": 64 * 64 * 4, "other arguments": 32 * 64 * 4}
    assert bar.parts.items() >= sizes.items()
    assert bar.parts["new results"] >= 32 * 32 * 4
    assert shown.kind_rows()[0] == ["donated arguments", "16 KiB"]


def test_of_a_step_of_the_library():
    sharded = fsdp.fully_shard(
        lambda rngs: nnx.Linear(64, 64, rngs=rngs), optax.adam(1e-3), fsdp.make_mesh()
    )
    step = sharded.make_train_step(lambda model, batch: ((model(batch["x"]) ** 2).sum(), 1))
    with refused(expected="a step that was called once"):
        fsdp.step_memory(step)
    state, _ = step(sharded.init(seed=0), {"x": np.ones((8, 64), "float32")})
    shown = fsdp.step_memory(step)
    assert shown.bars[0].parts["donated arguments"] == fsdp.device_bytes(state).bars[0].total
