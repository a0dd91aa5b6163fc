"""How a launcher and an agent prove to each other over a plain socket that they know one secret.

Pure. The secret is the text of the job's key, which never goes over the socket:

1. the launcher sends :data:`HELLO` and 32 random bytes;
2. the agent sends 32 random bytes and its proof, an HMAC-SHA256 (RFC 2104) over both;
3. the launcher sends its own proof.

A proof is good for one connection and one side, so that none can be recorded or sent back. After
this both speak in frames, sealed with keys of this connection (``frames.py``). What is sent can
be read on the way, as with ``srun`` and ``mpirun``, but not changed. Used by ``gate.py`` (the
launcher's side) and ``enlist.py`` (the agent's).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from kvstore.launch.frames import Seal

HELLO = b"KVSTORE-GATE-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32


@dataclass(frozen=True)
class Handshake:
    """One connection: ``key`` is the text of the job's key, the nonces are each side's bytes."""

    key: str
    launcher_nonce: bytes
    agent_nonce: bytes

    def agent_proof(self) -> bytes:
        return self._derived(b"agent's proof")

    def launcher_proof(self) -> bytes:
        return self._derived(b"launcher's proof")

    def seal_to_agent(self) -> Seal:
        return Seal(self._derived(b"seal to the agent"))

    def seal_to_launcher(self) -> Seal:
        return Seal(self._derived(b"seal to the launcher"))

    def _derived(self, purpose: bytes) -> bytes:
        content = HELLO + purpose + b"\0" + self.launcher_nonce + self.agent_nonce
        return hmac.new(self.key.strip().encode(), content, hashlib.sha256).digest()


def is_same(one: bytes, other: bytes) -> bool:
    """Compare proofs without telling by the time it takes where they differ."""
    return hmac.compare_digest(one, other)
