"""The C++ extension. Every `int` named like a tensor is its address; 0 stands for an absent one."""

from collections.abc import Sequence

LANES: int
MAX_HEAD_DIM: int
MAX_HEADS_PER_GROUP: int

def available_isas() -> list[str]: ...
def grouped_bytes(n: int, k: int, group_size: int, storage: int, half: bool, has_offsets: bool, /) -> int: ...
def prefer_huge_pages(address: int, size: int, /) -> None: ...

class _Ops:
    """Run by CpuEngine, recorded by Program."""

    def linear(self, x: int, weight: int, bias: int, y: int, m: int, n: int, k: int, dtype: int, /) -> None: ...
    def grouped(
        self,
        x: int,
        weight: int,
        bias: int,
        y: int,
        order: int,
        m: int,
        n: int,
        k: int,
        group_size: int,
        storage: int,
        half: bool,
        has_offsets: bool,
        zero: int,
        /,
    ) -> None: ...
    def norm(
        self, x: int, residual: int, weight: int, bias: int, y: int, m: int, h: int, eps: float, subtract_mean: bool, /
    ) -> None: ...
    def gated_act(self, x: int, y: int, m: int, f: int, activation: int, /) -> None: ...
    def embedding(
        self, ids: int, table: int, y: int, m: int, h: int, vocab_size: int, dtype: int, packed: bool, /
    ) -> None: ...
    def select_rows(self, x: int, row_ids: int, y: int, r: int, h: int, /) -> None: ...
    def copy_columns(
        self, x: int, y: int, m: int, width: int, x_stride: int, x_first: int, y_stride: int, y_first: int, /
    ) -> None: ...
    def add(self, x: int, y: int, m: int, h: int, /) -> None: ...
    def fill(self, y: int, m: int, h: int, value: float, /) -> None: ...
    def scatter_columns(self, x: int, ids: int, y: int, m: int, n: int, h: int, /) -> None: ...
    def rope_and_cache(
        self,
        qkv: int,
        num_q: int,
        num_kv: int,
        head_dim: int,
        rotary_dim: int,
        table: int,
        max_position: int,
        positions: int,
        slots: int,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        block_size: int,
        dtype: int,
        num_blocks: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        m: int,
        /,
    ) -> None: ...
    def attention(
        self,
        qkv: int,
        y: int,
        num_q: int,
        num_kv: int,
        head_dim: int,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        block_size: int,
        dtype: int,
        seq_ids: int,
        prefix_lens: int,
        tree_masks: int,
        tree_starts: int,
        block_tables: int,
        max_blocks: int,
        scale: float,
        window: int,
        m: int,
        max_visible: int,
        /,
    ) -> None: ...
    def latent_attention(
        self,
        queries: int,
        y: int,
        num_heads: int,
        rank: int,
        rope_dim: int,
        latents: int,
        block_size: int,
        dtype: int,
        seq_ids: int,
        prefix_lens: int,
        tree_masks: int,
        tree_starts: int,
        block_tables: int,
        max_blocks: int,
        scale: float,
        m: int,
        max_visible: int,
        /,
    ) -> None: ...
    def latent_rope(
        self,
        queries: int,
        latents: int,
        num_heads: int,
        rank: int,
        rope_dim: int,
        interleaved: bool,
        table: int,
        max_position: int,
        positions: int,
        slots: int,
        pool_values: int,
        block_size: int,
        dtype: int,
        num_blocks: int,
        norm: int,
        eps: float,
        m: int,
        /,
    ) -> None: ...
    def linear_heads(
        self, x: int, weight: int, y: int, m: int, heads: int, n: int, k: int, passed: int, dtype: int, /
    ) -> None: ...
    def route(
        self,
        logits: int,
        correction: int,
        y: int,
        m: int,
        e: int,
        top_k: int,
        sigmoid: bool,
        normalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
        /,
    ) -> None: ...
    def experts(self, x: int, weights: int, base: int, y: int, m: int, bank: ExpertBank, /) -> None: ...

class ExpertBank:
    def __init__(self, h: int, f: int, activation: int, /) -> None: ...
    def add_linear(self, is_down: bool, weight: int, n: int, k: int, dtype: int, /) -> None: ...
    def add_grouped(
        self,
        is_down: bool,
        weight: int,
        order: int,
        n: int,
        k: int,
        group_size: int,
        storage: int,
        half: bool,
        has_offsets: bool,
        zero: int,
        /,
    ) -> None: ...

class CpuEngine(_Ops):
    def __init__(self, num_threads: int, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def pack(self, weight: int, packed: int, n: int, k: int, dtype: int, /) -> None: ...
    def pack_grouped(
        self,
        codes: int,
        scales: int,
        offsets: int,
        packed: int,
        n: int,
        k: int,
        group_size: int,
        storage: int,
        half: bool,
        /,
    ) -> None: ...
    def gumbel(
        self,
        logits: int,
        temperatures: int,
        seeds: int,
        positions: int,
        streams: int,
        r: int,
        v: int,
        k: int,
        ids: int,
        scores: int,
        /,
    ) -> None: ...
    def stream_read(self, data: int, num_bytes: int, /) -> int: ...
    def draft_chains(
        self,
        first: Program,
        next: Program,
        addresses: Sequence[int],
        rows: int,
        max_blocks: int,
        max_visible: int,
        temperatures: int,
        seeds: int,
        streams: int,
        noise_positions: int,
        num_active: int,
        steps: int,
        r: int,
        vocab: int,
        block_size: int,
        logits_step: int,
        ids: int,
        log_chances: int,
        shift: int,
        features_step: int,
        num_rivals: int,
        rivals_scale: float,
        least: float,
        /,
    ) -> None: ...
    def move_rows(
        self,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        block_size: int,
        dtype: int,
        num_kv: int,
        head_dim: int,
        sources: int,
        targets: int,
        num: int,
        /,
    ) -> None: ...

class Program(_Ops):
    def __init__(self, engine: CpuEngine) -> None: ...
    @property
    def num_steps(self) -> int: ...
    def bind(self, slot: int, recorded: int, first_step: int, /) -> None: ...
    def finish(self, recorded_rows: int, recorded_logit_rows: int, /) -> None: ...
    def run(self, addresses: list[int], rows: int, logit_rows: int, max_blocks: int, max_visible: int, /) -> None: ...

class SuffixCorpus:
    def __init__(self, max_tokens: int, window: int, /) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def add(self, tokens: Sequence[int], /) -> None: ...

class SuffixText:
    def __init__(self, window: int, corpus: SuffixCorpus | None, /) -> None: ...
    @property
    def size(self) -> int: ...
    def extend(self, tokens: Sequence[int], /) -> None: ...
    def copy(self, shortest: int, longest: int, num: int, /) -> tuple[int, list[int]]: ...
    def grow(self, max_nodes: int, least: float, /) -> list[tuple[int, int, float]]: ...
