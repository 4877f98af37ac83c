"""The lines that processes and process 0 exchange: JSON objects, each in a line of its own.

Both directions carry `same` (facts, and that they agree), `calls` (of each program, and that they
are asked for), `failed`, `left` and `say`.
"""

import json
from typing import Any

from fsdp_jax.errors import LOST, message, printable

LONGEST_LINE = 1 << 20  # bytes
LONGEST_TEXT = LONGEST_LINE // 16  # characters: JSON may take 6 bytes for one
EVERY = -1  # in place of the number of a process that failed

Line = dict[str, Any]


def process_of(number: int, count: int) -> str:
    """Names one of `count` processes, whose numbers begin at 0: `process 1 (of 0 to 3)`."""
    return f"process {number} (of 0 to {count - 1})"


def encode_line(line: Line) -> bytes:
    """Encodes a line as it is sent: JSON that ends with a newline."""
    return json.dumps(line).encode() + b"\n"


def failure_line(text: str, code: int, *, process: int = EVERY, stacks: bool = False) -> Line:
    """Makes the line that ends every process, with an error block and an exit code.

    `process` is the one that failed; with `stacks` each process prints the stacks of its threads.
    """
    return {"failed": process, "text": text, "code": code, "stacks": stacks}


def lost_line(process: int, where: str) -> Line:
    """Makes the failure line for a process whose connection closed without a word."""
    text = message(
        f"error: process {process} is gone",
        where=where,
        got="its connection closed: it was killed (out of memory?), or its machine was lost",
        fix="look at its own log, and at its machine's; then run the same command again, which "
        "resumes from the last checkpoint if the program saves any",
    )
    return failure_line(text, LOST, process=process)


def plain_text(text: object) -> str:
    """Converts what another process sent to a text of bounded length without control characters."""
    lines = str(text)[:LONGEST_TEXT].split("\n")
    return "\n".join(map(printable, lines))
