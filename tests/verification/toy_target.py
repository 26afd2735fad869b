"""A target of which everything is known: its logits are a function of the last token. And drafters to test it with."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.verification.choice import SamplingState, propose
from forerun.verification.logprobs import TokenLogprob
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import LogitRows, Verdict, verify

ToyDrafter = Callable[[Sequence[int], int], DraftTree]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    verdicts: list[Verdict]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for verdict in self.verdicts for entry in verdict.logprobs or ()]


def markov_table(vocab: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Logits after each token: float32 [vocab, vocab]."""
    return (np.random.default_rng(seed).normal(size=(vocab, vocab)) * scale).astype(np.float32)


def decode(
    table: np.ndarray,
    params: SamplingParams,
    count: int,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (0,),
    drafter: ToyDrafter | None = None,
    end_tokens: Sequence[int] = (),
) -> Answer:
    """`count` tokens of the toy target, or up to an end token; without a drafter this is plain decoding."""
    vocab = len(table)
    state = SamplingState(params, seed, prompt, vocab, end_tokens)
    tokens, verdicts = list(prompt), []

    def stop(token: int) -> bool:
        return state.emitted >= count or (token in end_tokens and not params.ignore_eos)

    while not verdicts or not stop(tokens[-1]):
        tree = drafter(tokens, state.position) if drafter else EMPTY_TREE
        rows = torch.from_numpy(table[[token % vocab for token in (tokens[-1], *tree.tokens)]])
        verdicts.append(verify(tree, LogitRows(rows), state, stop))
        tokens += verdicts[-1].tokens
    return Answer(tokens[len(prompt) :], verdicts)


def chain(tokens: Sequence[int], name: str = "chain") -> DraftTree:
    """A draft tree without branches."""
    size = len(tokens)
    return DraftTree(list(tokens), list(range(-1, size - 1)), [0.5] * size, [name] * size)


def oracle(answer: Sequence[int], prompt_length: int, depth: int = 4) -> ToyDrafter:
    """Proposes the answer itself."""
    return lambda tokens, position: chain(answer[position - prompt_length :][:depth], "oracle")


def same_noise(table: np.ndarray, params: SamplingParams, seed: int, depth: int = 3, width: int = 2) -> ToyDrafter:
    """A draft model on `table` that makes choices with the target's noise, as a tree."""

    def drafter(tokens: Sequence[int], position: int) -> DraftTree:
        nodes: list[tuple[int, int, float]] = []
        edge = [(-1, tokens[-1])]
        for level in range(depth):
            below = []
            for parent, last in edge:
                for token, chance in propose(table[last], params, seed, position + level, width):
                    below.append((len(nodes), token))
                    nodes.append((token, parent, chance * (nodes[parent][2] if parent >= 0 else 1.0)))
            edge = below
        return DraftTree(
            [n[0] for n in nodes], [n[1] for n in nodes], [n[2] for n in nodes], ["same noise"] * len(nodes)
        )

    return drafter


def random_trees(vocab: int, seed: int = 0, nodes: int = 6) -> ToyDrafter:
    """Proposes anything."""
    rng = random.Random(seed)

    def drafter(tokens: Sequence[int], position: int) -> DraftTree:
        size = rng.randrange(nodes + 1)
        return DraftTree(
            [rng.randrange(vocab) for _ in range(size)],
            [rng.randrange(-1, node) for node in range(size)],
            [0.5] * size,
            ["random"] * size,
        )

    return drafter


def malicious(answer: Sequence[int], prompt_length: int, vocab: int) -> ToyDrafter:
    """Duplicate children, of which only one goes on rightly; dead branches; ids that no vocabulary has."""

    def drafter(tokens: Sequence[int], position: int) -> DraftTree:
        right = list(answer[position - prompt_length :][:3])
        if len(right) < 3:
            return chain([vocab + 7, -1])
        wrong = [(token + 1) % vocab for token in right]
        return DraftTree(
            [right[0], right[0], wrong[0], vocab + 5, right[1], right[1], wrong[1], right[2], right[2]],
            [-1, -1, -1, -1, 0, 1, 1, 4, 2],
            [0.5] * 9,
            list("abcdefghi"),
        )

    return drafter
