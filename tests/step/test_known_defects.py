"""The table of compiler defects: its form, and which steps it names."""

import re
from dataclasses import replace

import optax
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.step import known_defects as module
from fsdp_jax.step import xla_options
from fsdp_jax.step.known_defects import KNOWN_DEFECTS, KnownDefect, known_defects

DEFECT = KnownDefect("a/b#1", "gpu", "0.9.1", "0.10.2", "wrong", "wait", frozenset({"offload"}))


def test_an_entry_names_its_thread_its_releases_and_what_helps():
    for defect in KNOWN_DEFECTS:
        assert re.fullmatch(r"(jax-ml/jax|openxla/xla)#\d+", defect.source), defect
        assert module._release_order(defect.first) <= module._release_order(defect.last), defect
        assert defect.platform in ("gpu", "tpu", "cpu"), defect
        assert defect.symptom, defect
        assert defect.fix, defect
        assert defect.source in str(defect), defect
        assert "\n" not in str(defect), defect
    assert len(KNOWN_DEFECTS) == len({each.source for each in KNOWN_DEFECTS})


def test_releases_are_ordered_by_number():
    hits = {
        "0.9.0": False,
        "0.9.1": True,
        "0.10.0.dev20260512": True,
        "0.10.2": True,
        "0.10.10": False,
        "0.11.0": False,
        "0.9.1.dev20260101": False,
    }
    assert {jaxlib: DEFECT.hits(jaxlib, "gpu", "any", {"offload"}) for jaxlib in hits} == hits


def test_a_defect_needs_its_platform_and_what_it_depends_on():
    assert not DEFECT.hits("0.10.2", "tpu", "any", {"offload"})
    assert not DEFECT.hits("0.10.2", "gpu", "any", {"accumulation"})


def step_plan(offload=None, **arguments):
    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(
        lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        optax.sgd(0.1),
        mesh,
        min_size=1,
        offload=offload,
    )

    def loss(model, batch):
        return (model(batch["x"]) ** 2).sum(), batch["x"].size

    return sharded.make_train_step(loss, **arguments).plan


def test_the_features_of_a_step_are_read_from_its_plan():
    plain = module.step_features(step_plan())
    assert plain == {"annotations"}
    other = module.step_features(step_plan(accumulation=2, local_batch=True), processes=2)
    assert other == {"accumulation", "processes"}
    assert "offload" in module.step_features(step_plan(Offload(params=True)))


def test_only_what_hits_the_installed_release_is_returned(monkeypatch):
    plan = step_plan()
    here = KnownDefect("jax-ml/jax#1", "cpu", "0.1.0", "99.0.0", "slow", "wait")
    monkeypatch.setattr(module, "KNOWN_DEFECTS", (DEFECT, here))
    assert known_defects(plan) == [here]
    monkeypatch.setattr(module, "version", lambda name: "100.0.0")
    assert known_defects(plan) == []


def test_a_defect_whose_pass_is_disabled_is_not_named(monkeypatch):
    fix = "XLA_FLAGS=--xla_disable_hlo_passes=some-pass"
    here = KnownDefect("jax-ml/jax#1", "cpu", "0.1.0", "99.0.0", "wrong", fix)
    monkeypatch.setattr(module, "KNOWN_DEFECTS", (here,))
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=other")
    assert known_defects(step_plan()) == [here]
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=other,some-pass")
    assert known_defects(step_plan()) == []


def test_a_defect_of_a_pass_left_out_of_the_step_is_not_named(monkeypatch):
    (entry,) = (each for each in KNOWN_DEFECTS if each.source == "openxla/xla#46231")
    here = replace(entry, platform="cpu", first="0.1.0", last="99.0.0")
    monkeypatch.setattr(module, "KNOWN_DEFECTS", (here,))
    plan = step_plan(Offload(params=True))
    assert known_defects(plan) == [here]
    monkeypatch.setattr(xla_options, "GPU", ("cpu",))  # where steps are compiled without it
    assert known_defects(plan) == []


def test_the_wrong_order_of_offloaded_arrays_is_a_known_defect():
    (entry,) = (each for each in KNOWN_DEFECTS if each.source == "openxla/xla#46231")
    assert entry.hits("0.10.2", "gpu", "NVIDIA H100 80GB HBM3", {"offload"})
    assert not entry.hits("0.10.2", "tpu", "TPU v5", {"offload"})
