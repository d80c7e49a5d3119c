"""Make the page's sample: four small weights with sizes that betray a wrong tail, packed as `qcs4w pack` does.

Usage: make_sample.py [OUT.safetensors], by default the sample.safetensors beside this file.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from qcs4w_packer import pack_file

SAMPLE = Path(__file__).parent / "sample.safetensors"
SHAPES = {"block.up_proj": (128, 129), "block.down_proj": (65, 128), "long_row": (7, 2047), "smallest": (1, 1)}


def main(output: Path) -> None:
    """Write the float weights to a temporary file and pack them."""
    draw = np.random.default_rng(20261201)
    weights = {
        f"{name}.weight": (draw.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    weights["block.up_proj.bias"] = draw.standard_normal(128).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.safetensors"
        save_file(weights, source)
        pack_file(source, output, force=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE)
