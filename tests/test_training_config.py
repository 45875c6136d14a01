"""Training configs: fields given as text, files under configs/, phases, and what `check` refuses before a run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.errors import InputError
from eagle3_jax.training.config import TrainConfig, check_taps, load_config, override

CONFIG = TrainConfig(target="t", output="o", data=("d.jsonl",))
RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))

TEXTS: dict[str, tuple[str, Any]] = {
    "target": ("models/a b", "models/a b"),
    "output": ("runs/1", "runs/1"),
    "data": ("a.jsonl,b.jsonl", ("a.jsonl", "b.jsonl")),
    "features": ("f", ("f",)),
    "init": ("my/draft", "my/draft"),
    "target_dtype": ("bfloat16", "bfloat16"),
    "last_turn_only": ("true", True),
    "template": ("(('enable_thinking', False),)", (("enable_thinking", False),)),
    "supervise": ("all", "all"),
    "held_out_rows": ("0", 0),
    "draft_vocab_size": ("96", 96),
    "vocab": ("ids.json", "ids.json"),
    "taps": ("(2, 4, 5)", (2, 4, 5)),
    "rope_theta": ("1e6", 1e6),
    "fc_norm": ("true", True),
    "norm_output": ("1", True),
    "norm_before_residual": ("False", False),
    "row_length": ("64", 64),
    "batch_rows": ("2", 2),
    "accumulation": ("4", 4),
    "updates": ("1_500", 1500),
    "schedule": ("((100, 1), (50, 7))", ((100, 1), (50, 7))),
    "token_loss": ("0.1", 0.1),
    "feature_loss": ("1", 1.0),
    "freeze_head": ("true", True),
    "step_decay": ("1", 1.0),
    "learning_rate": ("3e-4", 3e-4),
    "warmup": ("0", 0),
    "final_learning_rate": ("0", 0.0),
    "learning_rate_phases": ("((10, 'linear', 1), (20, 'cosine', 0.1))", ((10, "linear", 1.0), (20, "cosine", 0.1))),
    "betas": ("(0, 0.99)", (0.0, 0.99)),
    "weight_decay": ("0.1", 0.1),
    "clip": ("1.0", 1.0),
    "compute_dtype": ("bfloat16", "bfloat16"),
    "rematerialise": ("all", "all"),
    "attention": ("splash", "splash"),
    "mesh": ("(2,1,4)", (2, 1, 4)),
    "slices": ("2", 2),
    "seed": ("7", 7),
    "eval_every": ("10", 10),
    "save_every": ("20", 20),
    "log_every": ("1", 1),
    "decoded_prompts": ("0", 0),
    "writers": ("tensorboard,wandb", ("tensorboard", "wandb")),
    "keep": ("3", 3),
}


def test_every_field_can_be_given_as_text():
    assert set(TEXTS) == {field.name for field in dataclasses.fields(TrainConfig)}
    made = override(CONFIG, {name: text for name, (text, _) in TEXTS.items()})
    for name, (_, value) in TEXTS.items():
        found = getattr(made, name)
        assert found == value
        assert type(found) is type(value), name
        if isinstance(value, tuple):
            assert [type(item) for item in found] == [type(item) for item in value], name


def test_fields_that_are_not_given_stay():
    assert override(CONFIG, {}) == CONFIG
    assert override(CONFIG, {"taps": "()", "data": ""}) == dataclasses.replace(CONFIG, taps=(), data=())


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("updates", "many", "int"),
        ("updates", "10.5", "int"),
        ("updates", "True", "int"),
        ("clip", "True", "float"),
        ("mesh", "8", "tuple"),
        ("learning_rate", "'1e-3'", "float"),
        ("fc_norm", "yes", "true or false"),
        ("taps", "3", "tuple"),
        ("taps", "(1, 2.0)", "tuple"),
        ("betas", "(0.9,)", "tuple"),
        ("schedule", "(10, 1)", "tuple"),
        ("schedule", "((10, 1, 2),)", "tuple"),
        ("keep", "__import__('os')", "int"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, text: str, kind: str):
    with pytest.raises(InputError) as caught:
        override(CONFIG, {name: text})
    assert caught.value.expected.startswith(f"--{name} to be {kind}")
    assert caught.value.found == repr(text)


def test_an_unknown_field_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"--learning_rates.*Did you mean --learning_rate"):
        override(CONFIG, {"learning_rates": "1"})
    with pytest.raises(InputError, match="Fields: target, output"):
        override(CONFIG, {"zzz": "1"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates": 999}, "schedule: phases that add up to updates = 999; found 1000"),
        ({"schedule": ()}, "schedule: phases that add up to updates = 1000; found 0"),
        ({"schedule": ((1000, 0),)}, "schedule: at least one update and one step in every phase"),
        ({"schedule": ((1010, 1), (-10, 2))}, "schedule: at least one update and one step in every phase"),
        ({"updates": 0, "schedule": (), "warmup": 0}, "updates: at least 1; found 0"),
        ({"warmup": 1001}, "warmup: a warm-up no longer than the run of 1000; found 1001"),
        ({"learning_rate_phases": ((999, "linear", 1.0),)}, "learning_rate_phases: phases that add up to"),
        ({"learning_rate_phases": ((1000, "step", 1.0),)}, "learning_rate_phases: (updates, linear or cosine"),
        ({"learning_rate_phases": ((1000, "linear", float("nan")),)}, "learning_rate_phases: (updates, linear or"),
        ({"learning_rate_phases": ((1010, "linear", 1.0), (-10, "linear", 1.0))}, "learning_rate_phases: (upd"),
        ({"taps": (4, 2)}, "taps: ascending"),
        ({"taps": (2, 2, 4)}, "taps: ascending"),
        ({"taps": (-1, 2)}, "taps: ascending"),
        ({"held_out_rows": -1}, "held_out_rows: 0 or more"),
        *(({name: value}, f"{name}: a finite number above 0; found {value}") for name, value in (
            ("clip", 0.0), ("rope_theta", float("nan")),
        )),
        *(({name: value}, f"{name}: a finite number, 0 or more; found {value}") for name, value in (
            ("learning_rate", float("inf")), ("step_decay", -0.5), ("weight_decay", float("nan")),
        )),
        ({"betas": (0.9, 1.0)}, "betas: two numbers from 0 to below 1"),
        ({"seed": -1}, "seed: from 0 to 4294967295; found -1"),
        ({"data": ()}, "data: data files, or folders of features; found neither"),
        ({"supervise": "prompts"}, "supervise: replies or all; found prompts"),
        ({"compute_dtype": "float16"}, "compute_dtype: float32 or bfloat16; found float16"),
        ({"rematerialise": "some"}, "rematerialise: nothing or activations or all; found some"),
        ({"mesh": (8, 1)}, "mesh: three sizes of at least 1"),
        ({"slices": 2}, "mesh: three sizes of at least 1"),
        ({"mesh": (3, 2, 8), "slices": 2, "batch_rows": 4}, "batch_rows: a multiple of the 12 parts"),
        ({"final_learning_rate": 1.0}, "final_learning_rate: between 0 and learning_rate = 0.0001; found 1.0"),
        ({"final_learning_rate": -1e-5}, "final_learning_rate: between 0"),
        *(({name: 0}, f"{name}: at least 1; found 0") for name in (
            "row_length", "batch_rows", "accumulation", "eval_every", "save_every", "log_every", "keep",
            "draft_vocab_size",
        )),
    ],
)  # fmt: skip
def test_what_could_only_fail_later_is_refused_by_name(changes: dict[str, Any], message: str):
    CONFIG.check()
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as caught:
        dataclasses.replace(CONFIG, **changes).check()
    assert caught.value.remedy == f"Set --{message.split(':')[0]}."


def test_features_stand_in_for_data():
    dataclasses.replace(CONFIG, data=(), features=("f",)).check()


@pytest.mark.parametrize("taps", [(), (1, 1), (2, 1), (-1, 0), (0, 10)])
def test_boundaries_that_a_target_does_not_have_are_refused(taps: tuple[int, ...]):
    check_taps((0, 3, 8), 8)
    with pytest.raises(InputError, match="boundaries from 0 to 8, the target's number of layers"):
        check_taps(taps, 8)


def test_phases_come_one_after_the_other():
    made = dataclasses.replace(CONFIG, updates=6, schedule=((2, 1), (3, 4), (1, 7)))
    assert [made.steps_at(update) for update in range(6)] == [1, 1, 4, 4, 4, 7]
    assert made.max_steps == 7


def rates(config: TrainConfig) -> list[float]:
    config.check()
    schedule = config.learning_rates()
    return [float(np.asarray(schedule(update))) for update in range(config.updates)]


def test_phases_of_the_learning_rate_follow_the_closed_form():
    made = dataclasses.replace(
        CONFIG, updates=14, schedule=((14, 1),), warmup=99, learning_rate_phases=(
            (4, "linear", 1.0), (2, "constant", 0.5), (4, "cosine", 0.1), (1, "linear", 0.3), (3, "cosine", 0.6),
        ),
    )  # fmt: skip
    half = lambda step, of: (1 + math.cos(math.pi * step / of)) / 2
    falling = [0.1 + 0.4 * half(step, 4) for step in (1, 2, 3, 4)]
    rising = [0.6 - 0.3 * half(step, 3) for step in (1, 2, 3)]
    assert rates(made) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5, 0.5, *falling, 0.3, *rising])
    assert rates(made)[-1] == pytest.approx(0.6)


@pytest.mark.parametrize("warmup", [9, 10])
def test_a_warmup_as_long_as_the_run_is_finite(warmup: int):
    made = dataclasses.replace(CONFIG, updates=10, schedule=((10, 1),), warmup=warmup, learning_rate=1.0)
    rise = [1 / warmup + (1 - 1 / warmup) * step / warmup for step in range(warmup)]
    assert rates(made) == pytest.approx([*rise, 1.0][:10])


def test_a_config_file_is_run(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from eagle3_jax.training.config import TrainConfig\n"
        "def config():\n    return TrainConfig(target='x', output='y', data=('z',))\n"
    )
    assert load_config(path) == TrainConfig(target="x", output="y", data=("z",))


@pytest.mark.parametrize(
    ("text", "found"), [("x = 1", "none"), ("config = 3", "int"), ("def config():\n    return {}", "dict")]
)
def test_a_file_that_gives_no_config_is_refused(tmp_path: Path, text: str, found: str):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\(\) -> TrainConfig") as caught:
        load_config(path)
    assert caught.value.found == found


def test_a_missing_config_is_refused_with_those_that_exist(tmp_path: Path):
    (tmp_path / "one.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"nothing there.*Known ones: .*one\.py"):
        load_config(tmp_path / "two.py")
    with pytest.raises(InputError, match="another kind of file"):
        load_config(tmp_path / "notes.txt")
    with pytest.raises(InputError, match="Python files under configs/"):
        load_config(tmp_path / "absent" / "two.py")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_passes_its_check(path: Path):
    load_config(path).check()
