"""Compiled programs that a run keeps in a folder, or takes from one, in place of compiling them.

[Note: all or none] Every process of a run reads a program, or every one compiles it: on GPUs each
measures a part of the kernels and waits for what the others have measured. So process 0 decides.
A process that does not see its file is sent it. jax's own cache lets each process look for itself,
and on CPUs no process but 0 finds what process 0 has kept: their keys differ.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fsdp_jax.compat.compilation_cache import (
    Compile,
    ProgramNotReadError,
    compile_and_take,
    key_of_program,
    loses_order,
    read_compiled,
    without_cache_on_cpus,
)
from fsdp_jax.compat.xla_flags import WITHOUT_TRITON
from fsdp_jax.errors import ConfigError, DamageError, ReadableError
from fsdp_jax.processes import gather_from_processes, in_any_process
from fsdp_jax.step.program_files import (
    WORDS,
    Header,
    describe_machine,
    differences,
    file_name,
    folder_of,
    parse_program,
    programs_in,
    read_program,
    remove_old,
    write_program,
)

THE_STEP = "the train step"
Use = Literal["keep", "require", "write"]
MOST_FILES = 32  # in a folder that a run keeps
_CPU_DEVICES = "jax_num_cpu_devices"
_DIGEST = 32  # bytes of a SHA-256
_LOOPS = (
    "XLA reads a program for several CPU devices without the order of the collectives in its loops "
    "(docs/design/xla-cpu-waits.md)"
)
_WITHOUT_LOOPS = (
    "a step without loops: model.scan_layers False, train.accumulation 1, no train.loss_chunk, and "
    "a data.sequence_length of at most 1024"
)
_NOT_GIVEN = (
    "jax keeps no program that calls back to Python, that this process has compiled before, or for "
    "devices whose programs it does not serialize"
)


@dataclass(frozen=True)
class _Wanted:
    """A program that a run wants; `is_strict`: where it cannot be read, the run ends."""

    own: Header  # which that of its file has to equal
    file: Path
    key: str  # jax's, in this process
    compile_it: Compile
    is_strict: bool

    def require_fit(self, content: bytes, where: str) -> None:
        """Raises ConfigError or DamageError unless what a file has is this program."""
        header, _ = parse_program(content, where)
        _refuse_difference(where, header, self.own)
        _require_key(where, header, self.key)


class KeptPrograms:
    """A folder of compiled programs, and what a run does with it.

    `keep`: takes a program that fits, and compiles and writes one that does not; what cannot be
    written is said. `require`: takes programs, writes none, and refuses what does not fit, until
    the train step is there: after that, a run is not ended for it. `write`: as `keep`, and refuses
    what cannot be written.

    Attributes:
        read: names of the programs that were read.
        compiled: names of those that were compiled.

    """

    def __init__(
        self,
        directory: Path,
        use: Use,
        values: Mapping[str, Any],
        say: Callable[[str], None] = print,
    ) -> None:
        """Takes the `values` of the configuration by key, which name what differs in an error."""
        self.directory, self.use = directory, use
        self.read: list[str] = []
        self.compiled: list[str] = []
        self._equal_machines: bool | None = None  # None: not compared yet
        self._values = json.loads(json.dumps(dict(values), default=str))
        self._say = say

    def compile(
        self, name: str, lowered: Any, mesh: Mesh, options: Mapping[str, Any], *, is_step: bool
    ) -> Any:
        """Takes the program from the folder, or compiles it; waits for all processes.

        `name`: such as `the train step`; `is_step`: it is required, and its loops have collectives.
        Raises ConfigError or DamageError for what is refused.
        """
        compile_it = partial(lowered.compile, compiler_options=dict(options) or None)
        is_strict = self.use == "require" and is_step and not self._trains
        if is_step and loses_order(mesh, lowered):
            if self.use == "write" or is_strict:
                raise self._refusal(name, _LOOPS, _WITHOUT_LOOPS)
            with without_cache_on_cpus(mesh, lowered):
                return self._compile_only(name, compile_it)
        own = describe_machine(mesh) | {
            "program": name,
            "stablehlo": _digest(lowered.as_text().encode()).hex(),
            # without what is chosen where there is no GPU
            "options": {key: str(options[key]) for key in options.keys() - WITHOUT_TRITON.keys()},
            "config": self._values,
        }
        is_present = mesh.devices.flat[0] in jax.devices()
        if is_present and not self._machines_are_equal(own):
            return self._compile_only(name, compile_it)
        file = folder_of(self.directory, own["topology"]["processes"]) / file_name(name, own)
        wanted = _Wanted(own, file, key_of_program(compile_it), compile_it, is_strict)
        keys: list[str] = []  # none of devices that are not present, which report other versions
        if is_present:
            compiled = self._take(wanted, self._agreed(wanted, self._find(wanted)))
            if compiled is not None:
                self.read.append(name)
                return compiled
            keys = [digest.hex() for digest in _gather(_digest(wanted.key.encode()))]
        return self._compile_and_write(wanted, keys)

    @property
    def _trains(self) -> bool:
        return THE_STEP in (*self.read, *self.compiled)

    def _compile_only(self, name: str, compile_it: Compile) -> Any:
        compiled = compile_it()
        self.compiled.append(name)
        return compiled

    def _machines_are_equal(self, own: Header) -> bool:
        """Compares what the processes run on, once; raises ConfigError where that is required."""
        if self._equal_machines is None:
            facts = {name: own[name] for name in ("versions", "device", "flags", "settings")}
            texts = [json.dumps(fact, sort_keys=True) for fact in facts.values()]
            each = _gather(b"".join(_digest(text.encode())[:8] for text in texts))
            differ = {
                WORDS[name]: fact
                for number, (name, fact) in enumerate(facts.items())
                if len({digests[8 * number :][:8] for digests in each}) > 1
            }
            self._equal_machines = not differ
            if differ:
                what = f"the processes differ in {', '.join(differ)}, and share no programs"
                if self.use != "keep":
                    fix = "the same hardware, packages and environment on all hosts"
                    raise ConfigError(what, got=json.dumps(differ), fix=fix)
                if jax.process_index() == 0:
                    self._say(f"note: {what}; programs are not kept")
        return self._equal_machines

    def require_any(self, processes: int) -> None:
        """Raises ConfigError in process 0 unless there is a train step for so many processes."""
        folder = folder_of(self.directory, processes)
        if self.use != "require" or jax.process_index() != 0 or programs_in(folder, THE_STEP):
            return
        folders = sorted(self.directory.glob("processes-*"))
        found = [path.name for path in folders if programs_in(path, THE_STEP)]
        nothing = "no programs" if self.directory.is_dir() else "no such folder"
        raise ConfigError(
            f"there is no compiled program of {THE_STEP} for so many processes",
            where=str(self.directory),
            expected=f"a train step in {folder.name}",
            got=", ".join(found) or nothing,
            fix=_compile_again(),
        )

    def _find(self, wanted: _Wanted) -> bytes:
        """Reads the file of a program; b"" for none that this process can use.

        Process 0 raises the error of one that is required.
        """
        try:
            content = read_program(wanted.file)
            if content is None:
                self._refuse_missing(wanted)
                return b""
            wanted.require_fit(content, str(wanted.file))
        except ReadableError as error:
            if wanted.is_strict:
                raise
            if jax.process_index() == 0:
                self._say(f"note: {error.what} ({error.where}); it is compiled anew")
            return b""
        return content

    def _refuse_missing(self, wanted: _Wanted) -> None:
        """Raises ConfigError for a required program that is not there, with what is in its place.

        Only in process 0: others are sent what they do not see.
        """
        if self.use != "require" or jax.process_index() != 0:
            return
        name, folder = wanted.own["program"], wanted.file.parent
        for found in programs_in(folder, name)[-1:]:
            wanted.require_fit(read_program(found) or b"", str(found))
        raise ConfigError(
            f"there is no compiled program of {name}",
            where=str(folder),
            expected=wanted.file.name,
            fix=_compile_again(),
        )

    def _agreed(self, wanted: _Wanted, content: bytes) -> bytes:
        """Returns what process 0 has found, in all processes; b"" for none, or none that fits."""
        each = _gather(_digest(content) if content else b"")
        if not any(each[0]):
            return b""
        if len(set(each)) == 1:
            return content
        content, fits = _broadcast(content), True
        try:
            wanted.require_fit(content, "the program that process 0 has sent")
        except ReadableError:
            if wanted.is_strict:
                raise
            fits = False
        return b"" if in_any_process(not fits) else content

    def _take(self, wanted: _Wanted, content: bytes) -> Any:
        """Has jax read a program; None, in all processes, where there is none or any cannot."""
        if not content:
            return None
        _, entry = parse_program(content, str(wanted.file))
        compiled, problem = None, ""
        try:
            compiled = read_compiled(wanted.compile_it, wanted.key, entry)
        except ProgramNotReadError as error:
            problem = str(error)
            if wanted.is_strict:
                raise DamageError(
                    "XLA does not read a compiled program",
                    where=str(wanted.file),
                    got=problem,
                    fix=_compile_again(),
                ) from error
        if not in_any_process(bool(problem)):
            return compiled
        if problem:
            self._say(f"note: XLA does not read {wanted.file}: {problem}; it is compiled anew")
        return None

    def _compile_and_write(self, wanted: _Wanted, keys: list[str]) -> Any:
        """Compiles a program in every process, and writes it in process 0."""
        name, file = wanted.own["program"], wanted.file
        compiled, entry = compile_and_take(wanted.compile_it, wanted.key)
        self.compiled.append(name)
        if jax.process_index() != 0 or self.use == "require":
            return compiled
        if not entry:
            if self.use == "write":
                raise self._refusal(name, _NOT_GIVEN)
            return compiled
        try:
            write_program(file, wanted.own | {"keys": keys}, entry)
            if self.use == "keep":
                remove_old(file.parent, MOST_FILES)
        except OSError as error:
            if self.use == "write":
                what, fix = "a compiled program cannot be written", "--to another folder"
                raise ConfigError(what, where=str(file), got=error, fix=fix) from error
            self._say(f"warning: the program of {name} is not kept: {error}")
        return compiled

    def _refusal(self, name: str, why: str, fix: str = "") -> ConfigError:
        """Makes the error for a program that has to be kept, and cannot be."""
        what = f"the program of {name} cannot be kept"
        return ConfigError(what, where=str(self.directory), got=why, fix=fix)


def _compile_again() -> str:
    """Words the fix that compiles for the devices of this run."""
    command = "fsdp-jax compile CONFIG --to DIR"
    if jax.default_backend() != "cpu":
        command += ", started as this run is,"
    else:
        stated = max(getattr(jax.config, _CPU_DEVICES), 0)  # by `launch`, or train.devices
        command += f" --processes {jax.process_count()}" + f" --devices {stated}" * bool(stated)
    return f"{command} with all keys of this run; or leave out --programs, and the run compiles"


def _refuse_difference(where: str, header: Header, own: Header) -> None:
    """Raises ConfigError for a program of something else, which it names."""
    found = differences(header, own, {"program": "program", **WORDS})
    if not found and header.get("stablehlo") == own["stablehlo"]:
        return
    fix = _compile_again()
    if found:
        name, told, mine = found[0]
    elif keys := differences(header, own, {"config": ""}):
        name = "configuration"
        told = ", ".join(f"{key} {value}" for key, value, _ in keys[:4])
        mine = ", ".join(f"{key} {value}" for key, _, value in keys[:4])
    else:
        name = "source: the step is traced to another StableHLO, with equal keys"
        told, mine = f"SHA-256 {header.get('stablehlo')}", own["stablehlo"]
        fix = f"the same releases of fsdp_jax, flax and optax, in the same folders, or {fix}"
    what = f"the compiled program of {own['program']} is of another {name}"
    raise ConfigError(what, where=where, expected=told, got=mine, fix=fix)


def _require_key(where: str, header: Header, key: str) -> None:
    """Raises ConfigError unless jax's key of a program is that of the file, if it has one.

    What the header does not list is hashed in it, such as the device assignment.
    """
    keys = header.get("keys", [])
    number = jax.process_index()
    told = keys[number] if number < len(keys) else ""
    own = _digest(key.encode()).hex()
    if told and told != own:
        raise ConfigError(
            "a compiled program is of other settings than are hashed in jax's key of it",
            where=where,
            expected=f"{told}, of process {number}",
            got=own if key else "no key: this process has compiled it before",
            fix=f"the same environment and settings of jax, or {_compile_again()}",
        )


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _gather(part: bytes) -> list[bytes]:
    """Gathers up to 32 bytes of every process; waits for all of them."""
    part = part.ljust(_DIGEST, b"\0")
    if jax.process_count() == 1:
        return [part]
    return [bytes(row) for row in gather_from_processes(np.frombuffer(part, np.uint8))]


def _broadcast(content: bytes) -> bytes:
    """Sends bytes of process 0 to the others."""
    size = int.from_bytes(_gather(len(content).to_bytes(8, "little"))[0][:8], "little")
    own = np.frombuffer(content[:size].ljust(size, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes()


_current: KeptPrograms | None = None


@contextmanager
def keeping(programs: KeptPrograms | None) -> Iterator[None]:
    """Has the steps and the initial values of a block keep their programs; None: they do not."""
    global _current
    before, _current = _current, programs
    try:
        yield
    finally:
        _current = before


def was_read(name: str) -> bool:
    """Tells whether a program was read in place of being compiled."""
    return _current is not None and name in _current.read


def keeps_programs() -> bool:
    """Tells whether programs are kept."""
    return _current is not None


def compile_kept(
    name: str, lowered: Any, mesh: Mesh, options: Mapping[str, Any], *, is_step: bool = True
) -> Any:
    """Compiles a program, or takes it from where this process keeps its programs.

    `is_step`: not initial values, whose loops have no collectives. Without a name it is not kept.
    """
    if _current is None or not name:
        compile_it = partial(lowered.compile, compiler_options=dict(options) or None)
        if not is_step:
            return compile_it()
        with without_cache_on_cpus(mesh, lowered):
            return compile_it()
    return _current.compile(name, lowered, mesh, options, is_step=is_step)
