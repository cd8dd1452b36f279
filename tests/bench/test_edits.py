"""What a prediction brings: the predictions that are made, and one small measurement."""

from __future__ import annotations

import random
from argparse import Namespace

import edits

from tests.support import mini


def test_a_share_of_the_tokens_is_changed() -> None:
    llm = mini.plain()
    truth = llm.tokenizer.encode("The little fox went to the old market and met two dogs. " * 8)
    text = edits.edited(llm, truth, 0.05, random.Random(3))
    predicted = llm.tokenizer.encode(text)
    assert edits.edited(llm, truth, 0.0, random.Random(3)) == llm.tokenizer.decode(truth)
    assert 0 < edits.num_wrong(predicted, truth) <= 0.1 * len(truth)
    assert edits.num_wrong(truth, truth) == 0 and edits.num_wrong([1, 2, 9, 4], [1, 2, 3, 4, 5]) == 2
    assert edits.num_wrong([1, 2, 9, 3, 9], [1, 2, 3]) == 2  # what was added counts


def test_predictions_are_measured_beside_plain_decoding() -> None:
    given = Namespace(model="mini", tokens=40, changed=0.05, num=2, drafter="suffix", max_draft_tokens=24,
                      temperature=0.7, seed=0)  # fmt: skip
    result = edits.measured(mini.plain(), given)
    assert result["equal"] and result["tokens"] == [40, 40]
    steps = {row["engine"]: row["tokens_per_step"] for row in result["rows"]}
    assert steps[edits.PLAIN] == 1.0 and steps[edits.PREDICTED] > max(1.5, steps[edits.DRAFTED])
    machine = {"cpu": "x", "cores": 2, "kernels": "k", "commit": "c", "date": "d"}
    lines = edits.markdown({**result, "machine": machine, "command": "c"}).splitlines()
    assert lines[0].startswith("2 texts of 40 to 40 tokens") and lines[-1] == "c"
    assert [line.split(" | ")[0] for line in lines[4:7]] == [f"| {row['engine']}" for row in result["rows"]]
