"""Mutual authentication of launcher and nodes over TCP by a shared secret.

Each side proves that it knows the secret by an HMAC of two random numbers, one of each side, so a recorded
proof is of no use later and the secret itself is never sent. All parts have fixed lengths, and nothing else
is read before. What follows is neither encrypted nor signed, like all traffic of a job.

1. The launcher sends :data:`GREETING` and its random number.
2. The node sends its random number and its proof.
3. The launcher sends its proof, or zeros if the node's is wrong.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from pathlib import Path

from dglkge.errors import InputError, os_errors
from dglkge.launch.remote.ssh import NOT_INHERITED, SECRET_VARIABLE

GREETING = b"dglkge-launch 2\n"
RANDOM_BYTES = PROOF_BYTES = 32
HANDSHAKE_SECONDS = 10.0
SHORTEST_SECRET = 16

WRONG_SECRET = f"wrong secret: --secret_file or {SECRET_VARIABLE} must be the same on all nodes"


class RefusedError(InputError):
    """The other side refuses the connection, or is no dglkge-launch."""


def read_secret(path: str | None) -> bytes:
    """Return the secret that all nodes of a job share, of a file or of the variable DGLKGE_SECRET.

    Removes from this process's environment what no process of the job may inherit. Raises InputError if there
    is no secret, it is shorter than SHORTEST_SECRET bytes, or the file cannot be read or is not private.
    """
    text, where = os.environ.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
    for name in NOT_INHERITED:
        os.environ.pop(name, None)
    if path is not None:
        where = path
        with os_errors(InputError, f"cannot read --secret_file {path}"):
            text = read_private(Path(path), "--secret_file")
    text = text.strip()
    if not text:
        raise InputError(
            "nodes without SSH need a shared secret, since whoever connects could run commands on them: give "
            f"--secret_file or the variable {SECRET_VARIABLE} (make one with: openssl rand -hex 32)"
        )
    if len(text) < SHORTEST_SECRET:
        raise InputError(f"the secret of {where} has {len(text)} bytes; expected at least {SHORTEST_SECRET}")
    return text


def read_private(path: Path, option: str) -> bytes:
    """Read a file with a secret, which `option` has named; raises InputError if other users can read it.

    Messages do not show the path: it may be a secret that was given in place of a file.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise InputError(f"other users can read the file of {option}: its mode is {mode:o}; chmod 600 it")
        return file.read()


def _proof(secret: bytes, role: bytes, random_numbers: bytes) -> bytes:
    """Return the HMAC by which one side proves that it knows the secret."""
    # The role keeps a proof of one side from being sent back as that of the other.
    return hmac.digest(secret, GREETING + role + random_numbers, "sha256")


async def authenticate_node(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """Check a node that has connected, and prove to it that this is the launcher.

    Raises RefusedError if it does not know the secret, which it has been told; EOFError or OSError if the
    connection is lost.
    """
    random_number = secrets.token_bytes(RANDOM_BYTES)
    writer.write(GREETING + random_number)
    random_numbers = random_number + await reader.readexactly(RANDOM_BYTES)
    proof = await reader.readexactly(PROOF_BYTES)
    is_right = hmac.compare_digest(proof, _proof(secret, b"node", random_numbers))
    writer.write(_proof(secret, b"launcher", random_numbers) if is_right else bytes(PROOF_BYTES))
    await writer.drain()
    if not is_right:
        raise RefusedError(WRONG_SECRET)


async def authenticate_launcher(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """Prove to the launcher that this is a node, and check the launcher; raises as the other side does."""
    greeting = await reader.readexactly(len(GREETING))
    if greeting != GREETING:
        raise RefusedError(f"it is no dglkge-launch of this version (greeting {greeting!r})")
    random_number = secrets.token_bytes(RANDOM_BYTES)
    random_numbers = await reader.readexactly(RANDOM_BYTES) + random_number
    writer.write(random_number + _proof(secret, b"node", random_numbers))
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"launcher", random_numbers)):
        raise RefusedError(WRONG_SECRET)
