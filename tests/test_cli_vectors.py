"""The vectors command, and its header in C and C++."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import CommandLine

#: Computes every linear of the header in float32 and says what is wrong; also what is right, to show that it looked.
PROGRAM = """
#include <math.h>
#include <stdio.h>
#include "qcs4w_vectors.h"

int main(int argc, char **argv) {
    int even_is_low = argc > 1 && argv[1] != NULL; /* read it the wrong way round */
    unsigned long exact = 0, bounded = 0, wrong = 0;
    for (size_t i = 0; i < QCS4W_VECTOR_COUNT; i++) {
        const qcs4w_vector *v = &qcs4w_vectors[i];
        for (uint32_t m = 0; m < v->M; m++) {
            for (uint32_t n = 0; n < v->N; n++) {
                float sum = 0.0f;
                for (uint32_t k = 0; k < v->K; k++) {
                    int byte = v->packed[n * v->K_packed + k / 2];
                    int nibble = (int)(k % 2) == even_is_low ? byte >> 4 : byte & 15;
                    sum += v->x[m * v->K + k] * ((float)(nibble - 8) * v->scales[n]);
                }
                double error = fabs((double)sum - v->y[m * v->N + n]);
                if (v->bound == NULL) exact++; else bounded++;
                if (error > (v->bound == NULL ? 0.0 : (double)v->bound[m * v->N + n])) wrong++;
            }
        }
    }
    printf("%lu %lu %lu\\n", exact, bounded, wrong);
    return wrong != 0;
}
"""


def compiler(name: str) -> str:
    """A compiler; without one the test is skipped, or fails where QCS4W_REQUIRE_COMPILER is set (as .ci/run does)."""
    found = shutil.which(name)
    if not found:
        if os.environ.get("QCS4W_REQUIRE_COMPILER"):
            pytest.fail(f"there is no {name}, and QCS4W_REQUIRE_COMPILER is set")
        pytest.skip(f"there is no {name}")
    return found


@pytest.mark.parametrize(
    ("name", "file", "standard"), [("cc", "test.c", "-std=c99"), ("c++", "test.cpp", "-std=c++11")], ids=["C", "C++"]
)
def test_the_header_in_c(name: str, file: str, standard: str, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A program in C99 or C++11, compiled without a warning, finds every y right, and wrong with nibbles swapped."""
    tool = compiler(name)
    index = qcs4w("vectors", "-o", tmp_path / "v", "--json").document["index"]
    (tmp_path / file).write_text(PROGRAM)
    flags = [standard, "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path / 'v'}"]
    program = tmp_path / "program"
    subprocess.run([tool, *flags, tmp_path / file, "-o", program, "-lm"], check=True, timeout=120)
    outputs = []
    for arguments in ([], ["even-low"]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
        outputs.append((done.returncode, *map(int, done.stdout.split())))
    elements = sum(case["M"] * case["N"] for case in index["cases"] if case["kind"] == "exact")
    assert outputs[0] == (0, elements, elements, 0)
    assert outputs[1][0] == 1
    assert outputs[1][3] > elements, "swapped nibbles are wrong nearly everywhere"


def test_the_answer(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Each case stands in the table; the JSON holds the index."""
    result = qcs4w("vectors", "-o", tmp_path / "v", "--sizes", "3,5,7", "--sizes", "1x2x3", "--sizes", "3,5,7")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert ["exact_3x5x7", "3", "5", "7", "equal", "244", "B"] in lines
    assert "wrote 4 cases" in result.out
    document = qcs4w("vectors", "-o", tmp_path / "w", "--sizes", "3,5,7", "--seed", "9", "--json").document
    assert [case["name"] for case in document["index"]["cases"]] == ["exact_3x5x7", "bounded_3x5x7"]
    assert document["index"]["seed"] == 9
    assert document["nbytes"] == sum(file.stat().st_size for file in (tmp_path / "w").iterdir())


def test_what_is_refused(tmp_path: Path, qcs4w: CommandLine) -> None:
    """No output, a size that is none, a folder that is there: one error, and nothing is changed."""
    assert "--output" in qcs4w.refused("vectors")
    assert "4,64,128" in qcs4w.refused("vectors", "-o", tmp_path / "v", "--sizes", "3,5")
    assert "at least 1" in qcs4w.refused("vectors", "-o", tmp_path / "v", "--sizes", "3,5,0")
    assert "at most" in qcs4w.refused("vectors", "-o", tmp_path / "v", "--sizes", "1,100000,100000")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("mine")
    assert "--force" in qcs4w.refused("vectors", "-o", tmp_path / "mine")
    assert "does not remove that" in qcs4w.refused("vectors", "-o", tmp_path / "mine", "--force")
    assert (tmp_path / "mine" / "a.txt").read_text() == "mine"
    assert "no folder" in qcs4w.refused("vectors", "-o", tmp_path / "none" / "v")
    assert "no folder" in qcs4w.refused("vectors", "-o", tmp_path / "mine" / "a.txt")
