"""Measure pack against cp: the same file, warm, in turns, a process each; processor time and peak memory too.

Two safetensors files of linear weights, one F32 and one BF16, in a folder of choice (/dev/shm needs no disk; what lies
there counts as memory). A line gives the best wall time of cp and of the whole command, start-up included, their
ratio, the best processor time of the command, the gigabytes of source per second of processor time, counted as F32
and without start-up, and the peak resident memory. Start-up is that of packing a tiny file.

--checkpoint FOLDER makes a checkpoint as Llama's are, of 20 GB in bf16 shards, in that folder: the first 10 layers
random, holes for the rest. It is packed once, compared with the bound on memory (1.5 times the largest tensor and
400 MB), and removed.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from timed import timed

from qcs4w_packer.safetensors_file import Planned, SafetensorsLayout

_ROWS, _COLUMNS = 4096, 4096
_SHARD_NBYTES = 5_000_000_000


def main() -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108 - the user's choice
    parser.add_argument("--gib", type=float, default=2, help="size of each file")
    parser.add_argument("--turns", type=int, default=5, help="runs of each")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="pack 20 GB of shards in this folder instead")
    parser.add_argument("--layers", type=int, default=41, help="of the checkpoint: 41 make 20 GB")
    arguments = parser.parse_args()
    parent = arguments.checkpoint or arguments.folder
    with tempfile.TemporaryDirectory(dir=parent, prefix="qcs4w-bench-") as folder:
        if arguments.checkpoint:
            pack_checkpoint(Path(folder), arguments.layers)
        else:
            pack_files(Path(folder), arguments.gib, arguments.turns)


def pack_files(folder: Path, gib: float, turns: int) -> None:
    """Print the figures of both files."""
    tiny = folder / "tiny.safetensors"
    write_weights(tiny, [Planned("a.weight", "F32", (4, 4))], random=1)
    start = min((timed(packing(tiny, folder / "out.safetensors")) for _ in range(turns)), key=lambda run: run[1])
    say(f"best of {turns} turns, {len_cores()} cores; start-up {start[0]:.2f} s, {start[1]:.2f} s of processor time")
    say(f"{'file':<22}{'cp s':>7}{'pack s':>8}{'ratio':>7}{'CPU s':>8}{'F32 GB/CPU s':>14}{'peak MB':>9}")
    for dtype, nbytes in (("F32", 4), ("BF16", 2)):
        count = max(1, int(gib * (1 << 30)) // (_ROWS * _COLUMNS * nbytes))
        path = folder / f"{dtype}.safetensors"
        tensors = [Planned(f"layers.{i}.fc.weight", dtype, (_ROWS, _COLUMNS)) for i in range(count)]
        write_weights(path, tensors, random=count)
        runs = []
        for _ in range(turns):
            copied = timed(["cp", str(path), str(folder / "copy")])
            (folder / "copy").unlink()
            runs.append((copied, timed(packing(path, folder / "out.safetensors"))))
        cp = min(run[0][0] for run in runs)
        wall, processor = (min(run[1][i] for run in runs) for i in range(2))
        rate = count * _ROWS * _COLUMNS * 4 / 1e9 / max(1e-9, processor - start[1])
        peak = max(run[1][2] for run in runs) / 1e6
        label = f"{dtype} {path.stat().st_size / (1 << 30):.2f} GiB"
        say(f"{label:<22}{cp:>7.2f}{wall:>8.2f}{wall / cp:>7.2f}{processor:>8.2f}{rate:>14.2f}{peak:>9.0f}")
        path.unlink()


def pack_checkpoint(folder: Path, layers: int) -> None:
    """Print the figures of one checkpoint."""
    free = shutil.disk_usage(folder).free
    tensors = list(llama_tensors(layers))
    total = sum(tensor.nbytes for tensor in tensors)
    if total > 2 * free:
        sys.exit(f"{folder}: {free:,} bytes are free, a third of {total:,} is needed for data and output")
    say(f"making {total / 1e9:.1f} GB in {folder}")
    random = write_checkpoint(folder / "model", tensors)
    say(f"{random / 1e9:.1f} GB of it random, holes for the rest; packing")
    seconds, processor, peak, code = timed(packing(folder / "model", folder / "packed"))
    if code:
        sys.exit(f"pack ended with {code}")
    largest = max(tensor.nbytes for tensor in tensors)
    bound = 1.5 * largest + 400e6
    packed = sum(path.stat().st_size for path in (folder / "packed").iterdir())
    say(f"{seconds:.1f} s ({total / seconds / 1e9:.2f} GB/s), {processor:.1f} s of processor time")
    say(f"{total / 1e9:.1f} GB → {packed / 1e9:.1f} GB in {len(list((folder / 'packed').glob('*.safetensors')))} files")
    verdict = "within" if peak <= bound else "BEYOND"
    say(
        f"peak {peak / 1e6:.0f} MB, {verdict} the bound of {bound / 1e6:.0f} MB (largest tensor {largest / 1e6:.0f} MB)"
    )


def llama_tensors(layers: int) -> Iterator[Planned]:
    """Yield the tensors of a Llama of 4096 features, in bf16."""
    hidden, keys, inner, words = 4096, 1024, 14336, 128256
    yield Planned("model.embed_tokens.weight", "BF16", (words, hidden))
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        for name, shape in shapes.items():
            yield Planned(f"model.layers.{layer}.{name}.weight", "BF16", shape)
    yield Planned("model.norm.weight", "BF16", (hidden,))
    yield Planned("lm_head.weight", "BF16", (words, hidden))


def write_checkpoint(folder: Path, tensors: Sequence[Planned]) -> int:
    """Write shards, index and config; return the bytes that are random and no holes."""
    folder.mkdir()
    shards: list[list[Planned]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > _SHARD_NBYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map: dict[str, str] = {}
    left = 4_000_000_000
    written = 0
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        count = 0
        while count < len(shard) and written < left:
            written += shard[count].nbytes
            count += 1
        write_weights(folder / name, shard, random=count)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    return written


def write_weights(path: Path, tensors: Sequence[Planned], *, random: int) -> None:
    """Write a safetensors file: the first tensors random floats of common sizes, holes for the others."""
    layout = SafetensorsLayout(tensors, {})
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(layout.header({}))
        file.truncate(layout.nbytes)
        for tensor in tensors[:random]:
            file.seek(layout.offsets[tensor.name])
            left = tensor.nbytes
            while left:
                count = min(left, 16 << 20)
                bits = np.frombuffer(rng.bytes(count), np.uint16 if tensor.dtype == "BF16" else np.uint32)
                shift = 7 if tensor.dtype == "BF16" else 23
                exponents = (bits >> shift & 7) + 118  # 2⁻⁹ to 2⁻²
                keep = bits.dtype.type((1 << shift) - 1 | 1 << (8 * bits.itemsize - 1))  # mantissa and sign
                file.write((bits & keep | (exponents << shift).astype(bits.dtype)).tobytes())
                left -= count


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content))


def packing(source: Path, output: Path) -> list[str]:
    """Return the command that packs."""
    return [sys.executable, "-m", "qcs4w_cli", "pack", str(source), "-o", str(output), "--force", "--quiet"]


def len_cores() -> int:
    """Return how many processors may be used."""
    from qcs4w_packer.ordered import cores

    return cores()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
