"""A run's trackers get what its own files have.

The runs share the compiled step of `conftest.py`.
"""

from runs import records
from test_trackers import events, scalars


def test_a_run_and_its_continuation_are_tracked(run):
    overrides = ("--track.tensorboard", "true", "--checkpoint.every", "2")
    assert run("tracked", *overrides, "--train.steps", "4") == 0
    assert run("tracked", *overrides, "--train.steps", "6") == 0
    folder = run.directory / "tracked"
    written = {record["step"]: record["loss"] for record in records(folder)}
    tracked = scalars(folder / "tensorboard", "loss")
    assert tracked.keys() == written.keys() == {1, 2, 3, 4, 5, 6}
    assert all(abs(tracked[step] - loss) < 1e-6 for step, loss in written.items())
    held_out = {record["step"] for record in records(folder, "evals.jsonl")}
    assert scalars(folder / "tensorboard", "evaluation/held_out_loss").keys() == held_out
    text = b"".join(event.SerializeToString() for event in events(folder / "tensorboard"))
    for attached in (b"train.global_batch_size", b"versions: fsdp_jax", b"full_shard on replica=1"):
        assert attached in text
