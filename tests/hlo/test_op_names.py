"""Names of operations, as tracing and XLA's combiner write them."""

import pytest

from fsdp_jax.hlo.op_names import scoped_paths, split_merged_names, strip_tracing

pytestmark = pytest.mark.releases


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(f)/mul", ["jit(f)/mul"]),
        ("jit(f)/(a/b:c)", ["jit(f)/a/b", "jit(f)/c"]),
        ("jit(f)/(a/(b:c)/d:e)/g", ["jit(f)/a/b/d/g", "jit(f)/a/c/d/g", "jit(f)/e/g"]),
        ("jit(f)/transpose(jvp(a:b))/c", ["jit(f)/transpose(jvp(a:b))/c"]),
        (
            "jit(f)/(jvp()/x:transpose(jvp(jit(g)))/y)",
            ["jit(f)/jvp()/x", "jit(f)/transpose(jvp(jit(g)))/y"],
        ),
        ("", [""]),
        ("jit(f)/(never closed:", ["jit(f)/(never closed:"]),
    ],
)
def test_combined_names_are_expanded(name, expected):
    assert split_merged_names(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "jit(f)/jvp()/while/body/closed_call/fsdp.gather[blocks/attn/qkv]/all_gather",
            ["blocks/attn/qkv"],
        ),
        ("jit(step)/transpose(jvp(fsdp.reduce[head]))/reduce_scatter", ["head"]),
        # XLA cuts the common beginning at a slash, inside the brackets too
        (
            "jit(f)/fsdp.gather[mlp/(up/w]/all_gather:down/w]/all_gather)",
            ["mlp/up/w", "mlp/down/w"],
        ),
        ("jit(f)/dot_general", []),
    ],
)
def test_scopes(name, expected):
    assert scoped_paths(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(step)/jvp()/while/body/closed_call/dot_general", "dot_general"),
        (
            "jit(f)/transpose(jvp(mlp))/while/body/checkpoint/rematted_computation/up/dot_general",
            "mlp/up/dot_general",
        ),
        (
            "jit(f)/jvp(GPT/blocks)/vmap(BTNH,BSNH->BNTS)/dot_general",
            "GPT/blocks/BTNH,BSNH->BNTS/dot_general",
        ),
        ("jit(f)/shard_map/cond/branch_1_fun/psum", "psum"),
        ("jit(f)/(a/add:a/mul)", "a/add+a/mul"),
        ("jit(f)/jvp(mlp)/reshape;checkpoint/mlp/reshape", "mlp/reshape"),
        ("", ""),
    ],
)
def test_what_tracing_adds_is_stripped(name, expected):
    assert strip_tracing(name) == expected


def test_a_factored_prefix_may_end_inside_a_bracket():
    name = "jit(f)/jvp(fsdp.gather[mlp/(down/w])/all_gather:gate/w])/all_gather:up/w])/all_gather)"
    assert scoped_paths(name) == ["mlp/down/w", "mlp/gate/w", "mlp/up/w"]


def test_a_function_whose_own_name_contains_slashes():
    assert scoped_paths("jit(f)/jit(fsdp.gather[mlp/up])/add") == ["mlp/up"]
    assert strip_tracing("jit(f)/jvp(shard_map)/foo(fsdp[mlp/up])/add").endswith("add")
