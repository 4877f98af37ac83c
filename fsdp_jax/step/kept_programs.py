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
from fsdp_jax.processes import gather_from_processes
from fsdp_jax.step.program_files import (
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
_DIGEST = 32  # bytes of a SHA-256
_LOOPS = (
    "XLA reads a program for several CPU devices without the order of the collectives in its loops "
    "(docs/design/xla-cpu-waits.md)"
)
_CALLBACK = (
    "jax keeps no program that calls back to Python, and none while its cache is switched off"
)
_COMPILE_AGAIN = (
    "fsdp-jax compile CONFIG --to DIR, with the same configuration, versions and devices"
)


class KeptPrograms:
    """A folder of compiled programs, and what a run does with it.

    `keep`: takes a program that fits, and compiles and writes one that does not; what cannot be
    written is said. `require`: takes programs, writes none, and refuses what does not fit, until
    the train step is there: after that, a run is not ended for it. `write`: as `keep`, and refuses
    what cannot be written.

    Attributes:
        read: names of the programs that were read.
        compiled: names of those that were compiled.
        files: of both.

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
        self.files: list[Path] = []
        self._trains = False
        self._is_step = False  # what is compiled now
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
        self._is_step = is_step
        if is_step and loses_order(mesh, lowered):
            self._refuse_to_keep(name, _LOOPS)
            with without_cache_on_cpus(mesh, lowered):
                return self._note(name, compile_it(), self.compiled)
        own = describe_machine(mesh) | {
            "program": name,
            "stablehlo": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
            "options": {
                key: str(value)
                for key, value in sorted(options.items())
                if key not in WITHOUT_TRITON  # chosen where there is no GPU
            },
            "config": self._values,
        }
        file = folder_of(self.directory, own["topology"]["processes"]) / file_name(name, own)
        key = ""
        if not _is_described(mesh):
            if not self._machines_are_equal(own):
                return self._note(name, compile_it(), self.compiled)
            key = key_of_program(compile_it)
            content = self._agreed(self._find(file, own, key), key)
            if content:
                compiled = self._take(content, compile_it, key, file)
                if compiled is not None:
                    self.files.append(file)
                    return self._note(name, compiled, self.read)
        return self._note(name, self._compile_and_write(compile_it, file, own, key), self.compiled)

    def _note(self, name: str, compiled: Any, done: list[str]) -> Any:
        done.append(name)
        self._trains |= name == THE_STEP
        return compiled

    @property
    def is_strict(self) -> bool:
        """Whether a program that is not there ends the run: a step's, until the run trains."""
        return self.use == "require" and self._is_step and not self._trains

    def _machines_are_equal(self, own: Header) -> bool:
        """Compares what the processes run on, once; raises ConfigError where that is required."""
        if self._equal_machines is None:
            facts = json.dumps([own[name] for name in ("versions", "device", "flags")])
            each = _gather(hashlib.sha256(facts.encode()).digest())
            self._equal_machines = len(set(each)) == 1
            if not self._equal_machines:
                what = "the processes have other devices, versions or flags of XLA"
                if self.use != "keep":
                    raise ConfigError(f"{what}, so that they share no programs", got=facts)
                if jax.process_index() == 0:
                    self._say(f"note: {what}; programs are not kept")
        return self._equal_machines

    def require_any(self, processes: int) -> None:
        """Raises ConfigError in process 0 unless there is a train step for so many processes."""
        folder = folder_of(self.directory, processes)
        if self.use != "require" or jax.process_index() != 0 or programs_in(folder, THE_STEP):
            return
        counts = sorted(path.name for path in self.directory.glob("processes-*"))
        raise ConfigError(
            f"there is no compiled program of {THE_STEP} for so many processes",
            where=str(self.directory),
            expected=folder.name,
            got=", ".join(counts) or "no programs",
            fix=_COMPILE_AGAIN,
        )

    def _find(self, file: Path, own: Header, key: str) -> bytes:
        """Reads the file of a program; b"" for none that this process can use.

        Process 0 raises the error of one that is required.
        """
        try:
            if not file.exists():
                self._refuse_missing(file, own)
                return b""
            content = read_program(file)
            header, _ = parse_program(content, str(file))
            _refuse_difference(file, header, own, _COMPILE_AGAIN)
            _require_key(file, header, key)
        except ReadableError as error:
            if self.is_strict:
                raise
            if jax.process_index() == 0:
                self._say(f"note: {str(error).splitlines()[0]} ({file}); it is compiled anew")
            return b""
        return content

    def _refuse_missing(self, file: Path, own: Header) -> None:
        """Raises ConfigError for a required program that is not there, with what is in its place.

        Only in process 0: others are sent what they do not see.
        """
        if self.use != "require" or jax.process_index() != 0:
            return
        found = programs_in(file.parent, own["program"])
        if found:
            header, _ = parse_program(read_program(found[-1]), str(found[-1]))
            _refuse_difference(found[-1], header, own, _COMPILE_AGAIN)
        raise ConfigError(
            f"there is no compiled program of {own['program']}",
            where=str(file.parent),
            expected=file.name,
            fix=_COMPILE_AGAIN,
        )

    def _agreed(self, content: bytes, key: str) -> bytes:
        """Returns what process 0 has found, in all processes; b"" for none, or none that fits."""
        each = _gather(hashlib.sha256(content).digest() if content else b"")
        if not any(each[0]):
            return b""
        if len(set(each)) == 1:
            return content
        content = _broadcast(content)
        fits = True
        try:
            header, _ = parse_program(content, "the program that process 0 has sent")
            _require_key(Path("the program that process 0 has sent"), header, key)
        except ReadableError:
            if self.is_strict:
                raise
            fits = False
        return content if _all_of_them(fits) else b""

    def _take(self, content: bytes, compile_it: Compile, key: str, file: Path) -> Any:
        """Has jax read a program; returns None, in all processes, where any of them cannot."""
        _, entry = parse_program(content, str(file))
        compiled, problem = None, ""
        try:
            compiled = read_compiled(compile_it, key, entry)
        except ProgramNotReadError as error:
            problem = str(error)
            if self.is_strict:
                raise DamageError(
                    "XLA does not read a compiled program",
                    where=str(file),
                    got=problem,
                    fix=_COMPILE_AGAIN,
                ) from error
        if _all_of_them(not problem):
            return compiled
        if problem:
            self._say(f"note: XLA does not read {file}: {problem}; it is compiled anew")
        return None

    def _compile_and_write(self, compile_it: Compile, file: Path, own: Header, key: str) -> Any:
        """Compiles a program in every process, and writes it in process 0."""
        described = not key and self.use == "write"
        if described:  # a key that nobody asks for: the program is for other devices
            key = key_of_program(compile_it)
        compiled, entry = compile_and_take(compile_it, key)
        keys: list[str] = []
        if not described:
            keys = [part.hex() for part in _gather(_hash_in(key))]
        if jax.process_index() != 0 or self.use == "require":
            return compiled
        if not entry:
            self._refuse_to_keep(own["program"], _CALLBACK)
            return compiled
        try:
            write_program(file, own | {"keys": keys}, entry)
            self.files.append(file)
            if self.use == "keep":
                remove_old(file.parent, MOST_FILES)
        except OSError as error:
            if self.use == "write":
                raise ConfigError(
                    "a compiled program cannot be written", where=str(file), got=str(error)
                ) from error
            self._say(f"warning: the program of {own['program']} is not kept: {error}")
        return compiled

    def _refuse_to_keep(self, name: str, why: str) -> None:
        """Raises ConfigError for a program that cannot be kept, where it has to be."""
        if self.use == "write" or self.is_strict:
            raise ConfigError(
                f"the program of {name} cannot be kept",
                where=str(self.directory),
                got=why,
                fix="model.scan_layers False and train.accumulation 1 make a step without loops"
                if why == _LOOPS
                else "",
            )


def _refuse_difference(file: Path, header: Header, own: Header, fix: str) -> None:
    """Raises ConfigError for a program of something else, which it names."""
    what = f"the compiled program of {own['program']} is of another"
    if header.get("program") != own["program"]:
        raise ConfigError(f"{what} program", where=str(file), got=header.get("program"), fix=fix)
    found = differences(header, own)
    if found:
        name, told, mine = found[0]
        raise ConfigError(f"{what} {name}", where=str(file), expected=told, got=mine, fix=fix)
    if header.get("stablehlo") == own["stablehlo"]:
        return
    keys = differences(header, own, {"config": ""})
    if keys:
        told = ", ".join(f"{key} {value}" for key, value, _ in keys[:4])
        mine = ", ".join(f"{key} {value}" for key, _, value in keys[:4])
        raise ConfigError(
            f"{what} configuration", where=str(file), expected=told, got=mine, fix=fix
        )
    raise ConfigError(
        f"{what} source: the step is traced to another StableHLO, with equal keys",
        where=str(file),
        expected=f"SHA-256 {header.get('stablehlo')}",
        got=own["stablehlo"],
        fix=f"the same releases of fsdp_jax, flax and optax, or {fix}",
    )


def _require_key(file: Path, header: Header, key: str) -> None:
    """Raises ConfigError unless jax's key of a program is that of the file, if it has one."""
    keys = header.get("keys", [])
    number = jax.process_index()
    told = keys[number] if number < len(keys) else ""
    if told and told != _hash_in(key).hex():
        raise ConfigError(
            "a compiled program is of other settings of jax or XLA than are hashed in its key",
            where=str(file),
            expected=f"{told}, of process {number}",
            got=_hash_in(key).hex(),
            fix="the same settings of jax, or compile it again",
        )


def _hash_in(key: str) -> bytes:
    """Reads the hash at the end of jax's key; another digest of a key of another form."""
    _, _, end = key.rpartition("-")
    try:
        found = bytes.fromhex(end)
    except ValueError:
        found = b""
    return found if len(found) == _DIGEST else hashlib.sha256(key.encode()).digest()


def _is_described(mesh: Mesh) -> bool:
    """Tells whether the devices are those of a machine that is not present."""
    return mesh.devices.flat[0] not in jax.devices()


def _gather(part: bytes) -> list[bytes]:
    """Gathers up to 32 bytes of every process; waits for all of them."""
    part = part.ljust(_DIGEST, b"\0")
    if jax.process_count() == 1:
        return [part]
    return [bytes(row) for row in gather_from_processes(np.frombuffer(part, np.uint8))]


def _all_of_them(flag: bool) -> bool:
    """Tells whether a flag is set in all processes; waits for all of them."""
    return all(each[0] for each in _gather(bytes([flag])))


def _broadcast(content: bytes) -> bytes:
    """Sends bytes of process 0 to the others."""
    size = int.from_bytes(_gather(len(content).to_bytes(8, "little"))[0][:8], "little")
    own = np.frombuffer(content[:size].ljust(size, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8).tobytes()


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
