"""Safetensors: read when asked for, whole or in shards; what is broken or missing is named."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forerun.errors import WeightsError
from forerun.models.weights import INDEX_FILE, PlannedTensor, load_tensors, write_safetensors

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


def save_shards(directory, shards, index=None):
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index or weight_map}))


def test_tensors_of_a_single_file_come_by_name(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = load_tensors(tmp_path)
    assert set(found) == {"a", "b"}
    assert len(found) == 2
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert found.file_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_shards_are_one_mapping(tmp_path):
    save_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}, "x-2.safetensors": {"b": TENSORS["b"]}})
    found = load_tensors(tmp_path)
    assert torch.equal(found["a"], TENSORS["a"])
    assert torch.equal(found["b"], TENSORS["b"])


def test_a_missing_tensor_is_named(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'c' is missing.*" + tmp_path.name):
        load_tensors(tmp_path)["c"]
    assert "c" not in load_tensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    save_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}, "x-2.safetensors": {"b": TENSORS["b"]}})
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shard x-2\.safetensors is missing"):
        load_tensors(tmp_path)


def test_an_index_that_contradicts_its_shards_is_named(tmp_path):
    save_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}}, index={"z": "x-1.safetensors"})
    with pytest.raises(WeightsError, match=r"'z' is missing in .*x-1\.safetensors"):
        load_tensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(tmp_path, content):
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(WeightsError, match=r"index"):
        load_tensors(tmp_path)


def test_an_index_cannot_point_outside_its_directory(tmp_path):
    save_file(TENSORS, tmp_path / "elsewhere.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(WeightsError, match="missing"):
        load_tensors(tmp_path / "model")


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors .*truncated or corrupt"):
        load_tensors(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*refused"):
        load_tensors(tmp_path)


def test_a_directory_without_weights_says_what_was_expected(tmp_path):
    with pytest.raises(WeightsError, match=r"no weights: expected model\.safetensors"):
        load_tensors(tmp_path)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16])), max_size=4
    ),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_what_is_written_in_chunks_is_read_back(tmp_path_factory, shapes, step):
    path = tmp_path_factory.mktemp("w") / "model.safetensors"
    values = {f"t{i}": torch.randn(rows, columns).to(dtype) for i, (rows, columns, dtype) in enumerate(shapes)}
    planned = [PlannedTensor(n, v.dtype, tuple(v.shape), list(v.float().split(step))) for n, v in values.items()]
    assert sum(write_safetensors(path, planned)) == sum(tensor.nbytes for tensor in planned)
    found = load_file(path)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_chunks_that_do_not_fill_the_shape_are_an_error(tmp_path):
    planned = [PlannedTensor("a", torch.float32, (3, 2), [torch.zeros(2, 2)])]
    with pytest.raises(ValueError, match="a: 16 bytes written"):
        list(write_safetensors(tmp_path / "m.safetensors", planned))
