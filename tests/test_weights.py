from __future__ import annotations

import torch

from stretto.weights import fingerprint


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
