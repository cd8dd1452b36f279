"""From logits and a hypothetical prefix to the distribution of the next token.

Knows: every sampling parameter, applied to one row after a given prefix. Does not know: where the prefix came from
(plain decoding or a draft tree), who draws, or how.

The same function serves plain decoding and every tree node, one row at a time, so sampling parameters compose with
speculation exactly. Order: allowed tokens, logit bias, min_tokens, bad words, grammar; repetition, frequency and
presence penalties; temperature; min-p, top-k, top-p. All arithmetic is float32 except probabilities (float64).
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from forerun.core import GrammarMask, Request, SamplingParams, TokenBits
from forerun.errors import GrammarError, LogitsError

log = logging.getLogger("forerun.engine")

NEG_INF = float("-inf")


WAIT_S = 0.02  # in all, for asynchronous masks that a step can do without


@runtime_checkable
class AsyncGrammarMask(GrammarMask, Protocol):
    """A mask computed asynchronously: steps leave out requests whose mask has not arrived."""

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        """Whether the mask has arrived, waiting at most `wait_s`; asks for it if nobody has.

        Raises GrammarError if it will never come.
        """


class ForcingMask(GrammarMask, Protocol):
    """A mask that also knows where the grammar leaves one text to go on with. Any mask may have the method."""

    def forced(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        """Tokens that spell the beginning of that text, as the model would cut it; () if several texts may follow.

        They are guesses, which the target checks like all drafts. Called once `allowed` is known after this prefix.
        """


class ShapedRow(NamedTuple):
    """A row ready for the draw: token v is drawn with probability softmax(logits / temperature)[v]."""

    logits: Tensor  # [vocab_size] float32
    temperature: float  # 0: the argmax


def is_plain(params: SamplingParams) -> bool:
    """Only the temperature matters: the row can go to the draw as it is."""
    return not (_masks(params) or _penalizes(params) or (_filters(params) and not params.greedy))


def give_up_at() -> float:
    """The time at which waiting for any masks must end, starting now; on the clock of `perf_counter`."""
    return perf_counter() + WAIT_S


def grammar_ready(request: Request, output_token_ids: Sequence[int], wait_s: float) -> bool:
    """Whether the grammar's mask after these tokens has arrived, waiting at most `wait_s`; asks for it if nobody has.

    Raises GrammarError if it will never come. A user's grammar may raise anything, which ends its own request alone.
    """
    grammar = request.params.grammar
    if grammar is None or not isinstance(grammar, AsyncGrammarMask):  # isinstance takes 10 us
        return True
    try:
        return bool(grammar.ready(output_token_ids, wait_s))
    except LogitsError:
        raise
    except Exception as error:
        raise _failed(request, error) from error


def mask_ready(request: Request, path: Sequence[int] = (), give_up_s: float = 0.0) -> bool:
    """`grammar_ready` after the known tokens plus `path`, waiting until `give_up_s`; false if it will never come."""
    if request.params.grammar is None:
        return True
    try:
        return grammar_ready(request, [*request.output_token_ids, *path], max(0.0, give_up_s - perf_counter()))
    except LogitsError:  # of which `allowed` raises the reason
        return False


def shape_draft(logits: Tensor, request: Request, path: Sequence[int], give_up_s: float) -> ShapedRow:
    """`shape_row` for a row to draw drafts from: a mask that fails, or is not there by `give_up_s`, is left out."""
    try:
        return shape_row(logits, request, path, with_grammar=mask_ready(request, path, give_up_s))
    except GrammarError:  # the request's own affair once its tokens are chosen, no fault of a drafter's
        return shape_row(logits, request, path, with_grammar=False)


def shape_row(logits: Tensor, request: Request, path: Sequence[int], with_grammar: bool = True) -> ShapedRow:
    """Apply the request's parameters to logits [vocab_size] after its known tokens plus `path`.

    The input is left alone. Raises GrammarError if the request's grammar fails.
    """
    params = request.params
    if is_plain(params):
        return ShapedRow(logits, params.temperature)
    row = logits.clone()
    if _masks(params):
        _apply_masks(row, request, path)
        if params.grammar is not None and with_grammar:
            _apply_grammar(row, request, path)
    if _penalizes(params):
        _apply_penalties(row, request, path)
    if params.greedy or not _filters(params):
        return ShapedRow(row, params.temperature)
    return ShapedRow(_filter(row / params.temperature, params), 1.0)


def probabilities(row: ShapedRow) -> Tensor:
    """The distribution a shaped row stands for, on the host -> [vocab_size] float64; one-hot at temperature 0."""
    logits = row.logits.cpu()
    if row.temperature == 0.0:
        one_hot = torch.zeros(logits.shape[0], dtype=torch.float64)
        one_hot[int(logits.argmax())] = 1.0
        return one_hot
    return torch.softmax(logits.double() / row.temperature, dim=0)


def is_drawable(row: Tensor) -> bool:
    """Whether some token has a finite logit and none is NaN or +inf."""
    top = float(row.max())  # NaN wins torch's max
    return top == top and abs(top) != float("inf")


# -- what applies at all ----------------------------------------------------------------------------------------


def _masks(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.grammar is not None
        or params.min_tokens
    )


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


# -- masks and biases (in place on the row) ---------------------------------------------------------------------


def _apply_masks(row: Tensor, request: Request, path: Sequence[int]) -> None:
    params = request.params
    if params.allowed:
        _allow_only(row, _ids(params.allowed, row))
    if params.logit_bias:
        ids, values = params.biases
        row[_ids(ids, row)] += torch.frombuffer(values, dtype=torch.float32).to(row.device)
    if request.num_output + len(path) < params.min_tokens:
        _ban(row, request.stop_token_ids)
    if request.bad_word_ids:
        _ban(row, _completions(request.token_ids, path, request.bad_word_ids))


def _apply_grammar(row: Tensor, request: Request, path: Sequence[int]) -> None:
    """A user's grammar may fail in any way, or allow what is no token: that must end its own request alone."""
    grammar = request.params.grammar
    assert grammar is not None
    try:
        allowed = grammar.allowed([*request.output_token_ids, *path])
        bits = _unpacked(allowed, row.shape[0]) if isinstance(allowed, TokenBits) else None
        ids = None if allowed is None or isinstance(allowed, TokenBits) else _checked_ids(allowed, row.shape[0])
    except LogitsError:
        raise
    except Exception as error:
        raise _failed(request, error) from error
    if bits is not None:
        row.masked_fill_(bits.to(row.device) == 0, NEG_INF)
    elif ids is not None:
        _allow_only(row, ids.to(row.device))


def _failed(request: Request, error: Exception) -> GrammarError:
    log.warning("request %s: its grammar failed", request.request_id, exc_info=error)
    return GrammarError(f"request {request.request_id}: its grammar failed: {type(error).__name__}: {error}")


def _checked_ids(token_ids: Iterable[int], num_tokens: int) -> Tensor:
    """On the host; raises what is wrong with them."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_tokens:
        raise ValueError(
            f"it allows tokens {int(ids.min())} to {int(ids.max())}, the model's are 0 to {num_tokens - 1}"
        )
    return ids


def _ids(token_ids: Iterable[int], row: Tensor) -> Tensor:
    """Token ids as an index of the row; from an array, which `core.SamplingParams` keeps, at no cost."""
    if isinstance(token_ids, array):
        return torch.frombuffer(token_ids, dtype=torch.int64).to(row.device)
    return torch.tensor(list(token_ids), dtype=torch.int64, device=row.device)


def _allow_only(row: Tensor, ids: Tensor) -> None:
    kept = row[ids].clone()
    row.fill_(NEG_INF)
    row[ids] = kept


def _unpacked(allowed: TokenBits, num_tokens: int) -> Tensor:
    """On the host, one number a token: 0 for what is not allowed, as for ids beyond the bits."""
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(allowed.packed, np.uint8), count=num_tokens, bitorder="little")
    )  # [num_tokens]


def _ban(row: Tensor, token_ids: Iterable[int]) -> None:
    row[_ids(token_ids, row)] = NEG_INF


def _completions(known: Sequence[int], path: Sequence[int], bad_words: Sequence[Sequence[int]]) -> set[int]:
    """Last tokens of the bad words whose other tokens are the last known tokens and the path."""
    longest = max(map(len, bad_words)) - 1
    tokens = (*known[max(0, len(known) - longest) :], *path)
    return {word[-1] for word in bad_words if tokens[max(0, len(tokens) - len(word) + 1) :] == tuple(word[:-1])}


# -- penalties (in place on the row) ----------------------------------------------------------------------------


def _apply_penalties(row: Tensor, request: Request, path: Sequence[int]) -> None:
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.token_ids, *path}), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    counts = Counter([*request.output_token_ids, *path])
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
        amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
        row[ids] -= params.frequency_penalty * amounts + params.presence_penalty


# -- filters ----------------------------------------------------------------------------------------------------


def _filter(row: Tensor, params: SamplingParams) -> Tensor:
    """min-p, top-k, top-p on tempered logits [vocab_size]; ties at a boundary go to the lower id."""
    if params.min_p > 0.0:
        row = row.masked_fill(torch.softmax(row, dim=0) < params.min_p * torch.softmax(row, dim=0).max(), NEG_INF)
    if params.top_k <= 0 and params.top_p >= 1.0:
        return row
    order = torch.argsort(row, descending=True, stable=True)
    num_kept = min(params.top_k, row.shape[0]) if params.top_k > 0 else row.shape[0]
    if params.top_p < 1.0:
        best = row[order[:num_kept]].cpu()  # cumulative sums of a GPU have no fixed order
        num_kept = min(num_kept, _nucleus_size(best, params.top_p))
    filtered = torch.full_like(row, NEG_INF)
    filtered[order[:num_kept]] = row[order[:num_kept]]
    return filtered


def _nucleus_size(sorted_logits: Tensor, top_p: float) -> int:
    """The fewest best tokens whose probabilities reach top_p; at least one."""
    cumulative = torch.softmax(sorted_logits.double(), dim=0).cumsum(0)
    return int((cumulative < top_p).sum()) + 1
