"""Methods side by side on the same prompts, in one process; `metrics.py` decides what the words mean.

Every prompt is answered by every method before the next prompt, so that whatever else the machine does hits all alike.
Compilation happens in a warm-up of each shape and is never timed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint import replace_file
from eagle3_jax.costs import Costs, measure_costs
from eagle3_jax.draft import Draft
from eagle3_jax.engine import Answer, Request, cache_length_for, decode, prefill_buckets
from eagle3_jax.errors import InputError
from eagle3_jax.generate import Drafter
from eagle3_jax.metrics import conditional_n_alpha, ratio, tau, tokens_per_second
from eagle3_jax.runtime import Runtime
from eagle3_jax.target import Target
from eagle3_jax.tree import TreeShape

Runner = Callable[[Request], Answer]


@dataclasses.dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
      name: plain, eagle3, sps, lookup or hf.
      draft_name: the draft's label, for eagle3 and sps.
      draft: what drafts.
      draft_length: W of a chain; 0 without a draft, and with a tree.
      tree: the tree that is drafted instead of a chain.
    """

    name: str
    draft_name: str | None = None
    draft: Drafter | None = None
    draft_length: int = 0
    tree: TreeShape | None = None

    @property
    def shape(self) -> TreeShape | None:
        """What is drafted, a chain as the tree that it is; None without a draft."""
        return self.tree or (TreeShape.chain(self.draft_length) if self.draft_length else None)

    @property
    def depth(self) -> int:
        """W: most drafts that a round can accept."""
        return 0 if self.shape is None else self.shape.depth

    @property
    def label(self) -> str:
        """How tables call it."""
        if self.shape is None:
            return self.name
        shape = f"K={self.draft_length}"
        if self.tree is not None:
            shape = f"M={self.tree.nodes} W={self.tree.depth} k={self.tree.top_k}"
        return " ".join(part for part in (self.name, self.draft_name, shape) if part)


def _ours(target: Target, method: Method, eos: Sequence[int]) -> Runner:
    """Answer with our engine; warms up each shape once, untimed."""
    warm: set[tuple[Any, ...]] = set()

    def events(request: Request) -> Iterator[Any]:
        return decode(target, method.draft, [request], draft_length=method.draft_length, tree=method.tree, eos=eos)

    def run(request: Request) -> Answer:
        shapes = (
            tuple(prefill_buckets(len(request.tokens))),
            cache_length_for([request], target.config, method.depth),
            request.temperature == 0,
        )
        if shapes not in warm:
            rounds = 0
            for rounds, _ in enumerate(events(request)):
                if rounds == 3:
                    break
            # An answer that prefill ended has compiled no round.
            if rounds or request.max_new_tokens == 1:
                warm.add(shapes)
        for event in events(request):
            if event.answer is not None:
                return event.answer
        raise AssertionError("decoding ended without an answer")

    return run


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

    def run(request: Request) -> Answer:
        nonlocal warm
        if not warm:
            generate(request, 3)
            warm = True
        ids, first, seconds = generate(request, request.max_new_tokens)
        return Answer(
            index=0, token_ids=tuple(ids), finish_reason="stop" if ids[-1] in eos else "length",
            prompt_tokens=len(request.tokens), verification_passes=len(ids) - 1, accepted=(), logprobs=(),
            seconds=seconds, first_token_seconds=first,
        )  # fmt: skip

    return run


def record(
    task: str,
    method: Method,
    temperature: float,
    answers: Sequence[Answer],
    plain: Sequence[Answer],
    costs: Costs | None = None,
) -> dict[str, Any]:
    """One entry of results.json: a method on a task, compared with plain decoding of the same prompts.

    With the costs of a round's parts, `modelled_speedup` is what this tau would bring if a round cost nothing else.
    """
    tokens = [len(answer.token_ids) for answer in answers]
    passes = [answer.verification_passes for answer in answers]
    decoding = [answer.seconds - answer.first_token_seconds for answer in answers]
    speed = tokens_per_second(tokens, decoding)
    plain_speed = tokens_per_second(
        [len(answer.token_ids) for answer in plain], [answer.seconds - answer.first_token_seconds for answer in plain]
    )
    forks = []
    for index, (ours, theirs) in enumerate(zip(answers, plain)):
        if ours.token_ids != theirs.token_ids:
            place = next(
                (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids)) if a != b),
                min(len(ours.token_ids), len(theirs.token_ids)),
            )
            forks.append({"prompt": index, "token": place})
    accepted = [count for answer in answers for count in answer.accepted]
    mean = tau(tokens, passes)
    return {
        "method": method.name,
        "draft": method.draft_name,
        "draft_length": method.draft_length,
        "tree": None if method.tree is None else dataclasses.asdict(method.tree),
        "task": task,
        "temperature": temperature,
        "batch": 1,
        "prompts": len(answers),
        "new_tokens": sum(tokens),
        "verification_passes": sum(passes),
        "tau": mean,
        "n_alpha": conditional_n_alpha(accepted, method.depth),
        "tokens_per_second": speed,
        "end_to_end_seconds": sum(answer.seconds for answer in answers),
        "time_to_first_token": ratio(sum(answer.first_token_seconds for answer in answers), len(answers)),
        "speedup": None if speed is None or plain_speed is None else ratio(speed, plain_speed),
        "modelled_speedup": costs.speedup(mean, method.shape) if costs and mean and method.shape else None,
        "identical_to_plain": ratio(len(answers) - len(forks), len(answers)) if temperature == 0 else None,
        "forks": forks if temperature == 0 else [],
    }


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
      max_new_tokens: per answer.
      eos: end-of-sequence ids.
      out: folder for the results.
      info: what this process runs on, for the record.
    """
    out.mkdir(parents=True, exist_ok=True)
    runners = {
        method.label: _transformers(target_folder, eos, info) if method.name == "hf" else _ours(target, method, eos)
        for method in methods
    }
    costs = _costs(target, methods, [tokens for prompts in tasks.values() for tokens in prompts], max_new_tokens)
    records: list[dict[str, Any]] = []
    for temperature in temperatures:
        for task, prompts in tasks.items():
            answers: dict[str, list[Answer]] = {method.label: [] for method in methods}
            for index, tokens in enumerate(prompts):
                request = Request(tokens, max_new_tokens=max_new_tokens, temperature=temperature, seed=index)
                for method in methods:
                    answers[method.label].append(runners[method.label](request))
                print(f"\r{task} T={temperature:g}: {index + 1}/{len(prompts)}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            plain = answers[methods[0].label]
            records += [
                record(
                    task, method, temperature, answers[method.label], plain,
                    costs.get(method.draft_name) if temperature == 0 else None,
                )
                | dataclasses.asdict(info)
                | {"max_new_tokens": max_new_tokens}
                for method in methods
            ]  # fmt: skip
            text = json.dumps(records, indent=1)
            replace_file(out / "results.json", lambda part, text=text: part.write_text(text + "\n", encoding="utf-8"))
            report = render(records)
            replace_file(out / "report.md", lambda part, report=report: part.write_text(report, encoding="utf-8"))
    return records


def render(records: Sequence[dict[str, Any]]) -> str:
    """Tables in Markdown: a row for each method, two columns (speedup, tau) for each task, and their mean.

    A ratio over nothing, as for answers that all ended with their first token, is "-" and in no mean.
    """
    first = records[0]
    parts = [
        f"{first['device']} ({first['platform']}), {first['dtype']}, matmul precision {first['precision']}, at most "
        f"{first['max_new_tokens']} new tokens; one prompt at a time, of several turns the first.\n"
    ]
    shown = lambda value, form, unit="": "-" if value is None else format(value, form) + unit
    mean = lambda values: sum(kept) / len(kept) if (kept := [value for value in values if value is not None]) else None
    for temperature in dict.fromkeys(entry["temperature"] for entry in records):
        chosen = [entry for entry in records if entry["temperature"] == temperature]
        tasks = list(dict.fromkeys(entry["task"] for entry in chosen))
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in chosen:
            tree = None if entry["tree"] is None else TreeShape(**entry["tree"])
            method = Method(entry["method"], entry["draft"], None, entry["draft_length"], tree)
            rows.setdefault(method.label, {})[entry["task"]] = entry
        parts.append(f"## Temperature {temperature:g}\n")
        parts.append(
            "| method | "
            + " | ".join(f"{task} speedup | tau" for task in tasks)
            + " | mean speedup | of its parts | mean tau | tok/s | identical |"
        )
        parts.append("|---" * (2 * len(tasks) + 6) + "|")
        for label, by_task in rows.items():
            cells, speedups, taus = [], [], []
            for task in tasks:
                entry = by_task[task]
                speedups.append(entry["speedup"])
                taus.append(entry["tau"])
                cells += [shown(speedups[-1], ".2f", "x"), shown(taus[-1], ".2f")]
            whole = {
                name: mean([entry[name] for entry in by_task.values()])
                for name in ("tokens_per_second", "identical_to_plain", "modelled_speedup")
            }
            cells += [
                shown(mean(speedups), ".2f", "x"),
                shown(whole["modelled_speedup"], ".2f", "x"),
                shown(mean(taus), ".2f"),
                shown(whole["tokens_per_second"], ".1f"),
                shown(whole["identical_to_plain"], ".1%"),
            ]
            note = " (slower)" if (mean(speedups) or 1) < 1 and label != "plain" else ""
            parts.append(f"| {label}{note} | " + " | ".join(cells) + " |")
        if any(entry["modelled_speedup"] for entry in chosen):
            parts.append(
                "\nOf its parts: tau / (verification + drafting + catching up), in plain steps, each timed alone."
            )
        alphas = [(label, entry) for label, by_task in rows.items() for entry in by_task.values() if entry["n_alpha"]]
        if alphas:
            parts.append("\nn-alpha (acceptance of draft n+1, given that the n before it were accepted):\n")
            for label, entry in alphas:
                values = " ".join(shown(value, ".2f") for value in entry["n_alpha"])
                parts.append(f"- {label}, {entry['task']}: {values}")
        parts.append("")
    return "\n".join(parts)
