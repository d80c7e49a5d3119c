"""pack with other methods than absmax: what the files say, what they gain, how they resume, and bad calibrations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import load_file, save_file

from qcs4w_cli.pack import METHODS as OFFERED
from qcs4w_packer import Recipe, Request, load_packed, open_packed, open_source, pack_file, pack_weight, quantize
from qcs4w_packer.calibrated import Calibrated, calibrated_from_json
from qcs4w_packer.metadata import PackedEntry, to_document
from qcs4w_packer.methods.calibration import Calibration, held_out_rows
from qcs4w_packer.methods.gptq import gptq, hmse, mse
from qcs4w_packer.methods.recipe import METHODS
from qcs4w_packer.pack_finish import finish
from qcs4w_packer.pack_plan import plan_pack
from qcs4w_packer.pack_shard import pack_shard
from qcs4w_packer.pack_watch import PackedTensor, Tally, Watch
from qcs4w_packer.work_folder import WorkFolder

NAMES = ("layers.0.fc.weight", "layers.1.fc.weight")


@pytest.fixture
def inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Activations of both linears, with columns that go together, by module and by weight."""

    def some(rows: int, columns: int) -> np.ndarray:
        mixed = (rng.standard_normal((rows, columns)) / np.arange(1, columns + 1)) @ rng.standard_normal((columns,) * 2)
        return np.asarray(mixed + 0.1 * rng.standard_normal((rows, columns)), np.float32)

    return {"layers.0.fc": some(800, 33).reshape(4, 200, 33), "layers.1.fc.weight": some(300, 12)}


@pytest.fixture
def activations(inputs: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The activations in a file."""
    path = tmp_path / "activations.npz"
    np.savez(path, **inputs)
    return path


def weights(checkpoint: Path) -> list[np.ndarray]:
    """The weights of both linears."""
    tensors = load_file(checkpoint)
    return [tensors[name].astype(np.float32) for name in NAMES]


def seen(x: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The rows that codes are chosen by, and those kept apart."""
    rows = x.reshape(-1, x.shape[-1])
    apart = held_out_rows(len(rows), seed)
    return rows[~apart], rows[apart]


def test_the_command_offers_every_method() -> None:
    """The names on the command line are the packer's."""
    assert tuple(METHODS) == OFFERED


def test_mse_needs_nothing(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Codes and scales are those of least squared error, the table and the file say so, and no weight moves further."""
    out = tmp_path / "mse.safetensors"
    document = qcs4w("pack", checkpoint, "-o", out, "--method", "mse", "--json").document
    plain = qcs4w("pack", checkpoint, "-o", tmp_path / "absmax.safetensors", "--json").document
    for name, weight, ours, theirs in zip(NAMES, weights(checkpoint), document["packed"], plain["packed"], strict=True):
        packed = load_packed(out, name)
        expected = mse(weight)
        np.testing.assert_array_equal(packed.codes(), expected.codes)
        np.testing.assert_array_equal(packed.scales, expected.scales)
        assert (ours["method"], ours["calibration"]) == ("mse", None)
        assert ours["quantization_error"]["relative"] < theirs["quantization_error"]["relative"]
    with open_packed(out) as file:
        assert {entry.method for entry in file.entries.values()} == {"mse"}
    assert qcs4w("pack", checkpoint, "-o", out, "--method", "mse", "--force").out.count("  mse") == 2


@pytest.mark.parametrize("method", ["hmse", "gptq", None])
def test_calibrated_codes_gain_on_rows_kept_apart(
    method: str | None, checkpoint: Path, activations: Path, inputs: dict[str, np.ndarray], tmp_path: Path,
    qcs4w: CommandLine,
) -> None:  # fmt: skip
    """The file holds the method's own codes; the error on rows that it has not seen is told, and is below absmax's."""
    out = tmp_path / "out.safetensors"
    options = ("--calibration", activations, *(["--method", method] if method else []))
    document = qcs4w("pack", checkpoint, "-o", out, *options, "--json").document
    for tensor, weight, x in zip(document["packed"], weights(checkpoint), inputs.values(), strict=True):
        rows, apart = seen(x)
        gram = rows.T @ rows
        expected = hmse(weight, np.diagonal(gram)) if method == "hmse" else gptq(weight, gram, len(rows))
        packed = load_packed(out, tensor["tensor"])
        np.testing.assert_array_equal(packed.codes(), expected.codes)
        np.testing.assert_allclose(packed.scales, expected.scales, rtol=1e-5)
        told = tensor["calibration"]
        assert tensor["method"] == (method or "gptq")
        assert (told["rows"], told["held_out_rows"], told["seed"]) == (len(rows), len(apart), 0)
        for key, dequantized in (("output_error", packed), ("absmax_output_error", pack_weight(weight))):
            lost = np.linalg.norm(apart @ (weight - dequantized.dequantize()).T) / np.linalg.norm(apart @ weight.T)
            assert told[key] == pytest.approx(lost, rel=1e-3)
        assert told["output_error"] < told["absmax_output_error"]
        with open_packed(out) as file:
            entry = file.entries[tensor["tensor"]]
        assert entry.method == tensor["method"]
        assert entry.calibration is not None
        assert entry.calibration.to_json() == told
    table = qcs4w("pack", checkpoint, "-o", out, *options, "--force").out
    assert "output error as a share of absmax's: median 0." in table
    assert "absmax's  share" in table
    assert "(seed 0)" in table
    inspected = qcs4w("inspect", out, "--json").document
    assert inspected["tensors"][0]["calibration"]["seed"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", [m for m in METHODS if m != "absmax"])
def test_every_method_verifies_and_runs(
    gpu: object, method: str, checkpoint: Path, activations: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """The GPU computes with them, their source explains them, and run takes them like any other."""
    out = tmp_path / "out.safetensors"
    options = () if method == "mse" else ("--calibration", activations)
    assert qcs4w("pack", checkpoint, "-o", out, "--method", method, *options).code == 0
    assert qcs4w("verify", out, "--source", checkpoint).code == 0
    assert qcs4w("run", out, "-x", activations, "-o", tmp_path / "y.npz").code == 0
    assert qcs4w("diff", out, out).code == 0


@pytest.mark.parametrize("form", ["activations", "hessian", "mean_square"])
def test_h_and_mean_squares_do_as_activations_do(
    form: str, checkpoint: Path, inputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """What `calibrate` keeps of the activations gives the codes that they give themselves."""
    arrays: dict[str, np.ndarray] = {}
    for name, x in inputs.items():
        rows = x.reshape(-1, x.shape[-1])
        if form == "activations":
            arrays[name] = x
        elif form == "hessian":
            arrays |= {f"{name}.hessian": rows.T @ rows, f"{name}.hessian_rows": np.array([len(rows)])}
        else:
            arrays[f"{name}.mean_square"] = np.square(rows).mean(axis=0)
    path = tmp_path / "calibration.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    method = "hmse" if form == "mean_square" else "gptq"
    out = tmp_path / "out.safetensors"
    report = pack_file(checkpoint, out, recipe=Recipe(method, path))
    for tensor, weight, x in zip(report.packed, weights(checkpoint), inputs.values(), strict=True):
        rows = seen(x)[0] if form == "activations" else x.reshape(-1, x.shape[-1])
        gram = rows.T @ rows
        expected = gptq(weight, gram, len(rows)) if method == "gptq" else hmse(weight, np.diagonal(gram))
        np.testing.assert_array_equal(load_packed(out, tensor.entry.name).codes(), expected.codes)
        assert tensor.entry.calibration is not None
        assert tensor.entry.calibration.held_out_rows == (len(seen(x)[1]) if form == "activations" else 0)
        assert (tensor.entry.calibration.output_error is None) == (form == "mean_square")


def test_threads_and_seeds(checkpoint: Path, activations: Path, tmp_path: Path) -> None:
    """One seed gives one file, to the bit, with one thread or with five; another seed keeps other rows apart."""
    made = []
    for threads, seed in ((1, 7), (5, 7), (2, 8)):
        out = tmp_path / f"{threads}.safetensors"
        recipe = Recipe(calibration=activations, seed=seed)
        with open_source(checkpoint) as source, Calibration(activations, seed) as calibration:
            plan = plan_pack(source, out, recipe=recipe, calibration=calibration)
            work = WorkFolder(plan)
            for shard in plan.shards:
                pack_shard(work, shard, Tally(Watch(), plan.source_nbytes), threads=threads)
            finish(work, force=False)
        made.append(out.read_bytes())
    assert made[0] == made[1] != made[2]


def test_transposed_and_aliased_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    """A weight stored [in, out] gets the codes of its transpose."""
    weight = rng.standard_normal((20, 30)).astype(np.float32)
    x = rng.standard_normal((640, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", **{"h.0.attn.c_attn": x})
    save_file({"h.0.attn.c_attn.weight": weight}, tmp_path / "m.safetensors")
    pack_file(
        tmp_path / "m.safetensors", tmp_path / "o.safetensors", request=Request(transpose=("*",)),
        recipe=Recipe(calibration=tmp_path / "x.npz"),
    )  # fmt: skip
    rows, _ = seen(x)
    expected = gptq(np.ascontiguousarray(weight.T), rows.T @ rows, len(rows))
    found = load_packed(tmp_path / "o.safetensors", "h.0.attn.c_attn.weight")
    np.testing.assert_array_equal(found.codes(), expected.codes)


def test_what_the_file_does_not_name_is_packed_by_absmax(
    checkpoint: Path, inputs: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Its bytes are absmax's and its method says so; the answer tells how many there are."""
    np.savez(tmp_path / "some.npz", **{"layers.1.fc": inputs["layers.1.fc.weight"]})
    out = tmp_path / "out.safetensors"
    result = qcs4w("pack", checkpoint, "-o", out, "--calibration", tmp_path / "some.npz")
    assert "nothing is known of the inputs of 1 tensor, packed by absmax" in result.out
    with open_packed(out) as file:
        assert [entry.method for entry in file.entries.values()] == ["absmax", "gptq"]
    np.testing.assert_array_equal(load_packed(out, NAMES[0]).codes(), quantize(weights(checkpoint)[0])[0])


def test_traps_are_told(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Few rows, and inputs that are all zero, are warned of by name; the file says what was used instead."""
    np.savez(
        tmp_path / "x.npz",
        **{"layers.0.fc": np.zeros((800, 33), np.float32), "layers.1.fc": np.ones((5, 12), np.float32)},
    )
    options = ("pack", checkpoint, "-o", tmp_path / "o.safetensors", "--calibration", tmp_path / "x.npz")
    result = qcs4w(*options, "--json")
    first, second = result.document["packed"]
    assert (first["method"], first["calibration"]["fallback"]) == ("mse", "all its inputs are zero")
    assert any("all its inputs are zero" in text for text in first["warnings"])
    assert second["method"] == "gptq"
    assert any("5 rows of inputs are few, 192 (16·K) or more" in text for text in second["warnings"])
    told = qcs4w(*options, "--force").err
    assert "fewer than 4·K rows" in told
    assert "packed by mse, since all its inputs are zero: 1 tensor" in told


def test_a_broken_run_goes_on_only_with_the_same_calibration(
    checkpoint: Path, activations: Path, inputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """What was finished is kept, figures included; another method, seed or calibration file starts clean."""
    notes: list[str] = []

    def stop(tensor: PackedTensor) -> None:
        if tensor.entry.name == NAMES[0] and not tensor.resumed:
            raise InterruptedError

    def run(recipe: Recipe, watch: Watch) -> Any:
        return pack_file(checkpoint, tmp_path / "out.safetensors", recipe=recipe, watch=watch, force=True)

    whole = run(Recipe(calibration=activations), Watch())
    expected = (tmp_path / "out.safetensors").read_bytes()
    with pytest.raises(InterruptedError):
        run(Recipe(calibration=activations), Watch(packed=stop))
    again = run(Recipe(calibration=activations), Watch(note=notes.append))
    assert any("resumed" in note for note in notes)
    assert [tensor.resumed for tensor in again.packed] == [True, False]
    assert (tmp_path / "out.safetensors").read_bytes() == expected
    assert [t.entry for t in again.packed] == [t.entry for t in whole.packed]
    other = tmp_path / "other.npz"
    np.savez(other, **{name: 2 * x[..., ::-1] for name, x in inputs.items()})
    for recipe in (
        Recipe("hmse", activations), Recipe(calibration=activations, seed=1), Recipe(calibration=other), Recipe("mse"),
    ):  # fmt: skip
        with pytest.raises(InterruptedError):
            run(Recipe(calibration=activations), Watch(packed=stop))
        notes.clear()
        assert not any(tensor.resumed for tensor in run(recipe, Watch(note=notes.append)).packed)
        assert any("starting clean" in note for note in notes)


BAD: dict[str, tuple[dict[str, np.ndarray], tuple[str, ...]]] = {
    "wrong K": ({"layers.0.fc": np.ones((9, 32), np.float32)}, ("layers.0.fc", "[9, 32]", "[..., 33]")),
    "no rows": ({"layers.0.fc": np.ones((0, 33), np.float32)}, ("layers.0.fc", "[0, 33]")),
    "integers": ({"layers.0.fc": np.ones((9, 33), np.int32)}, ("layers.0.fc", "I32")),
    "NaN": ({"layers.0.fc": np.pad([[np.nan]], ((2, 6), (5, 27)))}, ("layers.0.fc", "nan", "row 2, column 5")),
    "infinite": ({"layers.1.fc.mean_square": np.r_[np.inf, np.ones(11)]}, ("mean_square", "inf", "column 0")),
    "no such name": ({"layers.0.fz": np.ones((9, 33), np.float32)}, ("layers.0.fz", "did you mean")),
    "nothing packed": ({"layers.0.norm": np.ones((9, 12), np.float32)}, ("nothing about the tensors that are packed",)),
    "asymmetric": (
        {"layers.1.fc.hessian": np.eye(12) + np.eye(12, k=1), "layers.1.fc.hessian_rows": np.array(9)},
        ("not symmetric", "row 0, column 1"),
    ),
    "negative": (
        {"layers.1.fc.hessian": -np.eye(12), "layers.1.fc.hessian_rows": np.array(9)}, ("column 0", "sum of squares")
    ),
    "not square": (
        {"layers.1.fc.hessian": np.ones((12, 11)), "layers.1.fc.hessian_rows": np.array(9)}, ("[12, 11]", "[12, 12]")
    ),
    "rows missing": ({"layers.1.fc.hessian": np.eye(12)}, ("layers.1.fc.hessian_rows",)),
    "rows wrong": (
        {"layers.1.fc.hessian": np.eye(12), "layers.1.fc.hessian_rows": np.array(0)}, ("not one integer of at least 1",)
    ),
    "only means": ({"layers.1.fc.mean_square": np.ones(12)}, ("only mean(x²) is known", "--method hmse")),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "words"), BAD.values(), ids=BAD)
def test_a_bad_calibration_is_one_clear_error(
    arrays: dict[str, np.ndarray], words: tuple[str, ...], checkpoint: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """What is wrong is told with the array's name, and nothing is written."""
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    method = ("--method", "hmse") if "inf" in words else ()
    error = qcs4w.refused("pack", checkpoint, "-o", tmp_path / "o.safetensors", "--calibration", path, *method)
    for word in words:
        assert word in error
    assert "bad.npz" in error
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "gptq"), ("needs to know the inputs", "--calibration")),
        (("--method", "mse", "--calibration", "x.npz"), ("has no use for a calibration",)),
        (("--calibration", "nowhere.npz"), ("nowhere.npz", "does not exist")),
        (("--method", "mse", "--device", "cuda"), ("works on the CPU",)),
        (("--method", "best"), ("best",)),
    ],
    ids=["no calibration", "useless", "no file", "device", "unknown"],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], words: tuple[str, ...], checkpoint: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """They are refused before any work."""
    error = qcs4w.refused("pack", checkpoint, "-o", tmp_path / "o.safetensors", *options)
    assert all(word in error for word in words)


def test_a_dry_run_with_calibration_says_the_same_size(
    checkpoint: Path, activations: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Room for the figures is planned; the methods are told, the figures are not there yet."""
    out = tmp_path / "out.safetensors"
    dry = qcs4w("pack", checkpoint, "-n", "--calibration", activations, "--json").document
    real = qcs4w("pack", checkpoint, "-o", out, "--calibration", activations, "--json").document
    assert dry["output_nbytes"] == real["output_nbytes"] == out.stat().st_size
    assert [t["method"] for t in dry["packed"]] == ["gptq", "gptq"]
    assert dry["packed"][0]["calibration"]["output_error"] is None
    assert "gptq" in qcs4w("pack", checkpoint, "-n", "--calibration", activations).out


def test_metadata_without_calibration_is_read_as_before(packed_file: Path) -> None:
    """A file of absmax says nothing of calibration, and one that says nothing is read."""
    entry = PackedEntry("a", 1, 2)
    assert "calibration" not in json.loads(to_document([entry]))["tensors"]["a"]
    with open_packed(packed_file) as file:
        assert all(entry.calibration is None for entry in file.entries.values())


@pytest.mark.parametrize(
    "said",
    [[], {}, {"rows": -1}, {"damping": float("inf")}, {"rows": True}, {"fallback": 3}, {"output_error": "0.1"}],
    ids=str,
)
def test_a_calibration_that_is_not_sound_is_refused(said: Any) -> None:
    """Metadata of a hostile file are checked like all others."""
    sound = Calibrated(5, 1, 0).to_json()
    assert calibrated_from_json(sound) == Calibrated(5, 1, 0)
    with pytest.raises((TypeError, ValueError)):
        calibrated_from_json(sound | said if said else said)
