"""Tables of other trainers: read as their owners read them, and written for them."""

import re
from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import yaml
from flax import nnx
from for_each import for_each
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax.sharding import dialects
from fsdp_jax.sharding.dialects import to_path_rules
from fsdp_jax.sharding.mesh import spec_of
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases

MESH = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
lint, partition_specs, match_table, to_logical_axis_rules = (
    partial(function, axes="fsdp")  # of MESH, which has `data` too
    for function in (
        fsdp.lint,
        fsdp.partition_specs,
        dialects.match_table,
        dialects.to_logical_axis_rules,
    )
)
NAMES = ["batch", "embed", "mlp", "heads", "layers"]


def shaped(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def annotated(names):
    return {"w": nn.Partitioned(shaped(*(64 for _ in names)), names)}


def tables(axes: list[str]):
    """Tables of logical names: one axis, several, or none for each entry; names may repeat."""
    several = st.lists(st.sampled_from(axes), unique=True, max_size=3)
    entry = st.one_of(st.none(), st.sampled_from(axes), several.map(tuple))
    return st.lists(st.tuples(st.sampled_from(NAMES), entry), max_size=6)


def dims():
    return st.lists(st.sampled_from([*NAMES, None]), max_size=4).filter(
        lambda names: all(names.count(name) < 2 for name in NAMES)  # Flax refuses others
    )


def by_flax(names, table):
    return spec_of(entry or None for entry in nn.logical_to_mesh_axes(tuple(names), table))


def by_size_of_one(entry):
    """An entry of one axis in a tuple, as our specs never have it."""
    return entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry


# Tables of logical names


@given(dims(), tables(["data", "fsdp", "tensor"]))
def test_a_table_is_read_as_flax_reads_it(names, table):
    specs = partition_specs(annotated(names), MESH, logical_axes=table, min_size=10**9)
    assert specs["w"] == spec_of(by_size_of_one(entry) for entry in by_flax(names, table))


@given(dims(), tables(["data", "fsdp", "tensor", "expert"]))
def test_flax_reads_our_table_as_we_do(names, table):
    """Axes that the mesh lacks are left out of the table."""
    table = [*table, ("unused", "data")]  # a table with no axis of the mesh is refused
    specs = partition_specs(annotated(names), MESH, logical_axes=table, min_size=10**9)
    written = to_logical_axis_rules(table, MESH)
    assert specs["w"] == spec_of(by_size_of_one(entry) for entry in by_flax(names, written))


def test_an_entry_without_an_axis_leaves_its_name_to_the_next():
    mesh, names = AbstractMesh((8,), ("fsdp",)), ("embed", "mlp")
    table = [("mlp", "tensor"), ("mlp", "fsdp"), ("embed", None)]
    assert partition_specs(annotated(names), mesh, logical_axes=table)["w"] == P(None, "fsdp")
    written = to_logical_axis_rules(table, mesh)
    assert written == [("mlp", "fsdp"), ("embed", None)]
    assert by_flax(names, written) == P(None, "fsdp")


def test_a_parameters_own_table_is_read():
    table = [("embed", "fsdp"), ("mlp", "tensor")]
    init = nnx.initializers.lecun_normal()
    with nnx.use_eager_sharding(False):
        kernel_init = nnx.with_partitioning(init, ("embed", "mlp"), sharding_rules=table)
        linear = nnx.Linear(64, 64, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    own = nn.with_logical_partitioning(init, ("embed", "mlp"), rules=table)
    linen = nn.Dense(64, kernel_init=own).init(jax.random.key(0), jnp.zeros((1, 64)))
    assert partition_specs(nnx.state(linear), MESH)["kernel"] == P("fsdp", "tensor")
    assert partition_specs(linen, MESH)["params"]["kernel"] == P("fsdp", "tensor")
    ours_first = partition_specs(linen, MESH, logical_axes={"embed": None})
    assert ours_first["params"]["kernel"] == P(None, "tensor")


MAXTEXT = """
logical_axis_rules: [
  ['activation_batch', ['data', 'fsdp', 'fsdp_transpose', 'expert']],
  ['mlp', ['fsdp_transpose', 'tensor', 'autoregressive']],
  ['vocab', ['tensor', 'autoregressive']],
  ['heads', ['tensor', 'autoregressive']],
  ['embed', ['fsdp', 'fsdp_transpose', 'sequence', 'expert']],
  ['embed', ['fsdp', 'sequence', 'expert']],
  ['norm', 'tensor'],
  ['layers', 'stage'],
  ['kv', []],
]
"""


def decoder():
    return {
        "token_embedder": {"embedding": nn.Partitioned(shaped(512, 64), ("vocab", "embed"))},
        "mlp": {"wi": {"kernel": nn.Partitioned(shaped(64, 4, 256), ("embed", "layers", "mlp"))}},
        "query": {"kernel": nn.Partitioned(shaped(64, 8, 16), ("embed", "heads", "kv"))},
        "norm": {"scale": nn.Partitioned(shaped(64), ("norm",))},
    }


def test_a_table_of_maxtext_comes_from_its_yaml():
    table = yaml.safe_load(MAXTEXT)["logical_axis_rules"]
    assert flatten(partition_specs(decoder(), MESH, logical_axes=table)) == {
        "token_embedder/embedding": P("tensor", "fsdp"),
        "mlp/wi/kernel": P("fsdp", None, "tensor"),
        "query/kernel": P("fsdp", "tensor"),
        "norm/scale": P("tensor"),
    }
    one_axis = partition_specs(decoder(), AbstractMesh((8,), ("fsdp",)), logical_axes=table)
    assert one_axis["mlp"]["wi"]["kernel"] == P("fsdp")
    assert one_axis["norm"]["scale"] == P()


T5X = [  # standard_logical_axis_rules() for one parameter dim
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
]


def test_a_table_of_t5x_shards_each_array_along_an_axis_once():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    params = {
        "wi": nn.Partitioned(shaped(64, 256), ("embed", "mlp")),
        "square": nn.Partitioned(shaped(256, 256), ("mlp", "joined_kv")),
    }
    settings = {"logical_axes": T5X, "axes": "data"}
    exact = partition_specs(params, mesh, min_size=10**9, **settings)
    assert exact == {"wi": P(None, "model"), "square": P("model")}
    # Beyond the table, an array with no part along `data` is sharded along it by size.
    specs = partition_specs(params, mesh, min_size=1, **settings)
    assert specs == {"wi": P("data", "model"), "square": P("model", "data")}


# Tables of paths

EASYLM = (
    ("transformer/wte/embedding", P("tensor", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "tensor")),
    ("attention/wo/kernel", P("tensor", "fsdp")),
    ("attention_norm/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "tensor")),
    (".*", P(None)),
)
LLAMA = {
    "transformer/wte/embedding": (512, 64),
    "transformer/h/0/attention/wq/kernel": (64, 64),
    "transformer/h/0/attention/wo/kernel": (64, 64),
    "transformer/h/0/attention_norm/kernel": (64,),
    "lm_head/kernel": (64, 512),
    "step": (),
}


def match_partition_rules(rules, paths):
    """As EasyLM matches: the first pattern that is found, scalars replicated."""
    return {
        path: spec_of(next(spec for rule, spec in rules if re.search(rule, path)) if shape else ())
        for path, shape in paths.items()
    }


def test_a_table_of_easylm_matches_what_it_matches_there():
    params = unflatten({path: shaped(*shape) for path, shape in LLAMA.items()})
    assert flatten(partition_specs(params, MESH, EASYLM)) == match_partition_rules(EASYLM, LLAMA)


TRANSFORMERS = [
    (("transformer", "wpe", "embedding"), P("tensor", None)),
    (("transformer", "wte", "embedding"), P("tensor", None)),
    (("attention", "(q_proj|k_proj|v_proj)", "kernel"), P(None, "tensor")),
    (("attention", "out_proj", "kernel"), P("tensor", None)),
    (("mlp", "c_fc", "kernel"), P(None, "tensor")),
    (("mlp", "c_fc", "bias"), P("tensor")),
    (("ln_1", "bias"), None),
]
PARTS = [part for pattern, _ in TRANSFORMERS for part in re.findall(r"\w+", " ".join(pattern))]


def match_window(patterns, parts):
    """As `_match` of the examples of transformers, word for word in effect."""
    compiled = tuple(re.compile(one + "$") for one in patterns)
    for start in range(len(parts) - len(compiled) + 1):
        matches = [one.match(part) for one, part in zip(compiled, parts[start:], strict=False)]
        if matches and all(matches):
            return True
    return False


@given(st.lists(st.sampled_from(["0", "q", "kernels", *PARTS]), min_size=1, max_size=5))
def test_a_table_of_tuples_matches_what_it_matches_there(parts):
    params = reduce(lambda tree, part: {part: tree}, reversed(parts), shaped(64, 64))
    expected = next((spec for one, spec in TRANSFORMERS if match_window(one, parts)), "none")
    for pattern, spec in TRANSFORMERS:
        kinds = [finding.kind for finding in lint(params, MESH, [(pattern, spec)])]
        assert ("unused rule" not in kinds) == match_window(pattern, parts)
    used = [(one, spec) for one, spec in TRANSFORMERS if match_window(one, parts)][:1]
    (placed,) = flatten(partition_specs(params, MESH, used, min_size=10**9)).values()
    assert placed == spec_of(() if expected in (None, "none") else expected)


def test_specs_become_a_table_of_paths_and_specs_again():
    table = yaml.safe_load(MAXTEXT)["logical_axis_rules"]
    specs = partition_specs(decoder(), MESH, logical_axes=table)
    paths = to_path_rules(specs)
    assert partition_specs(decoder(), MESH, paths, strict=True) == specs
    boxes = flatten(decoder(), is_leaf=lambda leaf: hasattr(leaf, "names"))
    shapes = {path: box.value.shape for path, box in boxes.items()}
    assert match_partition_rules(paths, shapes) == flatten(specs)


# Both kinds, by `fully_shard`


@for_each("shape", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
def test_a_layout_reads_tables_as_the_rules_alone_do(shape):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            up = nn.with_logical_partitioning(init, ("embed", "mlp"))
            x = nn.Dense(512, kernel_init=up, name="up")(x)
            down = nn.with_partitioning(init, ("tensor", "fsdp"))
            return nn.Dense(128, kernel_init=down, name="down")(x)

    table = [("embed", "fsdp"), ("mlp", ["expert", "tensor"])]
    rules = [(("down", "bias"), None), ("bias", ("fsdp",))]
    mesh = jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )
    settings = {"rules": rules, "logical_axes": table}
    x = jnp.zeros((8, 128))
    sharded = fsdp.fully_shard(
        Named(), optax.adam(1e-3), mesh, data="fsdp", inputs=(x,), **settings
    )
    shapes = jax.eval_shape(Named().init, jax.random.key(0), x)["params"]
    specs = partition_specs(shapes, mesh, rules, logical_axes=table)
    assert flatten(specs) == {path: leaf.spec for path, leaf in sharded.layout.by_path.items()}
    assert specs["up"]["kernel"] == (P("fsdp", "tensor") if "tensor" in shape else P("fsdp"))
    assert specs["down"]["kernel"] == (
        P("tensor", "fsdp") if "tensor" in shape else P(None, "fsdp")
    )


# What matched what


def test_the_table_of_matches_has_every_parameter():
    table = yaml.safe_load(MAXTEXT)["logical_axis_rules"]
    params = decoder() | {"head": {"kernel": nn.Partitioned(shaped(64, 512), ("embd", "vocab"))}}
    matched = match_table(params, [("norm", None)], MESH, logical_axes=table)
    rows = {row[0]: row[1:] for row in matched.rows}
    assert rows["norm/scale"][:4] == ("(64,)", "('norm',)", "norm", "P()")
    names, rule, spec, dropped, reason = rows["mlp/wi/kernel"][1:]
    assert (names, rule, spec) == (
        "('embed', 'layers', 'mlp')",
        "annotation",
        "P('fsdp', None, 'tensor')",
    )
    assert dropped.split(", ")[-1] == "autoregressive"
    assert "'stage' of 'layers', not in the mesh" in reason
    kinds = {finding.kind: finding for finding in matched.notes}
    assert kinds["unused names"].text.endswith("activation_batch")
    unknown = next(note for note in matched.notes if note.where == "head/kernel")
    assert unknown.kind == "unknown axis"
    assert "did you mean 'embed'?" in unknown.text
    assert matched.findings == ()
    counts = "1 by rules, 4 by annotation, 0 by heuristic"
    assert matched.summary() == f"5 parameters: {counts}; findings: 0"
    assert all(row[0] in str(matched) for row in matched.rows)


def test_an_axis_for_two_dims_is_in_the_notes():
    table = [("embed", "fsdp"), ("mlp", "fsdp")]
    matched = match_table(annotated(("embed", "mlp")), [], MESH, logical_axes=table, min_size=10**9)
    (note,) = matched.notes
    assert (note.kind, note.where) == ("repeated axis", "w")
    assert note.text == "'mlp', whose mesh axis another dim has"


def test_what_would_be_refused_is_in_the_table_too():
    params = {"a": shaped(64, 64), "b": shaped(63, 64), "<c>": shaped(8)}
    rules = [("b", ("fsdp",)), ("a", ("fspd",)), ("nothing", None)]
    matched = match_table(params, rules, MESH)
    assert [one.kind for one in matched.findings] == [
        "indivisible dim",
        "unknown axis",
        "unused rule",
    ]
    assert {row[0]: row[3] for row in matched.rows}["b"] == "refused"
    assert list(matched.findings) == lint(params, MESH, rules)
    html = matched._repr_html_()
    assert "&lt;c&gt;" in html
    assert "<li>unused rule" in html


@for_each(
    "table", ["embed", ("embed", "fsdp"), {"embed": 3}, [("embed",)], 3, [(("a", "b"), "fsdp")]]
)
def test_a_malformed_table_is_refused_with_one_that_is_not(table):
    with pytest.raises(ValueError, match=r"logical axes are \(name, mesh axes\) pairs") as raised:
        partition_specs(annotated(("embed",)), MESH, logical_axes=table)
    mended = eval(re.search(r"such as (\[.*\])", str(raised.value))[1])
    specs = partition_specs(annotated(("embed",)), MESH, logical_axes=mended)
    assert specs == {"w": P("fsdp")}
