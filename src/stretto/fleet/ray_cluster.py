"""A run's connection to Ray: a cluster that is there, or one of its own on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.config import Config
from stretto.errors import StrettoError
from stretto.fleet.ray_head import HeadLost
from stretto.model import visible_gpus

REACHABLE = 5.0  # seconds in which a cluster must answer


@contextmanager
def ray_for(config: Config, cores: int) -> Iterator[None]:
    """Ray for the time of a run: at `fleet.address`, else started here, and ended with the run; where this program has
    connected to Ray already, that.

    A Ray of its own has no dashboard, says nothing of its use to anybody, listens on this machine only, and has as many
    CPUs as the run asks for, be the `cores` fewer. Raises StrettoError where Ray is not installed, or not reached.
    """
    if config.fleet.kind != "ray":
        yield
        return
    if importlib.util.find_spec("ray") is None:
        raise StrettoError("fleet.kind = \"ray\" needs Ray: pip install '.[ray]' in a clone of Stretto")
    address = config.fleet.address
    if address is not None:
        _require_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        # Ray's own switch for a node that is nobody else's: it then has the address 127.0.0.1 and listens there.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault(
            "RAY_worker_niceness", "0"
        )  # else whatever else runs here goes before the engines
    import ray

    if ray.is_initialized():
        yield
        return
    quiet = {"configure_logging": False, "log_to_driver": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            wanted = config.fleet.workers * (config.fleet.threads or 1)
            if config.learner.place == "cluster":
                wanted += max(config.threads or 1, config.learner.shards)
            with _visible(gpus_for_ray(config)) as gpus:
                ray.init(
                    address="local",
                    num_cpus=max(cores, wanted),
                    num_gpus=gpus,
                    include_dashboard=False,
                    **quiet,
                )
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError, AssertionError) as error:
        where = "a Ray on this machine" if address is None else f'fleet.address = "{address}": Ray'
        raise StrettoError(f"{where} cannot be had: {error}{token_hint(error)}") from error
    if threading.current_thread() is threading.main_thread():
        # Ray has put its own there, for good. None: whoever had put his there did it outside Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    try:
        if address is None:
            check_gpus(config, ray.cluster_resources().get("GPU", 0.0))
        yield
    except HeadLost:  # who would be told, for a minute, after which Ray ends this program
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def token_hint(error: BaseException | None) -> str:
    """What to do where Ray was refused for want of a token, which it says in an error's causes only."""
    while error is not None:
        if "AuthToken" in str(error):
            return (
                "; the cluster asks for a token: set RAY_AUTH_MODE=token, and have its token in ~/.ray/auth_token or "
                "in RAY_AUTH_TOKEN"
            )
        error = error.__cause__ or error.__context__
    return ""


def gpus_for_ray(config: Config) -> list[str] | None:
    """The GPUs of this machine for a Ray of the run's own, as CUDA_VISIBLE_DEVICES names them; None: as Ray finds them.

    A learner in this program, or beside it, has the first ones; where the others are too few for the workers, these
    share with it.
    """
    if config.model.device == "cpu" or config.learner.place == "cluster":
        return None
    devices = visible_gpus()
    free = devices[config.learner.shards :]
    gpus = 1.0 if config.fleet.gpus is None else config.fleet.gpus
    return free if devices and len(free) >= config.fleet.workers * gpus else None


def check_gpus(config: Config, gpus: float) -> None:
    """Raise StrettoError if, of the `gpus` of a Ray of the run's own, to which none is ever added, a learner on it
    leaves no room to any worker.
    """
    learner, wanted = config.learner, config.fleet.gpus
    if learner.place != "cluster" or config.model.device == "cpu" or not gpus:
        return
    left = gpus - learner.shards
    if wanted != 0.0 and left < (wanted or 1.0):
        raise StrettoError(
            f'learner.place = "cluster" with learner.shards = {learner.shards} leaves {max(left, 0.0):g} of this '
            f"machine's {gpus:g} GPUs to the workers, of which one needs {wanted or 1.0:g}: use learner.place = "
            '"here", where they share with the learner, or fleet.gpus = 0 for workers without a GPU'
        )


@contextmanager
def _visible(gpus: list[str] | None) -> Iterator[int | None]:
    """Processes that are started meanwhile see these GPUs only; yields how many they are."""
    if gpus is None:
        yield None
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield len(gpus)
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _require_reachable(address: str) -> None:
    """Raise StrettoError if nobody listens at `address`: Ray itself would try for minutes, and then end the program."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise StrettoError(
            f'fleet.address = "{address}" is no address of a Ray cluster; use "auto" on one of its machines, '
            '"HOST:6379", or "ray://HOST:10001"'
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE).close()
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        raise StrettoError(
            f'fleet.address = "{address}": nobody answers there ({error}); `ray status` on the cluster\'s head says '
            "whether it runs"
        ) from error
