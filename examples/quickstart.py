import numpy as np

from qcs4w_gpu import Gpu, Linear, verify
from qcs4w_packer import load_packed, pack_weight, save_container

weight = np.random.default_rng(0).standard_normal((64, 129), np.float32)  # (out_features, in_features)
save_container("weight.safetensors", {"fc.weight": pack_weight(weight)}, force=True)
packed = load_packed("weight.safetensors", "fc.weight")
with Gpu() as gpu:
    y = Linear(gpu, packed)(np.ones((2, 3, 129), np.float32))  # float32, (2, 3, 64)
    assert verify(gpu, packed, source=weight).status == "pass"

np.testing.assert_allclose(y[0, 0], packed.dequantize().sum(axis=1), rtol=1e-4, atol=1e-4)
