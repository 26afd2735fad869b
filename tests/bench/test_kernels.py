"""What `forerun bench --kernels` measures and reports. No test says how fast anything is."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.bench.kernels import (
    ROWS,
    KernelReport,
    _linear_layers,
    _prefill,
    _step,
    measure_kernels,
    packed_weights,
)
from forerun.errors import ConfigError
from forerun.kernels.cpu import load_cpu_kernels
from forerun.kernels.reference import ReferenceKernels
from tests.models.test_parity import one_shot
from tests.models.tiny import CONTEXT, VOCABULARY, tiny_config, tiny_decoder, tiny_tensors

KERNELS = [kernels for kernels in (ReferenceKernels("cpu"), load_cpu_kernels(1)) if kernels]
each = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)


def loaded(decoder):
    return SimpleNamespace(decoder=decoder, precision="fp32")


@each
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_the_report_has_every_figure_for_every_number_of_rows(kernels, family):
    rounds = []
    model = loaded(tiny_decoder(family, kernels=kernels))
    report = measure_kernels(model, context=70, prefill_rows=100, rounds=2, advance=lambda: rounds.append(1)).json()
    assert list(report) == ["isa", "precision", "threads", "read_ms", "step_ms", "linear_ms", "prefill_tokens_per_s"]
    assert (report["isa"], report["precision"]) == (kernels.name, "fp32")
    assert report["threads"] >= 1
    assert list(report["step_ms"]) == list(report["linear_ms"]) == ["1", "2", "4", "8", "16", "32", "64"]
    times = [report["read_ms"], report["prefill_tokens_per_s"], *report["step_ms"].values()]
    assert all(math.isfinite(value) and value > 0 for value in [*times, *report["linear_ms"].values()])
    assert len(rounds) == 2


def test_a_context_beyond_the_models_is_refused_with_what_is_possible():
    model = loaded(tiny_decoder(kernels=ReferenceKernels()))
    measure_kernels(model, context=CONTEXT - max(ROWS), rounds=1)
    with pytest.raises(ConfigError, match=r"--context is 193; at most 192 .* 256 positions"):
        measure_kernels(model, context=CONTEXT - max(ROWS) + 1, rounds=1)


@each
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_step_is_the_real_thing_after_a_context_that_was_computed(kernels, rows):
    decoder = tiny_decoder(kernels=kernels)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 200)
    store = decoder.new_store(200)
    _prefill(decoder, store, tokens[:100], 32)
    logits = _step(decoder, store, tokens, 100, rows)()
    assert torch.equal(logits, one_shot(decoder, tokens[: 100 + rows])[100:])


class Recorder(ReferenceKernels):
    """Notes which packed weights are used, in order."""

    def __init__(self):
        super().__init__("cpu")
        self.used = []

    def norm_project(self, x, norm, packed):
        self.used.append((packed, norm, x.shape))
        return super().norm_project(x, norm, packed)

    def project_add(self, x, packed, residual, norm=None):
        self.used.append((packed, norm, x.shape))
        return super().project_add(x, packed, residual, norm)

    def mixture_add(self, x, norm, mixture, activation, residual):
        self.used.append((mixture, norm, x.shape))
        return super().mixture_add(x, norm, mixture, activation, residual)

    def logits(self, x, norm, packed, prepared, softcap):
        self.used.append((packed, norm, x.shape))
        return super().logits(x, norm, packed, prepared, softcap)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_the_linear_layers_measured_are_those_of_a_forward_pass_in_its_order(family):
    kernels = Recorder()
    decoder = tiny_decoder(family, kernels=kernels)
    store = decoder.new_store(200)
    _step(decoder, store, np.zeros(200, np.int64), 70, 20)()
    of_the_pass, kernels.used = kernels.used, []
    _linear_layers(decoder, store, 20)()
    assert len(kernels.used) == len(of_the_pass)
    for (packed, norm, shape), (own, own_norm, own_shape) in zip(kernels.used, of_the_pass, strict=True):
        assert packed is own
        assert norm is own_norm
        assert shape == own_shape


@each
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_reading_the_weights_reads_all_of_them_once(kernels, family):
    decoder = tiny_decoder(family, kernels=kernels, num_hidden_layers=1)
    linear = sum(
        weight.numel()
        for name, weight in tiny_tensors(tiny_config(family)).items()
        if weight.dim() == 2 and "embed" not in name and "layers.1" not in name
    )
    read = kernels.weight_reader(packed_weights(decoder))()
    assert 4 * linear <= read <= 4.5 * linear  # panels are filled up to whole ones


def test_people_get_the_ratios_to_one_row_and_to_one_reading():
    report = KernelReport("avx2", "int8", 2, 2.0, {1: 3.0, 16: 4.5}, {1: 2.5, 16: 5.0}, 1234.5)
    table = report.table("a caption")
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["1", "16", "read", "prefill"]
    assert columns[1:4] == [
        ["3.00", "4.50", "2.00", "1,234"],
        ["1.00x", "1.50x", "", "tok/s"],
        ["1.50x", "2.25x", "", ""],
    ]
    assert columns[4][:2] == ["2.50", "5.00"]
    assert columns[6][:2] == ["1.25x", "2.50x"]
