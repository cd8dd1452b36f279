"""Replays recorded drafts under a policy, with a clock of recorded costs: seconds instead of hours, and no noise.

    python benchmarks/simulate.py [--machine 1b-int4] [--work short] [--seeds 2]
    python benchmarks/simulate.py --record --prompts question.jsonl

At every position of texts of `mini` it is known what each drafter would propose, how sure it would be, and which
tokens really followed (`traces/mini.json.xz`, written by `--record`). A portfolio of drafters that read from there runs
under a policy, and what passes and calls take comes from a table (`traces/costs.json`, milliseconds). Widening a model
changes its costs, not its text, so the same traces serve a larger model.

Five kinds of work: `spec`, Spec-Bench prompts one by one; `short`, answers of 20 to 40 tokens to prompts of 300;
`batch`, 16 requests at once; and, only if asked for, `spec` on a machine that is slow at first, for the time of 400
passes of a quiet one: `busy`, all takes 2, 3.5 or 8 times as long; `shared`, others have it for 3 to 9 of every 6 to 12
ms, so that many passes of `mini` are as fast as ever and some take very long. Printed is decoding speed over plain and
over the best fixed number of drafts, for a new policy (`new`; of `busy` and `shared` when all texts were written once,
the slow time among it) and for one that has seen the same kind of work (`known`), then geometric means and the worst.

To try another policy, change `policy_for`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.prompts import read_prompts, spread
from forerun.core import Request
from forerun.drafters.base import Stateless
from forerun.drafters.portfolio import Member, Portfolio
from forerun.policy.base import Outcome, Policy, StepResult, StepSeconds
from forerun.policy.costs import CallCosts, Costs, PassCosts
from forerun.policy.fixed import FixedPolicy
from forerun.policy.policy import AdaptivePolicy
from forerun.speculation.draft import Draft

TRACES, COSTS = (Path(__file__).parent / "traces" / name for name in ("mini.json.xz", "costs.json"))
WORKS, TEMPERATURES = ("spec", "short", "batch", "busy", "shared"), (0.0, 0.7, 1.0)
MEMBERS = {"draft": ("draft",), "eagle": ("eagle",), "suffix": ("suffix",), "portfolio": ("suffix", "draft")}
MOST = {"draft": 8, "eagle": 8, "suffix": 12, "portfolio": 16}  # drafts, as by default
FIXED = (1, 2, 3, 4, 6, 8)
NOISE, HICCUP = 0.03, 0.01  # of times: standard deviation, and share of them that is half as long again
BUSY, BUSY_STEPS, BUSY_NOISE = (2.0, 3.5, 8.0), 400, 0.3  # how slow, for the time of how many quiet passes, how uneven
SHARED, SLICE_MS = (2.0, 3.0, 4.0), 3.0  # how slow, as other processes run in turns; for how long each runs
SLOWED = {"busy": BUSY, "shared": SHARED}
VOCAB_SIZE = 1 << 16  # more than any token of the traces
HALVES = {"all": slice(None), "choose": slice(0, None, 2), "report": slice(1, None, 2)}
SCALE = 20  # log chances are kept as whole numbers, times this


# -- the recorded machine -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Machine:
    """A clock, and what moves it on."""

    costs: Mapping[str, Any]
    seed: int
    slowed: float = 1.0  # by something that runs beside it at first
    slice_s: float = 0.0  # for which it runs before it waits for the others; 0: all is slowed alike
    now_s: float = 0.0
    passes: PassCosts = field(init=False)
    _random: random.Random = field(init=False)
    _slice_left_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.passes = PassCosts({int(rows): ms / 1e3 for rows, ms in self.costs["pass"].items()})

    def spend(self, ms: float) -> float:
        """Let so much time pass, more or less -> seconds."""
        factor = max(self._random.gauss(1.0, NOISE), 1.0 - 3 * NOISE) * (1.5 if self._random.random() < HICCUP else 1.0)
        if self.slowed > 1.0 and self.now_s < BUSY_STEPS * self.passes(1):
            if self.slice_s > 0.0:
                return self._share(factor * ms / 1e3)
            factor *= self.slowed * math.exp(self._random.gauss(0.0, BUSY_NOISE))
        self.now_s += factor * ms / 1e3
        return factor * ms / 1e3

    def _share(self, seconds: float) -> float:
        """So long, and how long others run between."""
        took, self._slice_left_s = seconds, self._slice_left_s - seconds
        while self._slice_left_s < 0.0:
            run_s = self.slice_s * math.exp(self._random.gauss(0.0, BUSY_NOISE))
            took += (self.slowed - 1.0) * run_s
            self._slice_left_s += run_s
        self.now_s += took
        return took

    def spend_step(self, num_requests: int, num_rows: int, drafts: bool, plans: bool) -> float:
        """A pass and all around it, calls of drafters apart -> seconds."""
        c = self.costs
        ms = 1e3 * self.passes(num_rows) * (c["after_drafts"] if drafts else 1.0) + c["step"] + c["row"] * num_rows
        if drafts:
            ms += c["drafted"] * (1.0 + 0.05 * num_requests)
        if plans:
            ms += c["planned"] * (1.0 + 0.1 * num_requests) if drafts else c["resting"]
        return self.spend(ms)

    def call_ms(self, member: str, num_requests: int, levels: int, num_read: int) -> float:
        """A call of a drafter."""
        of_call, of_level, of_request, of_token = self.costs["calls"][member]
        shared = of_level * levels * math.sqrt(1.0 + 0.15 * (num_requests - 1))
        return float(of_call + shared + of_request * num_requests + of_token * num_read)


class Replay(Stateless):
    """A drafter that proposes what was recorded: of its tree the likeliest nodes, as far as levels promise enough."""

    def __init__(self, name: str, trace: str, machine: Machine, texts: Mapping[str, Mapping[str, Any]]) -> None:
        self.name, self.max_nodes, self.weight_bytes = name, MOST[name] + 1, int(name != "suffix")
        self._trace, self._machine, self._texts = trace, machine, texts
        self._num_read: dict[str, int] = {}

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Read what was missed, add the nodes, spend the time."""
        levels = num_read = 0
        for draft in drafts:
            request, num_known = draft.request, len(draft.request.token_ids)
            lag, self._num_read[request.request_id] = num_known - self._num_read.get(request.request_id, 0), num_known
            draft.num_caught_up = lag if lag > self.max_nodes else 0
            recorded = self._texts[request.request_id]["drafts"][self._trace]
            levels = max(levels, self._add(draft, recorded[request.num_output]))
            num_read += lag
        self._machine.spend(self._machine.call_ms(self.name, len(drafts), levels, num_read))

    def _add(self, draft: Draft, nodes: Sequence[tuple[int, int, int]]) -> int:
        """-> levels drawn."""
        depths = [0]
        for _, parent, _ in nodes:
            depths.append(depths[parent] + 1)
        levels = max(depths)
        if self.weight_bytes:
            ends = [sum(math.exp(-c / SCALE) for (*_, c), d in zip(nodes, depths[1:], strict=True) if d == level)
                    for level in range(1, levels + 1)]  # fmt: skip
            levels = next((level for level, end in enumerate(ends, 1) if end < draft.least), levels)
        kept, places = list[int](), {0: 0}
        for index in sorted(range(len(nodes)), key=lambda index: (nodes[index][2], index)):
            if len(kept) < draft.num_free and depths[index + 1] <= levels and nodes[index][1] in {0, *kept}:
                kept.append(index + 1)
        for index in sorted(kept):
            token, parent, chance = nodes[index - 1]
            places[index] = draft.add(places[parent], token, -chance / SCALE)
        return max((depths[index] for index in kept), default=0)


def policy_for(members: Sequence[str], most: int, machine: Machine) -> Policy:
    """As the engine builds one: passes and calls were timed alone, which is quicker than in the running engine."""
    alone = machine.costs["alone"]
    timed = {rows: alone * seconds for rows, seconds in machine.passes.points.items() if rows <= 64}
    costs = Costs(PassCosts(timed))
    for member in members:
        costs.calls[member] = CallCosts(draws_levels=member != "suffix")
        if member != "suffix":
            for size in (1, 2, 4, 8):
                costs.calls[member].expect(size, size, alone * machine.call_ms(member, 1, size, 0) / 1e3)
            costs.calls[member].expect_reading(1, machine.costs["calls"][member][-1] / 1e3)
    return AdaptivePolicy(most + 1, costs, may_prune=True)


# -- running --------------------------------------------------------------------------------------------------------


def decode(policy: Policy, members: Sequence[str], texts: Sequence[Mapping[str, Any]], machine: Machine, batch: bool
) -> float:  # fmt: skip
    """Write all texts, one by one or together -> seconds."""
    requests = [_request(index, text) for index, text in enumerate(texts)]
    by_id = {request.request_id: text for request, text in zip(requests, texts, strict=True)}
    trace = {"draft": machine.costs["draft_trace"]}
    drafters = [Replay(member, trace.get(member, member), machine, by_id) for member in members]
    guarded = [Member(drafter, VOCAB_SIZE) for drafter in drafters]
    portfolio = Portfolio(guarded, "portfolio", 64, coupled=True, clock=lambda: machine.now_s)
    began = machine.now_s
    for group in [requests] if batch else [[request] for request in requests]:
        while group:
            _step(policy, portfolio, group, by_id, machine)
            group = [request for request in group if request.finish_reason is None]
    return machine.now_s - began


def _request(index: int, text: Mapping[str, Any]) -> Request:
    """One that has its first token, which came with the prompt."""
    prompt, tokens = (0,) * text["prompt"], text["tokens"]
    request = Request(str(index), prompt, SamplingParams(), seed=0, max_len=len(prompt) + len(tokens))
    request.token_ids.append(tokens[0])
    return request


def _step(
    policy: Policy, portfolio: Portfolio, requests: Sequence[Request], texts: Mapping[str, Any], machine: Machine
) -> None:
    plan, began = policy.plan(requests), machine.now_s
    drafts = [Draft(r, max(1, min(plan.max_nodes(r), r.num_remaining)), plan=plan) for r in requests]
    growing = [draft for draft in drafts if draft.max_nodes > 1]
    if growing:
        portfolio.propose(growing)
        plan.prune(growing)
    calls, draft_s = portfolio.take_calls(), machine.now_s - began
    num_rows = sum(draft.num_nodes for draft in drafts)
    verify_s = machine.spend_step(len(requests), num_rows, bool(calls), isinstance(policy, AdaptivePolicy))
    outcomes = [_accept(draft, texts[draft.request.request_id]["tokens"]) for draft in drafts]
    step_s = machine.now_s - began
    policy.learn(StepResult(outcomes, calls, num_rows, 0, StepSeconds(draft_s, verify_s, step_s, step_s)))


def _accept(draft: Draft, text: Sequence[int]) -> Outcome:
    """Walk along the tokens that followed."""
    request, node, emitted = draft.request, 0, list[int]()
    for token in text[request.num_output :]:
        emitted.append(token)
        child = draft.tree.child_with(node, token)
        if child is None or child not in draft.verified:
            break
        node = child
    request.token_ids += emitted
    if request.num_remaining == 0:
        request.finish_reason = "length"
    return Outcome(request, draft, emitted)


def measure(machine_costs: Mapping[str, Any], drafter: str, texts: Sequence[Any], work: str, seeds: int) -> Any:
    """-> speeds over plain: of each fixed number, of a new policy and of one that knows the work."""
    members = MEMBERS[drafter]

    def run(policy: Callable[[Machine], Policy], seed: int = 0, times: int = 1, slowed: float = 1.0) -> list[float]:
        machine = Machine(machine_costs, seed, slowed, SLICE_MS / 1e3 if work == "shared" else 0.0)
        made = policy(machine)
        return [decode(made, members, texts, machine, work == "batch") for _ in range(times)]

    def fixed_s(num_drafts: int) -> float:
        return run(lambda _: FixedPolicy(1 + num_drafts))[0]

    plain_s = fixed_s(0)
    fixed = {num: plain_s / fixed_s(num) for num in FIXED}
    slow_first = work in SLOWED
    took = [run(lambda machine: policy_for(members, MOST[drafter], machine), seed, 2 + slow_first, slowed)[slow_first:]
            for seed, slowed in product(range(seeds), SLOWED.get(work, (1.0,)))]  # fmt: skip
    new, known = (plain_s / (sum(seconds) / len(took)) for seconds in zip(*took, strict=True))
    return fixed, new, known


def compare(machines: Sequence[str], works: Sequence[str], seeds: int, half: str) -> None:
    """Print a line a case, then what they come to."""
    traces, costs = json.loads(lzma.decompress(TRACES.read_bytes())), json.loads(COSTS.read_text("utf-8"))
    for name in machines:
        over_best: dict[str, list[float]] = {"new": [], "known": []}
        least_of_plain = math.inf
        print(f"{name:8} {'drafter':9} work     T  best fixed     new           known")
        for work, drafter, temperature in product(works, MEMBERS, TEMPERATURES):
            kind = "short" if work == "short" else "spec"
            texts = [text for text in traces if (text["work"], text["temperature"]) == (kind, temperature)]
            fixed, new, known = measure(costs[name], drafter, texts[HALVES[half]], work, seeds)
            best = max(fixed, key=fixed.__getitem__)
            reference = max(fixed[best], 1.0)
            over_best["new"].append(new / reference)
            over_best["known"].append(known / reference)
            least_of_plain = min(least_of_plain, new, known)
            shown = "  ".join(f"{speed:.2f}x ({speed / reference:.3f})" for speed in (new, known))
            print(f"{'':8} {drafter:9} {work:6} {temperature:3.1f}  {best:2d}: {fixed[best]:.2f}x  {shown}", flush=True)
        for label, ratios in over_best.items():
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{name} {label:5}: over the best fixed number or plain {mean:.3f}, at least {min(ratios):.3f}")
        print(f"{name}: never below {least_of_plain:.3f} of plain")


# -- recording ------------------------------------------------------------------------------------------------------


class Recorder(FixedPolicy):
    """Lets drafters propose all they can, writes it down, and has none of it verified: one position a step."""

    __slots__ = ("seen",)
    looks_at_drafts = True

    def prune(self, drafts: Sequence[Draft]) -> None:
        """Write down the nodes: token, parent, log chance."""
        for draft in drafts:
            tree, chances = draft.tree, draft.survival
            nodes = [
                (tree.tokens[i], tree.parents[i], round(-SCALE * min(chances[i], 0.0))) for i in range(1, len(tree))
            ]
            RECORDED.setdefault(draft.request.parent_id, {})[draft.request.num_output] = nodes
            draft.keep([0])


RECORDED: dict[str, dict[int, list[tuple[int, int, int]]]] = {}


def record(prompts: Path, num_prompts: int) -> None:
    """Write the traces of mini: about two minutes."""
    llm = LLM("mini", max_num_seqs=16, prefix_caching=False)
    rendered = [llm.render_chat([{"role": "user", "content": c.turns[0]}]) for c in read_prompts(prompts)]
    long = [prompt[-300:] for prompt in rendered if len(prompt) >= 300]
    lengths = random.Random(0)
    works = {
        "spec": [(prompt, 96) for prompt in spread([p for p in rendered if len(p) < 900], num_prompts)],
        "short": [(prompt, lengths.randint(20, 40)) for prompt in spread(long, 24)],
    }
    traces = [trace for T in TEMPERATURES for work in works for trace in _record(llm, work, works[work], T)]
    TRACES.parent.mkdir(exist_ok=True)
    TRACES.write_bytes(lzma.compress(json.dumps(traces, separators=(",", ":")).encode(), preset=9))


def _record(llm: LLM, work: str, asked: Sequence[tuple[Sequence[int], int]], temperature: float) -> list[Any]:
    params = [SamplingParams(max_tokens=n, temperature=temperature, seed=i, ignore_eos=True)
              for i, (_, n) in enumerate(asked)]  # fmt: skip
    traces: list[Any] = []
    for name, text, most, width in (("draft", "draft=mini-draft", 8, 1), ("draft_tree", "draft=mini-draft", 8, 3),
                                    ("eagle", "eagle=mini-eagle", 8, 3), ("suffix", "suffix", 12, None)):  # fmt: skip
        options = {"max_draft_tokens": most, "tree_width": width, "adaptive": False, "across_requests": False}
        one = llm.with_drafter(text, **options)
        one.engine.policy = Recorder(most + 1)
        RECORDED.clear()
        outputs = one.generate([prompt for prompt, _ in asked], params)
        if not traces:
            traces = [{"work": work, "temperature": temperature, "prompt": len(prompt), "drafts": {}, "tokens": []}
                      for prompt, _ in asked]  # fmt: skip
        for trace, output in zip(traces, outputs, strict=True):
            trace["tokens"] = list(output.outputs[0].token_ids)
            seen = RECORDED[output.request_id]
            trace["drafts"][name] = [seen.get(place, []) for place in range(len(trace["tokens"]))]
    return traces


def main() -> None:
    """Record, or replay."""
    parser = argparse.ArgumentParser(
        description="Speed of a policy on recorded drafts, over plain decoding and over the best fixed number of "
        "drafts: a line a case, then geometric means. All of it takes some two minutes."
    )
    parser.add_argument("--machine", action="append", choices=["mini", "1b-int4"], help="whose costs "
                        "(traces/costs.json); all unless given")  # fmt: skip
    parser.add_argument("--work", action="append", choices=WORKS, help="prompts one by one, short answers to long "
                        "prompts, 16 at once (these unless given), or after a busy time: slowed alike, or shared in "
                        "turns")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=2, help="of the noise of times: runs of every policy")
    parser.add_argument("--half", choices=HALVES, default="all", help="choose rules and constants by one half of the "
                        "texts, report by the other")  # fmt: skip
    parser.add_argument("--record", action="store_true", help="write the traces of mini anew instead")
    parser.add_argument("--prompts", type=Path, help="Spec-Bench's question.jsonl, to record")
    parser.add_argument("--num-prompts", type=int, default=16, help="of spec, to record")
    given = parser.parse_args()
    if given.record:
        record(given.prompts, given.num_prompts)
    else:
        compare(given.machine or ["mini", "1b-int4"], given.work or WORKS[:3], given.seeds, given.half)


if __name__ == "__main__":
    main()
