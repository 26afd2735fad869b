"""Sampling parameters hold for drafted tokens as for any other: filters, penalties, biases, with every drafter."""

from collections import Counter

import pytest
import torch

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.models.architecture import Architecture
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Oracle, Script
from tests.engine.guessing import PartlyRight, truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, run, same
from tests.models.tiny import run_on, tiny_config, tiny_tensors

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def noisy_target(noise=0.05):
    """The target with noise on its weights: it is right about half of the time."""
    config, generator = tiny_config(), torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tiny_tensors(config).items()
    }
    return run_on(Architecture.from_config(config), tensors, torch.float32)


def drafter(kind):
    if kind == "suffix":
        return SuffixDrafter(min_score=0.0)
    model = {"same": decoder, "noisy": noisy_target, "other": lambda: decoder(seed=9)}[kind]()
    return DraftModelDrafter(model, slots=1024, target_vocab_size=VOCABULARY)


@pytest.mark.parametrize("kind", ["same", "noisy", "other", "suffix"])
def test_every_combination_of_filters_is_applied_to_drafted_tokens(kind):
    """All combinations together in one batch per temperature; each request is what it is alone."""
    served = engine(drafters=[drafter(kind)], depth=3, max_batch=9)
    accepted = 0
    for temperature in (0.3, 1.0, 1.7):
        asks = [
            Ask(
                [*PROMPT, at],
                SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=at, max_tokens=6),
            )
            for at, (top_p, top_k) in enumerate((p, k) for p in (0.5, 0.9, 1.0) for k in (1, 5, 0))
        ]
        alone, _ = truth_of(asks)
        outputs = run(served, asks)
        assert all(map(same, outputs, alone))
        accepted += sum(output.stats.accepted for output in outputs)
    assert accepted > 0 or kind in ("other", "suffix")


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.5])
def test_the_target_itself_is_always_right_with_top_k_of_one(temperature):
    served = engine(drafters=[drafter("same")], width=1, depth=4)
    (output,) = run(served, [Ask(PROMPT, SamplingParams(temperature=temperature, top_k=1, seed=3, max_tokens=20))])
    assert output.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.4},
        {"min_tokens": 8},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 8},
    ],
    ids=lambda penalties: "+".join(penalties),
)
@pytest.mark.parametrize("k", [2, 8, 48])
def test_penalties_count_every_accepted_token_once_and_no_rejected_one(penalties, k):
    """After each step the counts are those of the committed tokens, with all drafts right and with none."""
    params = SamplingParams(max_tokens=50, ignore_eos=True, **penalties)
    ask = Ask(PROMPT, params)
    (expected,), truth = truth_of([ask])
    for guess, rate in ((Oracle(truth), 1.0), (Anti(truth, VOCABULARY), 0.0), (PartlyRight(truth, k, [k // 2]), None)):
        served = engine(drafters=[guess], depth=k, nodes=k, step_nodes=k)

        def counts_match(_, served=served):
            for request in served.scheduler.running:
                assert request.state.emitted == len(request.answer)
                if params.penalises:
                    tokens, counts = request.state._tally.read()
                    told = {
                        token: count for token, count in zip(tokens.tolist(), counts.tolist(), strict=True) if count
                    }
                    assert told == Counter(request.answer)

        (output,) = run(served, [ask], each_step=counts_match)
        assert same(output, expected)
        assert rate is None or output.stats.acceptance_rate == rate


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_token_never_appears_though_it_is_proposed_again_and_again(temperature):
    free = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=6)
    (whole,), _ = truth_of([Ask(PROMPT, free)])
    banned = whole.token_ids[2]
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, temperature=temperature, seed=6, logit_bias={banned: -100.0}
    )
    (expected,), _ = truth_of([Ask(PROMPT, params)])
    (output,) = run(engine(drafters=[Script([banned] * 4)]), [Ask(PROMPT, params)])
    assert same(output, expected)
    assert banned not in output.token_ids
    assert output.stats.accepted == 0


def test_a_forced_token_is_accepted_from_a_draft():
    params = SamplingParams(max_tokens=21, ignore_eos=True, temperature=1.0, seed=6, logit_bias={77: 100.0})
    (output,) = run(engine(drafters=[Script([77] * 4)]), [Ask(PROMPT, params)])
    assert set(output.token_ids) == {77}
    assert output.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("min_p", [0.05, 0.3])
def test_min_p_holds_for_accepted_tokens_and_the_bonus(min_p):
    asks = [
        Ask(PROMPT, SamplingParams(max_tokens=12, temperature=1.3, min_p=min_p, seed=seed, logit_bias={9: 2.0}))
        for seed in range(6)
    ]
    alone, _ = truth_of(asks)
    outputs = run(engine(drafters=[drafter("noisy")]), asks)
    assert all(map(same, outputs, alone))
    assert sum(output.stats.accepted for output in outputs) > 0


def test_with_many_seeds_drafted_answers_are_as_varied_as_plain_ones():
    """Nothing collapses to the likeliest token: 60 seeds, two tokens each, the same set of answers."""
    asks = [Ask(PROMPT, SamplingParams(max_tokens=3, temperature=1.0, seed=seed)) for seed in range(60)]
    alone, _ = truth_of(asks)
    outputs = run(engine(drafters=[drafter("same")], max_batch=60), asks)
    assert all(map(same, outputs, alone))
    assert len({output.token_ids for output in outputs}) > 40
