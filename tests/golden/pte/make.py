"""Make the .pte files of this folder with ExecuTorch itself, and list them with its own readers.

    python make.py FOLDER      make every file and listing.json anew (about a minute)
    python make.py --list      list the files that lie here anew, into listing.json

Needs executorch 1.5.1, torchao 0.18 and torch 2.13. Weights are seeded, so that the same versions make the same weights
and the same bytes of them. tests/witness/test_pte.py exports other models with the functions of this file.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
from executorch.backends.vulkan.patterns import fusable_patterns
from executorch.backends.vulkan.quantizer.vulkan_quantizer import VulkanQuantizer, get_symmetric_quantization_config
from executorch.backends.vulkan.serialization import vulkan_graph_serialize as vulkan
from executorch.backends.vulkan.serialization.vulkan_graph_schema import OperatorCall, VkBytes, VkGraph, VkTensor
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize import _program as program
from executorch.extension.flat_tensor.serialize import serialize as flat_tensor
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

CALL = "et_vk.linear_qcs4w.default"
DTYPES = {1: "U8", 4: "F16", 5: "F32"}
Method = tuple[nn.Module, tuple[torch.Tensor, ...], Any]


class Stack(nn.Module):
    """Modules and functions one after the other."""

    def __init__(self, *parts: nn.Module | Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.linears = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.parts = [part if not isinstance(part, nn.Module) else None for part in parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        linears = iter(self.linears)
        for part in self.parts:
            x = next(linears)(x) if part is None else part(x)
        return x


def linear(in_features: int, out_features: int, seed: int, *, bias: bool = False, factor: float = 1.0) -> nn.Linear:
    """Make a linear layer with seeded weights."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * factor)
    return layer


def cache_patterns() -> None:
    """Build the graphs of each fusion pattern once: rebuilding them is most of the time that lowering takes."""
    for entry in fusable_patterns.values():
        make = entry.get_graphs_fn
        if make is not None and not hasattr(make, "made"):

            def once(make: Callable[[], Any] = make, made: list[Any] = []) -> Any:  # noqa: B006
                if not made:
                    made.append(make())
                return made[0]

            once.made = True  # type: ignore[attr-defined]
            entry.get_graphs_fn = once


def lower(
    methods: dict[str, Method], *, bits: int = 4, options: dict[str, Any] | None = None, inline: bool = False
) -> dict[str, bytes]:
    """Quantize, export and lower modules as ExecuTorch's users do.

    Args:
        methods: (module, example inputs, dynamic shapes or None) by the method's name.
        bits: of a weight.
        options: compile options of the partitioner.
        inline: keep the delegates in the program.

    Returns:
        The program's bytes by "", those of its data files by their names.
    """
    cache_patterns()
    exported = {}
    for name, (module, inputs, dynamic) in methods.items():
        quantizer = VulkanQuantizer()
        quantizer.set_global(get_symmetric_quantization_config(is_dynamic=False, weight_bits=bits))
        traced = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic, strict=True).module()
        prepared = prepare_pt2e(traced, quantizer)
        prepared(*inputs)
        exported[name] = torch.export.export(convert_pt2e(prepared), inputs, dynamic_shapes=dynamic, strict=True)
    edge = to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner(options or {})])
    done = edge.to_executorch(ExecutorchBackendConfig(extract_delegate_segments=not inline))
    data = {name if name.endswith(".ptd") else f"{name}.ptd": bytes(cord) for name, cord in done._tensor_data.items()}
    return {"": done.buffer, **data}


def edited(pte: bytes, edit: Callable[[VkGraph, dict[str, bytes]], list[torch.Tensor] | None]) -> bytes:
    """Change the graph of the only delegate, and serialize it again with ExecuTorch's serializers."""
    file = program.deserialize_pte_binary(pte)
    (blob,) = file.program.backend_delegate_data
    graph = vulkan.flatbuffer_to_vk_graph(flatbuffer_of(blob.data))
    named = {key: file.named_data.buffers[entry.buffer_index] for key, entry in file.named_data.pte_data.items()}
    constants = edit(graph, named)
    if constants is None:
        constants = [(constant.named_key, constant.length) for constant in graph.constants]
    graph.constants.clear()
    blob.data = vulkan.serialize_vulkan_graph(graph, constants, [])
    return bytes(program.serialize_pte_binary(file, extract_delegate_segments=True))


def through_aliases(graph: VkGraph, named: dict[str, bytes]) -> None:
    """Let the weight reach its call through two prepacks, the scales through one."""
    call = next(call for call in graph.chain if call.name == CALL)
    prepacks = []
    for place, times in ((1, 2), (2, 1)):
        for _ in range(times):
            constant = graph.values[call.args[place]].value
            graph.values.append(type(graph.values[0])(VkTensor(**{**vars(constant), "constant_id": -1})))
            prepacks.append(OperatorCall(0, "et_vk.prepack.default", [call.args[place], len(graph.values) - 1]))
            call.args[place] = len(graph.values) - 1
    graph.chain[:0] = prepacks


def into_the_blob(graph: VkGraph, named: dict[str, bytes]) -> list[torch.Tensor]:
    """Store the constants behind the graph, as older versions did."""
    return [torch.frombuffer(bytearray(named[constant.named_key]), dtype=torch.uint8) for constant in graph.constants]


def make_all(folder: Path) -> None:
    """Make every file."""
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    same = [linear(16, 16, 7), linear(16, 16, 7)]
    one = {"forward": (linear(16, 8, 11), (x,), None)}
    batch = torch.export.Dim("batch", min=1, max=6)
    prompt, token = torch.randn(8, 16), torch.randn(1, 16)
    models: dict[str, dict[str, bytes]] = {
        # cumsum is not for Vulkan: the graph falls into two parts.
        "two_delegates": lower(
            {"forward": (Stack(linear(16, 8, 1), lambda x: torch.cumsum(x, -1), linear(8, 12, 2)), (x,), None)}
        ),
        "equal_layers": lower({"forward": (Stack(same[0], torch.relu, same[1]), (x,), None)}),
        "two_methods": lower(
            {
                "prefill": (Stack(linear(16, 8, 3), torch.relu, linear(8, 4, 4)), (prompt,), None),
                "decode": (Stack(linear(16, 8, 3), torch.relu, linear(8, 4, 4)), (token,), None),
            }
        ),
        "f16_scales": lower(one, options={"force_fp16": True}),
        "f16_model": lower({"forward": (linear(16, 8, 12).half(), (x.half(),), None)}),
        "external": lower(
            {"forward": (Stack(linear(16, 8, 5), torch.relu, linear(8, 4, 6)), (x,), None)},
            options={"external_constants_max_data_bytes": 100},
        ),
        "eight_bit": lower({"forward": (linear(16, 8, 8, factor=1e-9), (x,), None)}, bits=8),
        "inline_delegate": lower(one, inline=True),
        "dynamic_batch": lower({"forward": (linear(20, 12, 9), (torch.randn(2, 3, 20),), ({0: batch},))}),
        "unaligned": lower({"forward": (linear(10, 3, 10, bias=True), (torch.randn(2, 10),), None)}),
    }
    plain = lower(one)[""]
    models["aliases"] = {"": edited(plain, through_aliases)}
    models["inline_constants"] = {"": edited(plain, into_the_blob)}
    for name, files in models.items():
        for suffix, data in files.items():
            # Short names: what ExecuTorch calls a data file is of no matter, the keys are.
            number = sorted(files).index(suffix)
            (folder / (f"{name}.{number}.ptd" if suffix else f"{name}.pte")).write_bytes(data)


def flatbuffer_of(blob: bytes) -> bytes:
    """Return the graph of a delegate's blob."""
    header = vulkan.VulkanDelegateHeader.from_bytes(blob[: vulkan.VulkanDelegateHeader.EXPECTED_LENGTH])
    return blob[header.flatbuffer_offset : header.flatbuffer_offset + header.flatbuffer_size]


def sha256(data: bytes) -> str:
    """Return the digest in hex."""
    return hashlib.sha256(data).hexdigest()


class Constants:
    """Where the named data of a program and of the data files beside it lies, by ExecuTorch's readers."""

    def __init__(self, path: Path):
        self.places: dict[str, tuple[str, int, int]] = {}
        data = path.read_bytes()
        header = program._get_extended_header(data)
        raw = program._flatbuffer_to_program(data)
        for entry in raw.named_data or []:
            segment = raw.segments[entry.segment_index]
            self.places[entry.key] = (path.name, header.segment_base_offset + segment.offset, segment.size)
        for file in sorted(path.parent.glob(f"{path.stem}.*.ptd")):
            data = file.read_bytes()
            head = flat_tensor.FlatTensorHeader.from_bytes(data[8:])
            tensors = flat_tensor._deserialize_to_flat_tensor(data[: head.flatbuffer_offset + head.flatbuffer_size])
            for entry in tensors.named_data:
                segment = tensors.segments[entry.segment_index]
                self.places[entry.key] = (file.name, head.segment_base_offset + segment.offset, segment.size)


def listing(path: Path) -> list[dict[str, Any]]:
    """List the linear_qcs4w calls of a file with ExecuTorch's own readers, bytes and all."""
    data = path.read_bytes()
    whole = program.deserialize_pte_binary(data).program
    constants = Constants(path)
    calls = []
    for plan in whole.execution_plan:
        for number, delegate in enumerate(plan.delegates):
            blob = whole.backend_delegate_data[delegate.processed.index].data
            if delegate.id != "VulkanBackend":
                continue
            graph = vulkan.flatbuffer_to_vk_graph(flatbuffer_of(blob))
            sources = {call.args[1]: call.args[0] for call in graph.chain if call.name == "et_vk.prepack.default"}
            for order, call in enumerate(graph.chain):
                if call.name != CALL:
                    continue
                x, weight, scales, _ = (graph.values[index].value for index in call.args)
                stored = []
                for index in call.args[1:3]:
                    while index in sources:
                        index = sources[index]
                    stored.append(place(graph.constants[graph.values[index].value.constant_id], constants, path, blob))
                calls.append(
                    {
                        "method": plan.name,
                        "delegate": number,
                        "order": order,
                        "x_dims": list(x.dims),
                        "weight_dims": list(weight.dims),
                        "scale_dims": list(scales.dims),
                        "scale_dtype": DTYPES[int(scales.datatype)],
                        "weight": stored[0],
                        "scales": stored[1],
                    }
                )
    return calls


def place(constant: VkBytes, constants: Constants, path: Path, blob: bytes) -> dict[str, Any]:
    """Tell where a constant lies and what its bytes are."""
    if constant.offset == 2**64 - 1:
        name, offset, nbytes = constants.places[constant.named_key]
    else:
        header = vulkan.VulkanDelegateHeader.from_bytes(blob[: vulkan.VulkanDelegateHeader.EXPECTED_LENGTH])
        data = path.read_bytes()
        assert data.count(blob) == 1
        name, nbytes = path.name, constant.length
        offset = data.index(blob) + header.bytes_offset + constant.offset
    content = (path.parent / name).read_bytes()[offset : offset + nbytes]
    assert nbytes == constant.length == len(content)
    return {
        "file": name,
        "offset": offset,
        "nbytes": nbytes,
        "key": constant.named_key or None,
        "sha256": sha256(content),
    }


def main(arguments: list[str]) -> None:
    """Make the files, or only list them."""
    folder = Path(__file__).parent if arguments == ["--list"] else Path(arguments[0])
    if arguments != ["--list"]:
        folder.mkdir(parents=True, exist_ok=True)
        make_all(folder)
    found = {path.name: listing(path) for path in sorted(folder.glob("*.pte"))}
    (folder / "listing.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
