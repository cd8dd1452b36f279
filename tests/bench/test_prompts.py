"""Prompt files: every format, and what is said about a bad line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.bench.prompts import NO_CATEGORY, read_prompts, spread
from forerun.errors import DataError


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_spec_bench_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 1, "category": "maths", "turns": ["a", "b"], "reference": ["c"]})
    [case] = read_prompts(path)
    assert case.turns == ("a", "b") and case.is_chat and case.category == "maths"
    assert case.place == f"{path}:1"


def test_human_eval_lines_keep_their_spaces(tmp_path: Path) -> None:
    [case] = read_prompts(write(tmp_path, {"task_id": "HumanEval/0", "prompt": "def f():\n    "}))
    assert case.turns == ("def f():\n    ",) and not case.is_chat and case.category == NO_CATEGORY


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    cases = read_prompts(write(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}))
    assert [case.place.rpartition(":")[2] for case in cases] == ["1", "3"]


def test_only_newlines_end_lines_and_a_byte_order_mark_is_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert [(case.turns, case.place) for case in read_prompts(path)] == [
        (("a\u2028b\x85c",), f"{path}:1"), (("d",), f"{path}:2"),
    ]  # fmt: skip


def test_own_prompts_are_there() -> None:
    cases = read_prompts(None)
    assert len(cases) == 12 and all(case.category != NO_CATEGORY for case in cases)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1]", "a list, not an object"),
        ({"text": "a"}, "neither turns nor prompt, but text"),
        ({"turns": []}, "turns is empty"),
        ({"turns": ["a", 3]}, "turns is empty or not text"),
        ({"turns": "a"}, "turns is empty or not text"),
        ({"prompt": " "}, "prompt is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert f"{path}:2: " in str(caught.value) and said in str(caught.value)


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the prompt file .*none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(tmp_path / "binary")


def test_a_limit_spreads_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": str(i)} for i in range(10)))
    assert [case.turns[0] for case in read_prompts(path, 3)] == ["0", "3", "6"]
    assert len(read_prompts(path, 99)) == 10
    with pytest.raises(DataError, match="limit must be 1 or more"):
        spread(read_prompts(path), 0)
