"""Methods side by side on the same prompts, in one process.

One at a time, every prompt is answered by every method before the next prompt, so that whatever else the machine does
hits all alike; in batches, every task is. Compilation happens in a warm-up of each shape and is never timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.costs import Costs, measure_costs
from eagle3_jax.draft import Draft
from eagle3_jax.engine import decode, prefill_buckets
from eagle3_jax.errors import InputError
from eagle3_jax.files import replace_file
from eagle3_jax.report import Method, Run, record, render
from eagle3_jax.requests import Answer, Request, cache_length_for
from eagle3_jax.runtime import Runtime, drop_programs
from eagle3_jax.target import Target
from eagle3_jax.tree import TreeShape

# What `--sweep` tries: a block of 2 to 8 tokens costs a 2-core CPU about the same, so small trees stand beside chains.
SWEEP: tuple[TreeShape, ...] = (
    *map(TreeShape.chain, (1, 2, 3, 4, 5, 7)),
    *(TreeShape(*shape) for shape in ((5, 2, 3), (8, 2, 4), (8, 3, 3), (8, 4, 2), (16, 4, 4), (24, 6, 4), (60, 8, 10))),
)

Runner = Callable[[Sequence[Request], int], Run]


class Ours:
    """Answers with our engine; warms up each shape once, untimed."""

    def __init__(self, target: Target, method: Method, eos: Sequence[int]):
        self._target, self._method, self._eos = target, method, eos
        self._warm: set[tuple[Any, ...]] = set()

    def cool(self) -> None:
        """Warm up again: compiled programs are gone."""
        self._warm.clear()

    def _events(self, requests: Sequence[Request], batch: int) -> Iterator[Any]:
        method = self._method
        return decode(
            self._target, method.draft, requests, batch=batch, eos=self._eos, draft_length=method.draft_length,
            tree=method.tree, lookup_nodes=method.lookup_nodes,
        )  # fmt: skip

    def _warm_up(self, requests: Sequence[Request], batch: int) -> None:
        cache = cache_length_for(requests, self._target.config, self._method.depth)
        shapes = {
            (tuple(prefill_buckets(len(request.tokens))), cache, batch, request.temperature == 0): request
            for request in requests
        }
        if shapes.keys() <= self._warm:
            return
        # One prompt of each length, the one that needs the longest cache, and as many as fill the batch.
        longest = max(requests, key=lambda request: len(request.tokens) + request.max_new_tokens)
        chosen = [*shapes.values(), longest, *requests][: max(batch, len(shapes) + 1)]
        seen: set[int] = set()
        rounds = 0
        for event in self._events(chosen, batch):
            rounds += event.index in seen
            seen.add(event.index)
            if len(seen) == len(chosen) and rounds >= 3 * batch:
                break
        # Calls that are still under way run before this one.
        jax.block_until_ready(jnp.zeros(()) + 1)
        # An answer that prefill ended has compiled no round.
        if rounds or requests[0].max_new_tokens == 1:
            self._warm.update(shapes)

    def __call__(self, requests: Sequence[Request], batch: int) -> Run:
        """Answer the requests, so many at a time, and time it."""
        self._warm_up(requests, batch)
        answers: dict[int, Answer] = {}
        began = time.perf_counter()
        for event in self._events(requests, batch):
            if event.answer is not None:
                answers[event.index] = event.answer
        return Run([answers[index] for index in range(len(requests))], time.perf_counter() - began)


def check_transformers(info: Runtime) -> None:
    """Refuse the method hf where transformers cannot run on the same device.

    Raises:
      InputError: no torch, or a torch that does not see the device.
    """
    try:
        import torch
    except ImportError:
        found = "no torch"
    else:
        if info.platform == "cpu" or (info.platform == "gpu" and torch.cuda.is_available()):
            return
        found = f"torch {torch.__version__}, which does not run on it"
    raise InputError(
        expected=f"torch on the {info.platform} for the method hf, so that both run on the same device",
        found=found,
        remedy="Install torch for the device (extra `torch`: pip install -e '.[torch]'), leave hf out, or pass "
        "--device cpu.",
    )


def _transformers(folder: Path, eos: Sequence[int], info: Runtime) -> Runner:
    """Answer with transformers' `generate` on the same device and in the same precision, as a baseline."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    device = "cuda" if info.platform == "gpu" else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, info.dtype), local_files_only=True)
    model = loaded.to(device).eval()
    # The folder's own defaults (penalties, min_p, ...) would change what is compared.
    model.generation_config = GenerationConfig()

    class Clock(StoppingCriteria):
        """Notes when the first token is there; never stops."""

        def __init__(self) -> None:
            self.first: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.first = self.first or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def generate(request: Request, tokens: int) -> tuple[list[int], float, float]:
        clock, began = Clock(), time.perf_counter()
        sampled = request.temperature > 0
        torch.manual_seed(request.seed)
        settings = (
            {"temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p} if sampled else {}
        )
        prompt = torch.tensor([request.tokens], device=device)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=sampled,
            eos_token_id=list(eos) or None, pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]), **settings,
        )  # fmt: skip
        ids = out[0, len(request.tokens) :].tolist()  # waits for the device
        end = time.perf_counter()
        return ids, (clock.first or end) - began, end - began

    warm = False

    def run(requests: Sequence[Request], batch: int) -> Run:
        nonlocal warm
        if not warm:
            generate(requests[0], 3)
            warm = True
        answers = [answer(request) for request in requests]
        return Run(answers, sum(found.seconds for found in answers))

    def answer(request: Request) -> Answer:
        ids, first, seconds = generate(request, request.max_new_tokens)
        return Answer(
            index=0, token_ids=tuple(ids), finish_reason="stop" if ids[-1] in eos else "length",
            prompt_tokens=len(request.tokens), verification_passes=len(ids) - 1, accepted=(), logprobs=(),
            seconds=seconds, first_token_seconds=first,
        )  # fmt: skip

    return run


def _costs(
    target: Target, methods: Sequence[Method], prompts: Sequence[tuple[int, ...]], max_new_tokens: int
) -> dict[str | None, Costs]:
    """The costs of a round's parts by draft name, greedy, over a cache as long as the median prompt needs."""
    requests = [Request(tokens, max_new_tokens=max_new_tokens) for tokens in prompts]
    lengths = sorted(cache_length_for([request], target.config, 0) for request in requests)
    costs: dict[str | None, Costs] = {}
    for method in methods:
        if isinstance(method.draft, Draft) and method.draft_name not in costs and lengths:
            same = [other.shape for other in methods if other.draft_name == method.draft_name]
            costs[method.draft_name] = measure_costs(
                target,
                method.draft,
                [shape for shape in same if shape is not None],
                cache_length=lengths[len(lengths) // 2],
            )
    return costs


def run_bench(
    target: Target,
    target_folder: Path,
    methods: Sequence[Method],
    tasks: dict[str, list[tuple[int, ...]]],
    *,
    temperatures: Sequence[float],
    batches: Sequence[int] = (1,),
    max_new_tokens: int,
    eos: Sequence[int],
    out: Path,
    info: Runtime,
) -> list[dict[str, Any]]:
    """Run every method on every task and write `out`/results.json and `out`/report.md as the tasks end.

    Args:
      target: the model.
      target_folder: where it came from, for the method hf.
      methods: plain first.
      tasks: prompts as token ids, by task.
      temperatures: each is a run of its own.
      batches: prompts decoded together; each is a run of its own. The method hf takes part in batches of 1.
      max_new_tokens: per answer.
      eos: end-of-sequence ids.
      out: folder for the results.
      info: what this process runs on, for the record.
    """
    out.mkdir(parents=True, exist_ok=True)
    runners: dict[str, Runner] = {
        method.label: _transformers(target_folder, eos, info) if method.name == "hf" else Ours(target, method, eos)
        for method in methods
    }
    costs: dict[str | None, Costs] = {}
    if 0 in temperatures and 1 in batches:
        costs = _costs(target, methods, [tokens for prompts in tasks.values() for tokens in prompts], max_new_tokens)
    records: list[dict[str, Any]] = []
    for temperature, batch in itertools.product(temperatures, batches):
        taking_part = [method for method in methods if batch == 1 or method.name != "hf"]
        for task, prompts in tasks.items():
            requests = [
                Request(tokens, max_new_tokens=max_new_tokens, temperature=temperature, seed=index)
                for index, tokens in enumerate(prompts)
            ]
            runs: dict[str, list[Run]] = {method.label: [] for method in taking_part}
            for part in [requests] if batch > 1 else [[request] for request in requests]:
                if drop_programs():
                    for runner in runners.values():
                        if isinstance(runner, Ours):
                            runner.cool()
                for method in taking_part:
                    runs[method.label].append(runners[method.label](part, batch))
                done = len(runs["plain"]) if batch == 1 else len(part)
                shown = f"{task} T={temperature:g} batch {batch}: {done}/{len(prompts)}"
                print(f"\r{shown}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            whole = {
                label: Run([answer for run in found for answer in run.answers], sum(run.seconds for run in found))
                for label, found in runs.items()
            }
            # A round's parts are timed for one greedy row.
            timed = costs if temperature == 0 and batch == 1 else {}
            records += [
                record(
                    task, method, temperature, whole[method.label], whole["plain"], batch=batch,
                    costs=None if method.lookup_nodes else timed.get(method.draft_name),
                )
                | dataclasses.asdict(info)
                | {"max_new_tokens": max_new_tokens}
                for method in taking_part
            ]  # fmt: skip
            text = json.dumps(records, indent=1)
            replace_file(out / "results.json", lambda part, text=text: part.write_text(text + "\n", encoding="utf-8"))
            report = render(records)
            replace_file(out / "report.md", lambda part, report=report: part.write_text(report, encoding="utf-8"))
    return records
