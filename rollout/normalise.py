"""Owns how answers are compared: normalisers, exact match and F1.

| rule | before comparing |
|---|---|
| squad_ascii | lower; drop string.punctuation; drop a, an, the; collapse spaces (the SQuAD script) |
| hotpot_ascii | as squad_ascii; F1 is 0 where one side is exactly yes, no or noanswer and the sides differ |
| unicode_p | lower; drop Unicode category P; drop a, an, the; collapse spaces |
| careful | NFC, then unicode_p; text that would vanish altogether keeps its own letters |
| characters | as careful; F1 counts characters, for languages that write no spaces |
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from core.errors import ConfigError

ARTICLES = re.compile(r"\b(a|an|the)\b")
ASCII_PUNCTUATION = frozenset(string.punctuation)
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


class Rule(NamedTuple):
    """One way of comparing answers."""

    name: str
    normalise: Callable[[str], str]
    tokens: Callable[[str], list[str]]
    """Of a normalised answer, for F1."""
    closed_answers: bool = False


def squad_ascii(text: str) -> str:
    """Normalise as the SQuAD script does."""
    return _tidy("".join(c for c in text.lower() if c not in ASCII_PUNCTUATION))


def unicode_p(text: str) -> str:
    """Normalise with punctuation as Unicode has it: signs such as $ and + stay."""
    return _tidy("".join(c for c in text.lower() if not unicodedata.category(c).startswith("P")))


def careful(text: str) -> str:
    """Normalise as unicode_p over NFC; text that it would erase is only lowered and collapsed."""
    composed = unicodedata.normalize("NFC", text)
    return unicode_p(composed) or " ".join(composed.lower().split())


def _tidy(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text).split())


def _characters(text: str) -> list[str]:
    return [c for c in text if not c.isspace()]


RULES = {
    rule.name: rule
    for rule in (
        Rule("squad_ascii", squad_ascii, str.split),
        Rule("hotpot_ascii", squad_ascii, str.split, closed_answers=True),
        Rule("unicode_p", unicode_p, str.split),
        Rule("careful", careful, str.split),
        Rule("characters", careful, _characters),
    )
}


def get_rule(name: str) -> Rule:
    """Return a rule by name; raises ConfigError naming the known ones."""
    if name not in RULES:
        raise ConfigError(f"no normaliser {name!r}, expected one of {', '.join(RULES)}")
    return RULES[name]


def exact_match(answer: str, references: Sequence[str], rule: Rule) -> bool:
    """Tell whether the answer equals a reference once both are normalised."""
    said = rule.normalise(answer)
    return any(said == rule.normalise(reference) for reference in references)


def f1(answer: str, references: Sequence[str], rule: Rule) -> float:
    """Return the best F1 over the references, 0..1: tokens as bags, so a repeated word counts twice."""
    return max((_f1(rule.normalise(answer), rule.normalise(each), rule) for each in references), default=0.0)


def _f1(said: str, wanted: str, rule: Rule) -> float:
    if rule.closed_answers and said != wanted and {said, wanted} & CLOSED_ANSWERS:
        return 0.0
    said_tokens, wanted_tokens = rule.tokens(said), rule.tokens(wanted)
    if not said_tokens or not wanted_tokens:
        return float(said_tokens == wanted_tokens)
    shared = (Counter(said_tokens) & Counter(wanted_tokens)).total()
    return 2 * shared / (len(said_tokens) + len(wanted_tokens))
