"""GGUF files: every tensor and setting arrives as transformers would have it, once, and bad files are told by name."""

import json
import multiprocessing
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError, TokenizerError, UnsupportedModelError, WeightsError
from forerun.models.architecture import Architecture
from forerun.models.gguf_config import config_from_gguf
from forerun.models.gguf_file import read_gguf
from forerun.models.gguf_import import converted, plan_tensors
from forerun.models.gguf_tokenizer import save_tokenizer
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import load_tensors
from tests.models.tiny_gguf import (
    PIECES,
    add_byte_level_tokenizer,
    add_sentencepiece_tokenizer,
    byte_level_tokenizer,
    write_gguf,
    write_tokenizer_only,
)

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def tokenizer_of(path, directory):
    directory.mkdir()
    save_tokenizer(read_gguf([path]).metadata, path, directory)
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_as_it_was_before_it_became_a_gguf(tmp_path, family):
    config, tensors = write_gguf(tmp_path / "m.gguf", family, max_window_layers=28)
    directory = converted([tmp_path / "m.gguf"], "fp32")
    found = load_tensors(directory)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-7)
    described = json.loads((directory / "config.json").read_text())
    expected = Architecture.from_config(config)
    if "gemma" in family:  # GGUF does not say it; llama.cpp derives it in the same way
        expected = Architecture.from_config({**config, "query_pre_attn_scalar": config["head_dim"]})
    assert Architecture.from_config(described) == expected


def test_gemma3_layers_follow_its_pattern_of_six(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma3_text", num_hidden_layers=7)
    described = config_from_gguf(read_gguf([tmp_path / "m.gguf"]))
    assert [kind.startswith("sliding") for kind in described["layer_types"]] == [True] * 5 + [False, True]
    assert described["rope_local_base_freq"] == 10_000.0
    assert described["rope_theta"] == 1e6


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_quantisation_gives_the_values_that_gguf_dequantises(tmp_path, quantisation):
    _, tensors = write_gguf(tmp_path / "m.gguf", quantisation=quantisation)
    found = load_tensors(converted([tmp_path / "m.gguf"], "fp32"))
    kind = gguf.GGMLQuantizationType[quantisation]
    name = "model.layers.1.mlp.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name].numpy(), kind), kind)
    assert torch.equal(found[name], torch.from_numpy(expected.astype(np.float32)))
    spread = tensors["model.layers.0.self_attn.q_proj.weight"].std()
    difference = found["model.layers.0.self_attn.q_proj.weight"] - tensors["model.layers.0.self_attn.q_proj.weight"]
    assert difference.abs().max() < spread / 2  # rows are in the right order


@pytest.mark.parametrize("quantisation", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_only_llama_cpp_can_write_are_read(tmp_path, quantisation):
    kind = gguf.GGMLQuantizationType[quantisation]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 60, (6, 512 // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf([tmp_path / "m.gguf"]).tensors["blk.0.ffn_up.weight"]
    assert tensor.shape == (6, 512)
    np.testing.assert_array_equal(tensor.rows_as_float(tensor.data), gguf.quants.dequantize(raw, kind))


def test_matrices_take_the_precision_and_vectors_stay_exact(tmp_path):
    _, tensors = write_gguf(tmp_path / "m.gguf")
    found = load_tensors(converted([tmp_path / "m.gguf"], "bf16"))
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(found["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"].bfloat16())
    assert found["model.norm.weight"].dtype == torch.float32


def test_llama3_rope_scaling_is_recognised_from_its_divisors(tmp_path):
    config, _ = write_gguf(tmp_path / "plain.gguf", rope_theta=500_000.0)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    plain = 500_000.0 ** (-np.arange(half) / half)
    turns = 8192 * plain / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    divisors = plain / ((1 - smooth) * plain / 8 + smooth * plain)
    source = read_gguf([tmp_path / "plain.gguf"])

    def with_divisors(values):
        writer = gguf.GGUFWriter(tmp_path / "rope.gguf", "llama")
        writer.add_tensor("rope_freqs.weight", values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source.tensors.update(read_gguf([tmp_path / "rope.gguf"]).tensors)
        return config_from_gguf(source)

    assert with_divisors(divisors)["rope_scaling"] == scaling
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        with_divisors(divisors**2)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(tmp_path, entries, expected):
    write_gguf(tmp_path / "m.gguf", metadata=entries)
    assert config_from_gguf(read_gguf([tmp_path / "m.gguf"]))["rope_scaling"] == expected


def test_a_conversion_is_made_once_and_again_when_the_file_changes(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    first = converted([path], "fp32")
    (first / "mark").touch()
    assert converted([path], "fp32") == first
    assert (first / "mark").exists()
    assert converted([path], "bf16") != first
    os.utime(path, ns=(1, 1))
    assert converted([path], "fp32") != first


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    write_gguf(tmp_path / "m.gguf", drop=["blk.1.ffn_up.weight"])
    with pytest.raises(WeightsError):
        converted([tmp_path / "m.gguf"], "fp32")
    assert list((tmp_path / "cache" / "converted").iterdir()) == []


def _convert(path, queue):
    queue.put(str(converted([path], "fp32")))


def test_two_processes_may_convert_the_same_file_at_once(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_convert, args=(tmp_path / "m.gguf", queue)) for _ in range(2)]
    for process in processes:
        process.start()
    directories = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(directories) == 1
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 1
    assert len(load_tensors(directories.pop())) > 0


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="FORERUN_CACHE"):
        converted([tmp_path / "m.gguf"], "fp32")


def test_parts_of_a_split_model_are_one_model(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=8)
    whole = read_gguf([tmp_path / "m.gguf"])
    for tensor in whole.tensors.values():
        writer.add_tensor(tensor.name, tensor.rows_as_float(tensor.data).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) > 1
    read = read_gguf(parts)
    assert read.tensors.keys() == whole.tensors.keys()
    with pytest.raises(WeightsError, match=r"parts"):
        read_gguf(parts[:1])


@given(st.integers(min_value=0, max_value=10_000))
@settings(max_examples=40, deadline=None)
def test_a_truncated_file_is_a_weights_error_that_names_it(tmp_path_factory, kept):
    directory = tmp_path_factory.mktemp("cut")
    whole = directory / "whole.gguf"
    write_tokenizer_only(whole, add_byte_level_tokenizer)
    data = whole.read_bytes()
    cut = directory / "cut.gguf"
    cut.write_bytes(data[: min(kept, len(data) - 33)])
    with pytest.raises(WeightsError, match=r"cut\.gguf"):
        read_gguf([cut])


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_damaged_header_is_a_clear_error_or_harmless(tmp_path_factory, seed, count):
    directory, data = tmp_path_factory.mktemp("bad"), bytearray(_whole_file())
    generator = np.random.default_rng(seed)
    for _ in range(count):  # mostly in the settings, before the tokenizer's long lists
        last = _whole_file().index(b"tokenizer.ggml.tokens") + 300 if generator.random() < 0.7 else 24_000
        data[generator.integers(4, last)] = generator.choice([0, 1, 255, generator.integers(256)])
    (directory / "bad.gguf").write_bytes(data)
    with suppress(ModelError):
        converted([directory / "bad.gguf"], "bf16")


@cache
def _whole_file():
    path = Path(tempfile.mkdtemp()) / "whole.gguf"
    write_gguf(path)
    return path.read_bytes()


def test_truncated_tensor_data_names_tensor_and_sizes(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match=r"cut\.gguf is truncated: tensor '.+' ends at byte \d+"):
        converted([tmp_path / "cut.gguf"], "fp32")


def test_a_file_of_another_kind_is_refused_by_its_magic(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(WeightsError, match=r"m\.gguf is not a GGUF file"):
        read_gguf([tmp_path / "m.gguf"])


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(WeightsError, match=r"m\.gguf"):
        read_gguf([tmp_path / "m.gguf"])


def test_a_missing_tensor_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", drop=["blk.1.attn_q.weight"])
    with pytest.raises(WeightsError, match=r"'blk\.1\.attn_q\.weight' is missing"):
        converted([tmp_path / "m.gguf"], "fp32")


def test_a_tensor_too_many_is_not_ignored(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    source = read_gguf([tmp_path / "m.gguf"])
    known = source.tensors["blk.0.attn_norm.weight"]
    source.tensors["odd"] = replace(known, name="blk.0.attn_sinks.weight")
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.attn_sinks\.weight'.* has no place"):
        plan_tensors(source, config_from_gguf(source), torch.float32)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, .*gemma3"):
        converted([tmp_path / "m.gguf"], "fp32")


def test_a_gguf_without_tokenizer_says_so(tmp_path):
    write_gguf(tmp_path / "m.gguf", tokenizer=False)
    with pytest.raises(TokenizerError, match=r"m\.gguf holds no tokenizer"):
        converted([tmp_path / "m.gguf"], "fp32")


def test_an_unknown_pre_tokenizer_is_an_error_and_not_a_guess(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "tomorrow"})
    with pytest.raises(TokenizerError, match=r"'tomorrow'.*smollm"):
        converted([tmp_path / "m.gguf"], "fp32")


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_byte_level_ids_are_those_of_the_tokenizer_that_was_written(text):
    ours, original = _byte_level_pair()
    assert ours.encode(text) == original.encode(text).ids


@cache
def _byte_level_pair():
    directory = Path(tempfile.mkdtemp())
    original = byte_level_tokenizer()
    write_tokenizer_only(directory / "t.gguf", lambda writer: add_byte_level_tokenizer(writer, original))
    return tokenizer_of(directory / "t.gguf", directory / "t"), original


def test_padding_rows_are_no_tokens(tmp_path):
    write_tokenizer_only(tmp_path / "t.gguf", add_byte_level_tokenizer)
    tokenizer = tokenizer_of(tmp_path / "t.gguf", tmp_path / "t")
    assert tokenizer.vocab_size == byte_level_tokenizer().get_vocab_size()
    assert tokenizer.decode([500]) == ""


def test_end_tokens_are_the_stated_ones_and_the_known_turn_ends(tmp_path):
    write_tokenizer_only(tmp_path / "t.gguf", add_byte_level_tokenizer)
    assert tokenizer_of(tmp_path / "t.gguf", tmp_path / "t").end_token_ids == {1, 2}


def sentencepiece_reference(text, tokens, scores):
    """SentencePiece's BPE, slowly: join the neighbours with the best joint piece, the leftmost of equals."""
    known = {piece: scores[tokens.index(piece)] for piece in PIECES}
    symbols = list(text)
    while True:
        pairs = [(-known[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in known]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [tokens.index(symbol)] if symbol in known else [4 + byte for byte in symbol.encode()]
    return ids


@given(st.text("abcdeé x😀", max_size=24).filter(lambda text: "  " not in text))
@settings(max_examples=80, deadline=None)
def test_sentencepiece_ids_are_those_of_its_algorithm(text):
    tokenizer, tokens, scores = _sentencepiece(add_space_prefix=False)
    assert tokenizer.encode(text) == [1, *sentencepiece_reference(text.replace(" ", "▁"), tokens, scores)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prefixed, *_ = _sentencepiece(add_space_prefix=True)
    expected = sentencepiece_reference("▁" + text.replace(" ", "▁"), tokens, scores) if text else []
    assert prefixed.encode(text) == [1, *expected]
    assert prefixed.decode(prefixed.encode(text)) == text


@cache
def _sentencepiece(*, add_space_prefix):
    directory = Path(tempfile.mkdtemp())
    kept = []
    write_tokenizer_only(
        directory / "t.gguf",
        lambda writer: kept.extend(add_sentencepiece_tokenizer(writer, add_space_prefix=add_space_prefix)),
    )
    return tokenizer_of(directory / "t.gguf", directory / "t"), *kept


def test_user_defined_pieces_are_found_before_any_merge():
    tokenizer, *_ = _sentencepiece(add_space_prefix=False)
    assert tokenizer.encode("a  b", add_special_tokens=False) == [261, 3, 262]
    assert tokenizer.decode([261, 3, 262]) == "a  b"
