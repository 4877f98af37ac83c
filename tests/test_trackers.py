"""Trackers get the numbers of a run; one that fails is reported, and ends nothing.

The scalar is an array of jax, as a step's metrics are; nothing else is compiled.
"""

import html
import struct
import sys
import time
from dataclasses import fields
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from fsdp_jax.errors import ConfigError, MissingPackageError
from fsdp_jax.trackers import TRACKERS, TrackerOptions, Trackers

CONFIG = {"train.steps": 5, "strategy": "full_shard"}
TEXTS = {"layout": "blocks/0/kernel  P('data')"}


def events(folder):
    """Reads the event files of TensorBoard, oldest first."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (size,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + size])
            found.append(event)
            data = data[16 + size :]
    return found


def scalars(folder, name):
    values = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return {step: value.simple_value for step, value in values if value.tag == name}


def test_every_tracker_has_an_option():
    assert [field.name for field in fields(TrackerOptions)] == [*TRACKERS, "name"]


def test_tensorboard_has_numbers_and_hides_repeated_steps(tmp_path):
    options = TrackerOptions(tensorboard=True)
    with Trackers(options, tmp_path, CONFIG, TEXTS) as trackers:
        trackers.log(1, {"loss": jnp.float32(0.5), "metrics": {"accuracy": np.array([0.25])}})
        trackers.log(2, {"loss": float("nan"), "time": "12:00", "mfu": None, "tokens": 64})
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "loss") == {1: 0.5}
    assert scalars(folder, "metrics/accuracy") == {1: 0.25}
    assert scalars(folder, "tokens") == {2: 64}
    text = b"".join(event.SerializeToString() for event in events(folder))
    assert b"full_shard" in text
    assert b"blocks/0/kernel" in text
    # A run that goes on after step 1 hides step 2 of before.
    with Trackers(options, tmp_path, step=1) as trackers:
        trackers.log(2, {"loss": 0.25})
        trackers.log(3, {"loss": 0.5})
        # It goes back to step 1 without a restart, as after a spike of the loss.
        trackers.log(2, {"loss": 0.75})
        trackers.log(2, {"evaluation/loss": 1.0})
    starts = [event.step for event in events(folder) if event.HasField("session_log")]
    assert starts == [1, 2, 2]
    written = [event for event in events(folder) if event.summary.value]
    assert [event.step for event in written][-4:] == [2, 3, 2, 2]


def test_wandb_gets_one_run_over_restarts_and_no_step_twice(tmp_path, monkeypatch, capsys):
    """By a module in its place; the next test has the real one."""
    calls, starts = [], []
    run = SimpleNamespace(
        log=calls.append, finish=lambda: calls.append("end"), define_metric=lambda *_, **__: None
    )
    wandb = SimpleNamespace(
        init=lambda **settings: starts.append(settings) or run,
        Settings=lambda **settings: settings,
        Html=lambda text, inject: text,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step, losses in enumerate([{1: 0.5, 2: 0.625}, {2: 0.375, 3: 0.875}]):
        with Trackers(TrackerOptions(wandb="project"), tmp_path, CONFIG, TEXTS, step=step) as each:
            for number, loss in losses.items():
                each.log(number, {"loss": loss})
    page = {"layout": f"<pre>{html.escape(TEXTS['layout'])}</pre>"}
    first = [page, {"loss": 0.5, "step": 1}, {"loss": 0.625, "step": 2}, "end"]
    assert calls == [*first, page, {"loss": 0.875, "step": 3}, "end"]
    assert starts[0] == starts[1]  # one id
    assert (starts[0]["project"], starts[0]["config"]) == ("project", CONFIG)
    assert capsys.readouterr().err.count("note: wandb has steps up to 2") == 1


@pytest.mark.long
def test_wandb_offline_keeps_one_run_over_restarts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    written = [{1: 0.5, 2: 0.625}, {2: 0.375, 3: 0.875}]
    for step, losses in enumerate(written):
        with Trackers(TrackerOptions(wandb="project"), tmp_path, CONFIG, TEXTS, step=step) as each:
            for number, loss in losses.items():
                each.log(number, {"loss": loss})
        time.sleep(1)  # W&B names a start by its second.
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "one id"
    first, second = (file.read_bytes() for file in files)
    for word in (b"loss", b"full_shard", b"0.5", b"0.625"):
        assert word in first
    assert b"0.375" not in second, "step 2 was sent before"
    assert b"0.875" in second
    (page, *_) = (tmp_path / "wandb").glob("offline-run-*/files/media/html/layout_*.html")
    assert "blocks/0/kernel  P(" in page.read_text()
    assert capsys.readouterr().err.count("note: wandb has steps up to 2") == 1


def test_trackio_gets_the_same(tmp_path, monkeypatch):
    """By a module in its place: its dependencies and those of this suite exclude each other."""
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    trackio = SimpleNamespace(init=lambda **arguments: calls.append(arguments) or run)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with Trackers(TrackerOptions(trackio="project", name="mine"), tmp_path, CONFIG, TEXTS) as each:
        each.log(3, {"loss": 0.5, "step": 3})
        each.log(3, {"evaluation": {"loss": 0.25}})
        each.log(2, {"loss": 0.5})  # It went back.
        each.log(3, {"loss": 0.5})
        each.log(4, {"loss": 0.5})
    started = {"project": "project", "name": "mine", "resume": "allow", "config": CONFIG | TEXTS}
    sent = [(3, {"loss": 0.5}), (3, {"evaluation/loss": 0.25}), (4, {"loss": 0.5})]
    assert calls == [started, *sent, "end"]


def test_a_package_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with refused(error=MissingPackageError, fix="pip install 'fsdp_jax[trackio]'"):
        Trackers(TrackerOptions(trackio="project"), tmp_path)


def test_a_tracker_that_does_not_start_is_refused_by_its_key(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError("not logged in")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=refuse))
    got = "PermissionError: not logged in"
    with refused(error=ConfigError, where="track.trackio", got=got):
        Trackers(TrackerOptions(trackio="project"), tmp_path)


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise ConnectionError("the network is gone")

    run = SimpleNamespace(log=fail, finish=fail)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: run))
    options = TrackerOptions(trackio="project", tensorboard=True)
    with Trackers(options, tmp_path) as trackers:
        for step in (1, 2):
            trackers.log(step, {"loss": 0.5})
    said = capsys.readouterr().err
    assert said.count("trackio gets no more numbers of this run") == 1
    assert "ConnectionError: the network is gone" in said
    assert scalars(tmp_path / "tensorboard", "loss") == {1: 0.5, 2: 0.5}
