"""The rotary position embedding's base and scaling rule, read from a HuggingFace config in either of its two places.

A rule that is misread runs and gives worse text, so everything that is not understood is refused by name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from eagle3_jax.errors import InputError

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_ROPE_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling rule, named as transformers names them.

    `original_max_positions` is the length the model was trained on before scaling (llama3, yarn, dynamic).
    Fields of a rule that `kind` does not use stay None.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

        Raises:
          InputError: unknown type, unknown key, missing key, or the two places disagreeing.
        """
        nested, place = _rope_rule(config, where)
        thetas = {float(value) for value in (nested.pop("rope_theta", None), config.get("rope_theta")) if value}
        if len(thetas) > 1:
            _refuse_two(f"rotary base (rope_theta) in {where}", " and ".join(map(str, sorted(thetas))))
        if not thetas:
            logger.warning("%s has no rope_theta; the default %g is used", where, DEFAULT_ROPE_THETA)
        theta = thetas.pop() if thetas else DEFAULT_ROPE_THETA
        kind = nested.pop("rope_type")
        if kind not in ROPE_TYPES:
            raise InputError(
                expected=f"{place}.rope_type in {where} to be one of {', '.join(ROPE_TYPES)}",
                found=repr(kind),
                remedy="This rotary embedding is not implemented; use a checkpoint with one of the supported types.",
            )
        max_positions = config.get("max_position_embeddings")
        fields: dict[str, Any] = {"theta": theta, "kind": kind}

        def take(key: str, default: Any = None, required: bool = False) -> Any:
            value = nested.pop(key, None)
            if value is None and required:
                raise InputError(
                    expected=f"{place}.{key} in {where} (rope type {kind})",
                    found="no such key",
                    remedy="Add the value the model was trained with.",
                )
            return default if value is None else value

        if kind != "default":
            fields["factor"] = float(take("factor", required=True))
        if kind in ("llama3", "yarn", "dynamic"):
            original = take("original_max_position_embeddings", max_positions, required=kind == "llama3")
            fields["original_max_positions"] = None if original is None else int(original)
        if kind == "llama3":
            fields["low_freq_factor"] = float(take("low_freq_factor", required=True))
            fields["high_freq_factor"] = float(take("high_freq_factor", required=True))
        if kind == "yarn":
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                value = take(key)
                fields[key] = None if value is None else float(value)
            fields["beta_fast"] = float(take("beta_fast", 32.0))
            fields["beta_slow"] = float(take("beta_slow", 1.0))
            fields["truncate"] = bool(take("truncate", True))
        # Values left over must be harmless, or the rule would be applied differently from how it was written.
        nested.pop("original_max_position_embeddings", None)
        partial = nested.pop("partial_rotary_factor", None)
        if nested or partial not in (None, 1, 1.0):
            left = sorted(nested) + ([] if partial in (None, 1, 1.0) else ["partial_rotary_factor"])
            raise InputError(
                expected=f"only the keys of rope type {kind} in {where}'s {place}",
                found=f"also {', '.join(left)}",
                remedy="Remove them if they are meant to have no effect; otherwise this variant is not supported.",
            )
        return RopeConfig(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Return `rope_theta` and `rope_scaling` (None if unscaled) in transformers-4 form, as every engine reads."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.original_max_positions is not None:
            scaling["original_max_position_embeddings"] = self.original_max_positions
        names: dict[str, tuple[str, ...]] = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        }
        for name in names.get(self.kind, ()):
            if getattr(self, name) is not None:
                scaling[name] = getattr(self, name)
        return {"rope_theta": self.theta, "rope_scaling": scaling}


def _rope_rule(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The nested rotary settings, with their type under `rope_type`, and the key that holds them.

    Exporters mirror them in both places, under both names of the type; two that disagree are refused, since engines
    differ in which they follow. Two keys that transformers also looks for at the top are moved inside.
    """
    rules: dict[str, dict[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        rule = dict(config.get(place) or {})
        if rule:
            kinds = {kind for kind in (rule.pop("type", None), rule.pop("rope_type", None)) if kind is not None}
            if len(kinds) > 1:
                _refuse_two(f"rope type in {where}'s {place}", " and ".join(map(repr, sorted(map(str, kinds)))))
            rules[place] = rule | {"rope_type": kinds.pop() if kinds else "default"}
    if len(rules) == 2:
        new, old = ({key: value for key, value in rule.items() if value is not None} for rule in rules.values())
        if {"rope_theta": old.get("rope_theta"), **new} != {"rope_theta": new.get("rope_theta"), **old}:
            _refuse_two(f"rotary rule in {where}", f"rope_parameters {new} and rope_scaling {old}")
    place = next(iter(rules), "rope_scaling")
    rule = rules.get(place, {"rope_type": "default"})
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        outer, inner = config.get(key), rule.get(key)
        if None not in (outer, inner) and outer != inner:
            _refuse_two(f"{key} in {where}", f"{outer} at the top and {inner} in {place}")
        rule[key] = outer if inner is None else inner
    return rule, place


def _refuse_two(what: str, found: str) -> NoReturn:
    raise InputError(expected=f"one {what}", found=found, remedy="Keep the right one and delete the other.")
