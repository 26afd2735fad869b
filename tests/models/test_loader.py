"""Loading: every kind of name ends in the same running model, and bad settings are told before anything is read."""

import subprocess
import sys

import pytest
import torch

from forerun.errors import ConfigError, EngineError, ModelError, ModelNotFoundError, TokenizerError, WeightsError
from forerun.kernels.cpu import load_cpu_kernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.gguf_import import stored_types
from forerun.models.loader import choose_device, load_model
from forerun.models.quantization import quantize_rows
from tests.models.test_parity import one_shot, some_tokens
from tests.models.tiny import save_tiny_model
from tests.models.tiny_gguf import byte_level_tokenizer, write_gguf

CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def save_model(directory, **options):
    save_tiny_model(directory, **options)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return str(directory)


def load(name, **options):
    return load_model(name, **{"kernels": ReferenceKernels("cpu"), **CPU, **options})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gguf_and_the_directory_that_it_was_made_of_are_the_same_model(tmp_path, precision):
    write_gguf(tmp_path / "m.gguf", seed=3)
    from_gguf = load(str(tmp_path / "m.gguf"), precision=precision)
    from_directory = load(save_model(tmp_path / "m", seed=3), precision=precision)
    assert from_gguf.architecture == from_directory.architecture
    assert from_gguf.precision == precision
    tokens = some_tokens(9)
    assert torch.equal(one_shot(from_gguf.decoder, tokens), one_shot(from_directory.decoder, tokens))


class NativeKernels(ReferenceKernels):
    """The reference under a native name."""

    name = "native"


@pytest.mark.parametrize(
    ("precision", "quantisation", "largest", "group"),
    [
        ("int8", "F32", 127, 64),
        ("int4", "F32", 15, 32),
        ("int4", "Q8_0", 127, 32),
        ("int8", "Q4_1", 127, 64),
        ("int8", "Q5_0", 16, 32),
    ],
)
def test_a_gguf_is_held_in_the_precision_that_was_asked_for(tmp_path, precision, quantisation, largest, group):
    write_gguf(tmp_path / "m.gguf", quantisation=quantisation)
    model = load(str(tmp_path / "m.gguf"), precision=precision)
    assert model.precision == precision
    codes = model.decoder.layers[0].qkv.codes
    assert codes.shape[1] == group
    assert codes.abs().max() == largest
    assert model.decoder.new_store(1).keys.dtype is torch.bfloat16


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_blocks_of_a_gguf_lose_nothing(tmp_path, family, tied, quantisation):
    """The layers hold the very numbers that dequantising gives: auto is as far from them as activations are coarse."""
    tied = tied or family == "gemma2"
    write_gguf(tmp_path / "m.gguf", family, quantisation=quantisation, tie_word_embeddings=tied)
    exact = load(str(tmp_path / "m.gguf"), precision="fp32")
    held = load_model(str(tmp_path / "m.gguf"), kernels=NativeKernels("cpu"), device="cpu")
    assert held.precision == ("int4" if quantisation.startswith("Q4") else "int8")
    assert quantisation in held.precision_reason
    for mine, true in zip(held.decoder.layers, exact.decoder.layers, strict=True):
        pairs = [(mine.qkv, true.qkv), (mine.output, true.output)]
        if mine.mixture is None:
            pairs += [(mine.gate_up, true.gate_up), (mine.down, true.down)]
        else:
            pairs += zip(mine.mixture.down, true.mixture.down, strict=True)
        for quantized, plain in pairs:
            assert torch.equal(numbers(quantized), plain.weight)
    assert torch.equal(numbers(held.decoder.lm_head), exact.decoder.lm_head.weight)


def numbers(packed):
    """What a layer that the reference packed stands for, float32 [out, in]."""
    values = packed.codes.float() * packed.scales.float()
    if packed.minima is not None:
        values = values + packed.minima.float()
    return values.permute(2, 0, 1).flatten(1)


def test_a_gguf_of_mixed_types_is_held_as_it_is_where_it_can_be(tmp_path):
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q5_1", "ffn_up": "F16"}
    write_gguf(tmp_path / "m.gguf", quantisation="Q4_1", kinds=kinds)
    exact = load(str(tmp_path / "m.gguf"), precision="fp32").decoder
    held = load_model(str(tmp_path / "m.gguf"), kernels=NativeKernels("cpu"), device="cpu")
    assert "F16 weights are held in bf16" in held.precision_reason
    mine, true = held.decoder.layers[1], exact.layers[1]
    assert torch.equal(numbers(mine.qkv), true.qkv.weight)
    assert torch.equal(mine.gate_up.weight, true.gate_up.weight.bfloat16())
    asked = load(str(tmp_path / "m.gguf"), precision="int4").decoder.layers[1]
    assert torch.equal(numbers(asked.gate_up)[:96], true.gate_up.weight[:96])
    assert (numbers(asked.gate_up)[96:] - true.gate_up.weight[96:]).abs().max() < 0.01


def test_the_types_of_a_gguf_are_read_once(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", quantisation="Q8_0")
    parts = (tmp_path / "m.gguf",)
    types = stored_types(parts)
    assert types == {"Q8_0": (2 * (64 * 128 + 64 * 64 + 3 * 64 * 96) + 512 * 64) // 32 * 34}
    monkeypatch.setattr("forerun.models.gguf_import.read_gguf", None)
    assert stored_types(parts) == types
    (tmp_path / "file").touch()
    monkeypatch.undo()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))  # a cache that cannot be written
    assert stored_types(parts) == types


def test_the_types_of_one_file_are_not_taken_for_another_s(tmp_path):
    for name, quantisation in (("m.a", "Q8_0"), ("m.b", "Q4_0")):
        write_gguf(tmp_path / f"{name}.gguf", quantisation=quantisation)
        assert stored_types((tmp_path / f"{name}.gguf",)).keys() == {quantisation}
    write_gguf(tmp_path / "m.a.gguf", quantisation="Q5_1")
    assert stored_types((tmp_path / "m.a.gguf",)).keys() == {"Q5_1"}


@pytest.fixture
def native():
    """Native kernels that pack quantised weights."""
    kernels = load_cpu_kernels(threads=1)
    if kernels is None:
        pytest.skip("there are no native kernels here")
    try:
        kernels.pack(quantize_rows(torch.ones(32, 32)))
    except EngineError as error:
        pytest.skip(str(error))
    return kernels


@pytest.mark.parametrize(("precision", "quantisation"), [("int8", "F32"), ("int4", "Q4_1"), ("int8", "Q8_0")])
def test_a_second_start_maps_packed_weights_and_reads_no_gguf(tmp_path, monkeypatch, native, precision, quantisation):
    options = {"precision": precision, "kernels": native, "device": "cpu"}
    write_gguf(tmp_path / "m.gguf", quantisation=quantisation, tie_word_embeddings=True)
    cold = load_model(str(tmp_path / "m.gguf"), **options)
    (packed,) = (tmp_path / "cache" / "packed").iterdir()
    assert packed.name.startswith(f"m-{precision}-")
    monkeypatch.setattr("forerun.models.gguf_import.read_gguf", None)
    warm = load_model(str(tmp_path / "m.gguf"), **options)
    assert warm.weight_bytes == cold.weight_bytes
    tokens = some_tokens(9)
    assert torch.equal(one_shot(warm.decoder, tokens), one_shot(cold.decoder, tokens))


def test_other_weights_and_other_precisions_are_packed_apart(tmp_path, native):
    name, seen = save_model(tmp_path / "m"), []
    for seed, precision in ((0, "int8"), (0, "int4"), (1, "int8")):
        save_model(tmp_path / "m", seed=seed)
        expected = one_shot(load(name, precision=precision).decoder, some_tokens(9))
        mine = one_shot(load(name, precision=precision, kernels=native).decoder, some_tokens(9))
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
        assert all((mine - other).abs().max() > 0.01 for other in seen)
        seen.append(mine)


def test_floating_point_weights_are_not_kept_packed(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    load_model(str(tmp_path / "m.gguf"), device="cpu")
    assert not (tmp_path / "cache" / "packed").exists()


def test_a_directory_s_weights_may_be_quantised(tmp_path):
    name = save_model(tmp_path / "m")
    sizes = {precision: load(name, precision=precision).weight_bytes for precision in ("bf16", "int8", "int4")}
    assert sizes["int4"] < sizes["int8"] < sizes["bf16"]


def test_sizes_and_names_are_reported(tmp_path):
    write_gguf(tmp_path / "m.gguf", quantisation="Q8_0")
    model = load(str(tmp_path / "m.gguf"))
    assert model.name == str(tmp_path / "m.gguf")
    assert model.path.is_relative_to(tmp_path / "cache")
    assert model.file_bytes == (tmp_path / "m.gguf").stat().st_size
    assert model.weight_bytes > model.file_bytes
    assert model.precision == "bf16"
    assert model.device == torch.device("cpu")
    assert model.tokenizer.end_token_ids == {1, 2}


@pytest.mark.parametrize(
    ("precision", "asked", "held", "dtype"),
    [
        ("fp32", "auto", "fp32", torch.float32),
        ("bf16", "auto", "bf16", torch.bfloat16),
        ("int8", "auto", "bf16", torch.bfloat16),
        ("fp32", "int8", "int8", torch.int8),
        ("bf16", "fp32", "fp32", torch.float32),
    ],
)
def test_the_cache_is_held_as_asked_for_or_as_the_weights_that_are_not_quantised(
    precision, asked, held, dtype, tmp_path
):
    model = load(save_model(tmp_path / "m"), precision=precision, cache_precision=asked)
    assert model.cache_precision == held
    assert model.decoder.new_store(3).keys.dtype is dtype


def test_the_context_is_what_was_asked_for(tmp_path):
    name = save_model(tmp_path / "m")
    assert load(name).decoder.context_limit == 256
    assert load(name, context_length=64).decoder.context_limit == 64


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": "fp64"}, "auto, fp32, bf16, int8, int4"),
        ({"cache_precision": "int4"}, "auto, bf16, fp32, int8"),
        ({"device": "abacus"}, "auto, cpu, cuda"),
        ({"device": "mps"}, "auto, cpu, cuda"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"context_length": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_be_had_are_told_before_anything_is_read(options, told):
    with pytest.raises(ConfigError, match=told):
        load("no-such-model", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="offers 0 CUDA devices"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        load("no-such-model")
    save_tiny_model(tmp_path / "m")
    with pytest.raises(TokenizerError, match=r"m has no tokenizer\.json"):
        load(str(tmp_path / "m"))
    save_model(tmp_path / "n")
    (tmp_path / "n" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="n holds no weights"):
        load(str(tmp_path / "n"))


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_config_is_named(tmp_path, content):
    name = save_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(name)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="belongs to another model"):
        load(save_model(tmp_path / "m", vocab_size=200))


def test_a_warm_start_imports_nothing_that_it_does_not_need(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    load(str(tmp_path / "m.gguf"))
    code = (
        "import sys; from forerun.models.loader import load_model;"
        "from forerun.kernels.reference import ReferenceKernels;"
        f"load_model({str(tmp_path / 'm.gguf')!r}, device='cpu', kernels=ReferenceKernels('cpu'));"
        "print(sorted({'gguf', 'transformers', 'huggingface_hub', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_no_progress_bar_where_nobody_watches(tmp_path, capfd):
    write_gguf(tmp_path / "m.gguf")
    load(str(tmp_path / "m.gguf"))
    assert capfd.readouterr().err == ""
    load(str(tmp_path / "m.gguf"), precision="fp32", progress=True)
    assert "Converting m.gguf" in capfd.readouterr().err
