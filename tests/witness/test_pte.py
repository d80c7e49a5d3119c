"""The .pte reader against ExecuTorch: models are exported afresh and listed by both. Needs executorch and torchao."""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pte_making import Pte
from pte_making import ptd as ptd_by_hand

from qcs4w_packer import PteFile, pack_weight


def load_maker() -> ModuleType:
    """Import the script that made tests/golden/pte; it imports executorch and torchao."""
    path = Path(__file__).parents[1] / "golden" / "pte" / "make.py"
    spec = importlib.util.spec_from_file_location("make_pte", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_maker()

SHAPES = [(8, 16), (1, 2), (5, 6), (33, 8), (128, 30)]  # N, K


class Parallel(torch.nn.Module):
    """Linears side by side, each of its own part of the input."""

    def __init__(self, seed: int):
        super().__init__()
        layers = [make.linear(k, n, seed + i, bias=i % 2 == 1) for i, (n, k) in enumerate(SHAPES)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply each."""
        return tuple(layer(x) for layer, x in zip(self.layers, inputs, strict=True))


def inputs(*batch: int) -> tuple[torch.Tensor, ...]:
    """Random inputs for `Parallel`."""
    return tuple(torch.randn(*batch, k) for _, k in SHAPES)


def stacked(*sizes: int, seed: int) -> torch.nn.Module:
    """Linears one after the other, between them what Vulkan does not run."""
    parts: list[Any] = []
    for i, (k, n) in enumerate(pairwise(sizes)):
        parts += [make.linear(k, n, seed + i), lambda x: torch.cumsum(x, -1)]
    return make.Stack(*parts)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "many shapes": ({"forward": (Parallel(100), inputs(2, 3), None)}, {}),
    "external": (
        {"forward": (Parallel(300), inputs(1), None)},
        {"options": {"external_constants_max_data_bytes": 2048}},
    ),
    "half": ({"forward": (Parallel(400), inputs(4), None)}, {"options": {"force_fp16": True}}),
    "three delegates": ({"forward": (stacked(8, 16, 24, 8, seed=500), (torch.randn(2, 8),), None)}, {}),
    "inline, two methods": (
        {
            "one": (stacked(8, 16, 24, seed=600), (torch.randn(1, 8),), None),
            "two": (stacked(8, 16, 24, seed=600), (torch.randn(5, 8),), ({0: torch.export.Dim("m", min=1, max=9)},)),
        },
        {"inline": True},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model that was exported just now."""
    methods, options = MODELS[request.param]
    folder = tmp_path_factory.mktemp("pte")
    for number, (name, data) in enumerate(sorted(make.lower(methods, **options).items())):
        (folder / (f"model.{number}.ptd" if name else "model.pte")).write_bytes(data)
    return request.param, folder / "model.pte"


def test_lists_and_extracts_what_executorch_does(exported: tuple[str, Path]) -> None:
    """Places, shapes, digests and bytes of every call are those that ExecuTorch's own reader finds."""
    name, path = exported
    expected = make.listing(path)
    with PteFile(path) as file:
        calls = list(file.calls.values())
        assert len(calls) == len(expected) > 1
        for call, said in zip(calls, expected, strict=True):
            assert (call.method, call.delegate, call.order) == (said["method"], said["delegate"], said["order"])
            assert [call.out_features, call.in_features // 2] == said["weight_dims"]
            assert (call.rows, call.in_features) == (np.prod(said["x_dims"][:-1]), said["x_dims"][-1])
            assert call.scale_dtype == said["scale_dtype"] == ("F16" if name == "half" else "F32")
            for stored, place in ((call.weight, said["weight"]), (call.scales, said["scales"])):
                assert (stored.path.name, stored.offset, stored.nbytes) == (
                    place["file"],
                    place["offset"],
                    place["nbytes"],
                )
                assert (stored.key, stored.sha256, stored.key_matches) == (place["key"], place["sha256"], True)
            assert file.load(call.name).packed.tobytes() == call.weight.read()


@pytest.mark.parametrize("exported", ["many shapes"], indirect=True)
def test_extracts_what_pack_makes(exported: tuple[str, Path]) -> None:
    """The bytes in a program are those that qcs4w makes of the float weights."""
    module = MODELS["many shapes"][0]["forward"][0]
    by_shape = {}
    with PteFile(exported[1]) as file:
        for name in file.calls:
            linear = file.load(name)
            by_shape[linear.out_features, linear.in_features] = linear
    for layer in module.layers:
        ours = pack_weight(layer.weight.detach().numpy())
        found = by_shape[ours.out_features, ours.in_features]
        assert found.packed.tobytes() == ours.packed.tobytes()
        assert found.scales.tobytes() == ours.scales.tobytes()


def test_files_made_by_hand_are_files_to_executorch(tmp_path: Path) -> None:
    """ExecuTorch's readers read the files that our tests make field by field, and find the same in them."""
    pte = Pte()
    path = tmp_path / "a.pte"
    path.write_bytes(pte.to_bytes())
    (said,) = make.listing(path)
    assert (said["weight"]["sha256"], said["scales"]["sha256"]) == tuple(reversed(pte.named))
    pte.named, named = {"other": b"x"}, pte.named
    path.write_bytes(pte.to_bytes())
    (tmp_path / "a.1.ptd").write_bytes(ptd_by_hand(named))
    (said,) = make.listing(path)
    assert said["weight"]["file"] == "a.1.ptd"
    with PteFile(path) as file:
        assert file.calls["forward.linear_0"].weight.offset == said["weight"]["offset"]
