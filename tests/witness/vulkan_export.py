"""ExecuTorch's own way from float weights to `et_vk.linear_qcs4w`, and its own reader of what it wrote.

Nothing here knows the format: codes, scales and bytes are those of the package.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from executorch.backends.vulkan._passes.fuse_quantized_ops import pack_4bit_weight_tensor
from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
from executorch.backends.vulkan.patterns import fusable_patterns
from executorch.backends.vulkan.quantizer.vulkan_quantizer import VulkanQuantizer, get_symmetric_quantization_config
from executorch.backends.vulkan.serialization.vulkan_graph_schema import VkDataType, VkGraph, VkTensor
from executorch.backends.vulkan.serialization.vulkan_graph_serialize import (
    extract_vk_flatbuffer,
    flatbuffer_to_vk_graph,
)
from executorch.exir import EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from wrong_rules import Answer

QCS4W = "et_vk.linear_qcs4w.default"

# Every lowering matches against the same pattern graphs, and building them anew costs more than all else it does.
for _entry in fusable_patterns.values():
    if _entry.get_graphs_fn is not None:
        _entry.get_graphs_fn = functools.cache(_entry.get_graphs_fn)


class Linears(torch.nn.Module):
    """Linears side by side, each with its own input and output, so that many shapes go through one lowering."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> None:
        """Take the weights, each (N, K), as they are; biases for all of them or for none."""
        super().__init__()
        self.linears = torch.nn.ModuleList()
        for index, weight in enumerate(weights):
            out_features, in_features = weight.shape
            linear = torch.nn.Linear(in_features, out_features, bias=bool(biases), device="meta")
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            if biases:
                linear.bias = torch.nn.Parameter(biases[index], requires_grad=False)
            self.linears.append(linear)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return one output for each input."""
        return tuple(linear(x) for linear, x in zip(self.linears, inputs, strict=True))

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Two rows of input for each linear."""
        return tuple(torch.ones(2, linear.in_features, dtype=linear.weight.dtype) for linear in self.linears)


def quantized(model: Linears, **config: int) -> torch.fx.GraphModule:
    """Run the Vulkan quantizer as its users do: prepare, one forward, convert.

    Args:
        model: what to quantize.
        config: what differs from 4 bits, weights only, as `get_symmetric_quantization_config` names it.
    """
    quantizer = VulkanQuantizer().set_global(
        get_symmetric_quantization_config(is_dynamic=False, **{"weight_bits": 4, **config})
    )
    prepared = prepare_pt2e(torch.export.export(model.eval(), model.inputs()).module(), quantizer)
    prepared(*model.inputs())
    return convert_pt2e(prepared)


def quantizer_answers(converted: torch.fx.GraphModule) -> list[Answer]:
    """Return codes and scales of each linear of a converted module, and the bytes that ExecuTorch's packer makes."""
    answers = []
    for node in converted.graph.nodes:
        if node.target != torch.ops.aten.linear.default:
            continue
        dequantize = node.args[1]
        assert dequantize.target == torch.ops.quantized_decomposed.dequantize_per_channel.default
        weight, scales, zero_points = (getattr(converted, argument.target) for argument in dequantize.args[:3])
        assert weight.dtype == torch.int8
        assert not zero_points.any()
        answers.append(Answer(weight.numpy(), scales.numpy(), pack_4bit_weight_tensor(weight).numpy()))
    return answers


def lowered(converted: torch.fx.GraphModule, model: Linears) -> EdgeProgramManager:
    """Export a converted module and lower it to Vulkan."""
    exported = torch.export.export(converted, model.inputs())
    return to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner()])


@dataclass(frozen=True)
class Delegate:
    """A Vulkan graph inside a program, and where its constants are."""

    graph: VkGraph
    constants: dict[str, bytes]

    def constant(self, value_id: int, dtype: type[np.generic]) -> np.ndarray:
        """Return a constant; the file must say that its dtype is the one wanted."""
        value_id = self.unpacked(value_id)
        tensor = self.graph.values[value_id].value
        assert isinstance(tensor, VkTensor)
        assert tensor.datatype == {np.uint8: VkDataType.UINT8, np.float32: VkDataType.FLOAT32}[dtype]
        data = self.constants[self.graph.constants[tensor.constant_id].named_key]
        return np.frombuffer(data, dtype).reshape(tensor.dims)

    def unpacked(self, value_id: int) -> int:
        """Return the value that a prepacked one was made from, or itself."""
        sources = {call.args[1]: call.args[0] for call in self.graph.chain if call.name == "et_vk.prepack.default"}
        return sources.get(value_id, value_id)

    def operators(self) -> list[str]:
        """Name the calls in the order in which they run."""
        return [call.name for call in self.graph.chain]


def only_delegate(manager: EdgeProgramManager) -> Delegate:
    """Write the program and read it again with the package's own reader: the one delegate that it must have."""
    file: PTEFile = deserialize_pte_binary(bytes(manager.to_executorch().buffer))
    (delegate,) = file.program.execution_plan[0].delegates
    assert delegate.id == "VulkanBackend"
    blob = file.program.backend_delegate_data[delegate.processed.index].data
    assert file.named_data is not None
    named = file.named_data
    constants = {key: bytes(named.buffers[entry.buffer_index]) for key, entry in named.pte_data.items()}
    return Delegate(flatbuffer_to_vk_graph(extract_vk_flatbuffer(bytes(blob))), constants)


def lowered_weights(delegate: Delegate) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return packed bytes uint8 (N, ceil(K / 2)) and scales float32 (N,) of each linear, by the order of inputs."""
    found = {}
    for call in delegate.graph.chain:
        if call.name != QCS4W:
            continue
        x, weight, scales, _ = call.args
        found[delegate.graph.input_ids.index(x)] = (
            delegate.constant(weight, np.uint8),
            delegate.constant(scales, np.float32),
        )
    return [found[index] for index in sorted(found)]
