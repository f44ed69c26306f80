"""Builds the tokenizer of the shipped base model, as files that AutoTokenizer loads offline.

A byte-level BPE: all 256 bytes are in the vocabulary and nothing is normalised, so any Unicode text
is encoded without loss. Merges are learnt from english.txt; the words of the generated world and of
its prompts are whole tokens; and the long fixed phrases of the Qwen3.5 chat template (tool preamble,
frames of calls and results) are single non-special tokens, so that the demo's prompt costs a few
tens of tokens instead of a thousand.
"""

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.embedded.prompts import DEMO, SEARCH_TOOL, fixed_texts
from engine.embedded.spelling import EOS
from engine.embedded.world import ENTITIES, RELATIONS

PAD: Final = "<|endoftext|>"
SPECIAL: Final = (PAD, "<|im_start|>", EOS)
TAGS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)
FRAMES: Final = (
    "<tool_call>\n<function=search>\n<parameter=query>\n",
    "\n</parameter>\n</function>\n</tool_call>",
    "user\n<tool_response>\n",
    "\n</tool_response>",
    "assistant\n<think>\n\n</think>\n\n",
    "Answer:",
)
"""Fixed pieces of calls, results and answers; each is one token."""
WORD_PATTERN: Final = (
    r"\n?\[[1-9]\]"  # the number of a result, with the line break before it
    r"|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as GPT-2
)
RESULT_NUMBERS: Final = range(1, 6)

LEARNT_TOKENS: Final = 256 + 768
"""Size of the byte-level vocabulary before world words: 256 bytes and 768 merges."""
LONGEST_TEXT: Final = 1_000_000
"""Tokens above which transformers warns; the model's context is checked where it matters."""
QUESTION_WORDS: Final = ("What", "Who", "is", "the", "of", "The", "user", "assistant", "system")

_HERE: Final = Path(__file__).parent
ENGLISH: Final = _HERE / "english.txt"
TEMPLATE: Final = _HERE / "base" / "chat_template.jinja"


def _splitter() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _learn_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Learn merges from english.txt; returns the pieces in id order and the merges in rank order."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train([str(ENGLISH)], trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [(left, right) for left, right in model["merges"]]


def _word_pieces() -> list[str]:
    """List world and prompt words, bare and after a space, and result numbers, in byte-level spelling."""
    relations = [relation.name for relation in RELATIONS]
    names = [name for kind in ENTITIES.values() for name in kind]
    words = [*names, *relations, *QUESTION_WORDS]
    numbers = [f"{line}[{n}]" for n in RESULT_NUMBERS for line in ("", "Ċ")]
    return [*(piece for word in words for piece in (word, "Ġ" + word)), *numbers]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST_TEXT,
    )
    wrapped.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return wrapped


def _preamble_phrases(tokenizer: Tokenizer) -> list[str]:
    """Cut the template's system message with the search tool into its long fixed pieces."""
    messages = [{"role": "system", "content": DEMO.system}, {"role": "user", "content": "?"}]
    text = _wrap(tokenizer).apply_chat_template(messages, tools=[SEARCH_TOOL], tokenize=False)
    system = text.split("<|im_start|>")[1].split(EOS)[0]
    tool_start = system.index("\n{")
    tool_end = system.index("\n</tools>", tool_start)
    prompt_start = system.index("\n\n" + DEMO.system)
    return [
        system[:tool_start],
        system[tool_start:tool_end],
        system[tool_end:prompt_start],
    ]


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer; the same files on every machine."""
    pieces, merges = _learn_pieces()
    known = set(pieces)
    pieces += [piece for piece in dict.fromkeys(_word_pieces()) if piece not in known]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # ignore_merges: a whole word that is in the vocabulary is taken as it is
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    phrases = [*TAGS, *FRAMES, *_preamble_phrases(tokenizer), *fixed_texts()]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in phrases])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST_TEXT,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
