"""The command line: exit codes, and one readable block for each mistake.

One step is compiled, since `inspect --topology` reads the compiled program.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

from fsdp_jax.checkpoint import Lease
from fsdp_jax.cli import commands
from fsdp_jax.cli import main as command_line
from fsdp_jax.cli.commands import COMMANDS, TrainCommand
from fsdp_jax.cli.main import main
from fsdp_jax.data.options import KINDS, kinds_for
from fsdp_jax.errors import ArgumentError

TINY = """
model: {layers: 2, width: 32, heads: 2}
units: {classes: [Block]}
data: {sequence_length: 16}
train: {steps: 3, global_batch_size: 8, devices: 8, eval_batches: 1}
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"output: {tmp_path / 'run'}\n")
    return str(path)


def test_commands_are_listed(capsys):
    for argv, code in ((["--help"], 0), (["-h"], 0), ([], 2)):
        assert main(argv) == code
        shown = capsys.readouterr().out
        assert [name for name in COMMANDS if name not in shown] == []


OPTIONS = {
    "train": ["--train.global_batch_size"],
    "inspect": ["--train.global_batch_size"],
    "plan": ["--train.global_batch_size", "--search"],
    "certify": ["--train.global_batch_size"],
    "compile": ["--to DIR", "--topology T", "--processes N", "--devices N", "--json"],
    "tokenize": ["--vocab-size N"],
    "import": ["--to RUN"],
    "export": ["--step N"],
    "verify": ["--json"],
    "report": ["--html FILE", "--json"],
    "diff": ["diff A B", "--topology T", "--json"],
}


def test_help_of_each_command_lists_its_options(capsys):
    for command, options in OPTIONS.items():
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr()
        assert [option for option in options if option not in shown.out] == [], command
        assert shown.err == ""


def test_the_version_has_the_package_and_jax(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert main(["--version"]) == 0
    expected = f"fsdp_jax {project['version']}, jax {jax.__version__}, jaxlib {jax.lib.__version__}"
    assert capsys.readouterr().out == expected + "\n"


UNUSABLE = [
    ("trian", ["unknown command 'trian'", "did you mean 'train'?"]),
    ("--strategy zero1", ["unknown command '--strategy'", "fsdp-jax --help"]),
    ("train --train.stpes 3", ["unknown key 'train.stpes'", "did you mean '--train.steps'?"]),
    ("train --train.steps many", ["--train.steps"]),
    ("train --mesh.data 16", ["the mesh has more devices than there are", "train.devices"]),
    (
        "train --train.global_batch_size 12",
        ["train.global_batch_size", "8 devices x", "use 8 or 16"],
    ),
    ("train --train.accumulation 2", ["8 devices x accumulation 2", "got:      8"]),
    ("train --units.classes --units.min_params 9999999", ["units.min_params", "at most"]),
    ("train --model.preset tinny", ["unknown preset 'tinny'", "did you mean 'tiny'?"]),
    (
        "train --model.family llama --model.preset tiny",
        ["tiny, which is a gpt", "set model.family to gpt"],
    ),
    (
        "train --model.family llama --model.preset llama-tiny --model.dropout 0.1",
        ["dropout would be ignored", "model.dropout"],
    ),
    ("train --optimizer.name adam --optimizer.weight_decay 0.1", ["optimizer.weight_decay"]),
    ("train --data.kind text --data.path nowhere", ["the corpus does not exist", "data.path"]),
    ("train --cluster.processes 2", ["an incomplete cluster"]),
    ("train --remat full --remat_save atention", ["where:    remat_save", "'attention'?"]),
    ("train --model.frozen (", ["not a regular expression", "where:    model.frozen"]),
    ("train --lora.rank 2 --lora.targets (", ["where:    lora.targets"]),
    ("train --optimizer.clip 0", ["where:    optimizer.clip"]),
    (
        "train --model.attention flash --data.sequence_length 128",
        ["where:    model.attention"],
    ),
    ("inspect --html", ["--html FILE"]),
    ("compile", ["--to is missing", "Folder of the programs"]),
    ("compile --to out --topology cpu:8", ["--topology", "--processes N"]),
    ("compile --to out --topology h100:8 --processes 2", ["leave one out"]),
    ("compile --to out --devices 2", ["--devices goes with --processes"]),
    (
        "compile --to /dev/null/out --processes 2",
        ["--to cannot be written", "where:    /dev/null", "elsewhere"],
    ),
    ("train --programs nowhere", ["no compiled program", "no such folder", "fsdp-jax compile"]),
    ("inspect --jsno", ["unknown key 'jsno'", "did you mean '--json'?"]),
    ("inspect --json=maybe", ["--json: ignored explicit argument 'maybe'", "Print JSON."]),
]


def test_unusable_command_lines_are_blocks(tiny, tmp_path, capsys):
    wrong = []
    for line, blocks in UNUSABLE:
        command, *options = line.split()
        code, error = main([command, tiny, *options]), capsys.readouterr().err
        if code != 2 or "Traceback" in error or any(block not in error for block in blocks):
            wrong.append((line, code, error))
        assert not (tmp_path / "run" / "lease.json").exists(), line
    assert wrong == []


UNUSABLE_WITHOUT_CONFIG = [
    ("import", "fsdp-jax import gpt2 --to output/gpt2"),
    ("import gpt2 --too run", "did you mean '--to'?"),
    ("import nowhere --to run", "config.json"),
    ("import nowhere", "--to is missing\n"),
    ("import nowhere", "expected: --to RUN: Directory of the run, which is created."),
    ("export nowhere", "expected: --to DIR: Directory of the weights, which is created."),
    ("tokenize embedded", "expected: --to DIR: Folder of the shards, which is created."),
    ("export nowhere --to out --format hugingface", "did you mean 'huggingface'"),
    ("tokenize embedded --to out", "exactly one tokenizer is needed"),
    ("tokenize embedded --to out --vocab-size many", "a whole number"),
    ("tokenize nowhere --to out --tokenizer bytes", "nowhere"),
    ("tokenize embedded --to out --tokenizer bytes --held-out half", "a number"),
]


def test_unusable_arguments_of_other_commands_are_blocks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, said in UNUSABLE_WITHOUT_CONFIG:
        assert main(words.split()) == 2, words
        assert said in capsys.readouterr().err, words


TOO_SMALL = [
    ("plan CONFIG --topology h100 --search --devices 0", "--devices", "1"),
    ("plan CONFIG --topology h100 --search --devices=-8", "--devices", "1"),
    ("import gpt2 --to run --devices -1", "--devices", "1"),
    ("export run --to weights --step -1", "--step", "0"),
    ("tokenize embedded --to tokens --vocab-size 0", "--vocab-size", "1"),
    ("tokenize embedded --to tokens --vocab-size -300", "--vocab-size", "1"),
    ("tokenize embedded --to tokens --tokenizer bytes --held-out -0.1", "--held-out", "0"),
]


def test_numbers_that_are_too_small_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line, option, least in TOO_SMALL:
        assert main(line.split()) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"a value is too small\n  where:    {option}\n" in shown.err, line
        assert f"expected: {least} or more" in shown.err
        assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


TOO_LARGE = (
    "--train.global_batch_size=2147483640",
    "--data.sequence_length=2147483647",
    "--model.vocab_size=2147483647",
    "--model.width=1048576",
)


def test_what_cannot_fit_is_refused_before_it_is_allocated(tiny, tmp_path, capsys):
    for override in TOO_LARGE:
        assert main(["train", tiny, override]) == 3
        error = capsys.readouterr().err
        assert "the run does not fit this machine's memory\n  expected: " in error, override
        assert "GiB at most" in error
        assert not (tmp_path / "run").exists()


def test_a_page_that_cannot_be_written_is_refused_at_once(tiny, tmp_path, capsys):
    for page in (tmp_path, tmp_path / "none" / "page.html"):
        assert main(["inspect", tiny, "--html", str(page)]) == 2
        assert f"where:    --html\n  got:      {page}\n" in capsys.readouterr().err


def test_no_configuration(capsys):
    assert main(["train"]) == 2
    assert "no configuration" in capsys.readouterr().err


def test_empty_corpus(tiny, tmp_path, capsys):
    path = tmp_path / "empty.txt"
    path.touch()
    assert main(["train", tiny, "--data.kind", "text", "--data.path", str(path)]) == 2
    assert "the corpus is empty" in capsys.readouterr().err


def test_two_runs_in_one_directory(tiny, tmp_path, capsys):
    with Lease(tmp_path / "run"):
        assert main(["train", tiny]) == 2
    assert "another run is writing to this directory" in capsys.readouterr().err


def test_output_that_is_a_file(tiny, tmp_path, capsys):
    (tmp_path / "run").touch()
    assert main(["train", tiny]) == 2
    assert "the output directory cannot be used\n  where:    output" in capsys.readouterr().err


def test_debug_shows_the_traceback(tiny, capsys):
    assert main(["train", tiny, "--debug", "--strategy", "fulshard"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_failures_and_interruptions(monkeypatch, capsys):
    def fail(command):
        warnings.warn("careful", UserWarning, stacklevel=1)
        raise RuntimeError("a bug")

    def interrupt(command):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainCommand, "run", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["train", "CONFIG"]) == 1
    warned, failed, *_ = capsys.readouterr().err.splitlines()
    assert (warned, failed) == ("warning: careful", "error: RuntimeError: a bug")
    monkeypatch.setattr(TrainCommand, "run", interrupt)
    # The background jobs of a shell ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train", "CONFIG"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    # Not that nothing was written: `tokenize` keeps what it has.
    assert capsys.readouterr().err == "interrupted: run the same command again\n"


def test_a_panic_a_thread_and_a_destructor_are_blocks():
    code = """
import logging, sys, threading
from fsdp_jax.cli import main
from fsdp_jax.cli.commands import VerifyCommand
class PanicException(BaseException):
    pass
class Broken:
    def __del__(self):
        raise IndexError("of a destructor")
def fail(command):
    Broken()
    thread = threading.Thread(target=lambda: 1 / 0, name="writer")
    thread.start()
    thread.join()
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("a library").exception("a plugin cannot start")
    raise PanicException("index out of bounds")
VerifyCommand.run = fail
sys.argv = ["fsdp-jax", "verify", "run"]
sys.exit(main.main())
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    error = result.stderr
    assert (result.returncode, result.stdout) == (1, "")
    assert "warning: cleaning up failed: IndexError: of a destructor" in error
    assert "warning: a thread in the background failed: ZeroDivisionError: division" in error
    assert "a plugin cannot start\nZeroDivisionError: division by zero\n" in error
    assert "  where:    writer\n" in error
    assert "error: PanicException: index out of bounds\n  where: " in error
    assert "Traceback" not in error
    assert "ignored" not in error


def test_an_interrupt_that_meets_a_callback_is_not_lost():
    code = """
import gc, signal, sys, time
from fsdp_jax.cli import main
from fsdp_jax.cli.commands import VerifyCommand
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells' background jobs ignore it
def interrupt(command):
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
VerifyCommand.run = interrupt
sys.argv = ["fsdp-jax", "verify", "run"]
sys.exit(main.main())
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "interrupted: run the same command again\n"


def test_shards_that_the_disk_does_not_take_are_named(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fsdp_jax.cli.tokenize.tokenize", full)
    (tmp_path / "text.txt").write_text("to be, or not to be")
    words = ["tokenize", str(tmp_path / "text.txt"), "--to", "shards", "--tokenizer", "bytes"]
    assert main([*words, "--held-out", "0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the shards cannot be written\n  where:    shards\n")
    assert "No space left on device" in error
    assert "run the same command again" in error


def test_a_closed_stdout_is_no_failure():
    command = f"{sys.executable} -m fsdp_jax --help >&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_error_without_a_stderr_is_not_printed_on_stdout():
    command = f"{sys.executable} -m fsdp_jax trian 2>&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")


UNREAD = {
    "--help": (141, ""),
    "train --help": (141, ""),
    "inspect TINY": (141, ""),
    "inspect TINY --json": (141, ""),
    "inspect nowhere.yaml": (2, "error: the configuration cannot be read"),
}


def test_what_nobody_reads_ends_in_silence(tiny, capsys, monkeypatch):
    """As in `fsdp-jax inspect ... | head -1`."""
    for words, (code, says) in UNREAD.items():
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as stdout, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stdout)
            assert main(words.replace("TINY", tiny).split()) == code, words
        error = capsys.readouterr().err
        assert error.startswith(says)
        assert error.count("error: ") == (1 if says else 0)
        assert says or not error


@pytest.mark.parametrize("words", ["--help", pytest.param("inspect TINY", marks=pytest.mark.long)])
def test_a_process_whose_output_nobody_reads_ends_in_silence(tiny, words):
    """Also as the interpreter ends."""
    command = [sys.executable, "-m", "fsdp_jax", *words.replace("TINY", tiny).split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_a_broken_pipe_is_a_failure_of_a_run(tiny, monkeypatch, capsys):
    def broken(command):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(commands.TrainCommand, "run", broken)
    monkeypatch.setattr(commands.InspectCommand, "run", broken)
    block = "error: the system refuses it\n  got:      [Errno 32] Broken pipe\n"
    assert main(["inspect", tiny]) == 1  # a pipe of its own, since stdout has a reader
    assert capsys.readouterr().err == block
    monkeypatch.setattr(command_line, "_is_unread", lambda: True)
    assert main(["inspect", tiny]) == 141
    assert capsys.readouterr().err == ""
    assert main(["train", tiny]) == 1
    assert capsys.readouterr().err == block


LONG = "x" * 256


TOO_LONG = [
    ["train", f"{LONG}.yaml"],
    ["train", "TINY", "--output", LONG],
    *(
        ["train", "TINY", "--output", "run", "--data.kind", kind, "--data.path", LONG]
        for kind in kinds_for("text")
        if KINDS[kind].path != "unused"
    ),
    ["train", "TINY", "--output", "run", "--data.tokenizer", LONG],
    ["train", "TINY", "--output", "run", "--model.weights", LONG],
    ["inspect", "TINY", "--html", LONG],
    ["inspect", "TINY", "--html", f"{LONG}/page.html"],
    ["plan", "TINY", "--topology", "h100:8", "--search", "--to", LONG],
    ["plan", "--topology", "h100:8", "--compare", LONG, "TINY"],
    ["tokenize", LONG, "--to", "shards", "--tokenizer", "bytes"],
    ["tokenize", "TINY", "--to", LONG, "--tokenizer", "bytes"],
    ["tokenize", "TINY", "--to", "shards", "--tokenizer", LONG],
    ["import", LONG, "--to", "run"],
    ["export", LONG, "--to", "weights"],
    ["verify", LONG],
]


def test_names_that_are_too_long_are_blocks(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for words in TOO_LONG:
        code = main([word.replace("TINY", tiny) for word in words])
        said = capsys.readouterr()
        known = said.err.startswith("error: ") and "File name too long" in said.err
        if (code, said.out, known) != (2, "", True):
            wrong.append((words, code, said))
    assert wrong == []


def test_inspect_holds_a_step_to_its_contract(tiny, capsys, monkeypatch):
    argv = ["inspect", tiny, "--topology", "cpu:8", "--train.global_batch_size", "8"]
    argv += ["--train.local_batch", "True"]  # or XLA:CPU reduces a tied table twice
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["contract"]["holds"]
    assert 0 < report["wire_bytes"] <= 1.02 * report["wire_bytes_limit"] + 4096
    fields = {"op", "dtype", "axis", "count", "bytes", "overlapped_bytes", "where"}
    assert fields <= report["collectives"][0].keys()

    # With nothing expected, every collective of the program violates the contract.
    monkeypatch.setattr("fsdp_jax.contract.contract.expected_traffic", lambda plan: [])
    assert main(argv) == 3
    assert "DOES NOT HOLD" in capsys.readouterr().out


NO_TOPOLOGIES = {
    "h100": "topology",
    "h1000:8": "did you mean 'h100'",
    "cpu:80": "the number of virtual devices is fixed",
    "cpu:8000000": "expected: 131,072 devices at most",
    "h100:" + "9" * 99: "not a topology",
}


def test_inspect_on_a_topology_that_does_not_exist(tiny, capsys):
    for name, reason in NO_TOPOLOGIES.items():
        assert main(["inspect", tiny, "--topology", name]) == 2
        assert reason in capsys.readouterr().err


def test_inspect(tiny, tmp_path, capsys):
    page = tmp_path / "layout.html"
    assert main(["inspect", tiny, "--html", str(page), "--strategy", "zero2"]) == 0
    assert "shard_grad_op on replica=1 x data=8" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert main(["inspect", tiny, "--json", "--mesh.replica", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"replica": 2, "data": 4}
    assert not (tmp_path / "run").exists()


def refuse(_):
    raise ArgumentError("no kernel", where="model.attention")


def test_diff_of_configurations_files_and_a_run(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = Path("other.yaml")
    other.write_text(f"{Path(tiny).read_text()}\nmesh: {{replica: 2}}\n")
    assert main(["diff", tiny, str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["keys"]["mesh.replica"] == [None, 2]
    assert found["layout"]["mesh"] == [{"replica": 1, "data": 8}, {"replica": 2, "data": 4}]
    # What `inspect --json` and `plan --json` print, and a run's folder.
    for command, name in (
        (["inspect", tiny], "layout"),
        (["plan", tiny, "--topology", "h100:8"], "plan"),
    ):
        more = ["--analytic"] if name == "plan" else []
        assert main([*command, *more, "--json"]) == 0
        Path(f"{name}.json").write_text(capsys.readouterr().out)
    run = Path("run")
    run.mkdir()
    (run / "layout.json").write_text(Path("layout.json").read_text())
    (run / "config.yaml").write_text(Path(tiny).read_text())
    assert main(["diff", "layout.json", "run"]) == 0
    assert "no difference: full_shard" in capsys.readouterr().out
    plan = json.loads(Path("plan.json").read_text())
    plan["peak_bytes"] = 1 << 20
    plan["time"]["step_s"] = 1.0
    plan["collectives"][0] = dict.fromkeys(("op", "dtype", "axis"), "x") | {"bytes": 1 << 30}
    Path("smaller.json").write_text(json.dumps(plan | {"notes": ["less"]}))
    assert main(["diff", "plan.json", "smaller.json"]) == 0
    said = capsys.readouterr().out
    rows = {line.partition("  ")[0]: line.split("  ")[-1].strip() for line in said.splitlines()}
    assert (rows["peak_bytes"], rows["time.step_s"]) == ("1 MiB", "1")
    assert rows["collectives.x x along x"] == "1 GiB"
    assert "see --json: notes" in said
    # What cannot be compared.
    Path("neither.json").write_text("{}")
    Path("empty").mkdir()
    Path("damaged.json").write_text('{"leaves": [{}]}')
    monkeypatch.setattr("fsdp_jax.train.build.topology_devices", refuse)
    for words, said in (
        (["plan.json", "layout.json"], "nothing to compare"),
        (["neither.json", "layout.json"], "neither a layout nor a plan"),
        (["layout.json"], "A B is two paths"),
        (["layout.json", "nowhere"], "nowhere"),
        (["layout.json", "empty"], "the output directory of a run"),
        (["layout.json", "none.json"], "there is no such file"),
        (["layout.json", "damaged.json"], "where:    damaged.json"),
        (["layout.json", "other.yaml", "--topology", "h100:8"], "other.yaml: model.attention"),
    ):
        assert main(["diff", *words]) == 2, words
        assert said in capsys.readouterr().err
