"""The commands, one dataclass each: the fields are the command line, `run` returns the exit code.

The docstrings of classes and the comments of fields are the `--help` text. Heavy modules are
imported by `run`, after the command line has been checked.
"""

import json as json_format
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Literal

from fsdp_jax.cli.options import COMMAND, CONFIG, RUN, Argument, ConfigFile
from fsdp_jax.errors import BROKEN, ConfigError
from fsdp_jax.limits import Devices, NonNegative, NonNegativeFloat, Positive, Range
from fsdp_jax.tables import wrapped

OK = 0  # exit code

File = Annotated[str | None, "FILE"]
Topology = Annotated[str | None, "T"]
VocabSize = Annotated[int, Range(1, 2**22)]  # what trains a tokenizer allocates it

HF_FOLDER = Argument(
    "DIR", "a Hugging Face folder with config.json and safetensors", "gpt2 --to output/gpt2"
)
TWO = Argument(
    "A B",
    "two configurations, runs, or files of `inspect --json` or `plan --json`",
    "output/first output/second",
    count=2,
)
CORPUS = Argument(
    "CORPUS",
    "a text file, a .jsonl, or a folder of them",
    "texts --to output/tokens --vocab-size 32000",
)


@dataclass(frozen=True)
class TrainCommand:
    """Trains; starts, or resumes from the newest good checkpoint in the output directory."""

    config: Annotated[ConfigFile, CONFIG]

    def run(self) -> int:
        """Trains; returns 0 if all steps are done, 75 if a signal stopped the run after saving."""
        config = self.config.load()
        from fsdp_jax.train.main import train

        return train(config)


@dataclass(frozen=True)
class InspectCommand:
    """Shows how every array of the training state is sharded, and why.

    With --topology the step is also compiled for that machine, its collectives are listed and
    checked against the contract: exit code 3 if it does not hold.
    """

    config: Annotated[ConfigFile, CONFIG]
    # A machine that need not be present: h100:8, v5e:16x16, cpu:8, ...
    topology: Topology = None
    json: bool = False  # Print JSON.
    html: File = None  # Also write the layout as a page.

    def run(self) -> int:
        """Checks the contract; returns 0, or 3 if it does not hold."""
        config = self.config.load()
        _check_file_to_write("--html", self.html)
        from fsdp_jax.contract.contract import check_contract
        from fsdp_jax.sharding.report import layout_html, layout_json, layout_report
        from fsdp_jax.train.build import build, topology_devices

        devices = None if self.topology is None else topology_devices(self.topology)
        run = build(config, devices)
        layout = run.sharded.layout
        text, fields = layout_report(layout), layout_json(layout)
        holds = True
        if self.topology is not None:
            contract = check_contract(run.step, run.batch)
            text = f"{text}\n\nsent per step\n{contract}"
            fields |= contract.to_json()
            holds = contract.holds
        if self.html is not None:
            Path(self.html).write_text(layout_html(layout))
        return _print_result(text, fields, self.json, holds)


@dataclass(frozen=True)
class PlanCommand:
    """Estimates memory, communication and time of a step on hardware that need not be present.

    Compiles the step that `train` runs, or with --analytic computes the estimates without a
    compiler. Exit code 3 if the step does not fit in memory.
    """

    config: Annotated[ConfigFile, CONFIG]
    # The machine: h100:8, h100:64x8, v5e:16x16, ...; with --search also a chip alone (h100).
    topology: Topology = None
    analytic: bool = False  # Estimate without a compiler, in seconds.
    # Search for the fastest strategy, mesh, remat, prefetch and accumulation for the batch, and
    # write the configuration. For a chip alone, the smallest machine that it fits is used.
    search: bool = False
    # With --search and a chip alone: the number of devices.
    devices: Annotated[Positive | None, "N"] = None
    # With --search: where to write the configuration; default: NAME.planned.yaml.
    to: File = None
    # Compare CONFIG, with the keys that are given, with configuration B as it is; or, in place of
    # CONFIG, two configurations A and B, both with these keys.
    compare: Annotated[tuple[str, ...], "CONFIG"] = ()
    json: bool = False  # Print JSON.
    html: File = None  # Also write the plan as a page.
    # Compile again; otherwise compiled programs are cached.
    no_cache: bool = False

    def run(self) -> int:
        """Plans, compares or searches; returns 0, or 3 if a plan does not fit in memory."""
        self._check_options()
        files = self._files()
        configs = [file.load() for file in files.values()]
        from fsdp_jax import planner
        from fsdp_jax.train.planning import plan_of, search_fastest, with_faster

        assert self.topology is not None, "checked"
        # Search the settings of one configuration, or plan one or two as they are.
        cache = None if self.no_cache else planner.cache_folder()
        if self.search:
            choice = search_fastest(configs[0], self.topology, self.devices, cache, print_progress)
            target = Path(self.to or f"{Path(str(self.config.path)).stem}.planned.yaml")
            choice.save(target)
            plans = [choice.result.best.plan]
            fields: Any = choice.to_json() | {"written": str(target)}
            text: Any = f"{choice.result}\nwritten to {target}"
        else:
            topology = planner.parse_topology(self.topology)
            plans = [
                plan_of(config, topology, analytic=self.analytic, cache=cache) for config in configs
            ]
            if not self.compare:
                plans = [with_faster(plans[0], configs[0], topology)]
            text, fields = plans[0], plans[0].to_json()
            if self.compare:
                text = planner.plans_table(list(files), plans)
                fields = [plan.to_json() for plan in plans]
        # Print, and write the page too, also of a plan that does not fit.
        code = _print_result(text, fields, self.json, all(plan.fits for plan in plans))
        if self.html is not None:
            page = (
                planner.compare_html(plans, list(files))
                if self.compare
                else planner.plan_html(plans[0])
            )
            Path(self.html).write_text(page, encoding="utf-8")
        return code

    def _files(self) -> dict[str, ConfigFile]:
        """Names the configurations to plan: the one, or the two that are compared."""
        own = self.config
        if len(self.compare) == 1:
            changed = ", changed" if own.overrides else ""
            return {f"{own.path}{changed}": own, self.compare[0]: ConfigFile(self.compare[0], {})}
        return {str(path): replace(own, path=path) for path in self.compare or [own.path]}

    def _check_options(self) -> None:
        """Raises ConfigError for options that are missing or do not go together."""
        where = "command line"
        # One configuration, or two that differ to compare; and a machine to plan for.
        if self.compare and len(self._files()) != 2:
            raise ConfigError(
                "--compare takes two configurations",
                where=where,
                expected="CONFIG --remat full --compare B, or --compare A B",
                got=" ".join(["--compare", *self.compare]),
            )
        _check_file_to_write("--html", self.html)
        _check_file_to_write("--to", self.to)
        if self.topology is None:
            raise ConfigError(
                "--topology is missing",
                where=where,
                expected="--topology T",
                fix="--topology h100:8, h100:64x8, v5e:16x16, ...; with --search a chip alone, "
                "h100",
            )
        # Options that go with a search alone, or with none.
        if self.search:
            excluded = {"--analytic": self.analytic, "--compare": self.compare}
            what, fix = "does not go with --search", "search first, then plan what it wrote"
        else:
            excluded = {"--devices": self.devices is not None, "--to": self.to is not None}
            what, fix = "goes with --search", "add --search"
        for option, given in excluded.items():
            if given:
                raise ConfigError(f"{option} {what}", where=where, got=option, fix=fix)


@dataclass(frozen=True)
class CompileCommand:
    """Compiles the programs of a run ahead, for `train CONFIG --programs DIR`.

    Alone it compiles for the devices that it finds and, started as the processes of a run are, for
    all of theirs. With --processes it starts them here, and then one less, where CONFIG can run so;
    with --topology it compiles for GPUs and TPUs that need not be present.
    """

    config: Annotated[ConfigFile, CONFIG]
    to: Annotated[str, "DIR"]  # Folder of the programs, which is created.
    # A machine that need not be present: h100:8, h100:64x8, v5e:16x16, ...
    topology: Topology = None
    processes: Annotated[Positive | None, "N"] = None  # Number of processes to start, on CPUs.
    # With --processes: virtual CPU devices of each; default: train.devices.
    devices: Annotated[Devices | None, "N"] = None
    json: bool = False  # Print JSON.

    def run(self) -> int:
        """Compiles and returns 0."""
        self._check_options()
        if (self.processes, self.topology) != (None, None):  # of several, process 0 alone writes
            _check_folder_to_write("--to", self.to)
        config = self.config.load()
        if self.processes is not None:
            import jax

            os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes
            jax.config.update("jax_platforms", "cpu")  # of this one
        from fsdp_jax.train.compile_ahead import Ahead

        ahead = Ahead(config, Path(self.to).expanduser(), print_progress)
        code = OK
        if self.topology is not None:
            found = ahead.compile_for(self.topology)
        elif self.processes is not None:
            words = self.config.words()
            code, found = ahead.compile_in_processes(words, self.processes, self.devices)
        else:
            found = ahead.compile_here()
        if code == OK and found.rows:  # process 0 alone has them
            _print_result(found, found.to_json(), self.json, True)
        return code

    def _check_options(self) -> None:
        """Raises ConfigError for options that do not go together."""
        if self.topology is not None and self.processes is not None:
            what, fix = "--processes starts CPUs, which --topology does not", "leave one out"
            raise ConfigError(what, where="command line", got="both", fix=fix)
        if self.devices is not None and self.processes is None:
            what, fix = "--devices goes with --processes", "add --processes, or use --train.devices"
            raise ConfigError(what, where="command line", got="--devices", fix=fix)


@dataclass(frozen=True)
class CertifyCommand:
    """Compares every strategy and setting with the unsharded model on a small configuration.

    The model has the configured family, loss, optimizer, units and precision, but two layers of
    width 64, and runs on virtual CPU devices (train.devices, or 8). Compared are the initial
    values, and on each of seven batches the loss, the gradient norm, every gradient and the
    parameters, for every strategy, with accumulation 1 and 4, with state in host memory or on the
    devices and, if train.local_batch is set, with local batches and deferred reduction. The batches
    are random rows, in several arrangements. Exit code 3 if a number differs.
    """

    config: Annotated[ConfigFile, CONFIG]
    json: bool = False  # Print JSON.

    def run(self) -> int:
        """Certifies; returns 0, or 3 if a number differs."""
        config = self.config.load()
        from fsdp_jax.certify.certificate import CertifyError
        from fsdp_jax.cli.certify import certify_small

        try:
            certificate = certify_small(config)
            text = str(certificate)
        except CertifyError as error:
            certificate = error.certificate
            text = str(error)
        return _print_result(text, certificate.to_json(), self.json, certificate.holds)


@dataclass(frozen=True)
class TokenizeCommand:
    """Writes a corpus as token shards, for `train --data.kind tokens --data.path DIR`.

    CORPUS is a text file, a .jsonl, a folder of them, or `embedded`, the source of Python's
    standard library. A command that was stopped continues when it is run again. Give either
    --tokenizer or --vocab-size.
    """

    corpus: Annotated[str, CORPUS]
    to: Annotated[str, "DIR"]  # Folder of the shards, which is created.
    tokenizer: str | None = None  # bytes, or a tokenizer.json or its folder.
    # Train a byte-level BPE tokenizer of this many tokens on the corpus.
    vocab_size: Annotated[VocabSize | None, "N"] = None
    field: str = "text"  # Field of a record that holds the text.
    held_out: NonNegativeFloat | None = 0.05  # Share held out for evaluation.
    # Text that is not UTF-8: raise an error, replace its bytes, or skip its document (counted).
    invalid: Literal["error", "replace", "skip"] = "error"
    # What special tokens are where the text spells them: text, or tokens, of which the end-of-text
    # token ends a document. Both are counted.
    special_tokens: Literal["text", "tokens"] = "text"

    def run(self) -> int:
        """Writes the shards and returns 0."""
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise ConfigError(
                "exactly one tokenizer is needed",
                where="command line",
                expected="--tokenizer T or --vocab-size N",
                got="neither" if self.tokenizer is None else "both",
            )
        from fsdp_jax.cli.tokenize import tokenize_corpus

        print(tokenize_corpus(**vars(self), say=print_progress))
        return OK


@dataclass(frozen=True)
class ImportCommand:
    """Reads weights, or a whole state, into a sharded checkpoint: a run.

    From huggingface, DIR holds config.json, safetensors and perhaps a tokenizer; no code in it is
    run. `model.weights` also takes DIR itself: import weights that are used often.

    From orbax, DIR is a checkpoint of another program, such as MaxText: the folder of one step;
    from dcp, a distributed checkpoint of PyTorch, as of FSDP2; from levanter, one of Levanter.
    With the optimizer's state, if DIR has it, `train CONFIG --output RUN` goes on at its step; else
    the parameters are for `train --model.weights RUN`.
    """

    folder: Annotated[str, HF_FOLDER]
    to: Annotated[str, "RUN"]  # Directory of the run, which is created.
    # What wrote DIR.
    from_: Literal["huggingface", "orbax", "dcp", "levanter"] = "huggingface"
    # Not from huggingface: a configuration, whose `model` is that of the checkpoint.
    config: File = None
    # Not from huggingface: a file of Python, which is run: `rename(path, saved)` in it returns the
    # array of the checkpoint for each of our paths; default: the names of MaxText, torchtitan,
    # Levanter or transformers where the checkpoint has them, else the same paths.
    rename: File = None
    # Not from huggingface: patterns of parameters that are initialized anew, such as 'head/*'.
    except_: Annotated[tuple[str, ...], "GLOB"] = ()
    weights_only: bool = False  # Not from huggingface: leave the optimizer's state out.
    # Dtype of the parameters; default: float32, or with the optimizer's state precision.param.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Virtual CPU devices where there is no accelerator.
    devices: Annotated[Devices | None, "N"] = None

    def run(self) -> int:
        """Writes the checkpoint and returns 0."""
        if self.from_ != "huggingface":
            return self._run_checkpoint(self.from_)
        from fsdp_jax.data.checks import ignored_key_error

        for name in ("config", "rename", "except_", "weights_only"):
            value = getattr(self, name)
            if value:
                option = f"--{name.rstrip('_').replace('_', '-')}"
                fix = "leave it out, or --from orbax, dcp or levanter"
                raise ignored_key_error(option, value, fix)
        from fsdp_jax.train.build import start_devices
        from fsdp_jax.train.huggingface import import_huggingface

        start_devices(self.devices)
        print(import_huggingface(self.folder, self.to, dtype=self.dtype or "float32"))
        return OK

    def _run_checkpoint(self, written_by: Literal["orbax", "dcp", "levanter"]) -> int:
        """Writes what is in a checkpoint of another program and returns 0."""
        if self.config is None:
            raise ConfigError(
                "--config is missing",
                where="command line",
                expected="a configuration, whose `model` is that of the checkpoint",
                fix=f"fsdp-jax import {self.folder} --from {written_by} --config CONFIG "
                f"--to {self.to}",
            )
        from fsdp_jax.train.build import start_devices
        from fsdp_jax.train.import_checkpoint import import_checkpoint_run

        start_devices(self.devices)
        done = import_checkpoint_run(
            self.folder,
            self.to,
            written_by=written_by,
            config=self.config,
            rename=self.rename,
            skip=self.except_,
            weights_only=self.weights_only,
            dtype=self.dtype,
        )
        print(done)
        return OK


@dataclass(frozen=True)
class ExportCommand:
    """Writes the parameters of a verified checkpoint as safetensors, one full state dict."""

    output: Annotated[str, RUN]
    to: Annotated[str, "DIR"]  # Directory of the weights, which is created.
    # Step of the checkpoint; default: the newest.
    step: Annotated[NonNegative | None, "N"] = None
    dtype: str = "float32"  # float32, bfloat16, float16, or same (the dtypes that were trained).
    # safetensors: our parameter names. huggingface: theirs, with LoRA's adapters merged, the
    # tokenizer and a config.json that transformers loads.
    # peft: the adapters alone, under PEFT's names, with an adapter_config.json.
    format: Literal["safetensors", "huggingface", "peft"] = "safetensors"
    # params: the parameters; ema: their average, of a run with optimizer.ema.
    weights: Literal["params", "ema"] = "params"
    # With peft: name or path of the weights below the adapters; default: the folder model.weights.
    base: Annotated[str | None, "NAME"] = None

    def run(self) -> int:
        """Writes the weights and returns 0."""
        import functools

        import jax

        from fsdp_jax.data.checks import ignored_key_error

        jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
        if self.base is not None and self.format != "peft":
            raise ignored_key_error("--base", self.base, "leave it out, or --format peft")
        export: Callable[..., str]
        if self.format == "huggingface":
            from fsdp_jax.train.huggingface import export_huggingface as export
        elif self.format == "peft":
            from fsdp_jax.train.huggingface import export_peft

            export = functools.partial(export_peft, base=self.base)
        else:
            from fsdp_jax.checkpoint.verify import export_run as export

        dtype = None if self.dtype == "same" else self.dtype
        print(export(self.output, self.to, step=self.step, dtype=dtype, weights=self.weights))
        return OK


@dataclass(frozen=True)
class VerifyCommand:
    """Checks every checkpoint of a run against its manifest: exit code 3 if a file is damaged."""

    output: Annotated[str, RUN]
    json: bool = False  # Print JSON.

    def run(self) -> int:
        """Verifies a run's files; returns 0, or 3 if one is damaged."""
        from fsdp_jax.checkpoint.verify import verify_run

        report = verify_run(self.output)
        return _print_result(report, report.to_json(), self.json, report.good)


@dataclass(frozen=True)
class ReportCommand:
    """Shows a run from its files: losses, speed, goodput, starts, layout, configuration.

    The run may be training, and need not have ended well. Files that are missing or damaged are
    named.
    """

    output: Annotated[str, RUN]
    # Also write a self-contained page, with the curves.
    html: File = None
    json: bool = False  # Print JSON.

    def run(self) -> int:
        """Reports and returns 0."""
        _check_file_to_write("--html", self.html)
        from fsdp_jax.train.report import render_report, report_run

        report = report_run(self.output)
        text, fields = str(report), report.to_json()
        if self.html is not None:
            Path(self.html).write_text(render_report(report), encoding="utf-8")
            text += f"\n\nwritten to {self.html}"
            fields["written"] = self.html
        return _print_result(text, fields, self.json, True)


@dataclass(frozen=True)
class DiffCommand:
    """Shows what two configurations, runs, layouts or plans do otherwise, and why.

    A and B: configurations and runs, whose keys and layouts are compared; or files that `inspect
    --json` or `plan --json` wrote.
    """

    of: Annotated[tuple[str, str], TWO]
    # The machine that configurations are laid out on; default: that of train.devices.
    topology: Topology = None
    json: bool = False  # Print JSON.

    def run(self) -> int:
        """Compares and returns 0."""
        from fsdp_jax.cli.diff import difference

        found = difference(*self.of, self.topology)
        return _print_result(str(found), found.to_json(), self.json, True)


@dataclass(frozen=True)
class LaunchCommand:
    """Starts the processes of a run on this machine, ends them together, and starts them again.

    COMMAND is `train CONFIG ...` or a program, such as `python SCRIPT`. Each process has GPUs or
    virtual CPU devices of its own, and finds the others by JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. Each line of output is prefixed with the number of its
    process. SIGINT and SIGTERM are forwarded. If one process fails, all are stopped, and the exit
    code is that of the process, or 69 if it was killed.
    """

    command: Annotated[tuple[str, ...], COMMAND]
    nproc: Annotated[Positive, "N"]  # Number of processes.
    # GPUs, or virtual CPU devices, of each process; default: all GPUs, divided.
    devices_per_process: Annotated[Devices | None, "N"] = None
    # Number of times to restart all processes after a failure; not for exit codes 2 and 3.
    max_restarts: Annotated[NonNegative, "N"] = 0
    # Go on with fewer processes, at least so many, if one fails twice in a row, the second time
    # within 5 minutes; default: never.
    min_nproc: Annotated[Positive | None, "N"] = None
    # Folder of the output of each process, and of failures.jsonl; default: no files.
    log_dir: Annotated[str | None, "DIR"] = None
    # Seconds to save and end after a signal; then the processes are killed.
    stop_seconds: Annotated[Positive, "N"] = 300

    def run(self) -> int:
        """Runs the processes until they are done; returns their exit code."""
        from fsdp_jax.launch.supervisor import LaunchOptions, launch

        log_dir = None
        if self.log_dir is not None:
            log_dir = Path(self.log_dir)
        return launch(
            LaunchOptions(
                command=self.command,
                processes=self.nproc,
                devices_per_process=self.devices_per_process,
                max_restarts=self.max_restarts,
                min_processes=self.min_nproc,
                log_dir=log_dir,
                stop_seconds=self.stop_seconds,
            )
        )


def _print_result(text: object, fields: Any, as_json: bool, holds: bool) -> int:
    """Prints `text`, or `fields` as JSON. Returns OK if `holds`, otherwise BROKEN."""
    shown = json_format.dumps(fields, indent=1) if as_json else str(text)
    if sys.stdout.isatty() and not as_json:
        shown = wrapped(shown, get_terminal_size().columns)
    print(shown)
    return OK if holds else BROKEN


def _check_file_to_write(option: str, path: str | None) -> None:
    """Raises ConfigError or OSError, before any work, for a path that cannot be written."""
    if path is None:
        return
    what = ""
    if not Path(path).absolute().parent.is_dir():
        what, fix = "no such folder", "create it, or write elsewhere"
    elif Path(path).exists() and not Path(path).is_file():
        what, fix = "not a file", "write elsewhere"
    if what:
        raise ConfigError(what, where=option, got=path, fix=fix)


def _check_folder_to_write(option: str, path: str) -> None:
    """Raises ConfigError, before any work, for a folder that this user cannot make or write."""
    folder = Path(path).expanduser().absolute()
    found = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not found.is_dir():
        got = "not a folder"
    elif not os.access(found, os.W_OK | os.X_OK):
        got = "this user may not write there"
    else:
        return
    raise ConfigError(
        f"{option} cannot be written", where=str(found), got=got, fix="write elsewhere"
    )


def print_progress(line: str) -> None:
    """Prints a line on stderr, which leaves stdout to the result."""
    print(line, file=sys.stderr, flush=True)


COMMANDS: dict[str, type[Any]] = {
    "train": TrainCommand,
    "plan": PlanCommand,
    "inspect": InspectCommand,
    "compile": CompileCommand,
    "certify": CertifyCommand,
    "tokenize": TokenizeCommand,
    "import": ImportCommand,
    "export": ExportCommand,
    "verify": VerifyCommand,
    "report": ReportCommand,
    "diff": DiffCommand,
    "launch": LaunchCommand,
}
