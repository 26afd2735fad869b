"""A tokenizer for the tiny models, and a tiny model saved with it: for tests of text, stops and the LLM front."""

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forerun.models.tokenizer import Tokenizer
from tests.models.tiny import save_tiny_model

BEGIN, END = 0, 1
TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind",
    "a step is one forward pass; a draft is a guess; a guess that is right is free",
    "one two three four five six seven eight nine ten eleven twelve",
    'naïve café, "straße", 日本語のテキスト, 😀😃',
]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@cache
def inner_tokenizer():
    """Byte-level BPE with two special tokens, every byte, and merges up to 512 tokens at most."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TRAINING_TEXT, trainer)
    return inner


@cache
def tokenizer():
    """It adds nothing to a text, and names no end token."""
    return Tokenizer(inner_tokenizer())


def byte_tokens(text):
    """One token per byte of a text, so that characters are cut too."""
    alphabet = {tokenizer().token_bytes(token): token for token in range(2, 258)}
    return [alphabet[bytes([byte])] for byte in text.encode("utf-8")]


def save_talking_model(directory, *, seed=0, chat_template=CHAT_TEMPLATE, **overrides):
    """A tiny model in a directory as users have them: config, weights, tokenizer and chat template."""
    save_tiny_model(directory, seed=seed, **overrides)
    inner_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)
