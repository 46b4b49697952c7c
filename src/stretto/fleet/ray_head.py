"""Whether the head of a Ray cluster is there. Without it Ray ends its driver a minute later, with nothing that a user
could act on; so it is said before.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from stretto.errors import StrettoError

LOOK = 2.0  # seconds between two looks, and for which an answer is waited
RAYS_PATIENCE = (
    60.0  # seconds after which Ray ends a driver that does not reach its head, unless RAYS_KEY says other
)
RAYS_KEY = "RAY_gcs_rpc_server_reconnect_timeout_s"
SHARE = 0.5  # of these, after which the run ends: a head that is started again in time has not been missed


class HeadLost(StrettoError):
    """Nobody has answered at the address of the cluster's head for too long."""


class Head:
    """The head at `address`, "HOST:PORT". Any thread may look."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = False
        self._met = False  # else there may be no way from here, as for Ray's client outside the cluster
        self._patience = SHARE * float(os.environ.get(RAYS_KEY, RAYS_PATIENCE))
        self._looking = threading.Lock()
        self._looked = time.monotonic()
        self._silent = 0.0  # seconds, as they were waited here: this process may have been held itself

    def look(self) -> None:
        """At most every few seconds. Raises HeadLost when nobody has answered for too long."""
        if self._looking.acquire(blocking=False):
            try:
                if time.monotonic() - self._looked >= LOOK:
                    self._ask(self._patience)
            finally:
                self._looking.release()
        self._require()

    def look_again(self) -> None:
        """Something has been lost, perhaps with its head: raises HeadLost if nobody answers there now. (Where Ray has
        ended on this machine, too, it ends its driver within seconds.)
        """
        with self._looking:
            self._ask(0.0)
        self._require()

    def _ask(self, patience: float) -> None:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK).close()
            self._met, self._silent = True, 0.0
        except OSError:
            self._silent += min(time.monotonic() - self._looked, 2 * LOOK)
            self.lost = self.lost or (self._met and self._silent > patience)
        self._looked = time.monotonic()

    def _require(self) -> None:
        if self.lost:
            raise HeadLost(
                f"the head of the Ray cluster at {self.address} does not answer any more: its process (gcs_server) or "
                "its machine is gone, and all workers with it; the run goes on from its newest checkpoint with "
                "`stretto resume`, on this cluster when it is there again, or with --fleet.address on another one"
            )
