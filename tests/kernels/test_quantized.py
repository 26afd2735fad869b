"""Products with quantised weights: every instruction set gives the bits of the reference, in any company."""

import pytest
import torch

from forerun.errors import EngineError
from forerun.kernels.cpu import CpuKernels, binding
from forerun.kernels.quantized import QuantizedWeight
from forerun.kernels.reference import ReferenceKernels

SETS = binding.supported()
BITS = (8, 16)
KERNELS = [CpuKernels(isa, threads, bits) for isa in SETS for threads in (1, 2) for bits in BITS]
native = pytest.mark.skipif(not SETS, reason="no native kernels on this machine")
each = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: f"{k.name}-{k.threads}-{k.activation_bits}")
# bits, group, with minima, zero
FORMS = [(8, None, False, 0), (8, 32, False, 0), (8, 64, False, 0), (8, 32, True, 0)]
FORMS += [(4, 32, False, 8), (4, 64, False, 8), (4, 32, True, 0), (4, 64, True, 0)]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))


def quantized(rows, columns, form, seed=0):
    bits, group, minima, zero = form
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (rows, columns), generator=generator).to(dtype)
    if group is None:
        return QuantizedWeight(codes, torch.rand(rows, generator=generator) * 0.01)
    shape = (rows, columns // group)
    scales = (torch.randn(shape, generator=generator) * 0.01).half()
    offsets = (torch.randn(shape, generator=generator) * 0.1).half() if minima else None
    return QuantizedWeight(codes, scales, offsets, group, bits, zero)


def rows_of(count, columns, seed=0):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
@forms
def test_the_reference_is_as_exact_as_its_activations(form, bits):
    weight, x = quantized(40, 192, form), rows_of(20, 192)
    reference = ReferenceKernels("cpu", bits)
    got = reference.norm_project(x, None, reference.pack(weight)).double()
    want = x.double() @ weight.dequantized().double().T
    assert ((got - want).norm() / want.norm()).item() < {16: 1e-4, 8: 2e-2}[bits]


@native
@each
@forms
@pytest.mark.parametrize(("out", "features"), [(1, 64), (15, 64), (33, 128), (50, 576), (31, 2112), (577, 192)])
def test_every_instruction_set_gives_the_bits_of_the_reference(kernels, form, out, features):
    weight, bias = quantized(out, features, form), rows_of(1, out, seed=3)[0]
    reference = ReferenceKernels("cpu", kernels.activation_bits)
    ours, theirs = kernels.pack(weight, bias), reference.pack(weight, bias)
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 16, 17, 40):
        x = rows_of(rows, features, seed=rows)
        assert torch.equal(kernels.norm_project(x, None, ours), reference.norm_project(x, None, theirs)), rows


@native
@each
def test_a_layer_whose_inputs_fill_no_whole_step_is_padded(kernels):
    reference = ReferenceKernels("cpu", kernels.activation_bits)
    for features in (1, 3, 37, 100, 1027):
        weight, x = quantized(20, features, FORMS[0]), rows_of(9, features)
        want = reference.norm_project(x, None, reference.pack(weight))
        assert torch.equal(kernels.norm_project(x, None, kernels.pack(weight)), want)
    for form in (FORMS[1], FORMS[6]):  # half a step
        weight, x = quantized(20, 96, form), rows_of(9, 96)
        want = reference.norm_project(x, None, reference.pack(weight))
        assert torch.equal(kernels.norm_project(x, None, kernels.pack(weight)), want)


@native
@each
@forms
def test_a_row_has_the_same_bits_in_any_company(kernels, form):
    packed, x = kernels.pack(quantized(70, 192, form)), rows_of(64, 192, seed=5)
    alone = torch.cat([kernels.norm_project(row[None], None, packed) for row in x])
    for rows in range(1, 65):
        start = (rows * 7) % (65 - rows)
        assert torch.equal(kernels.norm_project(x[start : start + rows], None, packed), alone[start : start + rows])


@native
@each
@forms
def test_the_largest_sums_do_not_overflow(kernels, form):
    weight = quantized(3, 4096, form)
    weight.codes.fill_(-128 if weight.bits == 8 else 0)
    x = torch.ones(7, 4096)
    reference = ReferenceKernels("cpu", kernels.activation_bits)
    want = reference.norm_project(x, None, reference.pack(weight))
    assert torch.equal(kernels.norm_project(x, None, kernels.pack(weight)), want)
    exact = x.double() @ weight.dequantized().double().T
    torch.testing.assert_close(want.double(), exact, rtol=1e-5, atol=1e-3)


@native
@each
def test_rows_of_nothing_and_of_what_is_not_finite(kernels):
    x = rows_of(6, 64)
    x[1] = 0
    x[2, 5] = float("nan")
    x[3, 63] = float("inf")
    x[4] = 1e-42
    for form in FORMS:
        y = kernels.norm_project(x, None, kernels.pack(quantized(20, 64, form)))
        assert y[2].isnan().all()
        assert y[3].isnan().all()
        assert not y[1].any()
        assert not y[4].any()
        assert y[0].isfinite().all()
        assert y[5].isfinite().all()


def test_weights_that_contradict_themselves_are_refused():
    codes, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2).half()
    for arguments, told in [
        ((codes.int(), torch.ones(4)), "int8"),
        ((codes, torch.ones(3)), "scales"),
        ((codes, torch.ones(4).half()), "float16"),
        ((codes, torch.ones(4), torch.ones(4)), "group"),
        ((codes, scales, None, 48), "32 and 64"),
        ((codes, scales, torch.ones(4).half(), 32), "minima"),
        ((codes, scales, None, 32, 8, 8), "zero"),
        ((codes.to(torch.uint8), torch.ones(4), None, None, 4), "group"),
    ]:
        with pytest.raises(EngineError, match=told):
            QuantizedWeight(*arguments)


@native
def test_a_layer_too_wide_for_exact_sums_is_refused():
    with pytest.raises(EngineError, match="bf16"):
        KERNELS[0].pack(QuantizedWeight(torch.zeros(1, 65600, dtype=torch.int8), torch.ones(1)))
