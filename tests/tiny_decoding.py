"""What the decoding tests share: a small target with lively greedy text, an oracle that proposes given tokens, and the
exact distribution of a tiny target's text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy.stats import chi2
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle3_jax import chain, drafters, generate
from eagle3_jax import tree as tree_room
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import Plan
from eagle3_jax.engine import decode, pad_eos, prefill
from eagle3_jax.generate import DecodeState, Structure, decode_round
from eagle3_jax.requests import Answer, Request, sampling_of, structure_for
from eagle3_jax.sampling import Sampling, target_distribution
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.tree import ancestor_mask
from eagle3_jax.verify import Tree
from tests import tiny

TOY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
NO_EOS = pad_eos(())


@functools.cache
def toy() -> Target:
    """A target of 3 layers and 64 tokens whose greedy text does not fall into a loop at once."""
    return tiny.from_hf(tiny.hf_target(0, scale=16.0, **TOY))


@functools.cache
def toy_draft() -> Draft:
    """A random draft for the toy target."""
    return tiny.draft(toy(), size=40, taps=(0, 1, 3))


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Token i of the toy target is the text "a0", "a1", ... "h7": a stop string like "1c" lies across two tokens."""
    vocab = {f"{letter}{digit}": 8 * i + digit for i, letter in enumerate("abcdefgh") for digit in range(8)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="a0"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def prompts(count: int, vocab: int, *, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Random prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


def answers(target: Target, draft: Draft | None, requests: Sequence[Request], **options: Any) -> list[Answer]:
    """All answers, in the order of the requests, after checking that the events add up to them."""
    found: dict[int, Answer] = {}
    streamed: dict[int, list[int]] = {}
    for event in decode(target, draft, requests, **options):
        assert event.index not in found
        streamed.setdefault(event.index, []).extend(event.token_ids)
        if event.answer is not None:
            found[event.index] = event.answer
            assert tuple(streamed[event.index]) == event.answer.token_ids
    return [found[index] for index in range(len(requests))]


@struct.dataclass
class Oracle(Draft):
    """A draft that proposes `said[p]` for position p, whatever its weights would; its cache is kept as usual.

    In a tree, the path to the last of the deepest nodes says that, and all other nodes something else.
    """

    said: jax.Array


def oracle(draft: Draft, prompt: Sequence[int], continuation: Sequence[int]) -> Oracle:
    """An oracle that knows what follows a prompt, and guesses token 0 beyond."""
    said = np.zeros(1024, np.int32)
    text = [*prompt, *continuation]
    said[: len(text)] = text
    fields = {field.name: getattr(draft, field.name) for field in dataclasses.fields(Draft)}
    return Oracle(**fields, said=jnp.asarray(said))


def install_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decoding ask an oracle where it is given one. Programs compiled for other drafts stay as they are."""

    def propose(draft, cache, taps, tokens, count, length, temperature, uniforms):
        if not isinstance(draft, Oracle):
            return chain.propose_chain(draft, cache, taps, tokens, count, length, temperature, uniforms)
        _, cache = chain.catch_up(draft, cache, taps, tokens, count)
        positions = cache.lengths[:, None] + 1 + jnp.arange(length, dtype=jnp.int32)[None]
        return chain.Proposal(tokens=jnp.take(draft.said, positions, mode="clip"), distribution=None, cache=cache)

    def grow(real):
        def propose_grown(draft, cache, taps, tokens, count, root, shape):
            tree, ranks, cache = real(draft, cache, taps, tokens, count, root, shape)
            if not isinstance(draft, Oracle):
                return tree, ranks, cache
            nodes = tree.tokens.shape[1]
            last = jnp.argmax(tree.depths * nodes + jnp.arange(nodes, dtype=jnp.int32)[None], axis=1)
            path = jnp.take_along_axis(ancestor_mask(tree, shape.depth), last[:, None, None], axis=1)[:, 0]
            right = jnp.take(draft.said, cache.lengths[:, None] + tree.depths, mode="clip")
            wrong = (right + 1 + ranks) % draft.embed.shape[0]
            return dataclasses.replace(tree, tokens=jnp.where(path, right, wrong).at[:, 0].set(root)), ranks, cache

        return propose_grown

    monkeypatch.setattr(drafters, "propose_chain", propose)
    monkeypatch.setattr(drafters, "propose_tree", grow(tree_room.propose_tree))
    monkeypatch.setattr(drafters, "propose_fixed", grow(tree_room.propose_fixed))


def start(
    target: Target, draft: Draft | None, request: Request, plan: Plan, *, cache_length: int = 128, eos: Any = ()
) -> tuple[DecodeState, Structure, Sampling]:
    """A prefilled row with its structure and sampling values."""
    structure = structure_for([request], plan)
    state = prefill(target, draft, request, pad_eos(eos), structure=structure, cache_length=cache_length)
    return state, structure, sampling_of([request])


def decided(state: DecodeState) -> list[int]:
    """Tokens that the last round decided for row 0."""
    return np.asarray(state.tokens)[0, : int(state.count[0])].tolist()


def finish(
    target: Target, draft: Draft | None, state: DecodeState, sampling: Sampling, structure: Structure, eos: Any = ()
) -> list[int]:
    """Run row 0 to its end; returns the tokens decided from here on."""
    tokens: list[int] = []
    while int(state.reason[0]) == generate.RUNNING:
        state = decode_round(target, draft, state, sampling, pad_eos(eos), structure=structure)
        tokens += decided(state)
    return tokens


@functools.cache
def eight_tokens() -> Target:
    """A target of 8 tokens and 3 layers whose distributions are neither flat nor one-sided."""
    return tiny.from_hf(tiny.hf_target(3, scale=6.0, **(TOY | {"vocab_size": 8})))


def exact_joint(target: Target, prompt: Sequence[int], sampling: Sampling, *, filters: bool) -> np.ndarray:
    """Probability of every text of 3 tokens after a prompt, [V, V, V] fp64, by running the target on each prefix."""
    vocab = target.config.vocab_size
    prefixes = np.asarray([[*prompt, a, b] for a in range(vocab) for b in range(vocab)], np.int32)
    rows, length = prefixes.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (rows, length, length))
    values = jax.tree.map(lambda value: jnp.broadcast_to(value[:1], (rows,)), sampling)

    @jax.jit
    def distributions(target: Target) -> jax.Array:
        hidden = target_forward(target, jnp.asarray(prefixes), positions, mask).hidden[:, -3:]
        return target_distribution(target_logits(target, hidden), values, filters=filters)

    each = np.asarray(distributions(target), np.float64)
    each = each.reshape(vocab, vocab, 3, vocab)
    return each[0, 0, 0][:, None, None] * each[:, 0, 1][:, :, None] * each[:, :, 2]


def random_tree(rng: np.random.Generator, nodes: int, deepest: int, vocab: int) -> Tree:
    """A tree of random form and tokens, in which no node lies deeper than `deepest`."""
    parents, depths = [0], [0]
    for node in range(1, nodes):
        parent = int(rng.choice([index for index in range(node) if depths[index] < deepest]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    row = lambda values: jnp.asarray([values], jnp.int32)
    return Tree(tokens=row(rng.integers(0, vocab, nodes)), parents=row(parents), depths=row(depths))


def chi_square_p(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts against probabilities; cells that expect fewer than 5 are pooled.

    Cells of probability 0 must be empty, or the p-value is 0.
    """
    observed, probabilities = observed.ravel(), probabilities.ravel()
    if observed[probabilities == 0].any():
        return 0.0
    expected = observed.sum() * probabilities / probabilities.sum()
    rare = expected < 5
    cells = [*zip(observed[~rare], expected[~rare]), (observed[rare].sum(), expected[rare].sum())]
    # A pool that still expects too little is no evidence either way.
    cells = [(seen, wanted) for seen, wanted in cells if wanted >= 5]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
