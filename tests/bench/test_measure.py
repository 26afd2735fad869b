"""The order of the runs, and the arithmetic of their figures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.measure import Answer, Group, Pair, chat_prompt, percentiles, ratio, run_task, summarise, warm_up
from forerun.bench.report import report_task
from forerun.bench.workload import Workload, WorkloadRequest
from forerun.verification.sampling import SamplingParams
from tests.bench.fake_llm import FakeLLM

PARAMS = SamplingParams(max_tokens=9)


def workload(*prompts: str) -> Workload:
    return Workload("task", tuple(WorkloadRequest(prompt, prompt) for prompt in prompts))


def pair(plain: Answer, speculative: Answer) -> Pair:
    return Pair("id", plain, speculative)


def test_runs_alternate_which_way_goes_first() -> None:
    llm = FakeLLM()
    run_task(llm, workload("a", "b", "c"), PARAMS, concurrency=1)
    kinds = [kind for kind, _ in llm.calls]
    assert kinds == ["clear", "plain", "speculative", "speculative", "plain", "plain", "speculative"]


def test_both_runs_of_a_group_see_the_same_templated_prompts() -> None:
    llm = FakeLLM()
    finished: list[int] = []
    run_task(llm, workload("a", "b", "c"), PARAMS, concurrency=2, advance=finished.append)
    seen = [[llm.tokenizer.decode(prompt) for prompt in prompts] for kind, prompts in llm.calls if kind != "clear"]
    assert seen == [["<user>a", "<user>b"], ["<user>a", "<user>b"], ["<user>c"], ["<user>c"]]
    assert finished == [2, 1]


def test_drafting_history_is_cleared_between_tasks_and_after_the_warm_up() -> None:
    llm = FakeLLM()
    warm_up(llm, PARAMS, "warm")
    run_task(llm, workload("a"), PARAMS, concurrency=1)
    run_task(llm, workload("a"), PARAMS, concurrency=1)
    kinds = [kind for kind, _ in llm.calls]
    assert kinds == ["plain", "speculative", "clear", *["clear", "plain", "speculative"] * 2]


def test_a_model_without_chat_template_gets_the_plain_prompt() -> None:
    llm = FakeLLM()
    llm.model.chat_template.available = False
    assert chat_prompt(llm, "as it is") == "as it is"


def test_figures_are_sums_over_all_requests() -> None:
    plain = [Answer((1,) * 11, 0.1, 1.0, 10, steps=10), Answer((1,) * 31, 0.3, 1.0, 30, steps=30)]
    fast = [Answer((1,) * 11, 0.1, 0.5, 10, 5, 10, 5), Answer((1,) * 31, 0.3, 0.5, 30, 15, 30, 15)]
    groups = [Group((pair(a, b),), 2.0, 1.0) for a, b in zip(plain, fast, strict=True)]
    side = summarise(groups, speculative=True, concurrency=1)
    assert (side.tokens_per_s, side.output_tokens) == (40.0, 42)
    assert side.acceptance_rate == 0.5
    assert side.mean_accepted_length == 2.0
    assert side.decoding_efficiency == pytest.approx(40 / 60)
    assert side.ttft_ms.p50 == pytest.approx(200.0)
    assert side.tpot_ms.p50 == pytest.approx((50.0 + 500 / 30) / 2)
    base = summarise(groups, speculative=False, concurrency=1)
    assert (base.tokens_per_s, base.acceptance_rate, base.mean_accepted_length) == (20.0, None, None)
    assert base.decoding_efficiency == 1.0
    report = report_task(groups, 1)
    assert (report.speedup, report.identical) == (2.0, True)


def test_above_concurrency_one_the_wall_clock_of_groups_counts() -> None:
    answer = Answer((1,) * 10, 0.1, 1.0, 9, steps=9)
    groups = [Group((pair(answer, answer), pair(answer, answer)), 4.0, 2.0)]
    assert summarise(groups, speculative=False, concurrency=2).tokens_per_s == 5.0
    assert report_task(groups, 2).speedup == 2.0


def test_failed_requests_are_counted_and_left_out() -> None:
    good, bad = Answer((1, 2), 0.1, 1.0, 1, steps=1), Answer(error="too long")
    report = report_task([Group((pair(good, good), pair(bad, bad)), 1.0, 1.0)], 1)
    assert (report.requests, report.failed, report.identical, report.baseline.output_tokens) == (1, 1, True, 2)
    nothing = report_task([Group((pair(bad, bad),), 1.0, 1.0)], 1)
    assert (nothing.identical, nothing.speedup, nothing.baseline.tokens_per_s) == (False, None, None)


def test_one_different_token_is_seen() -> None:
    one, other = Answer((1, 2, 3), 0.1, 1.0, 2, 2), Answer((1, 2, 4), 0.1, 1.0, 2, 2)
    report = report_task([Group((pair(one, other), pair(one, one)), 1.0, 1.0)], 1)
    assert (report.identical, report.identical_requests) == (False, 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_agree_with_numpy(values: list[float]) -> None:
    mine = percentiles(values)
    assert [mine.p50, mine.p90, mine.p99] == pytest.approx(list(np.percentile(values, [50, 90, 99])))


def test_nothing_measured_has_no_percentiles_and_no_ratio() -> None:
    assert percentiles([]).p99 is None
    assert ratio(1, 0) is None
