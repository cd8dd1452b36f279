"""Texts that tokenizers get wrong, and what other libraries make of them, kept as hashes in golden_tokens.json.

    python -m tests.weights.golden_tokens

writes the file again, from ../shared/data and the embedded model: sentencepiece's own library for its models,
transformers for GPT-2, tokenizers for the embedded model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_suffix(".json")
TEXTS = (
    "", " ", "  ", "\t", "\n\n\n", " \n \r\n\t ", "Hello world", " Hello  world ", "  leading", "trailing  ",
    "def f(x):\n    return x ** 2  # ü\n\n\tif x == 0x1F:\n\t\tpass\n", '<div class="a">&nbsp;{{ x|y }}</div>\r\n',
    "CamelCaseHTTPServer snake_case_v2", "http://a.b/c?d=e&f=%20#g", "!!!???...---===", "a" * 40,
    "日本語のテキスト。中文字符,한국어", "العربية עברית हिन्दी ไทย", "𝒳 𐍈 \U0010ffff",
    "😀👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈 🦙.cpp", "e\u0301 \u00e9 A\u030a ﬁ ① ½",
    "1 22 333 4444 55555 1234567890 3.14159 1,000,000 0x7f ٣٤", "I'm you'LL we've IT'S don’t",
    "\u200b\u00a0x\u3000y\ufeff", "\x01\x7f", "x\u2028y\u0085z", "▁▁x ▁", "Ġx Ċ",
)  # fmt: skip
WITH_SPECIAL = ("<s>a</s> <unk> <|endoftext|> <|im_start|>user\n[INST] x [/INST]", "a</s>b <|end|> c<|im_end|>\n")
Encode = Callable[[str], list[int]]


def digest(encode: Encode, texts: Iterable[str]) -> str:
    """Of the token ids of all texts."""
    return hashlib.sha256(json.dumps([encode(text) for text in texts]).encode()).hexdigest()


def gpt2(folder: Path) -> Any:
    """The tokenizer of transformers for a folder with GPT-2's files."""
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer.from_pretrained(str(folder))


def main() -> None:
    """Write the hashes."""
    import sentencepiece
    import tokenizers

    from forerun.weights.resolve import resolve_model
    from tests.support.shared import DATA

    found, real = {}, DATA / "tokenizers"
    for name in ("llama2/tokenizer.model", "mistral/tokenizer.model.v1", "mistral/tokenizer.model.v3"):
        library = sentencepiece.SentencePieceProcessor(model_file=str(real / name))
        found[name] = digest(library.encode, TEXTS)
    library = gpt2(real / "gpt2")
    found["gpt2"] = digest(lambda text: library.encode(text, add_special_tokens=False), (*TEXTS, *WITH_SPECIAL))
    library = tokenizers.Tokenizer.from_file(str(resolve_model("mini") / "tokenizer.json"))
    found["mini"] = digest(lambda text: library.encode(text, add_special_tokens=False).ids, (*TEXTS, *WITH_SPECIAL))
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
