"""`scripts/gpu`: from end to end at toy size, on a CPU.

The script of the kernels compiles a matmul and an attention, whose time is its result.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts/gpu"
ROWS = {"kernels": 2, "plan": 1, "train": 4, "offload": 3}


def one_device():
    """The environment of the tests, with one device in place of eight."""
    flags = os.environ["XLA_FLAGS"].split()
    kept = [flag for flag in flags if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(kept)}


def load_script(name, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def check_record(file, name):
    kept = json.loads(file.read_text())
    rows = kept["rows"]
    if name == "kernels":
        rows = rows["kernels"]
    assert kept["bench"] == f"gpu_{name}"
    assert len(rows) == ROWS[name]
    assert not [row for row in rows if "failed" in row]
    assert kept["environment"]["device"]
    return kept


@pytest.mark.long
def test_kernels_prints_its_table_and_keeps_its_record(monkeypatch, tmp_path, capsys):
    kernels, record = load_script("kernels", monkeypatch), tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--toy", "--json", str(record)])
    assert kernels.main() == 0
    shown = capsys.readouterr().out
    assert json.loads(shown.splitlines()[-1]) == check_record(record, "kernels")


@pytest.mark.long
@pytest.mark.parametrize("script", ["plan", "offload"])
def test_a_script_prints_its_table_and_keeps_its_record(script, tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, SCRIPTS / f"{script}.py", "--toy", "--json", record]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_device())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == check_record(record, script)


@pytest.mark.exhaustive
def test_train_has_a_row_for_each_peer_of_one_model(tmp_path):
    # torch is left out where it is installed too, so that the rows are the same everywhere
    record = tmp_path / "record.json"
    command = [sys.executable, SCRIPTS / "train.py", "--toy", "--json", record]
    command += ["--peers", "ours", "by hand"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_device())
    assert done.returncode == 0, done.stderr
    rows = check_record(record, "train")["rows"]
    for model in ("gpt2-124m", "llama-1b"):
        ours, hand = sorted(
            (r for r in rows if r["model"] == model), key=lambda r: r["peer"] != "ours"
        )
        assert ours["parameters"] == hand["parameters"]
        assert ours["first_loss"] == pytest.approx(hand["first_loss"], rel=0.02)
    assert sorted(row["rounds"] for row in rows) == [1, 1, 1, 2]


def test_without_torch_its_rows_are_left_out_and_named(monkeypatch, capsys):
    train, asked = load_script("train", monkeypatch), []
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    monkeypatch.setattr(train, "measure", lambda options, *_: asked.append(options["peers"]) or [])
    monkeypatch.setattr(sys, "argv", ["train.py", "--toy"])
    assert train.main() == 0
    assert asked == [["ours", "by hand"]]
    assert "no torch: no rows of PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "fits", "tried"),
    [
        # tokens per second grow by 60%, and then by 1%
        ({2: 1.0, 4: 1.25, 8: 2.48, 16: 4.0}, 16, [2, 4, 8]),
        ({2: 1.0, 4: 1.25, 8: 1.5, 16: 1.8}, 8, [2, 4, 8, 16]),
    ],
    ids=["until it grows no more", "until it does not fit"],
)
def test_rows_are_doubled(seconds, fits, tried, monkeypatch, capsys):
    train = load_script("train", monkeypatch)

    def step_of(rows):
        if rows > fits:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return lambda: rows

    def step_seconds(step, **_):
        return [seconds[step()]] * 3

    trainer = train.Trainer(step_of, parameters=7, peak=lambda: 100)
    monkeypatch.setattr(train, "ours", lambda *_: trainer)
    monkeypatch.setattr(train, "step_seconds", step_seconds)
    trial = {"model": "gpt2-124m", "sequence": 64, "rows": 2, "dtype": "bfloat16", "peer": "ours"}
    trial |= {"attention": "blockwise", "words": "", "toy": True, "steps": 3, "batches": 8}
    train.try_batches(trial)
    batches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [batch["rows"] for batch in batches] == tried
    assert [batch["fits"] for batch in batches] == [rows <= fits for rows in tried]

    # the row is the fastest batch, with the loss of the first step of all
    monkeypatch.setattr(train, "run_trials", lambda *_: (batches, ""))
    row = train.search(trial, 60)
    assert row["rows"] == 8
    assert row["first_loss"] == 2
    assert row["batches"] == batches


def test_rows_are_halved_until_they_fit(monkeypatch):
    train, asked = load_script("train", monkeypatch), []
    fine = {"rows": 2, "fits": True, "seconds": [1.0], "first_loss": 6.0}

    def run_trials(script, trial, seconds):
        asked.append((trial["rows"], trial["batches"]))
        rows = trial["rows"]
        return [fine if rows <= 2 else {"rows": rows, "fits": False}], ""

    monkeypatch.setattr(train, "run_trials", run_trials)
    trial = {"model": "gpt2-124m", "sequence": 64, "rows": 8, "dtype": "bfloat16", "peer": "ours"}
    assert train.search(trial | {"batches": 8}, 60)["rows"] == 2
    assert asked == [(8, 8), (4, 1), (2, 1)]
    fine["fits"] = False
    row = train.search(trial | {"batches": 8}, 60)
    assert row["failed"] == "out of memory"


def test_what_there_is_no_time_for_is_left_out_and_named(monkeypatch, capsys):
    train = load_script("train", monkeypatch)
    options = {"peers": ["ours", "by hand"], "again": 4}
    assert train.measure(options, train.TOY_SETTINGS[:1], seconds=0) == []
    assert capsys.readouterr().err.splitlines() == [
        "ours, gpt2-124m 64 bfloat16: no time left",
        "by hand, gpt2-124m 64 bfloat16: no time left",
    ]


@pytest.mark.parametrize("model", ["gpt2-124m", "llama-1b"])
def test_every_setting_of_the_scripts_is_a_configuration(model, monkeypatch):
    plan, train = load_script("plan", monkeypatch), load_script("train", monkeypatch)
    settings = [each[:3] for each in train.SETTINGS] + [each[:3] for each in plan.CONFIGURATIONS]
    words = {each[:3]: each[3] for each in plan.CONFIGURATIONS}
    for name, sequence, rows in settings:
        if name == model:
            more = words.get((name, sequence, rows), "")
            config = plan.load(name, sequence, rows, more)
            assert config.data.sequence_length == sequence
            assert config.train.global_batch_size == rows
    assert plan.load(model, 64, 2, toy=True).model.layers == 2


def test_what_a_failed_or_slow_trial_printed_is_kept(monkeypatch, tmp_path):
    trials = load_script("trials", monkeypatch)
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "trial = json.loads(sys.argv[2])\n"
        "print(json.dumps({'rows': 2}), flush=True)\n"
        "time.sleep(trial['sleep'])\n"
        "if trial['fail']:\n"
        "    raise ValueError('no such kernel')\n"
    )
    good, failing, slow = ({"sleep": s, "fail": f} for s, f in ((0, 0), (0, 1), (600, 0)))
    assert trials.run_trials(str(script), good, 60) == ([{"rows": 2}], "")
    assert trials.run_trials(str(script), failing, 60) == (
        [{"rows": 2}],
        "ValueError: no such kernel",
    )
    assert trials.run_trial(str(script), failing, 60)["failed"] == "ValueError: no such kernel"
    assert trials.run_trials(str(script), slow, 5) == ([{"rows": 2}], "more than 5 s")


def test_all_runs_what_comes_after_a_failure_and_tells_it(monkeypatch, tmp_path, capfd):
    every = load_script("all", monkeypatch)
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    (tmp_path / "kernels.py").write_text(
        "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text(repr(sys.argv[3:]))"
    )
    monkeypatch.setattr(every, "HERE", tmp_path)
    monkeypatch.setattr(every, "SECONDS", {"train": 0.5, "kernels": 300})
    records = tmp_path / "records"
    monkeypatch.setattr(
        sys, "argv", ["all.py", "--toy", "--to", str(records), "--only", "train", "kernels"]
    )
    assert every.main() == 1
    assert "failed: train: ended after 0 s" in capfd.readouterr().err
    assert (records / "kernels.json").read_text() == "['--toy']"
    assert not (records / "train.json").exists()
