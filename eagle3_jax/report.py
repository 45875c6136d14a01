"""What a comparison says: one record for each method and task, tables of them, and the best setting of a draft.

`metrics.py` decides what the words mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eagle3_jax.costs import Costs
from eagle3_jax.drafters import Drafter
from eagle3_jax.metrics import conditional_n_alpha, ratio, tau, tokens_per_second
from eagle3_jax.requests import Answer
from eagle3_jax.tree import FixedTree, TreeShape


@dataclasses.dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
      name: plain, eagle3, sps, lookup or hf.
      draft_name: the draft's label, for eagle3 and sps.
      draft: what drafts.
      draft_length: W of a chain; 0 without a draft, and with a tree.
      tree: the tree that is drafted instead of a chain.
      lookup_nodes: nodes that lookup fills beside the draft's.
    """

    name: str
    draft_name: str | None = None
    draft: Drafter | None = None
    draft_length: int = 0
    tree: TreeShape | FixedTree | None = None
    lookup_nodes: int = 0

    @property
    def shape(self) -> TreeShape | FixedTree | None:
        """What is drafted, a chain as the tree that it is; None without a draft."""
        return self.tree or (TreeShape.chain(self.draft_length) if self.draft_length else None)

    @property
    def depth(self) -> int:
        """Most drafts that a round can accept."""
        return 0 if self.shape is None else max(self.shape.depth, self.lookup_nodes)

    @property
    def label(self) -> str:
        """How tables call it."""
        parts = [self.name, self.draft_name]
        match self.tree:
            case TreeShape(nodes, depth, top_k):
                parts.append(f"M={nodes} W={depth} k={top_k}")
            case FixedTree():
                parts.append(f"M={self.tree.nodes} W={self.tree.depth} fixed")
            case None if self.draft_length:
                parts.append(f"K={self.draft_length}")
        if self.lookup_nodes:
            parts.append(f"+{self.lookup_nodes} lookup")
        return " ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Run:
    """The answers of one method to the prompts of a task.

    Attributes:
      answers: in the order of the prompts.
      seconds: that they took, end to end. Rows of a batch share them.
    """

    answers: Sequence[Answer]
    seconds: float

    @property
    def decoding(self) -> float:
        """Seconds less those of prefill, which runs one prompt at a time."""
        return self.seconds - sum(answer.first_token_seconds for answer in self.answers)


def record(
    task: str,
    method: Method,
    temperature: float,
    run: Run,
    plain: Run,
    *,
    batch: int = 1,
    costs: Costs | None = None,
) -> dict[str, Any]:
    """One entry of results.json: a method on a task, compared with plain decoding of the same prompts.

    With the costs of a round's parts, `modelled_speedup` is what this tau would bring if a round cost nothing else.
    """
    answers = run.answers
    lengths = lambda found: [len(answer.token_ids) for answer in found]
    tokens = lengths(answers)
    passes = [answer.verification_passes for answer in answers]
    speed = tokens_per_second(tokens, [run.decoding])
    plain_speed = tokens_per_second(lengths(plain.answers), [plain.decoding])
    forks = []
    for index, (ours, theirs) in enumerate(zip(answers, plain.answers)):
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
        "lookup_nodes": method.lookup_nodes,
        "task": task,
        "temperature": temperature,
        "batch": batch,
        "prompts": len(answers),
        "new_tokens": sum(tokens),
        "verification_passes": sum(passes),
        "tau": mean,
        "n_alpha": conditional_n_alpha(accepted, method.depth),
        "tokens_per_second": speed,
        "end_to_end_seconds": run.seconds,
        "time_to_first_token": ratio(sum(answer.first_token_seconds for answer in answers), len(answers)),
        "speedup": None if speed is None or plain_speed is None else ratio(speed, plain_speed),
        "modelled_speedup": costs.speedup(mean, method.shape) if costs and mean and method.shape else None,
        "identical_to_plain": ratio(len(answers) - len(forks), len(answers)) if temperature == 0 else None,
        "forks": forks if temperature == 0 else [],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _label(entry: dict[str, Any]) -> str:
    tree = entry["tree"]
    if tree is not None:
        tree = FixedTree(tuple(tree["parents"])) if "parents" in tree else TreeShape(**tree)
    return Method(entry["method"], entry["draft"], None, entry["draft_length"], tree, entry["lookup_nodes"]).label


def render(records: Sequence[dict[str, Any]]) -> str:
    """Tables in Markdown: a row for each method, two columns (speedup, tau) for each task, and their mean.

    A ratio over nothing, as for answers that all ended with their first token, is "-" and in no mean.
    """
    first = records[0]
    parts = [
        f"{first['device']} ({first['platform']}), {first['dtype']}, matmul precision {first['precision']}, at most "
        f"{first['max_new_tokens']} new tokens; of several turns the first.\n"
    ]
    for temperature in dict.fromkeys(entry["temperature"] for entry in records):
        chosen = [entry for entry in records if entry["temperature"] == temperature]
        batches = list(dict.fromkeys(entry["batch"] for entry in chosen))
        for batch in batches:
            rows = "one prompt at a time" if batch == 1 else f"{batch} prompts at a time"
            parts.append(f"## Temperature {temperature:g}, {rows}\n")
            parts += _table([entry for entry in chosen if entry["batch"] == batch])
        if len(batches) > 1:
            parts.append(f"## Temperature {temperature:g}: throughput by batch\n")
            parts += _throughput(chosen, batches)
    return "\n".join(parts)


def _table(chosen: Sequence[dict[str, Any]]) -> list[str]:
    """One temperature and batch."""
    tasks = list(dict.fromkeys(entry["task"] for entry in chosen))
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in chosen:
        rows.setdefault(_label(entry), {})[entry["task"]] = entry
    parts = [
        "| method | "
        + " | ".join(f"{task} speedup | tau" for task in tasks)
        + " | mean speedup | of its parts | mean tau | tok/s | identical |",
        "|---" * (2 * len(tasks) + 6) + "|",
    ]
    speedups: dict[str, float | None] = {}
    for label, by_task in rows.items():
        entries = [by_task[task] for task in tasks]
        cells = []
        for entry in entries:
            cells += [_shown(entry["speedup"], ".2f", "x"), _shown(entry["tau"], ".2f")]
        mean = {
            name: _mean([entry[name] for entry in entries])
            for name in ("speedup", "modelled_speedup", "tau", "tokens_per_second", "identical_to_plain")
        }
        speedups[label] = mean["speedup"]
        cells += [
            _shown(mean["speedup"], ".2f", "x"),
            _shown(mean["modelled_speedup"], ".2f", "x"),
            _shown(mean["tau"], ".2f"),
            _shown(mean["tokens_per_second"], ".1f"),
            _shown(mean["identical_to_plain"], ".1%"),
        ]
        note = " (slower)" if (mean["speedup"] or 1) < 1 and label != "plain" else ""
        parts.append(f"| {label}{note} | " + " | ".join(cells) + " |")
    if any(entry["modelled_speedup"] for entry in chosen):
        parts.append("\nOf its parts: tau / (verification + drafting + catching up), in plain steps, each timed alone.")
    parts += _best(chosen, speedups)
    alphas = [(label, entry) for label, by_task in rows.items() for entry in by_task.values() if entry["n_alpha"]]
    if alphas:
        parts.append("\nn-alpha (acceptance of draft n+1, given that the n before it were accepted):\n")
        for label, entry in alphas:
            values = " ".join(_shown(value, ".2f") for value in entry["n_alpha"])
            parts.append(f"- {label}, {entry['task']}: {values}")
    return [*parts, ""]


def _best(chosen: Sequence[dict[str, Any]], speedups: dict[str, float | None]) -> list[str]:
    """The fastest setting of each draft that was run with several."""
    parts = []
    for draft in dict.fromkeys(entry["draft"] for entry in chosen if entry["draft"] is not None):
        labels = dict.fromkeys(_label(entry) for entry in chosen if entry["draft"] == draft)
        known = {label: value for label in labels if (value := speedups[label]) is not None}
        if len(known) > 1:
            best = max(known, key=lambda label: known[label])
            parts.append(f"\nBest of {len(known)} settings of {draft}: {best}, {known[best]:.2f}x.")
    return parts


def _throughput(chosen: Sequence[dict[str, Any]], batches: Sequence[int]) -> list[str]:
    """Mean tokens/s, speedup and tau over the tasks, a column for each batch."""
    parts = [
        "| method | " + " | ".join(f"batch {batch}: tok/s, speedup, tau" for batch in batches) + " |",
        "|---" * (len(batches) + 1) + "|",
    ]
    for label in dict.fromkeys(map(_label, chosen)):
        cells = []
        for batch in batches:
            entries = [entry for entry in chosen if entry["batch"] == batch and _label(entry) == label]
            mean = lambda name, entries=entries: _mean([entry[name] for entry in entries])
            cells.append(
                f"{_shown(mean('tokens_per_second'), '.1f')}, {_shown(mean('speedup'), '.2f', 'x')}, "
                f"{_shown(mean('tau'), '.2f')}"
            )
        parts.append(f"| {label} | " + " | ".join(cells) + " |")
    return [*parts, ""]
