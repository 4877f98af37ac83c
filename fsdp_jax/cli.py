"""The command line: `fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...]`.

Arguments are read before anything heavy is imported. Every error is one block on stderr; see the exit codes.
"""

import difflib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TextIO

from fsdp_jax.errors import CheckpointError, ConfigError, DamageError, FitError, did_you_mean, message

OK, FAILED, UNUSABLE, BROKEN, STOPPED = 0, 1, 2, 3, 75
"""Exit codes: done; a failure while running; unusable arguments or configuration; a contract, a fit or a checkpoint
that does not hold; stopped by a signal after saving (run the same command again to go on)."""

INTERRUPTED = 130  # as shells have it

SYNTAX = "a YAML file, then dotted overrides such as `--train.steps 20`"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = _flag(words, "--debug")
    for name in () if debug else ("absl", "asyncio"):  # orbax's own tracebacks, hundreds of lines around our one block
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_usage())
            return OK if words else UNUSABLE
        name, *arguments = words
        if name not in COMMANDS:
            raise ConfigError(
                message(f"unknown command '{name}'", where="command line", fix=did_you_mean(name, COMMANDS))
            )
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return COMMANDS[name](arguments)
    except SystemExit as leaving:  # of the parser: help, or a malformed value that it has reported
        return leaving.code if isinstance(leaving.code, int) else UNUSABLE
    except KeyboardInterrupt:  # before the run listens to signals
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        sys.stdout.flush()  # what was said before stands before it in a log of both
        print(_block(error), file=sys.stderr)
        return _exit_code(error)


def train(arguments: list[str]) -> int:
    """Trains; starts, or resumes from the newest good checkpoint in the output directory."""
    from fsdp_jax.train.config import load, parse_help

    if parse_help("train", arguments, train.__doc__):
        return OK
    config = load(*_file_and_overrides("train", arguments))
    from fsdp_jax.train.start import train as run

    return run(config)


def inspect(arguments: list[str]) -> int:
    """Shows where every array of the training state lies, and why; with --topology T also what a step sends.

    --topology h100:8 (or v5e:16x16, cpu:8, ...) lays it out on that machine, which need not be there, compiles the step
    for it and holds it to its contract: exit code 3 where it does not hold. --json prints it for programs; --html FILE
    writes the layout as a page.
    """
    from fsdp_jax.train.config import load, parse_help

    if parse_help("inspect", arguments, inspect.__doc__):
        return OK
    as_json, page = _flag(arguments, "--json"), _option(arguments, "--html")
    name = _option(arguments, "--topology", "T")
    config = load(*_file_and_overrides("inspect", arguments), prog="fsdp-jax inspect CONFIG")
    from fsdp_jax.inspect import check_contract, layout_html, layout_json, layout_report
    from fsdp_jax.train.run import build, topology_devices

    run = build(config, None if name is None else topology_devices(name))
    layout = run.sharded.layout
    contract = None if name is None else check_contract(run.step, run.batch)
    if page is not None:
        Path(page).write_text(layout_html(layout))
    if as_json:
        print(json.dumps(layout_json(layout) | (contract.to_json() if contract else {}), indent=1))
    else:
        print(layout_report(layout) if contract is None else f"{layout_report(layout)}\n\nsent per step\n{contract}")
    return OK if contract is None or contract.holds else BROKEN


def plan(arguments: list[str]) -> int:
    """Tells memory, traffic and time of a step on hardware that need not be there: exit code 3 where it does not fit.

    fsdp-jax plan CONFIG --topology T [--analytic] [--json] [--html FILE] [--dotted.key VALUE ...]: compiles the step
    that `train` runs for h100:8, h100:64x8, v5e:16x16, ... --analytic reckons without any compiler, in seconds.
    --search looks for the fastest strategy, mesh, remat, prefetch and accumulation for the batch, and writes the
    configuration (--to FILE); T may then be a chip alone, h100: the fewest that it fits, or --devices N of them.
    --compare A B puts two configurations side by side. Compiled programs are kept; --no-cache compiles again.
    """
    from fsdp_jax.train.config import load, parse_help

    if parse_help("plan", arguments, plan.__doc__):
        return OK
    as_json, analytic, seek, fresh = (
        _flag(arguments, name) for name in ("--json", "--analytic", "--search", "--no-cache")
    )
    page, where, devices, to = (_option(arguments, f"--{name}", hint) for name, hint in PLAN_OPTIONS)
    if page is not None and not Path(page).absolute().parent.is_dir():
        raise ConfigError(message("no such folder", where="--html", got=page, fix="make it, or write elsewhere"))
    files = _compared(arguments)
    _check_flags(files[0][1], PLAN_FLAGS)
    if where is None:
        fix = "--topology h100:8, or h100:64x8, v5e:16x16, ...; with --search a chip alone, h100"
        raise ConfigError(message("--topology is missing", where="command line", expected="--topology T", fix=fix))
    if devices is not None and not devices.isdecimal():
        raise ConfigError(message("not a number of devices", where="--devices", expected="a whole number", got=devices))
    if seek and (analytic or len(files) > 1):
        got = "--analytic" if analytic else "--compare"
        fix = "search first, then plan what it wrote"
        raise ConfigError(message(f"{got} does not go with --search", where="command line", got=got, fix=fix))
    if not seek and (devices is not None or to is not None):
        got = "--devices" if devices is not None else "--to"
        raise ConfigError(message(f"{got} goes with --search", where="command line", got=got, fix="add --search"))
    configs = [load(name, words, prog="fsdp-jax plan CONFIG") for name, words in files]
    from fsdp_jax.planner import cache_folder
    from fsdp_jax.train.plans import choose, plan_of

    cache = None if fresh else cache_folder()
    if seek:
        choice = choose(configs[0], where, int(devices) if devices else None, cache, _progress)
        target = Path(to or f"{Path(files[0][0]).stem}.planned.yaml")
        choice.save(target)
        plans = [choice.found.best.plan]
        said = json.dumps(choice.to_json() | {"written": str(target)}, indent=1)
        print(said if as_json else f"{choice.found}\nwritten to {target}")
    else:
        from fsdp_jax.planner import parse_topology, plans_table

        plans = [plan_of(config, parse_topology(where), analytic=analytic, cache=cache) for config in configs]
        one, several = plans[0], len(plans) > 1
        found = [each.to_json() for each in plans] if several else one.to_json()
        names = [name for name, _ in files]
        print(json.dumps(found, indent=1) if as_json else plans_table(names, plans) if several else one)
    if page is not None:
        from fsdp_jax.planner import compare_html, plan_html

        Path(page).write_text(compare_html(plans) if len(plans) > 1 else plan_html(plans[0]), encoding="utf-8")
    return OK if all(each.fits for each in plans) else BROKEN


def _check_flags(words: list[str], flags: tuple[str, ...]) -> None:
    """A misspelt flag is named before what it leaves missing."""
    for word in words:
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.75)
        if word.startswith("--") and "." not in word and near:
            raise ConfigError(message(f"unknown flag '{word}'", where="command line", fix=f"did you mean '{near[0]}'?"))


PLAN_FLAGS = (
    "--topology",
    "--analytic",
    "--search",
    "--devices",
    "--compare",
    "--json",
    "--html",
    "--to",
    "--no-cache",
)
PLAN_OPTIONS = (("html", "FILE"), ("topology", "T"), ("devices", "N"), ("to", "FILE"))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _compared(words: list[str]) -> list[tuple[str, list[str]]]:
    """The one configuration, or the two of `--compare A B`, each with the overrides."""
    if "--compare" not in words:
        return [_file_and_overrides("plan", words)]
    at = words.index("--compare")
    files, rest = words[at + 1 : at + 3], words[:at] + words[at + 3 :]
    if len(files) < 2 or any(name.startswith("-") for name in files) or (rest and not rest[0].startswith("-")):
        got = " ".join(["--compare", *files])
        raise ConfigError(message("--compare takes two files", where="command line", expected="--compare A B", got=got))
    return [(name, rest) for name in files]


def verify(arguments: list[str]) -> int:
    """Checks every checkpoint of a run against its manifest: exit code 3 where a file is not as it was written.

    fsdp-jax verify RUN [--json]: RUN is the `output` of a run. --json prints it for programs.
    """
    if _help(arguments, verify.__doc__):
        return OK
    as_json = _flag(arguments, "--json")
    run = _only("verify", "RUN", "the output directory of a run", arguments)
    from fsdp_jax.checkpoint.verify import verify_run

    found = verify_run(run)
    print(json.dumps(found.to_json(), indent=1) if as_json else found)
    return OK if found.good else BROKEN


def export(arguments: list[str]) -> int:
    """Writes the parameters of a checkpoint as safetensors, one full state dict.

    fsdp-jax export RUN --to DIR [--step N] [--dtype D] [--format safetensors]: RUN is the `output` of a run, DIR is
    made. The newest step and float32 where not said; --dtype is float32, bfloat16, float16, or same, which keeps the
    dtypes that were trained. The step is verified first.
    """
    if _help(arguments, export.__doc__):
        return OK
    to, step, dtype, kind = (_option(arguments, f"--{name}", hint) for name, hint in EXPORT_OPTIONS)
    run = _only("export", "RUN", "the output directory of a run", arguments)
    if to is None:
        raise ConfigError(message("--to is missing", where="command line", expected="--to DIR, a directory to make"))
    if kind not in (None, "safetensors"):
        raise ConfigError(message("unknown format", where="--format", expected="safetensors", got=kind))
    if step is not None and not step.isdecimal():
        raise ConfigError(message("not a step", where="--step", expected="a whole number", got=step))
    import jax

    from fsdp_jax.checkpoint.verify import export_run

    jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
    dtype = None if dtype == "same" else dtype or "float32"
    print(export_run(run, to, step=None if step is None else int(step), dtype=dtype))
    return OK


EXPORT_OPTIONS = (("to", "DIR"), ("step", "N"), ("dtype", "D"), ("format", "safetensors"))

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train, "plan": plan, "inspect": inspect, "verify": verify, "export": export,
}  # fmt: skip


def _usage() -> str:
    lines = [f"  {name:<9}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...] [--debug]",
            "",
            "Fully Sharded Data Parallel for JAX.",
            "",
            *lines,
            "",
            f"CONFIG is {SYNTAX}; verify and export take the output directory of a run.",
            "`fsdp-jax COMMAND --help` lists every key. --debug shows tracebacks.",
            "Exit codes: 0 done; 1 a failure while running; 2 unusable arguments or configuration; 3 a contract, a fit",
            "or a checkpoint that does not hold; 75 stopped by a signal after saving (run the same command again).",
        ]
    )


def _file_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    if not words or words[0].startswith("-"):
        got = words[0] if words else "nothing"
        fix = f"fsdp-jax {command} configs/quickstart.yaml"
        raise ConfigError(message("no configuration", where="command line", expected=SYNTAX, got=got, fix=fix))
    return words[0], words[1:]


def _help(words: list[str], description: str | None) -> bool:
    """Prints what a command does, if help is asked for."""
    asked = bool({"-h", "--help"} & set(words))
    if asked:
        print(cleandoc(description or ""))
    return asked


def _only(command: str, name: str, meaning: str, words: list[str]) -> str:
    """The one argument that is left."""
    if len(words) != 1 or words[0].startswith("-"):
        got = " ".join(words) or "nothing"
        fix = f"fsdp-jax {command} output/quickstart"
        raise ConfigError(message(f"{name} is one path", where="command line", expected=meaning, got=got, fix=fix))
    return words[0]


def _flag(words: list[str], name: str) -> bool:
    """Whether the flag is there; it is taken out."""
    found = name in words
    words[:] = [word for word in words if word != name]
    return found


def _option(words: list[str], name: str, kind: str = "FILE") -> str | None:
    """The value after an option; both are taken out."""
    words[:] = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{name}=") else [word])]
    if name not in words:
        return None
    at = words.index(name)
    if at + 1 == len(words) or words[at + 1].startswith("--"):
        raise ConfigError(message(f"{name} needs a value", where="command line", expected=f"{name} {kind}"))
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return UNUSABLE
    return BROKEN if isinstance(error, DamageError | FitError) else FAILED


def _block(error: Exception) -> str:
    from fsdp_jax.compiled import NonFiniteError

    if isinstance(error, ConfigError | FitError | CheckpointError | NonFiniteError):
        return f"error: {error}"
    first = str(error).strip() or "no message"
    return message(f"error: {type(error).__name__}: {first}", fix="run again with --debug for the traceback")


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    print(f"warning: {message}", file=sys.stderr)
