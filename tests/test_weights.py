from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stretto.errors import StrettoError
from stretto.weights import WeightFiles, WeightsRef, fingerprint, read_weights


def test_equal_weights_have_equal_fingerprints_in_any_order() -> None:
    a = {"x": torch.arange(4.0), "y": torch.ones(2, 3, dtype=torch.bfloat16)}
    b = {name: tensor.clone() for name, tensor in reversed(a.items())}
    assert fingerprint(a) == fingerprint(b)


def test_layout_in_memory_does_not_matter() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert fingerprint({"x": matrix}) == fingerprint({"x": matrix.T.contiguous().T})


def test_any_difference_changes_it() -> None:
    base = {"x": torch.zeros(4), "s": torch.tensor(1.0)}
    others = [
        {"x": torch.tensor([0.0, 0.0, 0.0, -0.0]), "s": torch.tensor(1.0)},
        {"x": torch.zeros(2, 2), "s": torch.tensor(1.0)},
        {"x": torch.zeros(4, dtype=torch.int32), "s": torch.tensor(1.0)},
        {"z": torch.zeros(4), "s": torch.tensor(1.0)},
        {"x": torch.zeros(4), "s": torch.tensor(2.0)},
        {"x": torch.zeros(4)},
    ]
    assert len({fingerprint(tensors) for tensors in [base, *others]}) == 1 + len(others)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), value), "y": torch.ones(2, 2, dtype=torch.bfloat16)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def publish(files: WeightFiles, ref: WeightsRef, workers: Iterable[int]) -> WeightsRef:
    written = files.write(ref)
    files.publish(written, workers)
    return written


class TestFiles:
    def test_what_was_published_is_read(self, tmp_path: Path) -> None:
        files = WeightFiles(tmp_path / "weights")
        ref = publish(files, WeightsRef(3, "copy", tensors(0.5)), [0])
        assert (ref.kind, ref.version, dict(ref.tensors)) == ("file", 3, {})
        copy = read_weights(ref)
        assert (copy.kind, copy.version) == ("copy", 3)
        assert copy.fingerprint == fingerprint(tensors(0.5))

    def test_a_version_is_written_once(self, tmp_path: Path) -> None:
        files = WeightFiles(tmp_path / "weights")
        first = publish(files, WeightsRef(1, "copy", tensors(1.0)), [0])
        assert publish(files, WeightsRef(1, "copy", {}), [1]) is first

    def test_files_stay_while_somebody_needs_them(self, tmp_path: Path) -> None:
        folder = tmp_path / "weights"
        files = WeightFiles(folder)
        publish(files, WeightsRef(1, "copy", tensors(1.0)), [0, 1])
        publish(files, WeightsRef(2, "copy", tensors(2.0)), [0])
        files.taken(0, 1)
        assert names(folder) == ["version-000001.safetensors", "version-000002.safetensors"]
        files.taken(1)  # it is gone
        assert names(folder) == ["version-000002.safetensors"]
        files.taken(0, 2)
        assert names(folder) == ["version-000002.safetensors"]  # for those to come
        files.close()
        assert not folder.exists()

    def test_what_a_killed_run_left_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "version-000009.safetensors").write_bytes(b"old")
        files = WeightFiles(tmp_path / "weights")
        publish(files, WeightsRef(1, "copy", tensors(1.0)), [0])
        assert names(tmp_path / "weights") == ["version-000001.safetensors"]

    @pytest.mark.parametrize("damage", ["other", "cut", "gone"])
    def test_anything_else_is_refused(self, damage: str, tmp_path: Path) -> None:
        ref = WeightFiles(tmp_path / "weights").write(WeightsRef(1, "copy", tensors(1.0)))
        file = Path(ref.location)
        if damage == "other":
            save_file(tensors(2.0), file)
        elif damage == "cut":
            file.write_bytes(file.read_bytes()[:-3])
        else:
            file.unlink()
        with pytest.raises(StrettoError, match=r"weights of version 1: .*version-000001\.safetensors"):
            read_weights(ref)

    def test_a_disk_that_refuses_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "weights").write_text("in the way")
        with pytest.raises(StrettoError, match="weights of version 1: cannot write .* `stretto resume`"):
            WeightFiles(tmp_path / "weights").write(WeightsRef(1, "copy", tensors(1.0)))
