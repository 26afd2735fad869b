"""Real weights, out of GGUF: logits, greedy answers and token ids are those of transformers on the same directory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.errors import ModelNotFoundError
from forerun.kernels.reference import ReferenceKernels
from forerun.models.loader import load_model
from forerun.models.locate import locate
from tests.models.test_parity import chunk, one_shot, transformers_model

pytestmark = pytest.mark.model

ALIASES = ["smollm2-135m-instruct", "gemma3-270m"]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    'Here is a JSON object: {"name": "Ada", "born": 1815, "fields": ["mathematics",',
]
TEXTS = [
    *PROMPTS,
    "",
    " leading and trailing ",
    "tabs\tand\n\n\nlines\r\n   and    spaces",
    "naïve café, Straße, 日本語のテキスト, العربية, 😀👩‍👩‍👧 e\u0301",
    "1234567890 3.14159 1,000,000 ½ ²",
    "I'm you're they'll I'D",
    "<|im_start|>user\nhi<|im_end|> <start_of_turn>user\nhi<end_of_turn>",
    "<table><tr> <0x0A> ▁ \x00 \ufeff",
    "x" * 500,
]


@pytest.fixture(scope="module", params=ALIASES)
def pair(request):
    """A real model in fp32, here and in transformers."""
    try:
        locate(request.param)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    model = load_model(request.param, precision="fp32", progress=False)
    return model, transformers_model(model.path)


def prompt_ids(model, text):
    return np.array(model.tokenizer.encode(text))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_are_those_of_transformers(pair, prompt):
    model, reference = pair
    ids = prompt_ids(model, prompt)
    ours = one_shot(model.decoder, ids).cpu()
    with torch.no_grad():
        theirs = reference(torch.from_numpy(ids)[None]).logits[0]
    assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_logits_agree_past_the_sliding_window(pair):
    model, reference = pair
    if all(layer.window is None for layer in model.architecture.layers):
        pytest.skip("this model has no sliding window")
    ids = prompt_ids(model, " ".join(f"{n} plus {n + 1} is {2 * n + 1}." for n in range(50)))
    assert len(ids) > min(layer.window for layer in model.architecture.layers if layer.window) + 50
    slots = np.arange(len(ids))
    batch = replace(chunk(ids, 0, len(ids), slots), logit_rows=slots[-4:])
    ours = model.decoder.forward(batch, model.decoder.new_store(len(ids))).cpu()
    with torch.no_grad():
        theirs = reference(torch.from_numpy(ids)[None], logits_to_keep=4).logits[0]
    assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_greedy_answers_are_those_of_transformers(pair, prompt):
    model, reference = pair
    ids = prompt_ids(model, prompt)
    count = 16
    with torch.no_grad():
        theirs = reference.generate(
            torch.from_numpy(ids)[None],
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=sorted(model.tokenizer.end_token_ids),
        )[0, len(ids) :].tolist()
    slots = np.arange(len(ids) + count)
    store = model.decoder.new_store(len(slots))
    tokens, done, ours = list(ids), 0, []
    while len(ours) < len(theirs):
        logits = model.decoder.forward(chunk(np.array(tokens), done, len(tokens), slots), store)
        done = len(tokens)
        ours.append(int(logits[-1].argmax()))
        tokens.append(ours[-1])
    assert ours == theirs


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_and_text_are_those_of_transformers(pair, text):
    model, _ = pair
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model.path / "tokenizer.json"))
    ids = model.tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(pair, text):
    tokenizer = pair[0].tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    if text.startswith("<table>") and tokenizer.token(105) == "<start_of_turn>":
        pytest.skip("SentencePiece spells a space like the character U+2581")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_is_that_of_transformers(pair):
    model, _ = pair
    if not model.chat_template.available:
        pytest.skip("a base model")
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(model.path)
    for messages in (
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    ):
        prompt = model.chat_template.render(messages)
        assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = model.tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == theirs(prompt, add_special_tokens=False)["input_ids"]


def test_known_ids_of_the_original_tokenizers(pair):
    """From the models' published tokenizers, so that an error in reading GGUF cannot hide behind itself."""
    model, _ = pair
    known = {
        "smollm2-135m-instruct": {
            "The capital of France is": [504, 3575, 282, 4649, 314],
            "def add(a, b): return": [1604, 803, 24, 81, 28, 278, 727, 1003],
        },
        "gemma3-270m": {"The capital of France is": [2, 818, 5279, 529, 7001, 563]},
    }
    for text, ids in known[model.name].items():
        assert model.tokenizer.encode(text) == ids


@pytest.mark.parametrize(("precision", "divergence"), [("int4", 1e-4), ("int8", 0.01)])
def test_quantised_weights_of_the_default_model_answer_as_the_file_s_numbers(precision, divergence):
    """int4 are the file's blocks, nearer to its numbers than bf16 is (1e-4); int8 quantises them once more."""
    name = ALIASES[0]
    exact = load_model(name, precision="fp32", progress=False)
    quantized = load_model(name, precision=precision, kernels=ReferenceKernels("cpu"), device="cpu", progress=False)
    assert quantized.weight_bytes < 0.37 * exact.weight_bytes
    for prompt in PROMPTS:
        ids = prompt_ids(exact, prompt)
        true, mine = (one_shot(model.decoder, ids).cpu().log_softmax(-1) for model in (exact, quantized))
        assert (true.exp() * (true - mine)).sum(-1).mean() < divergence
