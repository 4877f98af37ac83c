"""A flood of connections to the port that processes meet on, from strangers of all kinds."""

import contextlib
import itertools
import json
import socket
import threading
import time
from collections import deque
from typing import Self

HELLO = {"process": 1, "where": "forged", "token": "f", "facts": {}}
NEW = {"protocol": 2, **HELLO, "nonce": "00"}
FAILED = {"failed": 1, "text": "error: forged", "code": 3, "stacks": False}
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    json.dumps(HELLO).encode() + b"\n",  # as an older release
    json.dumps(NEW).encode() + b"\n",  # and waits
    json.dumps(NEW).encode() + b'\n{"proof": "00"}\n',
    json.dumps(FAILED).encode() + b"\n",
    b'{"left": 1}\n{"left": 0}\n',
    b'{"same": "the configuration", "facts": {}}\n',
    b"[" * 60_000 + b"\n",
    b'{"process": 1e999, "where": "", "protocol": 2}\n',
    b'{"process": ' + b"9" * 6000 + b', "where": "", "protocol": 2}\n',
    b"x" * (1 << 20),
]


class Flood:
    """Keeps `most` connections open in a `with` block, for `seconds` at most; none ever reads.

    Those that are closed by the other side are made anew, 500 a second at most; `made` counts them.
    """

    def __init__(self, port: int, most: int, *, seconds: float):
        self._port, self._most, self._seconds = port, most, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.made = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        end = time.monotonic() + self._seconds
        kinds = itertools.cycle(STRANGE)
        connections: deque[socket.socket] = deque()
        while time.monotonic() < end and not self._over.is_set():
            stranger = socket.socket()
            try:
                stranger.settimeout(1)
                stranger.connect(("127.0.0.1", self._port))
            except OSError:  # process 0 does not listen yet, or does not accept
                stranger.close()
                time.sleep(0.02)
                continue
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(next(kinds))
            connections.append(stranger)
            self.made += 1
            if len(connections) >= self._most:
                connections.popleft().close()
                time.sleep(0.002)
        for each in connections:
            each.close()
