"""`eagle3-jax data inspect`, `vocab` and `features`: what a file becomes, what draft vocabularies cover, what reaches
features from a config."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from eagle3_jax import cli
from eagle3_jax.errors import InputError
from eagle3_jax.tokenizer import load_tokenizer
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.setup import packed_rows
from eagle3_jax.training.start import read_vocab
from tests import tiny, tiny_tokenizers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and a tokenizer; there are no weights."""
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2).config.save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def same_precision() -> Iterator[None]:
    """Commands set jax's precision, which must not leak into other tests."""
    before = jax.config.values["jax_default_matmul_precision"]
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    ]
    lines = [{"messages": turns}, {"prompt": "five", "response": "six six"}, {"prompt": "seven"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_row_is_shown_with_its_supervised_tokens_marked(target: Path, rows: Path, capsys, tmp_path: Path):
    code, out, notes = run(capsys, "data", "inspect", rows, "--target", target)
    assert code == 0
    tokenizer = load_tokenizer(target)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    assert "⟦two<|im_end|>⟧" in out
    assert "⟦four<|im_end|>⟧" in out
    assert "one" in out
    assert "⟦one" not in out
    assert "3 rows read, 2 kept, 1 dropped: 1 no assistant reply (line 3)" in notes
    _, out, _ = run(capsys, "data", "inspect", rows, "--target", target, "--row", 1, "--json")
    shown = json.loads(out)
    spans, tokens = np.asarray(shown["spans"]), np.asarray(shown["tokens"])
    assert tokenizer.decode(tokens[spans > 0].tolist()) == "six six<|im_end|>"
    _, out, _ = run(capsys, "data", "inspect", rows, "--target", target, "--last-turn-only")
    assert "⟦two" not in out
    assert "⟦four<|im_end|>⟧" in out
    place = tmp_path / "shown.txt"
    assert run(capsys, "data", "inspect", rows, "--target", target, "--out", place)[0] == 0
    assert "⟦two<|im_end|>⟧" in place.read_text(encoding="utf-8")
    code, _, notes = run(capsys, "data", "inspect", rows, "--target", target, "--out", place)
    assert (code, "an --out that does not exist yet" in notes) == (2, True)
    code, _, notes = run(capsys, "data", "inspect", rows, "--target", target, "--row", 2)
    assert (code, "--row from 0 to 1" in notes) == (2, True)


def test_vocabularies_cover_what_they_say(target: Path, rows: Path, capsys, tmp_path: Path):
    place = tmp_path / "vocab.json"
    arguments = ("data", "vocab", rows, rows, "--target", target, "--sizes", "4,2,1,320")
    code, out, notes = run(capsys, *arguments)
    assert code == 0
    found = json.loads(out)
    tokenizer = load_tokenizer(target)
    plain = lambda text: tokenizer.encode(text, add_special_tokens=False)
    supervised = 2 * [*plain("two<|im_end|>"), *plain("four<|im_end|>"), *plain("six six<|im_end|>")]
    assert found["supervised_tokens"] == len(supervised)
    shares = {int(size): share for size, share in found["coverage"].items()}
    assert list(shares) == [1, 2, 4, 320]
    assert shares[320] == 1
    assert shares[1] < shares[2] < shares[4] < 1
    # The end of a turn comes first, however rare.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shares[1] == pytest.approx(supervised.count(end) / len(supervised))
    assert f"{len(supervised)} supervised tokens" in notes
    code, _, notes = run(capsys, *arguments, "--out", place)
    assert (code, "--out with one size" in notes) == (2, True)
    assert run(capsys, *arguments[:-1], "999")[0] == 2
    whole = (*arguments[:-1], "320", "--out", place)
    assert run(capsys, *whole)[0] == 0
    np.testing.assert_array_equal(read_vocab(place, 320, 320), np.arange(320))
    with pytest.raises(InputError, match=r"4 of 320 tokens; found 320 of 320"):
        read_vocab(place, 4, 320)
    assert run(capsys, *whole)[0] == 2
    assert run(capsys, *arguments[:-1], "4", "--out", place, "--force")[0] == 0
    assert read_vocab(place, 4, 320).shape == (4,)
    place.write_text("[]", encoding="utf-8")
    for path, found_words in ((place, "found something else"), (tmp_path / "absent", "found no such file")):
        with pytest.raises(InputError, match=found_words):
            read_vocab(path, 4, 320)


def test_without_sizes_usual_ones_are_covered_and_of_a_small_vocabulary_all_of_it(
    target: Path, rows: Path, capsys, tmp_path: Path
):
    code, out, notes = run(capsys, "data", "vocab", rows, "--target", target)
    assert code == 0
    assert json.loads(out)["coverage"] == {"320": 1.0}
    assert "     320 tokens cover 100.00 %" in notes.splitlines()
    large = shutil.copytree(target, tmp_path / "large")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | {"vocab_size": 16384}))
    code, out, notes = run(capsys, "data", "vocab", rows, "--target", large)
    assert code == 0
    shares = json.loads(out)["coverage"]
    assert list(shares) == ["1024", "4096", "8192", "16384"]
    printed = [line for line in notes.splitlines() if "tokens cover" in line]
    assert printed == [f"{int(size):>8} tokens cover {100 * share:6.2f} %" for size, share in shares.items()]
    assert notes.splitlines()[-5].endswith("different ones")


# A template that opens a reply otherwise where thinking is turned off, and leaves thoughts out of the history.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and enable_thinking is false %}"
    "<none>{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<none>{% endif %}{% endif %}"
)


def test_what_a_config_says_of_replies_and_template_reaches_its_rows(target: Path, rows: Path, tmp_path: Path):
    folder = shutil.copytree(target, tmp_path / "target")
    tokenizer = tiny_tokenizers.chatml(THINKING, size=300)
    tokenizer.save_pretrained(folder)
    config = TrainConfig(target=str(folder), output="", data=(str(rows),), row_length=64)
    off = (("enable_thinking", False),)
    texts, counts = {}, {}
    for last, template in ((False, ()), (True, ()), (False, off)):
        packed = packed_rows(dataclasses.replace(config, last_turn_only=last, template=template))
        used = packed.tokens[packed.documents > 0].tolist()
        texts[last, template] = tokenizer.decode(used)
        counts[last, template] = np.count_nonzero(packed.spans)
    replies = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in ("two", "four", "six six")]
    assert counts[False, ()] == counts[False, off] == sum(map(len, replies))
    assert counts[True, ()] == sum(map(len, replies[1:]))
    assert texts[False, ()] == texts[True, ()]
    assert (texts[False, ()].count("<none>"), texts[False, off].count("<none>")) == (0, 3)


def test_features_of_rows_prepared_otherwise_are_refused_unless_replaced(target: Path, rows: Path, capsys, tmp_path):
    """The other thinking mode, or other replies, are other rows; the report on all lines is on stderr."""
    folder, out = tmp_path / "target", tmp_path / "features"
    tiny.hf_target(num_hidden_layers=2).save_pretrained(folder)
    tiny_tokenizers.chatml(THINKING, size=300).save_pretrained(folder)
    common = (
        "data", "features", "configs/smollm2_135m.py", "--target", folder, "--data", rows, "--out", out, "--taps",
        "(1,2)", "--row_length", 64, "--batch_rows", 1, "--cache-dir", "",
    )  # fmt: skip
    code, printed, notes = run(capsys, *common)
    assert (code, printed) == (0, f"{out}\n")
    assert f"{rows}: 3 rows read, 2 kept, 1 dropped: 1 no assistant reply (line 3)" in notes
    assert "2 rows encoded: " in notes
    before = (out / "features-00000.safetensors").read_bytes()
    for change, named in (
        (("--template", "(('enable_thinking',False),)"), "tokens"),
        (("--last_turn_only", "true"), "spans"),
    ):
        code, _, notes = run(capsys, *common, *change)
        assert (code, f"features that differ in {named}" in notes) == (2, True), notes
        assert (out / "features-00000.safetensors").read_bytes() == before
    assert run(capsys, *common, *change, "--force")[0] == 0
    assert run(capsys, *common)[0] == 2


def test_options_of_the_template_are_names_and_values(target: Path, rows: Path, capsys):
    code, _, notes = run(capsys, "data", "inspect", rows, "--target", target, "--template", "thinking")
    assert (code, "NAME=VALUE" in notes) == (2, True)
    assert run(capsys, "data", "inspect", rows, "--target", target, "--template", "thinking=False")[0] == 0
