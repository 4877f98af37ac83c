"""The commands: each takes the words after its name and returns an exit code.

Arguments are read before anything heavy is imported.
"""

import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from fsdp_jax.cli.arguments import asks_help, file_and_overrides, flag, only, option
from fsdp_jax.errors import ConfigError, did_you_mean, message

OK, BROKEN = 0, 3


def train(arguments: list[str]) -> int:
    """Trains; starts, or resumes from the newest good checkpoint in the output directory."""
    from fsdp_jax.train.config_file import load, parse_help

    if parse_help("train", arguments, train.__doc__):
        return OK
    config = load(*file_and_overrides("train", arguments))
    from fsdp_jax.train.main import train as run

    return run(config)


def inspect(arguments: list[str]) -> int:
    """Shows where every array of the training state lies, and why; with --topology T also what a
    step sends.

    --topology h100:8 (or v5e:16x16, cpu:8, ...) lays it out on that machine, which need not be
      there, compiles the step
    for it and holds it to its contract: exit code 3 where it does not hold. --json prints it for
    programs; --html FILE writes the layout as a page.
    """
    from fsdp_jax.train.config_file import load, parse_help

    if parse_help("inspect", arguments, inspect.__doc__):
        return OK
    as_json, page = flag(arguments, "--json"), option(arguments, "--html")
    name = option(arguments, "--topology", "T")
    config = load(*file_and_overrides("inspect", arguments), prog="fsdp-jax inspect CONFIG")
    from fsdp_jax.contract.contract import check_contract
    from fsdp_jax.sharding.report import layout_html, layout_json, layout_report
    from fsdp_jax.train.build import build, topology_devices

    run = build(config, None if name is None else topology_devices(name))
    layout = run.sharded.layout
    contract = None if name is None else check_contract(run.step, run.batch)
    if page is not None:
        Path(page).write_text(layout_html(layout))
    if as_json:
        print(json.dumps(layout_json(layout) | (contract.to_json() if contract else {}), indent=1))
    else:
        print(
            layout_report(layout)
            if contract is None
            else f"{layout_report(layout)}\n\nsent per step\n{contract}"
        )
    return OK if contract is None or contract.holds else BROKEN


def plan(arguments: list[str]) -> int:
    """Tells memory, traffic and time of a step on hardware that need not be there: exit code 3
    where it does not fit.

    fsdp-jax plan CONFIG --topology T [--analytic] [--json] [--html FILE] [--dotted.key VALUE ...]:
    compiles the step that `train` runs for h100:8, h100:64x8, v5e:16x16, ... --analytic reckons
    without any compiler, in seconds.
    --search looks for the fastest strategy, mesh, remat, prefetch and accumulation for the batch,
      and writes the
    configuration (--to FILE); T may then be a chip alone, h100: the fewest that it fits, or
    --devices N of them.
    --compare A B puts two configurations side by side. Compiled programs are kept; --no-cache
      compiles again.
    """
    from fsdp_jax.train.config_file import load, parse_help

    if parse_help("plan", arguments, plan.__doc__):
        return OK
    as_json, analytic, seek, fresh = (
        flag(arguments, name) for name in ("--json", "--analytic", "--search", "--no-cache")
    )
    page, where, devices, to = (option(arguments, f"--{name}", hint) for name, hint in PLAN_OPTIONS)
    if page is not None and not Path(page).absolute().parent.is_dir():
        raise ConfigError(
            message("no such folder", where="--html", got=page, fix="make it, or write elsewhere")
        )
    files = _compared(arguments)
    _check_flags(files[0][1], PLAN_FLAGS)
    if where is None:
        fix = "--topology h100:8, or h100:64x8, v5e:16x16, ...; with --search a chip alone, h100"
        raise ConfigError(
            message("--topology is missing", where="command line", expected="--topology T", fix=fix)
        )
    if devices is not None and not devices.isdecimal():
        raise ConfigError(
            message(
                "not a number of devices", where="--devices", expected="a whole number", got=devices
            )
        )
    if seek and (analytic or len(files) > 1):
        got = "--analytic" if analytic else "--compare"
        fix = "search first, then plan what it wrote"
        raise ConfigError(
            message(f"{got} does not go with --search", where="command line", got=got, fix=fix)
        )
    if not seek and (devices is not None or to is not None):
        got = "--devices" if devices is not None else "--to"
        raise ConfigError(
            message(f"{got} goes with --search", where="command line", got=got, fix="add --search")
        )
    configs = [load(name, words, prog="fsdp-jax plan CONFIG") for name, words in files]
    from fsdp_jax.planner import cache_folder
    from fsdp_jax.train.planning import choose, plan_of

    cache = None if fresh else cache_folder()
    if seek:
        choice = choose(configs[0], where, int(devices) if devices else None, cache, _progress)
        target = Path(to or f"{Path(files[0][0]).stem}.planned.yaml")
        choice.save(target)
        plans = [choice.result.best.plan]
        said = json.dumps(choice.to_json() | {"written": str(target)}, indent=1)
        print(said if as_json else f"{choice.result}\nwritten to {target}")
    else:
        from fsdp_jax.planner import parse_topology, plans_table

        plans = [
            plan_of(config, parse_topology(where), analytic=analytic, cache=cache)
            for config in configs
        ]
        one, several = plans[0], len(plans) > 1
        found = [each.to_json() for each in plans] if several else one.to_json()
        names = [name for name, _ in files]
        print(
            json.dumps(found, indent=1)
            if as_json
            else plans_table(names, plans)
            if several
            else one
        )
    if page is not None:
        from fsdp_jax.planner import compare_html, plan_html

        Path(page).write_text(
            compare_html(plans) if len(plans) > 1 else plan_html(plans[0]), encoding="utf-8"
        )
    return OK if all(each.fits for each in plans) else BROKEN


def _check_flags(words: list[str], flags: tuple[str, ...]) -> None:
    """A misspelt flag is named before what it leaves missing."""
    for word in words:
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.75)
        if word.startswith("--") and "." not in word and near:
            raise ConfigError(
                message(
                    f"unknown flag '{word}'", where="command line", fix=f"did you mean '{near[0]}'?"
                )
            )


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
        return [file_and_overrides("plan", words)]
    at = words.index("--compare")
    files, rest = words[at + 1 : at + 3], words[:at] + words[at + 3 :]
    if (
        len(files) < 2
        or any(name.startswith("-") for name in files)
        or (rest and not rest[0].startswith("-"))
    ):
        got = " ".join(["--compare", *files])
        raise ConfigError(
            message(
                "--compare takes two files", where="command line", expected="--compare A B", got=got
            )
        )
    return [(name, rest) for name in files]


def certify(arguments: list[str]) -> int:
    """Compares every strategy and setting with the unsharded model, small: exit code 3 where a
    number differs.

    fsdp-jax certify CONFIG [--json] [--dotted.key VALUE ...]: a model of the configured family with
    two layers and width 64, its loss, optimizer, units and precision, on virtual CPU devices
    (train.devices, or 8). Loss, gradient norm, every gradient and the parameters after three steps,
    for every strategy, with accumulation 1 and 4, and where train.local_batch is set with local
    batches and deferred reduction too. --json prints it for programs.
    """
    from fsdp_jax.train.config_file import load, parse_help

    if parse_help("certify", arguments, certify.__doc__):
        return OK
    as_json = flag(arguments, "--json")
    config = load(*file_and_overrides("certify", arguments), prog="fsdp-jax certify CONFIG")
    from fsdp_jax.certify import CertifyError
    from fsdp_jax.cli.certify import certify_small

    try:
        found = certify_small(config)
        said = str(found)
    except CertifyError as error:
        found = error.certificate
        said = str(error)
    print(json.dumps(found.to_json(), indent=1) if as_json else said)
    return OK if found.holds else BROKEN


def verify(arguments: list[str]) -> int:
    """Checks every checkpoint of a run against its manifest: exit code 3 where a file is not as it
    was written.

    fsdp-jax verify RUN [--json]: RUN is the `output` of a run. --json prints it for programs.
    """
    if asks_help(arguments, verify.__doc__):
        return OK
    as_json = flag(arguments, "--json")
    run = only("verify", "RUN", "the output directory of a run", arguments, flags=["--json"])
    from fsdp_jax.checkpoint.verify import verify_run

    found = verify_run(run)
    print(json.dumps(found.to_json(), indent=1) if as_json else found)
    return OK if found.good else BROKEN


def export(arguments: list[str]) -> int:
    """Writes the parameters of a checkpoint as safetensors, one full state dict.

    fsdp-jax export RUN --to DIR [--step N] [--dtype D] [--format F]: RUN is the `output` of a run,
    DIR is made.
    --format safetensors, where not said, has our names; huggingface has theirs, with a config.json
      that transformers
    loads and the tokenizer, and LoRA's adapters merged. The newest step and float32 where not said;
    --dtype is float32, bfloat16, float16, or same, which keeps the dtypes that were trained. The
    step is verified first.
    """
    if asks_help(arguments, export.__doc__):
        return OK
    to, step, dtype, kind = (option(arguments, f"--{name}", hint) for name, hint in EXPORT_OPTIONS)
    run = only(
        "export", "RUN", "the output directory of a run", arguments, flags=_flags(EXPORT_OPTIONS)
    )
    to = _required(to, "--to", "DIR, a directory to make")
    if kind not in (None, *FORMATS):
        fix = did_you_mean(str(kind), FORMATS)
        raise ConfigError(
            message(
                "unknown format", where="--format", expected=" or ".join(FORMATS), got=kind, fix=fix
            )
        )
    number = _whole(step, "--step")
    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
    dtype = None if dtype == "same" else dtype or "float32"
    if kind == "huggingface":
        from fsdp_jax.train.huggingface import export_model

        print(export_model(run, to, step=number, dtype=dtype))
    else:
        from fsdp_jax.checkpoint.verify import export_run

        print(export_run(run, to, step=number, dtype=dtype))
    return OK


def import_(arguments: list[str]) -> int:
    """Reads weights as on Hugging Face into a sharded checkpoint, for `train --model.weights RUN`.

    fsdp-jax import DIR --to RUN [--dtype D] [--devices N]: DIR has config.json and safetensors,
    perhaps a tokenizer; RUN is made. --dtype is float32, where not said, or bfloat16. --devices:
    virtual CPU devices, where there is no accelerator. Nothing in DIR is run. `model.weights` takes
    DIR itself too: import once what is used often.
    """
    if asks_help(arguments, import_.__doc__):
        return OK
    to, dtype, devices = (option(arguments, f"--{name}", hint) for name, hint in IMPORT_OPTIONS)
    meaning = "a folder as on Hugging Face, with config.json and safetensors"
    folder = only(
        "import",
        "DIR",
        meaning,
        arguments,
        flags=_flags(IMPORT_OPTIONS),
        example="gpt2 --to output/gpt2",
    )
    to = _required(to, "--to", "RUN, a directory to make")
    from fsdp_jax.train.build import start_devices
    from fsdp_jax.train.huggingface import import_run

    start_devices(_whole(devices, "--devices"))
    print(import_run(folder, to, dtype=dtype or "float32"))
    return OK


def tokenize(arguments: list[str]) -> int:
    """Turns a corpus into token shards, for `train --data.kind tokens --data.path DIR`; goes on
    where it was stopped.

    fsdp-jax tokenize CORPUS --to DIR (--tokenizer T | --vocab-size N) [--field F] [--held-out S]
    [--invalid W]: CORPUS is a text file, a .jsonl, or a folder of them; `embedded` is the standard
    library's source. --tokenizer is bytes, a tokenizer.json or its folder; --vocab-size trains a
    byte-level BPE of N tokens on the corpus. --field is the text of a record (text), --held-out the
    share kept from training (0.05), --invalid what becomes of text that is not UTF-8: error,
    replace or skip.
    """
    if asks_help(arguments, tokenize.__doc__):
        return OK
    to, named, size, field, share, invalid = (
        option(arguments, f"--{name}", hint) for name, hint in TOKENIZE_OPTIONS
    )
    meaning = "a text file, a .jsonl, or a folder of them"
    corpus = only(
        "tokenize",
        "CORPUS",
        meaning,
        arguments,
        flags=_flags(TOKENIZE_OPTIONS),
        example="texts --to output/tokens --vocab-size 32000",
    )
    to = _required(to, "--to", "DIR, a directory to make")
    if (named is None) == (size is None):
        got, expected = "neither" if named is None else "both", "--tokenizer T or --vocab-size N"
        raise ConfigError(
            message("one tokenizer, please", where="command line", expected=expected, got=got)
        )
    from fsdp_jax.cli.tokenize import tokenize_corpus

    print(
        tokenize_corpus(
            corpus,
            to,
            tokenizer=named,
            vocab_size=_whole(size, "--vocab-size"),
            field=field or "text",
            held_out=_number(share, "--held-out"),
            invalid=invalid or "error",
            say=_progress,
        )
    )
    return OK


def _flags(options: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"--{name}" for name, _ in options]


def _required(value: str | None, name: str, expected: str) -> str:
    if value is None:
        raise ConfigError(
            message(f"{name} is missing", where="command line", expected=f"{name} {expected}")
        )
    return value


def _whole(value: str | None, name: str) -> int | None:
    if value is not None and not value.isdecimal():
        raise ConfigError(message("not a number", where=name, expected="a whole number", got=value))
    return None if value is None else int(value)


def _number(value: str | None, name: str) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        raise ConfigError(
            message("not a number", where=name, expected="a number", got=value)
        ) from None


FORMATS = ("safetensors", "huggingface")
EXPORT_OPTIONS = (("to", "DIR"), ("step", "N"), ("dtype", "D"), ("format", "F"))
IMPORT_OPTIONS = (("to", "RUN"), ("dtype", "D"), ("devices", "N"))
TOKENIZE_OPTIONS = (
    ("to", "DIR"),
    ("tokenizer", "T"),
    ("vocab-size", "N"),
    ("field", "F"),
    ("held-out", "S"),
    ("invalid", "W"),
)

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "inspect": inspect,
    "certify": certify,
    "tokenize": tokenize,
    "import": import_,
    "export": export,
    "verify": verify,
}
