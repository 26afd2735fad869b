"""Packed weights on disk: the same bits as packed anew, made without the weights, and never trusted when damaged."""

import os
import time

import pytest
import torch

from forerun.errors import EngineError
from forerun.kernels import open_linears
from forerun.kernels.cpu import load_cpu_kernels
from forerun.kernels.cpu.packed_file import DATA, PackedFile
from forerun.kernels.linears import Linears
from forerun.kernels.quantized import QuantizedWeight
from forerun.kernels.reference import ReferenceKernels
from forerun.models.quantization import quantize, quantize_groups

KERNELS = load_cpu_kernels(threads=1)
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there are no native kernels here")


def some_layers(kind):
    """Weights and biases by name; some have no bias, some are narrower than a panel."""
    generator = torch.Generator().manual_seed(1)

    def weight(rows, columns):
        values = torch.randn(rows, columns, generator=generator)
        if isinstance(kind, torch.dtype):
            return values.to(kind)
        return {"int8": lambda: quantize(values, 8), "int4": lambda: quantize(values, 4)}.get(
            kind, lambda: quantize_groups(values, 8)
        )()

    return {
        "qkv": (weight(40, 64), torch.randn(40, generator=generator)),
        "down": (weight(64, 96), None),
        "lm_head": (weight(301, 64), None),
    }


def packed_layers(layers, place):
    """The layers as a PackedFile hands them out, those that had to be made, and the PackedFile."""
    made = []
    linears = PackedFile(KERNELS, place)

    def maker(name):
        def make():
            made.append(name)
            return layers[name]

        return make

    try:
        packed = {name: linears.linear(name, maker(name)) for name in layers}
    except EngineError as error:
        if "not packed natively yet" in str(error):
            pytest.skip(str(error))
        raise
    linears.finish()
    return packed, made, linears


def products(packed):
    generator = torch.Generator().manual_seed(2)
    return {
        name: KERNELS.norm_project(torch.randn(5, layer.columns, generator=generator), None, layer)
        for name, layer in packed.items()
    }


def assert_same(one, other):
    for name, y in products(one).items():
        assert torch.equal(y, products(other)[name])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8", "int4", "int8 in groups"], ids=str)
def test_mapped_layers_compute_the_bits_of_layers_packed_anew(tmp_path, kind):
    layers = some_layers(kind)
    anew, made, first = packed_layers(layers, tmp_path / "m")
    assert made == list(layers)
    mapped, made, second = packed_layers(layers, tmp_path / "m")
    assert made == []
    assert_same(anew, mapped)
    assert all(KERNELS.weight_reader(layers_of.values())() > 0 for layers_of in (anew, mapped))
    sizes = [weight.nbytes + (0 if bias is None else bias.nbytes) for weight, bias in layers.values()]
    assert first.weight_bytes == second.weight_bytes == sum(sizes)
    if not isinstance(kind, torch.dtype):
        assert all(isinstance(weight, QuantizedWeight) for weight, _ in layers.values())
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(f"m-{KERNELS.name}-")


def test_layers_outlive_their_file(tmp_path):
    layers = some_layers(torch.float32)
    anew, _, _ = packed_layers(layers, tmp_path / "m")
    mapped, _, linears = packed_layers(layers, tmp_path / "m")
    linears.path.unlink()
    del linears
    assert_same(anew, mapped)


def test_a_layer_that_the_file_lacks_is_made_and_added(tmp_path):
    layers = some_layers(torch.float32)
    packed_layers({"qkv": layers["qkv"]}, tmp_path / "m")
    mixed, made, _ = packed_layers(layers, tmp_path / "m")
    assert made == ["down", "lm_head"]
    complete, made, _ = packed_layers(layers, tmp_path / "m")
    assert made == []
    assert_same(mixed, complete)


@pytest.mark.parametrize("damage", ["emptied", "cut", "longer", "magic", "index", "length"])
def test_a_damaged_file_is_made_anew(tmp_path, caplog, damage):
    layers = some_layers(torch.float32)
    anew, _, linears = packed_layers(layers, tmp_path / "m")
    data = bytearray(linears.path.read_bytes())
    if damage == "emptied":
        data = bytearray()
    elif damage == "cut":
        data = data[: DATA + 100]
    elif damage == "longer":
        data += b"\0"
    else:
        data[{"magic": 0, "length": 9, "index": 60}[damage]] ^= 1
    linears.path.write_bytes(data)
    again, made, _ = packed_layers(layers, tmp_path / "m")
    assert made == list(layers)
    assert "made anew" in caplog.text
    assert_same(anew, again)
    _, made, _ = packed_layers(layers, tmp_path / "m")
    assert made == []


def test_another_library_packs_anew_and_the_old_file_goes(tmp_path, monkeypatch):
    layers = some_layers(torch.float32)
    _, _, old = packed_layers(layers, tmp_path / "m")
    packed_layers(layers, tmp_path / "m-other")
    library = tmp_path / "library"
    library.write_bytes(b"rebuilt")
    monkeypatch.setattr("forerun.kernels.cpu.packed_file.LIBRARY", library)
    _, made, new = packed_layers(layers, tmp_path / "m")
    assert made == list(layers)
    assert new.path.is_file()
    assert not old.path.exists()
    assert len(list(tmp_path.glob("m-other-*"))) == 1


def test_a_place_that_cannot_be_written_only_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    layers = some_layers(torch.float32)
    for _ in range(2):
        caplog.clear()
        packed, made, _ = packed_layers(layers, tmp_path / "file" / "m")
        assert made == list(layers)
        assert "FORERUN_CACHE" in caplog.text
        assert len(caplog.records) == 1
    assert products(packed)


def test_a_write_that_breaks_off_leaves_nothing(tmp_path, monkeypatch, caplog):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.kernels.cpu.packed_file.os.fsync", full)
    packed_layers(some_layers(torch.float32), tmp_path / "m")
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_killed_writers_left_behind_is_removed(tmp_path):
    for name, age in ((".partial-old", 2 * 24 * 3600), (".partial-new", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    packed_layers(some_layers(torch.float32), tmp_path / "m")
    assert not (tmp_path / ".partial-old").exists()
    assert (tmp_path / ".partial-new").exists()


def test_native_kernels_keep_files_and_others_do_not(tmp_path):
    assert isinstance(open_linears(KERNELS, tmp_path / "m"), PackedFile)
    assert type(open_linears(ReferenceKernels("cpu"), tmp_path / "m")) is Linears
