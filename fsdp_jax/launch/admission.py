"""How a process and process 0 prove to each other that they know the secret of the run.

The joining process sends a hello with a nonce, process 0 answers with one of its own, and each then
sends a digest of both that is keyed with the secret, the joining process first: process 0 gives a
stranger nothing to try secrets on. A proof is of use once, in one direction and for one hello. The
secret itself is never sent. Without one the key is empty, and whoever reaches the port can join.
"""

import hashlib
import hmac
import json
import os
import secrets

from fsdp_jax.errors import UNUSABLE, ConfigError, message
from fsdp_jax.io.regular_files import open_regular
from fsdp_jax.launch.messages import Line, failure_line

PROTOCOL = 2  # of the hub; 1 knew no secret, and sent the facts with the hello
HELLO_SECONDS = 10.0  # until a connection has to be admitted
SECRET_VARIABLE = "FSDP_JAX_CLUSTER_SECRET"
SECRET_BYTES = (16, 4096)  # the least and most of a secret: a short one can be found by trying
PROCESS, HUB = "process", "hub"  # who proves


def read_secret(file: str | None) -> bytes:
    """Reads the secret from a file or, without one, from `FSDP_JAX_CLUSTER_SECRET`; b"" if unset.

    White space around it does not count. Raises ConfigError if there is a file or a variable, but
    no secret of 16 to 4096 bytes in it; no message quotes either, since a secret that was passed in
    place of its file would be printed.
    """
    where = "cluster.secret"
    least, most = SECRET_BYTES
    if file is not None:
        try:
            with open_regular(file) as content:
                secret = content.read(most + 1)
        except (OSError, ValueError) as error:
            got = getattr(error, "strerror", None) or "no path"
            fix = f"name a file that holds the secret; or leave it out, and set {SECRET_VARIABLE}"
            raise ConfigError(
                "the file of the secret cannot be read", where=where, got=got, fix=fix
            ) from None
    else:
        where = SECRET_VARIABLE
        variable = os.environ.get(SECRET_VARIABLE)
        if variable is None:
            return b""
        secret = os.fsencode(variable)
    secret = secret.strip()
    if not least <= len(secret) <= most:
        raise ConfigError(
            "the secret of the run is too short or too long",
            where=where,
            expected=f"{least} to {most} bytes",
            got=f"{len(secret)} bytes or more" if len(secret) > most else f"{len(secret)} bytes",
            fix="for example the output of `openssl rand -hex 32`",
        )
    return secret


def make_nonce() -> str:
    """Makes a text that is used in one handshake only."""
    return secrets.token_hex(16)


def make_proof(secret: bytes, prover: str, hello: Line, nonce: str) -> str:
    """Computes what proves knowledge of the secret, in hexadecimal.

    `prover`: `PROCESS` or `HUB`; `hello`: of the joining process, with its own nonce; `nonce`:
    process 0's.
    """
    said = [hello[name] for name in ("protocol", "process", "where", "token", "nonce")]
    text = json.dumps([prover, nonce, *said])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Compares a proof that was received with the right one, in a time that tells nothing."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def other_release_line(process: int, where: str) -> Line:
    """Makes the failure line for a process whose hello is of another release."""
    text = message(
        "error: the processes run different releases of fsdp_jax",
        where=f"process {process} ({where})",
        expected=f"protocol {PROTOCOL} of the hub, as in process 0",
        got="another one",
        fix="install the same release for every process",
    )
    return failure_line(text, UNUSABLE)


def other_secret_line(process: int, where: str) -> Line:
    """Makes the failure line for a process that does not know the secret."""
    text = message(
        f"error: process {process} does not know the secret of the run",
        where="cluster.secret",
        got=f"{where}: another secret than process 0's, or only one of them has one",
        fix=f"give every process the same file in cluster.secret, or the same {SECRET_VARIABLE}",
    )
    return failure_line(text, UNUSABLE)
