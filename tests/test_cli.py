"""The command line as other programs call it: results on stdout, notes on stderr, exit codes, one paragraph for bad
input, and the whole path from prompts to a measured draft on a tiny target."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax import cli, commands, prompts
from eagle3_jax.checkpoint import load_target, save_draft
from eagle3_jax.errors import InputError
from eagle3_jax.training.regenerate import answered
from eagle3_jax.tree import TreeShape
from tests import tiny, tiny_tokenizers

pytestmark = pytest.mark.smoke

TREE = ("--tree-nodes", "9", "--tree-depth", "3", "--tree-top-k", "3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a tokenizer, and a draft for it."""
    target = tmp_path_factory.mktemp("models") / "target"
    tiny.hf_target(num_hidden_layers=2, max_position_embeddings=128).save_pretrained(target)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(target)
    draft = target.parent / "draft"
    save_draft(draft, tiny.draft(load_target(target), taps=(0, 1, 2)))
    return target, draft


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's cache stays untouched, and jax's settings do not leak into other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    precision = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_default_matmul_precision", precision)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_generate_answers_the_same_with_a_draft_and_without(folders, capsys, tmp_path):
    target, draft = folders
    rows = [{"prompt": "hello there"}, {"messages": [{"role": "user", "content": "a b c"}]}, {"turns": ["one", "two"]}]
    file = write_jsonl(tmp_path / "prompts.jsonl", rows)
    common = ("generate", "--target", target, "--prompts", file, "--max-new-tokens", 12, "--json", "--ignore-eos")
    code, plain, notes = run(capsys, *common)
    assert code == 0
    assert notes.splitlines()[0].startswith("platform cpu, device ")
    assert "dtype float32, matmul precision highest" in notes.splitlines()[0]
    code, drafted, _ = run(capsys, *common, "--draft", draft, "--draft-length", 3, "--batch", 2, "--logprobs")
    assert code == 0
    code, grown, _ = run(capsys, *common, "--draft", draft, *TREE, "--attention", "xla")
    assert code == 0
    assert [json.loads(line)["token_ids"] for line in grown.splitlines()] == [
        json.loads(line)["token_ids"] for line in plain.splitlines()
    ]
    first = {record["prompt_index"]: record for record in map(json.loads, plain.splitlines())}
    second = {record["prompt_index"]: record for record in map(json.loads, drafted.splitlines())}
    assert sorted(first) == sorted(second) == [0, 1, 2]
    for index, record in first.items():
        assert second[index]["token_ids"] == record["token_ids"]
        assert record["new_tokens"] == len(record["token_ids"]) == 12
        assert record["finish_reason"] == "length"
        assert record["tau"] == 1.0
        assert record["verification_passes"] == 11
        assert record["prompt_tokens"] > 0
        assert record["seconds"] > record["first_token_seconds"] > 0
        assert len(second[index]["logprobs"]) == 12
        assert max(second[index]["logprobs"]) <= 0


def test_flags_of_sampling_reach_the_requests(folders, capsys, tmp_path, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr("eagle3_jax.commands.decode", lambda *models, **_: iter(asked.extend(models[2]) or ()))
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    code, *_ = run(
        capsys, "generate", "--target", folders[0], "--prompts", file, "--temperature", 0.7, "--top-k", 5, "--top-p",
        0.9, "--seed", 7, "--max-new-tokens", 11,
    )  # fmt: skip
    assert code == 0
    fields = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")
    assert [[getattr(request, name) for name in fields] for request in asked] == [
        [0.7, 5, 0.9, 7, 11],
        [0.7, 5, 0.9, 8, 11],
    ]


def test_a_bench_asks_at_each_temperature(folders, capsys, tmp_path):
    target, draft = folders
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "one two"}])
    code, _, notes = run(
        capsys, "bench", "--target", target, "--draft", f"d={draft}", "--tasks", f"t={asked}", "--temperatures", "0,5",
        "--draft-length", 2, "--max-new-tokens", 12, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, notes
    records = json.loads((tmp_path / "out" / "results.json").read_text())
    found = [(record["method"], record["temperature"], record["identical_to_plain"]) for record in records]
    assert found == [("plain", 0, 1.0), ("eagle3", 0, 1.0), ("plain", 5, None), ("eagle3", 5, None)]


def test_streamed_text_is_the_answer(folders, capsys):
    common = ("generate", "--target", folders[0], "--prompt", "hello", "--max-new-tokens", 16)
    _, whole, _ = run(capsys, *common)
    _, streamed, _ = run(capsys, *common, "--stream")
    assert streamed == whole
    assert whole.strip()


def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(folders, capsys):
    common = ("generate", "--target", folders[0], "--prompt", "hello", "--max-new-tokens", 24, "--ignore-eos", "--json")
    _, out, _ = run(capsys, *common)
    whole = json.loads(out)
    stop = whole["text"][6:8]
    _, out, _ = run(capsys, *common, "--stop", stop)
    cut = json.loads(out)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert cut["new_tokens"] == len(cut["token_ids"]) < 24


def test_a_dead_draft_is_warned_about(folders, capsys, tmp_path):
    target, draft = folders
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "hello there"}] * 2)
    common = ("generate", "--target", target, "--prompts", file, "--ignore-eos")
    _, _, notes = run(capsys, *common, "--draft", draft, "--max-new-tokens", 40)
    assert "80 tokens, 78 passes, tau 1.00" in notes
    for cause in (
        "0.00 drafts a round accepted: almost none. Likely causes",
        "another target",
        "taps",
        "rotary base",
        "norm flags",
        "vocabulary map",
        "chat template",
        "untrained",
    ):
        assert cause in notes
    # Too few passes to judge by, and nothing to judge.
    for arguments in (("--draft", draft, "--max-new-tokens", 20), ("--max-new-tokens", 40)):
        assert "almost none. Likely causes" not in run(capsys, *common, *arguments)[2]


def test_the_generation_configs_end_tokens_end_an_answer_unless_ignored(folders, capsys, tmp_path):
    target = shutil.copytree(folders[0], tmp_path / "target")
    common = ("generate", "--target", target, "--prompt", "hello", "--max-new-tokens", 32, "--json")
    free = json.loads(run(capsys, *common, "--ignore-eos")[1])["token_ids"]
    end = free[4]
    settings = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [7, end]}))
    answer = json.loads(run(capsys, *common)[1])
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == free[: free.index(end) + 1]
    ignored = json.loads(run(capsys, *common, "--ignore-eos")[1])
    assert ignored["finish_reason"] == "length"
    assert ignored["token_ids"] == free
    assert len(free) == 32


def test_an_absent_device_is_refused_at_once(folders):
    command = ["-m", "eagle3_jax.cli", "generate", "--device", "gpu"]
    done = subprocess.run(
        [sys.executable, *command, "--target", str(folders[0]), "--prompt", "x"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("eagle3-jax: expected a gpu device; found ")
    assert done.stdout == ""


def broken_target(folder: Path, target: Path, how: str) -> Path:
    shutil.copytree(target, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "foreign":
        weights.write_bytes(b"PK" + weights.read_bytes()[2:])
    elif how == "quantised":
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}})
        )
    elif how == "not json":
        config.write_text("{")
    elif how == "shape":
        tensors = load_file(weights)
        tensors["model.norm.weight"] = np.zeros(3, np.float32)
        save_file(tensors, weights)
    elif how == "unknown tensor":
        save_file(load_file(weights) | {"model.extra.weight": np.zeros(3, np.float32)}, weights)
    elif how == "missing shard":
        names = dict.fromkeys(load_file(weights), "model-00001-of-00002.safetensors")
        weights.rename(folder / "model-00001-of-00002.safetensors")
        names["lm_head.weight"] = "model-00002-of-00002.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    elif how == "rotary":
        # The weights are gone: the config is judged before they are looked for.
        weights.unlink()
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"rope_scaling": {"rope_type": "foo"}, "rope_parameters": None})
        )
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "complete safetensors"),
        ("foreign", "safetensors"),
        ("quantised", "gptq"),
        ("not json", "does not parse"),
        ("shape", "model.norm.weight has shape"),
        ("unknown tensor", "model.extra.weight"),
        ("missing shard", "model-00002-of-00002.safetensors"),
        ("rotary", "foo"),
    ],
)
def test_a_broken_target_is_refused_in_one_paragraph(folders, capsys, tmp_path, how, words):
    broken = broken_target(tmp_path / "broken", folders[0], how)
    code, out, notes = run(capsys, "generate", "--target", broken, "--prompt", "hello")
    assert code == 2
    assert out == ""
    assert words in notes
    assert "Traceback" not in notes
    assert "compiling" not in notes
    last = notes.splitlines()[-1]
    assert last.startswith("eagle3-jax: expected ")
    assert "; found " in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), "empty prompt"),
        (("--prompt", "   "), "empty prompt"),
        (("--prompt", "word " * 400), "context of 128 tokens"),
        (("--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens: 0, which must be at least 1"),
        (("--prompt", "x", "--batch", "many"), "invalid integer value: 'many'"),
        (("--prompt", "x", "--prompts", "y"), "not allowed with"),
        (("--prompt", "x", "--draft-length", "128", "--draft", "DRAFT"), "draft_length below the target's context"),
        (("--prompt", "x", "--top-p", "0"), "top_p"),
        (("--prompt", "x", "--method", "eagle3"), "--draft"),
        (("--prompt", "x", "--draft", "/nowhere"), "/nowhere"),
        (("--prompt", "x", "--device", "tpu"), "tpu"),
        (("--prompts", "/nowhere.jsonl"), "no such file"),
        (("--prompt", "x", "--draft-length", "3"), "--draft or --method lookup with what is to be drafted"),
        (("--prompt", "x", "--draft", "DRAFT", "--tree-nodes", "5"), "no --tree-depth, --tree-top-k"),
        (("--prompt", "x", "--draft", "DRAFT", *TREE, "--draft-length", "3"), "either a chain"),
        (("--prompt", "x", "--draft", "DRAFT", *TREE[:-1], "97"), "tree top-k from 1 to 96; found 97"),
        (("--prompt", "x", "--draft", "DRAFT", *TREE, "--tree-parents", "0,0"), "either a fixed tree"),
        (("--prompt", "x", "--draft", "DRAFT", "--tree-parents", "0,5"), "parent of node 2 a node before it"),
        (("--prompt", "x", "--lookup-nodes", "3"), "an EAGLE-3 draft with --lookup-nodes"),
        (("--prompt", "x", "--draft", "DRAFT", *TREE, "--lookup-nodes", "8"), "more tree nodes than the 8 of lookup"),
        (("--prompt", "x", "--attention", "cudnn"), "a GPU and --dtype bfloat16 for --attention cudnn"),
        (("--prompt", "x", "--logprobs"), "--json with --logprobs"),
        (("--prompt", "x", "--stream", "--json"), "either --stream"),
        (("--prompt", "x", "--stream", "--batch", "2"), "one row at a time"),
    ],
)
def test_bad_arguments_are_refused(folders, capsys, arguments, words):
    arguments = [folders[1] if argument == "DRAFT" else argument for argument in arguments]
    code, out, notes = run(capsys, "generate", "--target", folders[0], *arguments)
    assert code == 2
    assert out == ""
    assert words in notes
    assert "Traceback" not in notes
    assert len([line for line in notes.splitlines() if line.startswith("eagle3-jax: expected ")]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--draft-length": "4,x"}, "invalid list of integers value: '4,x'"),
        ({"--draft-length": "2,0"}, "--draft-length: 2,0, which must be at least 1"),
        ({"--draft-length": "4,4"}, "every value of --draft-length once"),
        ({"--temperatures": "0,x"}, "--temperatures"),
        ({"--temperatures": "0,-1"}, "temperature 0 (greedy) or from"),
        ({"--limit": "0"}, "--limit: 0, which must be at least 1"),
        ({"--tasks": "t=FILE t=FILE"}, "--tasks NAME=PATH, each name once"),
        ({"--methods": "plain,magic"}, "--methods"),
        ({"--batch": "2,2"}, "every value of --batch once"),
        ({"--batch": "1,2"}, "as many prompts in FILE as are decoded together, 2; found 1"),
        ({"--sweep": "", "--draft-length": "3"}, "either --sweep"),
        ({"--out": "FILE"}, "a folder as --out"),
    ],
)
def test_a_bench_that_cannot_be_meant_is_refused_before_anything_is_loaded(
    folders, capsys, tmp_path, monkeypatch, changes, words
):
    monkeypatch.setattr("eagle3_jax.commands.load_target", None)
    file = write_jsonl(tmp_path / "task.jsonl", [{"prompt": "one"}])
    given = {
        "--target": str(folders[0]),
        "--draft": f"d={folders[1]}",
        "--tasks": "t=FILE",
        "--out": str(tmp_path / "out"),
    }
    arguments = [
        part for name, value in (given | changes).items() for part in (name, *value.replace("FILE", str(file)).split())
    ]
    code, out, notes = run(capsys, "bench", *arguments)
    assert (code, out) == (2, "")
    assert words.replace("FILE", str(file)) in notes
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty file"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ("[1]\n", "line 1"),
        ('{"question": "a"}\n', "question"),
    ],
)
def test_an_unusable_prompt_file_is_refused(folders, capsys, tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompts", file)
    assert code == 2
    assert words in notes


def test_tracebacks_are_shown_on_request_only(folders, capsys):
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "", "--debug")
    assert code == 2
    assert "Traceback" in notes


def test_a_draft_given_as_target_and_a_target_given_as_draft_are_named(folders, capsys):
    target, draft = folders
    code, _, notes = run(capsys, "generate", "--target", draft, "--prompt", "x")
    assert (code, "this is an EAGLE-3 draft" in notes) == (2, True)
    # A target given as draft is a small model that drafts; as an EAGLE-3 draft it is refused.
    common = ("generate", "--target", target, "--prompt", "x", "--max-new-tokens", 8)
    assert run(capsys, *common, "--draft", target)[:2] == run(capsys, *common)[:2]
    code, _, notes = run(capsys, *common, "--draft", target, "--method", "eagle3")
    assert (code, "an EAGLE-3 draft for --method eagle3" in notes) == (2, True)


def test_faults_of_ours_and_full_memory_have_their_own_exit_codes(folders, capsys, monkeypatch):
    def fail(error: Exception) -> None:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("eagle3_jax.commands.load_target", raise_it)

    fail(ZeroDivisionError("x"))
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x")
    assert (code, "a fault of ours" in notes) == (1, True)
    fail(RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 5 bytes"))
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x")
    assert (code, "XLA_PYTHON_CLIENT_MEM_FRACTION" in notes) == (2, True)
    # Libraries that cannot start on a full GPU do not say why.
    fail(RuntimeError("INTERNAL: the library cublas was not initialized: CUBLAS_STATUS_NOT_INITIALIZED"))
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x")
    assert (code, "XLA_PYTHON_CLIENT_MEM_FRACTION" in notes) == (2, True)
    message = "Unable to initialize backend 'cuda': INTERNAL: no context: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    with monkeypatch.context() as patch:
        patch.setattr("jax.devices", lambda *_: (_ for _ in ()).throw(RuntimeError(message)))
        code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x")
    assert (code, "XLA_PYTHON_CLIENT_MEM_FRACTION" in notes) == (2, True)
    monkeypatch.setattr("eagle3_jax.commands.load_target", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x")
    assert (code, "interrupted" in notes) == (130, True)


def test_unknown_flags_and_unknown_fields_are_refused(folders, capsys):
    code, _, notes = run(capsys, "generate", "--target", folders[0], "--prompt", "x", "--tempratur", "1")
    assert (code, "--tempratur 1" in notes) == (2, True)
    code, _, notes = run(capsys, "train", "configs/smollm2_135m.py", "--lerning_rate", "1")
    assert (code, "Did you mean --learning_rate?" in notes) == (2, True)
    code, _, notes = run(capsys, "train", "configs/nothing.py")
    assert (code, "configs/smollm2_135m.py" in notes) == (2, True)


def test_line_separators_inside_a_string_do_not_split_a_row(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert prompts.read_jsonl(file) == [{"prompt": "a\u2028b\u0085c"}]


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(InputError, match="other bytes on line 2"):
        prompts.read_jsonl(file)


def test_lists_are_given_at_once_or_one_by_one():
    parse = cli.build_parser().parse_args
    common = ["bench", "--target", "t", "--out", "o"]
    once = parse([*common, "--draft", "a=A", "b=B", "--tasks", "x=X", "y=Y"])
    repeated = parse([*common, "--draft", "a=A", "--draft", "b=B", "--tasks", "x=X", "--tasks", "y=Y"])
    assert vars(once) == vars(repeated)
    assert (once.draft, once.tasks) == (["a=A", "b=B"], ["x=X", "y=Y"])
    assert parse(["generate", "--target", "t", "--prompt", "p", "--stop", "u", "v"]).stop == ["u", "v"]


def test_what_each_form_of_prompt_asks():
    asked = lambda row: list(prompts.read_prompt(row, "row").messages)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert asked({"messages": messages}) == messages
    answered = [*messages, {"role": "assistant", "content": "a"}]
    assert asked({"messages": answered}) == messages
    again = [*answered, {"role": "user", "content": "v"}]
    assert asked({"messages": again}) == again
    assert asked({"turns": ["a", "b"]}) == [{"role": "user", "content": "a"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "u"}]}]
    assert asked({"messages": parts, "prompt": None}) == [{"role": "user", "content": "u"}]
    for bad in ({"messages": [{"role": "user"}]}, {"turns": []}, {"turns": ["a", 3]}, {"prompt": 3}, {}):
        with pytest.raises(InputError):
            asked(bad)


def test_tools_reach_the_prompt_or_are_refused_by_name(tmp_path):
    """Ids as the tokenizer's own template gives them, whatever a message has besides its text."""
    tokenizer = tiny_tokenizers.chatml(tiny_tokenizers.TOOLS_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    function = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "user", "content": "one and one", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "7", "type": "function", "function": function}]},
        {"role": "tool", "content": "two", "tool_call_id": "7"},
    ]
    as_text = json.loads(json.dumps(messages))
    as_text[1] |= {"content": None}
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    for given in (messages, as_text, [*messages, {"role": "assistant", "content": "it is two"}]):
        asked = prompts.read_prompt({"messages": given, "tools": tools}, "row")
        assert list(asked.messages) == messages
        ids = prompts.encode_prompt(tokenizer, asked.messages, "row", tools=asked.tools)
        expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert list(ids) == expected
        text = tokenizer.decode(expected)
        assert all(part in text for part in ('"parameters"', '"arguments"', "<7>", "<ann>"))
    for row, words in (
        ({"prompt": "q", "tools": "add"}, "'tools' that is not a list of objects"),
        ({"messages": [{"role": "user", "content": "q", "function_call": {"a": 1}}]}, "'function_call', which is not"),
    ):
        with pytest.raises(InputError, match=words):
            prompts.read_prompt(row, "row 3")
    plain = tiny_tokenizers.chatml()  # its template knows no tools
    for given, words in ((tools, "shows the 'tools' of row 3"), ([], "shows the 'tool_calls' of row 3")):
        with pytest.raises(InputError, match=words):
            prompts.encode_prompt(plain, messages, "row 3", tools=given)
    with pytest.raises(InputError, match="found 'tools'"):
        prompts.encode_prompt(tokenizer, messages[:1], "row 3", tools=tools, raw=True)
    with pytest.raises(InputError, match="found 'tool_calls'"):
        prompts.encode_prompt(tokenizer, messages, "row 3", raw=True)


def test_generate_and_bench_ask_with_the_tools_of_a_row(folders, capsys, tmp_path, monkeypatch):
    target = shutil.copytree(folders[0], tmp_path / "target")
    tokenizer = tiny_tokenizers.chatml(tiny_tokenizers.TOOLS_TEMPLATE, size=300)
    tokenizer.save_pretrained(target)
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}
    expected = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], add_generation_prompt=True, return_dict=False
    )
    file = write_jsonl(tmp_path / "prompts.jsonl", [row])
    asked: list[Any] = []
    monkeypatch.setattr("eagle3_jax.commands.decode", lambda *models, **_: iter(asked.extend(models[2]) or ()))
    assert run(capsys, "generate", "--target", target, "--prompts", file, "--max-new-tokens", 2)[0] == 0
    assert list(asked[0].tokens) == expected
    tasks: list[Any] = []
    monkeypatch.setattr("eagle3_jax.bench.run_bench", lambda *models, **_: tasks.append(models[3]) or [])
    monkeypatch.setattr("eagle3_jax.commands.render", lambda records: "")
    common = ("bench", "--target", target, "--methods", "plain", "--max-new-tokens", 2, "--out", tmp_path / "out")
    assert run(capsys, *common, "--tasks", f"t={file}")[0] == 0
    assert list(tasks[0]["t"][0]) == expected


def test_from_prompts_to_a_measured_draft(folders, capsys, tmp_path):
    target, _ = folders
    questions = [{"id": n, "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(12)]
    asked, answers = write_jsonl(tmp_path / "questions.jsonl", questions), tmp_path / "answers.jsonl"
    regenerate = ("data", "regenerate", asked, "--target", target, "--out", answers, "--max-new-tokens", 20)
    code, _, _ = run(capsys, *regenerate, "--limit", 4)
    assert code == 0
    whole = answers.read_bytes()
    answers.write_bytes(whole + b'{"id": "4", "resp')  # as an interruption would leave it
    for arguments in (("--batch", 0), ("--batch", 0, "--force"), ("--target", tmp_path)):
        assert run(capsys, *regenerate, *arguments)[0] == 2
    assert answers.read_bytes().startswith(whole)  # refused: nothing is lost
    code, _, notes = run(capsys, *regenerate, "--batch", 4)
    assert (code, "8 prompts to answer, 4 answered before" in notes) == (0, True)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert answers.read_bytes().startswith(whole)
    assert sorted(int(row["id"]) for row in rows) == list(range(12))
    assert all(row["finished"] or row["n_tokens"] == 20 for row in rows)
    _, _, notes = run(capsys, *regenerate, "--force", "--max-prompt-tokens", 1)
    assert "0 prompts to answer, 0 answered before, 12 longer than 1 tokens left out" in notes
    assert len(answers.read_text().splitlines()) == 12  # nothing to put in their place

    fields = ("--target", target, "--data", answers, "--taps", "(0,1,2)", "--row_length", 64, "--batch_rows", 2)
    features, output = tmp_path / "features", tmp_path / "run"
    code, out, notes = run(capsys, "data", "features", "configs/smollm2_135m.py", *fields, "--out", features)
    assert (code, out.strip()) == (0, str(features))
    assert f"{answers}: 12 rows read, 12 kept, 0 dropped. 12 rows encoded: " in notes
    train = (
        "train", "configs/smollm2_135m.py", *fields, "--features", features, "--output", output, "--updates", 4,
        "--schedule", "((2,1),(2,2))", "--warmup", 1, "--held_out_rows", 2, "--draft_vocab_size", 96,
    )  # fmt: skip
    code, out, notes = run(capsys, *train, "--dry-run")
    assert (code, output.exists()) == (0, False)
    sizes = json.loads(out)["bytes_per_device"]
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
    assert sizes["optimiser"] == 2 * (sizes["draft"] - 4 * 96 - 320) + 8  # the vocabulary has no moments
    code, out, notes = run(capsys, *train, "--profile", tmp_path / "profile", "--log_every", 2)
    assert code == 0, notes
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert json.loads(out)["updates"] == 4
    assert "update 4/4 steps 2 loss" in notes
    draft = tmp_path / "draft"
    code, out, _ = run(capsys, "export", output, draft)
    assert (code, out.strip()) == (0, str(draft))
    assert run(capsys, "export", output, draft)[0] == 2
    for place in (output, tmp_path):  # neither is a draft's folder
        code, _, notes = run(capsys, "export", output, place, "--force")
        assert (code, "which is neither" in notes) == (2, True)
    assert (output / "run.json").exists()
    code, out, notes = run(
        capsys, "eval", "--target", target, "--draft", draft, "--data", answers, "--limit", 4, "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert result["decoding"]["tau"] >= 1
    assert len(result["teacher_forced"]["joint"]) == 5
    assert "accepts" not in notes
    # Of what teacher forcing promises a tree must reach as much as a chain: a fifth less is warned about.
    for short, warned in ((0.85, False), (0.75, True)):
        joint = (result["decoding"]["tau"] / short - 1) / 5
        promised = dict.fromkeys(("joint", "conditional", "accuracy", "cross_entropy"), [joint] * 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eagle3_jax.training.evaluation.evaluate_rows", lambda *_, promised=promised: promised)
            code, out, notes = run(
                capsys, "eval", "--target", target, "--draft", draft, "--data", answers, "--limit", 4,
                "--tree-nodes", 6, "--tree-depth", 5, "--tree-top-k", 1,
            )  # fmt: skip
        assert (code, "% less than teacher forcing promises" in notes) == (0, warned)
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["teacher_forced", "decoding"]

    bench = tmp_path / "bench"
    code, out, _ = run(
        capsys, "bench", "--target", target, "--draft", f"mine={draft}", "--tasks", f"t={asked}", "--limit", 3,
        "--methods", "plain,hf,eagle3,sps,lookup", f"--draft=small={target}", "--draft-length", "2,3", *TREE,
        "--max-new-tokens", 10, "--out", bench,
    )  # fmt: skip
    assert code == 0
    records = json.loads((bench / "results.json").read_text())
    assert [record["method"] for record in records] == ["plain", "hf", *["eagle3"] * 3, *["sps"] * 2, *["lookup"] * 2]
    assert records[5]["tau"] == 3.0  # the small model is the target itself
    assert records[4]["tree"] == {"nodes": 9, "depth": 3, "top_k": 3}
    assert len(records[4]["n_alpha"]) == 3
    assert all(record["identical_to_plain"] == 1.0 for record in records)
    assert records[0]["speedup"] == 1.0
    assert len(records[3]["n_alpha"]) == 3
    assert [record["modelled_speedup"] is None for record in records] == [True, True, False, False, False, *[True] * 4]
    assert "| method |" in (bench / "report.md").read_text()
    assert "identical" in out


def test_a_sweep_names_the_fastest_setting_and_batches_are_compared(folders, capsys, tmp_path, monkeypatch):
    target, draft = folders
    monkeypatch.setattr("eagle3_jax.bench.SWEEP", (TreeShape.chain(1), TreeShape(5, 2, 2)))
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"prompt": text} for text in ("one two", "b", "c d e")])
    code, out, notes = run(
        capsys, "bench", "--target", target, "--draft", f"d={draft}", "--tasks", f"t={asked}", "--methods",
        "plain,hf,eagle3,lookup", "--sweep", "--batch", "1,2", "--max-new-tokens", 12, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, notes
    records = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(record["batch"], record["method"]) for record in records] == [
        (1, "plain"), (1, "hf"), (1, "eagle3"), (1, "eagle3"), (1, "lookup"),
        (2, "plain"), (2, "eagle3"), (2, "eagle3"), (2, "lookup"),
    ]  # fmt: skip
    assert all(record["identical_to_plain"] == 1.0 for record in records)
    # Rows do not know of each other.
    assert [record["tau"] for record in records[2:5]] == [record["tau"] for record in records[6:]]
    assert [record["new_tokens"] for record in records] == [records[0]["new_tokens"]] * 9
    assert "## Temperature 0, 2 prompts at a time" in out
    assert out.count("Best of 2 settings of d: eagle3 d ") == 2
    table = out.split("throughput by batch")[1]
    assert "| method | batch 1: tok/s, speedup, tau | batch 2: tok/s, speedup, tau |" in table
    assert len([line for line in table.splitlines() if line.startswith("| eagle3 d ")]) == 2


def test_answers_written_before_are_known_and_nothing_of_them_is_lost(tmp_path):
    file = tmp_path / "answers.jsonl"
    assert answered(file) == set()
    file.write_text('{"id": 1}\n{"id": null}\n{"response": "x"}\n{"id": "b"}')  # whole, but for the last line's end
    assert answered(file) == {"1", "b"}
    assert file.read_text().endswith('{"id": "b"}\n')
    file.write_text('{"id": 1}\n{"id": 2, "resp')
    assert answered(file) == {"1"}
    assert file.read_text() == '{"id": 1}\n'
    for text in ("settings: 1", '{"id": 1}\nsettings\n{"id": 2'):  # some other file: left as it is
        file.write_text(text)
        with pytest.raises(InputError):
            answered(file)
        assert file.read_text() == text


def test_texts_come_in_the_order_of_their_prompts(folders, capsys, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("one two", "b", "c d e")])
    common = ("generate", "--target", folders[0], "--prompts", file, "--max-new-tokens", 8)
    _, expected, _ = run(capsys, *common)
    real = commands.decode
    monkeypatch.setattr(commands, "decode", lambda *args, **options: reversed(list(real(*args, **options))))
    assert run(capsys, *common)[1] == expected


def test_a_config_that_does_not_run_is_refused(capsys, tmp_path):
    for text, words in (("config = (", "SyntaxError"), ("def config():\n    return 1 / 0", "ZeroDivisionError")):
        file = tmp_path / "mine.py"
        file.write_text(text)
        code, _, notes = run(capsys, "train", file)
        assert (code, words in notes, "Traceback" in notes) == (2, True, False)


def test_a_draft_that_serves_longer_than_it_was_trained_says_so(folders, capsys, tmp_path):
    target = load_target(folders[0])
    save_draft(tmp_path / "draft", tiny.draft(target, taps=(0, 1, 2), trained_length=32))
    common = ("generate", "--target", folders[0], "--draft", tmp_path / "draft", "--prompt", "x", "--max-new-tokens")
    assert "the draft was trained on 32" in run(capsys, *common, 40)[2]
    assert "the draft was trained on" not in run(capsys, *common, 4)[2]
    save_draft(tmp_path / "draft", tiny.draft(target, taps=(0, 1, 2), max_position_embeddings=24), force=True)
    code, out, notes = run(capsys, *common, 60)
    assert (code, "the draft was made for 24" in notes) == (0, True)
    assert out == run(capsys, *common[:3], *common[5:], 60)[1]  # the text that plain decoding gives


def test_a_reader_that_goes_away_ends_the_command_quietly():
    code = (
        "import sys\nfrom eagle3_jax import cli, commands\n"
        "commands.generate = lambda args: [print('x' * 100) for _ in range(10000)] and 0\n"
        "sys.exit(cli.main(['generate', '--target', 'x', '--prompt', 'y']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        notes = child.stderr.read()
    assert (child.returncode, notes) == (130, b"")


def test_places_that_cannot_be_written_are_bad_input(folders, capsys, monkeypatch, tmp_path):
    common = ("generate", "--target", folders[0], "--prompt", "x", "--max-new-tokens", 2)
    (tmp_path / "file").write_text("")
    code, _, notes = run(capsys, *common, "--cache-dir", tmp_path / "file")
    assert (code, "a folder for compiled programs" in notes) == (2, True)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        code, _, notes = run(capsys, *common)
    assert (code, "compiled programs are not kept" in notes) == (0, True)
    monkeypatch.setattr("eagle3_jax.commands.load_target", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    code, _, notes = run(capsys, *common)
    assert (code, "can be read and written; found no" in notes) == (2, True)


def test_a_second_process_compiles_nothing_that_the_first_one_did(folders, tmp_path):
    target, draft = folders
    cache = tmp_path / "programs"
    command = [
        sys.executable, "-m", "eagle3_jax.cli", "generate", "--target",
        str(target), "--draft", str(draft), "--prompt", "hello", "--max-new-tokens", "8", "--cache-dir", str(cache),
    ]  # fmt: skip
    kept, texts = [], []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        assert f"compiling (once per shape; kept in {cache}" in done.stderr
        texts.append(done.stdout)
        kept.append(sorted(path.name for path in cache.iterdir() if not path.name.endswith("-atime")))
    assert any("decode_round" in name for name in kept[0])
    assert any("prefill_chunk" in name for name in kept[0])
    assert kept[1] == kept[0]
    assert texts[1] == texts[0]
