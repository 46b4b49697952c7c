"""Weights on their way from the learner to the engines: published once, pulled by each worker."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto.errors import StrettoError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Names one version of the policy's weights.

    `shared`: the engine already holds the learner's own tensors; nothing moves, the version changes. Legal only
    where generation and update cannot overlap. `copy`: `tensors`, which nobody changes any more, are copied into the
    engine's own module. `file`: they are read from the safetensors file at `location`, and must have `digest`.
    `object`: they lie in Ray's object store, as what `handle` names.
    """

    version: int
    kind: Literal["shared", "copy", "file", "object"]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    location: str = ""
    digest: str = ""
    handle: Any = None

    @property
    def fingerprint(self) -> str:
        """Of the weights as they are now; reads them all."""
        return fingerprint(self.tensors)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes, dtypes and values; equal iff the weights are equal, bit for bit."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_shapes(ref: WeightsRef) -> dict[str, tuple[int, ...]]:
    """Of the tensors that `ref` has or, if it is a `file`, names: then the file's head alone is read.

    Raises StrettoError if the file cannot be read.
    """
    if ref.kind != "file":
        return {name: tuple(tensor.shape) for name, tensor in ref.tensors.items()}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(ref.location, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(ref, error) from error


def _unreadable(ref: WeightsRef, error: Exception) -> StrettoError:
    return StrettoError(f"weights of version {ref.version}: {ref.location} cannot be read: {error}")


def read_weights(ref: WeightsRef) -> WeightsRef:
    """What a `file` names, as a `copy`. Raises StrettoError if the file is missing or not what was published."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(ref.location)
    except (OSError, SafetensorError) as error:
        raise _unreadable(ref, error) from error
    if fingerprint(tensors) != ref.digest:
        raise StrettoError(
            f"weights of version {ref.version}: {ref.location} is not what was published: its fingerprint differs"
        )
    return WeightsRef(ref.version, "copy", tensors)


class WeightFiles:
    """Published weights in `folder`, a file for each version, for as long as a worker may still read it.

    The folder is this object's own: what is in it, perhaps left by a killed run, is removed first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, WeightsRef] = {}  # by version
        self._readers: dict[int, set[int]] = {}  # version -> workers that have not taken it yet
        self.close()

    def publish(self, written: WeightsRef, workers: Iterable[int]) -> None:
        """Keep this file for these workers to read."""
        self._files[written.version] = written
        self._readers.setdefault(written.version, set()).update(workers)
        self._remove_unread()

    def write(self, ref: WeightsRef) -> WeightsRef:
        """The file with the tensors of `ref`, written unless that version was published and is there still.

        What takes time, and needs no lock while versions are written by one thread and one after the other. Raises
        StrettoError if the disk refuses.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if (known := self._files.get(ref.version)) is not None:
            return known
        path = self._folder / f"version-{ref.version:06d}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(ref.tensors), path)
        except (OSError, SafetensorError) as error:  # a full disk is a SafetensorError
            raise StrettoError(
                f"weights of version {ref.version}: cannot write {path} for the workers: {error}; "
                "the run goes on from its newest checkpoint with `stretto resume`"
            ) from error
        return WeightsRef(ref.version, "file", location=str(path), digest=ref.fingerprint)

    def taken(self, worker: int, version: int | None = None) -> None:
        """`worker` has read `version`; None: it reads nothing any more."""
        for each, readers in self._readers.items():
            if version is None or each == version:
                readers.discard(worker)
        self._remove_unread()

    def _remove_unread(self) -> None:
        """Remove older files that nobody is about to read; the newest stays for workers that come up."""
        for version in [v for v, readers in self._readers.items() if not readers and v != max(self._files)]:
            del self._readers[version]
            Path(self._files.pop(version).location).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
