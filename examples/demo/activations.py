"""Make real activations from a few sentences: what the first attention layer of all-MiniLM-L6-v2 gets to see.

That input is the sum of three embeddings, normalized: word + position + token type, then LayerNorm. The weights are
the model's own, so that the numbers are those that the layer meets in use. Usage: activations.py MODEL_DIR OUT.npz
"""

import re
import sys
from pathlib import Path

import numpy as np

from qcs4w_packer import open_source

SENTENCES = (
    "The nibble order decides whether a quantized model speaks or stammers.",
    "A kernel that is fast and wrong is only wrong.",
    "Even columns are high, odd columns are low.",
)
LAYER = "encoder.layer.0.attention.self.query"


def word_pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Split a text into the model's word pieces, longest first, as BERT's uncased tokenizer does for plain English."""
    ids = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        start, pieces = 0, []
        while start < len(word):
            ends = range(len(word), start, -1)
            end = next((e for e in ends if ("##" if start else "") + word[start:e] in vocabulary), None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[("##" if start else "") + word[start:end]])
            start = end
        ids += pieces
    return [*ids, vocabulary["[SEP]"]]


def main(model: str, output: str) -> None:
    """Write the activations of all tokens of all sentences, one row a token."""
    vocabulary = {word: i for i, word in enumerate((Path(model) / "vocab.txt").read_text("utf-8").splitlines())}
    with open_source(Path(model) / "model.safetensors") as source:
        part = {name: source.tensors[f"embeddings.{name}"].read() for name in EMBEDDINGS}
    rows = []
    for sentence in SENTENCES:
        ids = word_pieces(sentence, vocabulary)
        words, positions, types = (part[name] for name in EMBEDDINGS[:3])
        rows.append(words[ids] + positions[: len(ids)] + types[0])
    x = np.concatenate(rows)
    x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-12)
    x = x * part["LayerNorm.weight"] + part["LayerNorm.bias"]
    np.savez(output, **{LAYER: x})
    print(f"{output}: {len(x)} tokens of {len(SENTENCES)} sentences, input of {LAYER}")


EMBEDDINGS = (
    "word_embeddings.weight",
    "position_embeddings.weight",
    "token_type_embeddings.weight",
    "LayerNorm.weight",
    "LayerNorm.bias",
)

if __name__ == "__main__":
    main(*sys.argv[1:])
