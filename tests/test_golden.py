"""The packer against the bytes that ExecuTorch itself produced. golden/README.md says how they were made."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wrong_rules import WRONG_RULES, pack_wrongly

from qcs4w_packer import open_source, pack_codes, pack_weight, quantize


def digest(array: np.ndarray) -> str:
    """The sha256 of an array's raw little-endian bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def drawn_weights(manifest: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Draw the random cases again, in the order in which they were drawn: one torch generator, seed 1234."""
    generator = torch.Generator().manual_seed(1234)
    for prefix in ("rand_", "odd_"):
        for name, case in manifest.items():
            if name.startswith(prefix):
                yield name, torch.randn(case["N"], case["K"], generator=generator).numpy()
    yield "big_1024x4096", (torch.randn(1024, 4096, generator=generator) * 0.02).numpy()
    yield "uniform_512x1024", ((torch.rand(512, 1024, generator=generator) * 2 - 1) / 32).numpy()


def check(case: dict[str, Any], weight: np.ndarray) -> None:
    """Hold our codes, scales and packed bytes against the digests of ExecuTorch's."""
    assert digest(weight) == case["w_sha256"], "these are not the weights of the golden case"
    codes, scales = quantize(weight)
    packed = pack_weight(weight)
    assert digest(codes) == case["q_sha256"]
    assert digest(scales) == case["scales_sha256"]
    assert digest(packed.packed) == case["packed_sha256"]
    assert digest(packed.scales) == case["scales_sha256"]


def test_every_stored_case_is_equal(golden: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    """55 of 55 stored cases: codes, scales and bytes are ExecuTorch's, bit for bit."""
    stored = [name for name, case in manifest.items() if case["stored"]]
    assert len(stored) == 55
    for name in stored:
        weight = golden[f"{name}/w"]
        codes, scales = quantize(weight)
        packed = pack_weight(weight, name=name)
        np.testing.assert_array_equal(codes, golden[f"{name}/q"], err_msg=name)
        assert scales.tobytes() == golden[f"{name}/scales"].tobytes(), name
        np.testing.assert_array_equal(pack_codes(codes), golden[f"{name}/packed"], err_msg=name)
        np.testing.assert_array_equal(packed.packed, golden[f"{name}/packed"], err_msg=name)
        np.testing.assert_array_equal(packed.codes(), golden[f"{name}/q"], err_msg=name)


def test_every_case_is_equal_by_digest(golden: dict[str, np.ndarray], manifest: dict[str, Any], model: Path) -> None:
    """98 of 98 cases, the 41 matrices of a real model among them: the sha256 of our bytes is that of ExecuTorch's."""
    checked = set()
    for name, case in manifest.items():
        if case["stored"]:
            check(case, golden[f"{name}/w"])
            checked.add(name)
    for name, weight in drawn_weights(manifest):
        check(manifest[name], weight)
        checked.add(name)
    with open_source(model / "model.safetensors") as source:
        for name, case in manifest.items():
            if case["source"] == "synthetic":
                continue
            tensor = source.tensors[name]
            if name == "embeddings.position_ids":
                weight = np.frombuffer(tensor.fetch(0, tensor.rows), "<i8").astype(np.float32).reshape(tensor.shape)
            else:
                weight = tensor.read()
            check(case, weight)
            checked.add(name)
    assert checked == set(manifest)
    assert len(checked) == 98


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_is_noticed(rule: str, golden: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    """The golden cases are sharp: each of the usual wrong rules changes the bytes or scales of at least one of them."""
    stored = [name for name, case in manifest.items() if case["stored"]]
    answers = {name: pack_wrongly(golden[f"{name}/w"], rule) for name in stored}
    assert any(
        not np.array_equal(answer.packed, golden[f"{name}/packed"])
        or not np.array_equal(answer.scales, golden[f"{name}/scales"])
        for name, answer in answers.items()
    )
