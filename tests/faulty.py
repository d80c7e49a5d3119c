"""A linear with a fault, written out index by index: what a wrong kernel answers."""

import numpy as np
from numpy.typing import NDArray

from qcs4w_gpu.faults import BIASES, INPUTS, OUTPUTS, SCALES, Hypothesis
from qcs4w_packer import PackedLinear


def faulty(
    packed: PackedLinear, x: NDArray[np.float32], fault: Hypothesis, bias: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return the y of a linear with these faults, float32 (M, N); past an edge follows the other one."""
    rows, out_features, in_features = len(x), packed.out_features, packed.in_features
    codes = fault.reading.matrix(packed.packed, out_features, in_features).astype(np.float32)
    m, n, k = np.arange(rows), np.arange(out_features), np.arange(in_features)
    read = {
        INPUTS[0]: x,
        INPUTS[1]: x[(m + 1) % rows],
        INPUTS[2]: x[m - 1],
        INPUTS[3]: x.ravel()[k[None, :] * rows + m[:, None]],
    }[fault.input]
    scales = packed.scales
    if fault.scale == SCALES[3]:
        y = read @ (codes * scales[np.minimum(k, out_features - 1)][None, :]).T
    else:
        factors = {
            SCALES[0]: scales[None, :],
            SCALES[1]: scales[(n + 1) % out_features][None, :],
            SCALES[2]: scales[n - 1][None, :],
            SCALES[4]: scales[np.minimum(m, out_features - 1)][:, None],
            SCALES[5]: np.float32(1),
        }[fault.scale]
        y = (read @ codes.T) * factors
    if bias is not None:
        y = y + bias * np.float32({BIASES[0]: 1, BIASES[1]: 0, BIASES[2]: 2}[fault.bias])
    if fault.output == OUTPUTS[3]:
        written = np.empty(y.size, np.float32)
        written[n[None, :] * rows + m[:, None]] = y
        return written.reshape(y.shape)
    step = {OUTPUTS[0]: 0, OUTPUTS[1]: 1, OUTPUTS[2]: -1}[fault.output]
    return np.ascontiguousarray(y[:, (n + step) % out_features], np.float32)
