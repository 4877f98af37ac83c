"""Rules: which one wins, annotations, the size heuristic, the lint, and standalone use."""

import re
import warnings
from itertools import product
from math import prod
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from for_each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.sharding.mesh import axes_of, make_mesh, mesh_axes, shards_of, split_data
from fsdp_jax.sharding.param_leaves import logical_names, stacked_dims
from fsdp_jax.sharding.path_rules import rule_text
from fsdp_jax.sharding.rules import Rules, lint, partition_specs
from fsdp_jax.sharding.strategy import get_strategy

pytestmark = pytest.mark.releases

BOTH_AXES = ("replica", "data")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(4, 2)


def shaped(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp():
    return {
        "up": {"kernel": shaped(64, 256), "bias": shaped(256)},
        "down": {"kernel": shaped(256, 64)},
    }


def placed(leaf, mesh, *, stacked: int = 0, **settings):
    return Rules(**settings).place({"leaf": leaf}, mesh, stacked={"leaf": stacked})["leaf"]


# Rules


def test_the_first_rule_that_matches_wins(mesh):
    rules = [("up/kernel", (None, "data")), ("kernel$", ("data",)), ("bias", P())]
    placements = Rules(rules).place(mlp(), mesh)
    assert placements["up/kernel"].spec == P(None, "data")
    assert placements["up/kernel"].rule == "up/kernel"
    assert placements["down/kernel"].spec == P("data")
    assert (placements["up/bias"].spec, placements["up/bias"].rule) == (P(), "bias")


def test_a_rule_may_shard_what_the_heuristic_would_replicate(mesh):
    small = {"scale": shaped(8)}
    assert partition_specs(small, mesh) == {"scale": P()}
    assert partition_specs(small, mesh, [("scale", ("data",))]) == {"scale": P("data")}


@for_each("axes", [("data",), ("replica",), BOTH_AXES])
def test_fsdp_stands_for_the_axes_of_the_strategy(mesh, axes):
    rules = Rules([("kernel", (None, "fsdp"))], axes=axes)
    spec = rules.place({"kernel": shaped(8, 64)}, mesh)["kernel"].spec
    assert axes_of(spec[1]) == axes


@for_each(
    ("spec", "expected"),
    [
        (("embed", "mlp"), P("data", "replica")),
        (("mlp", "embed"), P("replica", "data")),
        (("whole", "both"), P(None, BOTH_AXES)),
        (("sharded", "whole"), P(BOTH_AXES)),
        ((("mlp", "embed"), None), P(BOTH_AXES)),
    ],
)
def test_logical_names_become_mesh_axes(mesh, spec, expected):
    logical = {
        "embed": "data",
        "mlp": "replica",
        "whole": None,
        "both": BOTH_AXES,
        "sharded": "fsdp",
    }
    assert partition_specs(shaped(64, 64), mesh, [("", spec)], logical_axes=logical) == expected


def test_a_list_from_a_configuration_file_is_a_spec(mesh):
    assert partition_specs(mlp(), mesh, [["up/kernel", [None, ["replica", "data"]]]])["up"][
        "kernel"
    ] == P(None, BOTH_AXES)


@for_each(
    ("spec", "fix"),
    [
        ("data", "('data',)"),
        (3, '(None, "fsdp")'),
        ((0,), '(None, "fsdp")'),
        (NamedSharding(make_mesh(8), P("data")), "its spec: P('data',)"),
    ],
)
def test_a_spec_has_an_entry_per_dim(spec, fix):
    with refused("one entry per dim", where="rule 'kernel'", fix=fix):
        Rules([("kernel", spec)])


@for_each("rules", [("kernel", ("data",)), "kernel", [("kernel",)], 3, ["ab"], [(3, None)]])
def test_rules_that_are_no_pairs_are_refused_with_one_that_is(mesh, rules):
    with refused("(pattern, spec) pairs", fix="a list of pairs, such as"):
        partition_specs(mlp(), mesh, rules)


def test_a_dict_of_rules_is_a_list_of_them(mesh):
    rules = {"up/kernel": (None, "data"), "kernel": ("data",)}
    assert partition_specs(mlp(), mesh, rules) == partition_specs(mlp(), mesh, [*rules.items()])


def test_a_last_rule_for_all_others_may_win_nowhere(mesh):
    rules = [("kernel", ("data",)), ("bias", None), (".*", None)]
    assert lint(mlp(), mesh, rules) == []
    shadowed = [(".*", None), ("kernel", ("data",))]
    assert [finding.kind for finding in lint(mlp(), mesh, shadowed)] == ["shadowed rule"]


def test_a_pattern_that_is_no_regular_expression_is_named():
    with pytest.raises(ValueError, match=r"not a regular expression(?s:.*)rule 'kernel\('"):
        Rules([("kernel(", ("data",))])


# The heuristic


@for_each(
    ("shape", "stacked", "expected"),
    [
        ((64, 256), 0, P(None, "data")),
        ((256, 64), 0, P("data")),
        ((64, 64), 0, P("data")),  # the first of equals
        ((255, 64), 0, P(None, "data")),  # the largest that divides, not the largest
        ((512, 16, 8), 1, P(None, "data")),  # never the layer dim
        ((512, 3, 8), 1, P(None, None, "data")),
        ((8, 4, 512, 2), 2, P(None, None, "data")),
    ],
)
def test_the_largest_dim_that_divides(mesh, shape, stacked, expected):
    placement = placed(shaped(*shape), mesh, stacked=stacked, min_size=1)
    assert placement.spec == expected
    assert placement.rule == "heuristic"
    assert f"largest dim divisible by 4 is dim {len(expected) - 1}" in placement.reason
    assert ("stacked layer dim" in placement.reason) == bool(stacked)


def test_min_size_counts_the_elements_of_one_layer(mesh):
    unstacked = placed(shaped(16, 64), mesh, min_size=1024)
    stacked = placed(shaped(16, 64), mesh, min_size=1024, stacked=1)
    assert unstacked.spec == P(None, "data")
    assert stacked.spec == P()
    assert stacked.reason == "64 elements, below min_size 1024"
    assert stacked.missed_shards == 1


def test_the_placement_of_an_indivisible_array_states_its_cost(mesh):
    placement = placed(shaped(63, 65), mesh, min_size=1)
    assert placement.spec == P()
    assert placement.missed_shards == 4
    assert "no dim of (63, 65) is divisible by 4: replicated" in placement.reason


def test_one_number_per_layer_is_replicated_and_not_wasted(mesh):
    for shape, stacked in (((), 0), ((32,), 1)):
        placement = placed(shaped(*shape), mesh, stacked=stacked, min_size=1)
        assert (placement.spec, placement.missed_shards, placement.reason) == (
            P(),
            1,
            "a scalar is replicated",
        )


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 96), max_size=4),
    stacked=st.integers(0, 2),
    axes=st.sampled_from([("data",), ("replica",), BOTH_AXES]),
    sizes=st.sampled_from([(4, 2), (2, 4), (8, 1), (1, 8), (3, 2)]),
    min_size=st.integers(0, 4096),
)
def test_whatever_the_shape_the_spec_fits(shape, stacked, axes, sizes, min_size):
    data, replica = sizes
    mesh = make_mesh(data, replica, allow_fewer=True)
    leaf = shaped(*shape)
    placement = placed(leaf, mesh, stacked=stacked, axes=axes, min_size=min_size)
    spec = placement.spec
    parts = [shards_of(mesh, entry) for entry in spec]
    used = [axis for entry in spec for axis in axes_of(entry)]
    assert len(spec) <= len(shape)
    assert all(size % n == 0 for size, n in zip(shape, parts, strict=False))
    assert not any(spec[:stacked])
    cutting = [axis for axis in axes if mesh.shape[axis] > 1]
    assert used in ([], list(axes)) or sorted(used) == sorted(cutting)
    one_layer, inner = prod(shape[stacked:]), shape[stacked:]
    by_one = any(size % shards_of(mesh, axes) == 0 for size in inner)
    deals = product(range(len(inner)), repeat=len(cutting)) if len(cutting) > 1 else ()
    by_several = any(
        all(
            size % prod(mesh.shape[a] for a, d in zip(cutting, deal, strict=True) if d == dim) == 0
            for dim, size in enumerate(inner)
        )
        for deal in deals
    )
    assert bool(used) == (one_layer >= min_size and (by_one or by_several))
    assert placement.missed_shards == 1 or not used
    assert NamedSharding(mesh, spec).shard_shape(tuple(shape)) is not None


# Stacks of layers


def test_layers_stacked_along_dim_0_are_found():
    shapes = {
        "embed/kernel": (512, 64),
        "blocks/attn/kernel": (12, 64, 192),
        "blocks/attn/bias": (12, 192),
        "blocks/norm/scale": (12, 64),
        "norm/scale": (64,),
    }
    assert stacked_dims(shapes) == {path: 1 for path in shapes if path.startswith("blocks")}


@for_each(
    "shapes",
    [
        {"blocks/0/kernel": (64, 192), "blocks/0/scale": (64,), "blocks/1/kernel": (64, 192)},
        {"norm/scale": (64,), "norm/bias": (64,)},
        {
            "q/kernel": (4096, 32, 128),
            "k/kernel": (4096, 8, 128),
            "v/kernel": (4096, 8, 128),
        },  # heads, not layers
        {"conv/kernel": (3, 3, 16, 32)},
        {"scalar": (), "matrix": (4, 4, 4)},
        {},
    ],
)
def test_subtrees_that_only_look_like_a_stack(shapes):
    assert stacked_dims(shapes) == {}


# Lint


def test_a_dim_that_names_an_axis_twice_is_refused():
    with refused("names an axis twice", where="rule 'up'"):
        Rules([("up", (("data", "data"), None))])


@for_each(
    ("rules", "kind", "text"),
    [
        ([("up/kernal", ("data",))], "unused rule", "no parameter; did you mean 'up/kernel'?"),
        (
            [("kernel", ("data",)), ("up/kernel", (None, "data"))],
            "shadowed rule",
            "taken by 'kernel'; put it before",
        ),
        (
            [("kernel", ("dta",))],
            "unknown axis",
            "'dta', neither a mesh axis nor in logical_axes; did you mean 'data'?",
        ),
        ([("kernel", ("fspd",))], "unknown axis", "did you mean 'fsdp'?"),
        ([("kernel", ("embd",))], "unknown axis", "did you mean 'embed'?"),
        ([("up/kernel", ("data", "data"))], "repeated axis", "'data', whose mesh axis another"),
        ([("up/kernel", ("fsdp", "embed"))], "repeated axis", "'fsdp', whose mesh axis another"),
        ([("up/bias", (None, "data"))], "rank mismatch", "has 2 entries for shape (256,)"),
        ([("odd", ("data",))], "indivisible dim", "splits dim 0 of (63, 64) in 4, by which"),
        ([("odd", ("data",))], "indivisible dim", "did you mean dim 1?"),
        ([("prime", ("data",))], "indivisible dim", "leave it to the heuristic, or pad"),
    ],
)
def test_findings_of_the_lint(mesh, rules, kind, text):
    params = {**mlp(), "odd": shaped(63, 64), "prime": shaped(61, 67)}
    findings = lint(params, mesh, rules, logical_axes={"embed": "data"})
    assert {finding.kind for finding in findings} == {kind}
    assert text in str(findings[0])
    assert str(findings[0]).startswith(f"{kind}: ")
    with pytest.raises(ValueError, match=f"do not fit this model \\({len(findings)}\\)"):
        partition_specs(params, mesh, rules, logical_axes={"embed": "data"})


def test_strict_wants_a_rule_or_an_annotation_for_every_leaf(mesh):
    params = {"named": nn.Partitioned(shaped(64, 64), names=("data", None)), **mlp()}
    findings = lint(params, mesh, [("kernel", ("data",))], strict=True)
    assert [(finding.kind, finding.where) for finding in findings] == [
        ("unmatched leaf", "up/bias")
    ]
    assert lint(params, mesh, [("kernel|bias", ("data",))], strict=True) == []


def test_all_findings_come_at_once(mesh):
    rules = [("nothing", ("data",)), ("up/kernel", ("data", "data")), ("down", ("dta",))]
    with pytest.raises(
        ValueError, match=r"\(3\)(?s:.*)unused rule(?s:.*)repeated axis(?s:.*)unknown axis"
    ):
        partition_specs(mlp(), mesh, rules)


@for_each("table", [{"embed": "data"}, {"embed": None}, {"mlp": "data"}])
@for_each("names", [("embed", "embed"), ("embed", None, ("embed", "data"))])
def test_a_name_on_two_dims_is_refused_as_flax_does(mesh, table, names):
    box = nn.Partitioned(shaped(*[64] * len(names)), names)
    if isinstance(names[-1], str):
        with pytest.raises(ValueError, match="more than once"):
            nn.logical_to_mesh_axes(names, tuple(table.items()))
    with pytest.raises(ValueError, match=r"repeated name: w: .*'embed' twice.*a rule"):
        partition_specs({"w": box}, mesh, logical_axes=table)
    # A rule takes the place of the annotation.
    ruled = partition_specs({"w": box}, mesh, [("w$", (None, "fsdp"))], logical_axes=table)
    assert ruled["w"] == P(None, ("replica", "data"))


# Settings that the mesh does not know


def test_settings_may_only_speak_of_axes_of_the_mesh(mesh):
    with refused("no axis 'modle'", where="logical_axes['mlp']"):
        partition_specs(mlp(), mesh, logical_axes={"mlp": "modle"})
    with refused("no axis 'dta'", where="axes", fix="did you mean 'data'"):
        partition_specs(mlp(), mesh, axes=("dta",))


@for_each("name", ["fsdp", "shard"])
@for_each("kind", [AxisType.Auto, AxisType.Explicit, None])
def test_meshes_of_ones_own_name_their_axes(name, kind):
    own: Mesh | AbstractMesh = AbstractMesh((4, 2), (name, "model"))
    if kind is not None:
        own = jax.make_mesh((4, 2), (name, "model"), axis_types=(kind,) * 2)
    rules = [("up/kernel", ("model", "fsdp"))]
    specs = partition_specs(mlp(), own, rules, axes=name)
    assert specs == {"up": {"kernel": P("model", name), "bias": P()}, "down": {"kernel": P(name)}}
    assert specs == partition_specs(mlp(), own, rules, axes=(name,))
    assert lint(mlp(), own, rules, axes=[name]) == []
    with jax.set_mesh(own) if isinstance(own, Mesh) else jax.sharding.use_abstract_mesh(own):
        assert specs == partition_specs(mlp(), own, rules, axes=name)


@for_each(
    ("shape", "default"),
    [
        ({"fsdp": 8}, "fsdp"),
        ({"x": 8}, "x"),
        ({"dp": 1, "x": 8}, "x"),
        ({"data": 4, "tensor": 2}, "data"),
        ({"data": 1, "tensor": 8}, "data"),
        ({"replica": 2, "data": 4}, BOTH_AXES),
        ({"data": 4, "replica": 2}, BOTH_AXES),
        ({"data": 1, "replica": 8}, "replica"),
        ({"x": 1}, "x"),
    ],
)
def test_the_axis_to_shard_along_is_that_of_fully_shard(shape, default):
    own = jax.make_mesh(
        tuple(shape.values()), tuple(shape), devices=jax.devices()[: prod(shape.values())]
    )
    assert partition_specs({"w": shaped(8, 256)}, own, min_size=1)["w"] == P(None, default)
    assert get_strategy("full_shard").shard_axes(mesh_axes(own)) == axes_of(default)


def test_the_reason_tells_a_rule_along_some_of_the_axes():
    own = AbstractMesh((2, 4), ("dp", "fsdp"))
    axes = ("dp", "fsdp")
    rules = Rules([("up/kernel", ("fsdp",)), ("down/kernel", (axes,))], axes=axes)
    placements = rules.place(mlp(), own)
    text = "first rule that matches; along ('fsdp',) alone of ('dp', 'fsdp')"
    assert (placements["up/kernel"].spec, placements["up/kernel"].reason) == (P("fsdp"), text)
    assert placements["down/kernel"].reason == "first rule that matches"


def test_an_annotation_along_other_axes_is_completed():
    named = {"w": nn.Partitioned(shaped(64, 512), (None, "other"))}
    for other in ("dp", "data", "replica"):
        own = AbstractMesh((2, 4), (other, "fsdp"))
        specs = partition_specs(named, own, axes="fsdp", logical_axes={"other": other})
        assert specs == {"w": P("fsdp", other)}


@for_each(
    ("names", "axes", "spec"),
    [
        (("data", "fsdp"), None, P("fsdp")),
        (("replica", "data", "fsdp"), None, P("fsdp")),
        *((("dp", "tp"), axes, P("dp")) for axes in (None, "fsdp", ("data",), ("dp", "tensor"))),
    ],
)
def test_a_mesh_that_does_not_say_its_axis_is_refused(names, axes, spec):
    own = AbstractMesh((2,) * len(names), names)
    with refused("which mesh axis shards the state" if axes is None else "no axis") as raised:
        partition_specs(mlp(), own, axes=axes)
    (fix,) = re.findall(r"axes=(\(.*\))", raised.value.fix)
    assert partition_specs(mlp(), own, axes=eval(fix))["down"]["kernel"] == spec


@for_each(
    ("axes", "what"),
    [
        ((), "not mesh axes"),
        (3, "not mesh axes"),
        (jnp.arange(2), "not mesh axes"),
        (("data", 3), "the mesh has no axis '3'"),
    ],
)
def test_axes_that_are_none_are_refused(mesh, axes, what):
    with refused(what, fix='axes=("data",)'):
        partition_specs(mlp(), mesh, axes=axes)


def test_arguments_in_another_order_are_refused(mesh):
    with refused("not a mesh", fix="(params, mesh, rules)"):
        partition_specs(mlp(), [], mesh)
    with refused("no array", fix="nnx.state(model, nnx.Param)"):
        partition_specs({"kernel": 3}, mesh)


def test_the_text_of_a_rule_is_one_for_all_layers_alike(mesh):
    shapes = {
        f"{block}/{layer}/q.1/w": (64, 8 * (layer + 1) if block == "odd" else 64)
        for block in ("blocks", "odd")
        for layer in range(2)
    }
    params = {path: shaped(*shape) for path, shape in shapes.items()}
    for path, winners in (("blocks/0/q.1/w", 2), ("odd/1/q.1/w", 1)):
        rule = eval(rule_text(path, P(None, "data"), shapes))
        placements = Rules([rule]).place(params, mesh)
        by_rule = [one for one, place in placements.items() if place.rule == rule[0]]
        assert path in by_rule
        assert len(by_rule) == winners
        assert placements[path].spec == P(None, "data")


# Alone, on trees from Flax


class Annotated(nnx.Module):
    """A kernel with logical axes, one without, and a batch norm."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(64, 256, rngs=rngs, kernel_init=init)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)


class LinenAnnotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(256, kernel_init=init)(x)
        return nn.Dense(64)(x)


def nnx_state():
    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.eval_shape(lambda: Annotated(nnx.Rngs(0))))


def linen_variables(unboxed: bool):
    variables = jax.eval_shape(lambda: LinenAnnotated().init(jax.random.key(0), jnp.zeros((1, 64))))
    return nn.meta.unbox(variables) if unboxed else variables


TREES = {
    "nnx": nnx_state,
    "pure nnx": lambda: nnx.to_pure_dict(nnx_state()),
    "linen boxed": lambda: linen_variables(False),
    "linen unboxed": lambda: linen_variables(True),
    "dicts": mlp,
    "a list": lambda: [shaped(64, 64), (shaped(8), {"x": shaped(256, 8)})],
}


def is_spec(leaf) -> bool:
    return isinstance(leaf, P)


@for_each("make", TREES.values())
def test_specs_come_in_the_same_tree_and_place_real_arrays(mesh, make):
    abstract = make()
    specs = partition_specs(abstract, mesh, min_size=64)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    sharded = jax.device_put(zeros, shardings)
    assert jax.tree.structure(sharded) == jax.tree.structure(abstract)
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    arrays = jax.tree.leaves(sharded)
    assert len(arrays) == len(flat_specs)
    for array, spec in zip(arrays, flat_specs, strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    assert any(not array.is_fully_replicated for array in arrays)


def test_the_trees_own_paths_are_what_rules_match(mesh):
    rules = [("up/kernel|Dense_0/kernel", (None, "data"))]
    assert partition_specs(nnx_state(), mesh, rules)["up"]["kernel"] == P(None, "data")
    for unboxed in (True, False):
        specs = partition_specs(linen_variables(unboxed), mesh, rules)
        assert specs["params"]["Dense_0"]["kernel"] == P(None, "data")


@for_each("path", ["up/kernel", "params/Dense_0/kernel"])
@for_each(
    ("logical", "spec", "rule", "dropped"),
    [
        (None, P(None, "data"), "heuristic", ("embed", "mlp")),
        ({"embed": "data"}, P("data"), "annotation", ("mlp",)),
        ({"embed": "data", "mlp": "tp"}, P("data"), "annotation", ("tp",)),
        ({"embed": "fsdp", "mlp": ("tp", "replica")}, P("data", "replica"), "annotation", ("tp",)),
        ({"embed": None, "mlp": "tp", "x": "data"}, P(None, "data"), "heuristic", ("tp",)),
        ({"embed": "data", "mlp": None}, P("data"), "annotation", ()),
        ({"embed": None, "mlp": None}, P(), "annotation", ()),
    ],
)
def test_of_an_annotation_what_the_mesh_has_remains(mesh, path, logical, spec, rule, dropped):
    tree = nnx_state() if path == "up/kernel" else linen_variables(False)
    with warnings.catch_warnings(action="error"):
        placement = Rules(logical_axes=logical or {}).place(tree, mesh)[path]
    assert (placement.spec, placement.rule, placement.dropped) == (spec, rule, dropped)
    assert placement.missed_shards == 1
    for name in dropped:
        assert f"'{name}'" in placement.reason.split("dropped: ")[1]
    assert ("nothing remains of annotation" in placement.reason) == (rule == "heuristic")
    if not dropped:
        assert placement.reason == "logical axes ('embed', 'mlp')"


@for_each(
    ("names", "spec", "rule"),
    [
        (("fsdp", "tp"), P("data"), "annotation"),
        ((("fsdp", "tp"), None), P("data"), "annotation"),
        ((None, "tp"), P(None, "data"), "heuristic"),
        (("tp", "replica"), P("data", "replica"), "annotation"),  # the heuristic shards the rest
        ((None, None), P(None, "data"), "heuristic"),
    ],
)
def test_axes_that_the_mesh_lacks_are_left_out_of_an_annotation(mesh, names, spec, rule):
    placement = Rules().place({"w": nn.Partitioned(shaped(128, 512), names)}, mesh)["w"]
    assert (placement.spec, placement.rule) == (spec, rule)
    assert placement.dropped == (("tp",) if "tp" in str(names) else ())


NO_NAMES = {
    "nnx": lambda: nnx.Param(shaped(128, 512), out_sharding=(None, None), eager_sharding=False),
    "linen": lambda: nn.Partitioned(shaped(128, 512), (None, None)),
    "its own table": lambda: nn.LogicallyPartitioned(
        shaped(128, 512), ("embed", None), rules=(("embed", None),)
    ),
}


@for_each("make", NO_NAMES.values())
def test_an_annotation_of_nones_goes_by_size(mesh, make):
    placement = Rules().place({"w": make()}, mesh)["w"]
    assert (placement.spec, placement.rule) == (P(None, "data"), "heuristic")
    assert "names no mesh axis" in placement.reason
    assert Rules(min_size=2**20).place({"w": make()}, mesh)["w"].spec == P()
    for spec in (None, P(), (None, None)):
        kept = Rules([("^w$", spec)]).place({"w": make()}, mesh)["w"]
        assert (kept.spec, kept.rule) == (P(), "^w$")
    by_table = Rules(logical_axes={"embed": None}).place(
        {"w": nn.Partitioned(shaped(128, 512), ("embed", None))}, mesh
    )["w"]
    assert (by_table.spec, by_table.rule) == (P(), "annotation")


def test_an_indivisible_annotation_of_nones_states_its_cost(mesh):
    box = nn.Partitioned(shaped(501, 501), (None, None))
    assert Rules().place({"w": box}, mesh)["w"].missed_shards == 4


def test_annotations_of_nones_keep_the_bytes_of_the_formula():
    init = nnx.initializers.lecun_normal()

    def make_model(rngs):
        def linear(names):
            kernel_init = nnx.with_partitioning(init, names)
            return nnx.Linear(256, 256, use_bias=False, rngs=rngs, kernel_init=kernel_init)

        return nnx.Sequential(linear(("fsdp", None)), linear((None, None)))

    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(make_model, optax.adam(1e-3), mesh, units="model")
    assert sharded.layout.per_device("params") == sharded.layout.total("params") / 8


def test_a_rule_of_ones_own_stays_strict(mesh):
    for logical in ({"mlp": "tp", "embed": "data"}, {"embed": "data"}):
        (finding,) = lint(mlp(), mesh, [("up/kernel", ("embed", "mlp"))], logical_axes=logical)
        assert finding.kind == "unknown axis"
        assert "logical_axes={'mlp': None} leaves its dim unsharded" in finding.text
        mended = logical | {"mlp": None}
        assert lint(mlp(), mesh, [("up/kernel", ("embed", "mlp"))], logical_axes=mended) == []


def test_the_fix_of_an_annotation_that_does_not_fit_works(mesh):
    params = {
        "odd": nn.Partitioned(shaped(63, 64), names=("data", None)),
        "flat": nn.Partitioned(shaped(64), names=(None, "data")),
    }
    findings = lint(params, mesh)
    assert [finding.kind for finding in findings] == ["rank mismatch", "indivisible dim"]
    rules = [eval(re.search(r"replicates it: (\(.*\))", finding.text)[1]) for finding in findings]
    assert partition_specs(params, mesh, rules) == {"odd": P(), "flat": P()}


def test_annotations_made_before_layers_were_stacked(mesh):
    tree = {"w": nn.Partitioned(shaped(12, 64, 64), names=("data", None))}
    assert Rules().place(tree, mesh, stacked={"w": 1})["w"].spec == P(None, "data")


def test_logical_names_of_leaves_without_any():
    assert logical_names(shaped(4)) is None
    assert logical_names(SimpleNamespace(names=P("a", None))) == ("a", None)


@for_each(("names", "fix"), [("fsdp", "('fsdp',)"), ((0, None), '("embed", None)')])
def test_an_annotation_that_is_none_is_refused(mesh, names, fix):
    boxed = {"w": nn.Partitioned(shaped(64, 64), names)}
    with refused("one entry per dim", fix=f"with_partitioning(init, {fix})"):
        partition_specs(boxed, mesh)


# Where `data` is several axes


@for_each(
    ("sizes", "shape", "stacked", "spec", "reason"),
    [
        ((2, 4), (64, 6), 0, P(("data_0", "data_1")), "largest dim divisible by 8 is dim 0"),
        (
            (2, 4),
            (6, 20),
            0,
            P("data_0", "data_1"),
            "no dim is divisible by 8: dim 0 in 2 and dim 1 in 4",
        ),
        ((2, 4), (20, 6), 0, P("data_1", "data_0"), "dim 0 in 4 and dim 1 in 2"),
        ((2, 2, 2), (20, 6), 0, P(("data_0", "data_1"), "data_2"), "dim 0 in 4 and dim 1 in 2"),
        (
            (2, 2, 2),
            (6, 6, 6),
            0,
            P("data_0", "data_1", "data_2"),
            "dim 0 in 2 and dim 1 in 2 and dim 2 in 2",
        ),
        ((2, 4), (4, 6, 20), 1, P(None, "data_0", "data_1"), "dim 1 in 2 and dim 2 in 4"),
        ((2, 4), (8, 6, 21), 1, P(), "no dim of (8, 6, 21) is divisible by 8: replicated"),
        ((2, 4), (6, 6), 0, P(), "no dim of (6, 6) is divisible by 8: replicated"),
    ],
)
def test_an_array_may_be_sharded_along_several_dims(sizes, shape, stacked, spec, reason):
    mesh = split_data(mesh_axes(make_mesh(8)), sizes).mesh
    placement = placed(shaped(*shape), mesh, stacked=stacked, min_size=1, axes=mesh.axis_names[1:])
    assert placement.spec == spec
    assert reason in placement.reason
    assert placement.missed_shards == (1 if spec else 8)


@for_each(
    ("arguments", "what"),
    [
        ({"min_size": "16"}, "not a number of elements\n  where:    min_size"),
        ({"logical_axes": jnp.arange(2)}, "where:    logical_axes"),
        ({"rules": [((3,), ("data",))]}, "where:    rule '3'\n  expected: text"),
    ],
)
def test_arguments_of_another_kind_are_refused(mesh, arguments, what):
    arguments = {"rules": ()} | arguments
    with pytest.raises(ValueError, match=what):
        partition_specs({"a": shaped(16, 64)}, mesh=mesh, **arguments)
