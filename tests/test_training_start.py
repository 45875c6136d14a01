"""Where a draft begins: continuing another draft, what is trained on, and which rows are held out."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eagle3_jax import cli
from eagle3_jax.checkpoint import fingerprint, load_draft, load_target, save_draft
from eagle3_jax.errors import InputError
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training import loop
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.evaluation import evaluate_rows
from eagle3_jax.training.features import Rows, write_features
from eagle3_jax.training.loop import train
from eagle3_jax.training.setup import packed_rows, prepare, supervised
from eagle3_jax.training.start import planned_shape
from tests import tiny, tiny_tokenizers

TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """One update of two steps that changes nothing: its learning rate is 0."""
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2).save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"one {n}", "response": "two three four five six " * (n % 3 + 1)} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return TrainConfig(
        target=str(folder), output="", data=(str(data),), draft_vocab_size=96, taps=TAPS, row_length=48, batch_rows=2,
        held_out_rows=2, updates=1, schedule=((1, 2),), learning_rate=0.0, final_learning_rate=0.0, warmup=0,
        decoded_prompts=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def begun(settings: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of random weights, and of a vocabulary that the rows would never have given."""
    folder = tmp_path_factory.mktemp("draft") / "begun"
    draft = tiny.draft(load_target(Path(settings.target)), taps=TAPS, trained_length=64)
    save_draft(folder, draft, dtype=jnp.float32)
    return folder


def test_a_run_continues_a_draft_with_its_vocabulary(settings: TrainConfig, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "begun")
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), init=str(folder))
    train(config)
    target = load_target(Path(settings.target))
    expected = tiny.draft(target, taps=TAPS)
    run = RunFolder(tmp_path / "run")
    params = run.manager.restore(run.latest())["params"]
    for name, leaf in vars(expected.params).items():
        if leaf is not None:
            np.testing.assert_array_equal(params[name], leaf, err_msg=name)
    _, shape, vocab = run.read()
    run.close()
    np.testing.assert_array_equal(vocab.d2t, expected.vocab.d2t)
    assert (shape.trained_length, shape.target_fingerprint) == (64, fingerprint(target))
    # Once there is a checkpoint, the run no longer needs what it began from.
    shutil.rmtree(folder)
    assert train(config).finished


def test_a_draft_of_another_shape_is_not_continued(settings: TrainConfig, begun: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), init=str(begun), draft_vocab_size=64, rope_theta=5e5, fc_norm=True
    )
    with pytest.raises(InputError) as error:
        train(config)
    for text in ("rope_theta 500000.0, draft_vocab_size 64, fc_norm True", "rope_theta 10000.0, draft_vocab_size 96"):
        assert text in str(error.value)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_draft_that_is_continued_decides_what_the_config_leaves_open(settings: TrainConfig, tmp_path: Path) -> None:
    """Taps, rotary embedding, vocabulary and switches; the first evaluation is that of the draft itself."""
    target = load_target(Path(settings.target))
    rope = RopeConfig(theta=5e5, kind="linear", factor=2.0)
    draft = tiny.draft(target, taps=(0, 2), rope=rope, norm_output=True)
    save_draft(tmp_path / "begun", draft, dtype=jnp.float32)
    open_fields = {"taps": (), "draft_vocab_size": 8192}
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), init=str(tmp_path / "begun"), eval_every=1, **open_fields
    )
    # Learning rate 0: what is evaluated after the update is the draft as it was.
    found = train(config).evaluation
    run = RunFolder(tmp_path / "run")
    _, shape, vocab = run.read()
    assert (shape.taps, shape.rope, shape.draft_vocab_size, shape.norm_output) == ((0, 2), rope, 96, True)
    np.testing.assert_array_equal(vocab.d2t, draft.vocab.d2t)
    setup = prepare(dataclasses.replace(config, output=str(tmp_path / "other")), RunFolder(tmp_path / "other"))
    packed = packed_rows(settings)
    held_out = Rows(type(packed)(**{name: array[setup.held_out] for name, array in vars(packed).items()}))
    own = evaluate_rows(target, load_draft(tmp_path / "begun", target), held_out, 2)
    assert found["accuracy"] == pytest.approx(own["accuracy"])
    assert found["joint"] == pytest.approx(own["joint"])
    # A plan is of that draft as well.
    assert planned_shape(config, target.config).taps == (0, 2)
    assert planned_shape(config, target.config).draft_vocab_size == 96
    # A resume asks the run, not the draft, which may be gone.
    shutil.rmtree(tmp_path / "begun")
    assert train(config).finished
    with pytest.raises(InputError, match="taps"):
        train(dataclasses.replace(config, taps=(0, 1)))


def test_taps_that_the_continued_draft_does_not_have_are_refused(
    settings: TrainConfig, begun: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), init=str(begun), taps=(0, 2))
    with pytest.raises(InputError, match=r"with taps \(0, 2\); found taps \(0, 1, 2\)"):
        train(config)


@pytest.mark.full
def test_eagles_first_objective_trains_is_exported_and_decodes(
    settings: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target's final hidden state as the only feature, a feature loss, the head frozen."""
    target = load_target(Path(settings.target))
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), taps=(3,), feature_loss=1.0, token_loss=0.1, freeze_head=True,
        updates=2, schedule=((2, 1),), learning_rate=1e-3, final_learning_rate=1e-3,
    )  # fmt: skip
    found = train(config).evaluation
    assert found["feature_loss"][0] > 0
    run = RunFolder(tmp_path / "run")
    params = run.manager.restore(run.latest())["params"]
    _, shape, vocab = run.read()
    run.close()
    assert shape.taps == (3,)
    head = np.asarray(target.params.lm_head)[np.asarray(vocab.d2t)]
    np.testing.assert_array_equal(params["lm_head"], head)
    begun = prepare(dataclasses.replace(config, output=str(tmp_path / "other")), RunFolder(tmp_path / "other"))
    assert not np.array_equal(params["fc"], begun.draft.params.fc)
    assert cli.main(["export", config.output, str(tmp_path / "draft"), "--dtype", "float32"]) == 0
    capsys.readouterr()
    texts = []
    for method in ([], ["--draft", str(tmp_path / "draft"), "--draft-length", "2"]):
        asked = ["--target", settings.target, "--prompt", "one two three", "--max-new-tokens", "12", "--json"]
        assert cli.main(["generate", *asked, *method, "--cache-dir", ""]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


def test_the_drafts_own_settings_reach_its_folder_and_weights_stay_fp32(settings: TrainConfig, tmp_path: Path) -> None:
    """From a bf16 target and in bf16 compute: masters, moments and everything that a save could lose."""
    folder = tmp_path / "target"
    model = tiny.hf_target(num_hidden_layers=8, head_dim=32).bfloat16()
    model.save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    switches = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    config = dataclasses.replace(
        settings, target=str(folder), output=str(tmp_path / "run"), taps=(), rope_theta=5e5, compute_dtype="bfloat16",
        **switches,
    )  # fmt: skip
    train(config)
    run = RunFolder(tmp_path / "run")
    state = run.manager.restore(run.latest())
    _, shape, vocab = run.read()
    run.close()
    assert {leaf.dtype for leaf in jax.tree.leaves((state["params"], state["opt_state"]))} <= {
        np.dtype("float32"), np.dtype("int32"),
    }  # fmt: skip
    # One rule gives the taps, whoever asks.
    target = load_target(folder)
    assert shape.taps == target.config.default_taps == (2, 4, 5)
    assert state["params"]["q"].shape == (4, 32, 128)
    assert cli.main(["export", config.output, str(tmp_path / "draft"), "--dtype", "float32"]) == 0
    draft = load_draft(tmp_path / "draft", target)
    assert (draft.config.rope.theta, draft.config.taps, draft.config.head_dim) == (5e5, (2, 4, 5), 32)
    for name in switches:
        assert getattr(draft.config, name)
    np.testing.assert_array_equal(draft.vocab.d2t, vocab.d2t)
    np.testing.assert_array_equal(draft.params.q, state["params"]["q"])
    # A draft kept in bf16 is continued in fp32.
    assert cli.main(["export", config.output, str(tmp_path / "narrow")]) == 0
    train(dataclasses.replace(config, output=str(tmp_path / "next"), init=str(tmp_path / "narrow")))
    run = RunFolder(tmp_path / "next")
    params = run.manager.restore(run.latest())["params"]
    run.close()
    assert params["q"].dtype == np.float32
    np.testing.assert_array_equal(params["q"], np.asarray(draft.params.q).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_all_tokens_but_the_first_two_of_each_document_are_supervised_on_demand() -> None:
    row = {
        "tokens": np.arange(7),
        "spans": np.asarray([0, 0, 1, 0, 0, 2, 0], np.int32),
        "documents": np.asarray([1, 1, 1, 2, 2, 2, 0], np.int32),
        "positions": np.asarray([0, 1, 2, 0, 1, 2, 0], np.int32),
    }
    assert supervised(row, "replies") is row
    assert supervised(row, "all")["spans"].tolist() == [0, 0, 1, 0, 0, 2, 0]


def test_a_run_trains_on_what_it_is_told_to_and_is_evaluated_on_replies(
    settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: dict[str, list[float]] = {"train": [], "evaluate": []}

    def watch(name: str, place: int, make):
        def made(*args, **options):
            step = make(*args, **options)

            def watched(*args, **options):
                out = step(*args, **options)
                slots[name].append(float((out[place] if place else out).slots[0]))
                return out

            return watched

        return made

    monkeypatch.setattr(loop, "make_train_step", watch("train", 1, loop.make_train_step))
    monkeypatch.setattr(loop, "make_eval_step", watch("evaluate", 0, loop.make_eval_step))
    for supervise in ("replies", "all"):
        train(dataclasses.replace(settings, output=str(tmp_path / supervise), supervise=supervise))
    replies, everything = slots["train"]
    assert 0 < replies < everything
    assert slots["evaluate"][0] == slots["evaluate"][1] > 0


def test_rows_are_held_out_from_the_first_features_only(settings: TrainConfig, tmp_path: Path) -> None:
    target = load_target(Path(settings.target))
    packed = packed_rows(settings)
    counts = {"first": 4, "second": len(packed.tokens) - 4}
    for name, rows in (("first", slice(None, 4)), ("second", slice(4, None))):
        part = jax.tree.map(lambda array, rows=rows: array[rows], vars(packed))
        write_features(tmp_path / name, type(packed)(**part), target, TAPS, batch=2)
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), data=(), features=tuple(str(tmp_path / name) for name in counts)
    )
    setup = prepare(config, RunFolder(tmp_path / "run"))
    assert sorted([*setup.held_out, *setup.train_order]) == list(range(sum(counts.values())))
    assert len(setup.held_out) == 2
    assert max(setup.held_out) < 4
    with pytest.raises(InputError, match="and 5 in the first folder of features; found 12, and 4"):
        prepare(dataclasses.replace(config, held_out_rows=5), RunFolder(tmp_path / "other"))
