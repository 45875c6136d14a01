"""Small tokenizers of the three kinds that targets have, built in memory: no file and no network is needed."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_TEMPLATE = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content']"
    " | trim + '<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CORPUS = (
    "user system assistant the quick brown fox jumps over the lazy dog",
    "one two three four five six seven eight nine ten red green blue",
    "Be kind. Hello, how are you? I am fine, thank you. héllo wörld — 日本語 🙂",
)

# Without a default system prompt, so that a conversation fits into few tokens.
SHORT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Shows tools, who speaks, calls, and which call a result answers.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for key in ('name', 'tool_call_id') %}{% if key in m %}"
    "<{{ m[key] }}>{% endif %}{% endfor %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}call {{ call['function'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level(special: list[str], size: int = 400) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def chatml(template: str | None = CHATML_TEMPLATE, size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML markers, of at most `size` tokens; its BOS is the marker that opens every turn, as
    SmolLM2's."""
    backend = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=template
    )


def llama3(template: str | None = LLAMA3_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds a BOS to every text, with a template that writes the BOS too."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = _byte_level(names)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        extra_special_tokens=names[1:4],
        chat_template=template,
    )


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2 style: spaces as a mark in front of words, unknown characters as byte tokens, first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghij.", "▁a", "▁b", "cd"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("c", "d")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
