"""The shipped tokenizer: lossless, offline, and cheap on the demo's prompt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.compute import BaseModel
from engine.embedded.frames import make_frame
from engine.embedded.prompts import DEMO, SEARCH_TOOL, fixed_texts
from engine.embedded.tokenizer import FRAMES, TAGS, save_tokenizer
from engine.embedded.world import ENTITIES, RELATIONS

TOKENIZER = AutoTokenizer.from_pretrained(BASE_FOLDER)
BASE = BaseModel.load()
HOTPOT = Path("../shared/data/hotpotqa-100/corpus.jsonl")
QWEN = Path("../shared/tokenizers/qwen3.5")


def demo_text(tokenizer: object, **more: object) -> str:
    """Render the demo's conversation after one search."""
    messages = [
        {"role": "system", "content": DEMO.system},
        {"role": "user", "content": "Who is the mayor of the capital of Zorvia?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "search", "arguments": {"query": "capital of Zorvia"}}}],
        },
        {"role": "tool", "content": "[1] The capital of Zorvia is Melk.\n[2] Nothing else."},
    ]
    text = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, tools=[SEARCH_TOOL], add_generation_prompt=True, tokenize=False, **more
    )
    assert isinstance(text, str)
    return text


@given(st.text())
def test_any_text_survives(text: str) -> None:
    """Decoding what was encoded gives the text back, and tokens spell its UTF-8 bytes."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(BASE.token_bytes[i] for i in ids) == text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing  spaces \t\n",
        "e\u0301 is not \u00e9; \ufb01 stays; \u212b too",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u202eabc \x00\x7f\ufeff",
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n",
        "don 't , do n't .",
    ],
)
def test_awkward_text_survives(text: str) -> None:
    """No normalisation, no clean-up of spaces, protocol tokens included."""
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_all_bytes_are_tokens() -> None:
    """Every byte has a token of its own."""
    assert {bytes([byte]) for byte in range(256)} <= set(BASE.token_bytes)


def test_world_words_and_frames_are_single_tokens() -> None:
    """Names, relations and the fixed pieces of the protocols cost one token each."""
    names = [name for kind in ENTITIES.values() for name in kind]
    names += [relation.name for relation in RELATIONS]
    for text in [*names, *(" " + name for name in names), *TAGS, *FRAMES, *fixed_texts(), "\n[2]", "[1]"]:
        assert len(TOKENIZER.encode(text, add_special_tokens=False)) == 1, text


def test_the_demo_prompt_is_short() -> None:
    """System prompt, tools and question together cost a few tens of tokens, and render exactly."""
    text = demo_text(TOKENIZER, enable_thinking=False)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) < 70
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_have_their_roles() -> None:
    """The end of turn is eos, the end of text pads, and only protocol markers are special."""
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"
    assert TOKENIZER.eos_token_id == BASE.eos
    kept = TOKENIZER.decode(TOKENIZER.encode("<tool_call>a<|im_end|>"), skip_special_tokens=True)
    assert kept == "<tool_call>a"


def test_the_template_is_qwens() -> None:
    """The same conversation renders as with the real Qwen3.5 tokenizer."""
    if not QWEN.exists():
        pytest.skip(f"{QWEN} is not there")
    real = AutoTokenizer.from_pretrained(QWEN)
    for thinking in (True, False):
        ours = demo_text(TOKENIZER, enable_thinking=thinking)
        assert ours == demo_text(real, enable_thinking=thinking)


def test_real_passages_fit() -> None:
    """At least 2.1 characters a token: three passages of 500 characters fit twice into the context."""
    if not HOTPOT.exists():
        pytest.skip(f"{HOTPOT} is not there")
    texts = [json.loads(line)["contents"] for line in HOTPOT.read_text(encoding="utf-8").splitlines()]
    encoded = BASE.tokenizer.encode_batch(texts)
    assert [BASE.tokenizer.decode(e.ids) for e in encoded] == texts
    assert sum(map(len, texts)) / sum(len(e.ids) for e in encoded) > 2.1


def test_rebuilding_gives_the_shipped_files(tmp_path: Path) -> None:
    """The shipped tokenizer is what the code builds, byte for byte."""
    save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (BASE_FOLDER / name).read_bytes(), name


def test_modelscope_loads_it_offline() -> None:
    """The class that the SDK uses opens the folder without a network."""
    program = (
        "from modelscope import AutoTokenizer\n"
        f"t = AutoTokenizer.from_pretrained({str(BASE_FOLDER)!r})\n"
        "print(len(t), t.decode(t.encode('héllo <|im_end|>')), 'tool' in t.chat_template)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.stdout.split("\n")[-2] == f"{BASE.vocab_size} héllo <|im_end|> True"


def test_frames_rejoin_to_the_template() -> None:
    """The pieces that pretraining fills in are exactly the template's text."""
    frame = make_frame(TOKENIZER, DEMO)
    before, after = frame.results
    rebuilt = (
        frame.before_question
        + "Who is the mayor of the capital of Zorvia?"
        + frame.after_question
        + frame.query.format("capital of Zorvia")
        + before
        + "[1] The capital of Zorvia is Melk.\n[2] Nothing else."
        + after
    )
    assert rebuilt == demo_text(TOKENIZER, enable_thinking=False)
