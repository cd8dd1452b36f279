"""The options that several commands share, and how they become settings of the engine and of requests.

Knows: names, help texts and how to read lists. Does not know: what an option does; ranges are checked in
`forerun.config` and `forerun.core`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.groups import values
from forerun.core import SamplingParams
from forerun.errors import ConfigError

DEFAULT_MODEL = "mini"
ENGINE, SAMPLING, DRAFTING = "Engine", "Sampling", "Drafting"


def _option(help_text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=True)


MODELS = "A folder, a GGUF file, ORGANISATION/NAME[:QUANT] of the hub, or an embedded model."
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODELS, show_default="mini")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

Dtype = Annotated[str, _option("auto (as stored), float32, bfloat16, or float16 if the checkpoint is.", ENGINE)]
KernelsName = Annotated[str, _option("auto, cpu (cpu:avx2: with that instruction set), triton or reference.", ENGINE)]
Threads = Annotated[
    int | None, _option("Threads to compute with; all physical cores this process may use unless given.", ENGINE)
]
Verification = Annotated[str, _option("coupled (same seed, same text) or rejection (same distribution).", DRAFTING)]
DrafterName = Annotated[
    str | None,
    typer.Option(
        help="auto, none, a drafter's NAME or NAME=MODEL (docs/drafters.md). Default: what --draft-model is for "
        "(draft, or the drafter of its heads), else draft where a draft model comes with the model, else ngram.",
        rich_help_panel=DRAFTING,
    ),
]
DraftModel = Annotated[str | None, _option("The draft model, or the folder of draft heads.", DRAFTING)]
Adaptive = Annotated[bool, _option("Choose each step's drafts by measured cost and acceptance.", DRAFTING)]
Explain = Annotated[bool, _option("Say what speculation did for the answer, and why.", DRAFTING, "--explain")]
MaxTokens = Annotated[int, _option("Most tokens to generate.", SAMPLING, "--max-tokens", "-n")]
Temperature = Annotated[float, _option("0 always takes the most probable token.", SAMPLING, "--temperature", "-t")]
Seed = Annotated[int, _option("The same seed gives the same text.", SAMPLING)]
GenerationConfig = Annotated[
    str, _option("Sampling defaults: auto (the model's generation_config.json), none, or a path.", SAMPLING)
]
USUAL_SAMPLING = {"temperature": 0.7}

PromptsFile = Annotated[
    Path | None, typer.Option(help="A .jsonl file of prompts; the twelve built-in ones unless given.")
]
Limit = Annotated[int | None, typer.Option(help="Use this many prompts, spread evenly over the file.", min=1)]
ChartFile = Annotated[Path | None, typer.Option("--chart", help="Draw the figures into this .svg file.")]
Drafters = Annotated[
    str | None,
    typer.Option(
        help="NAME, NAME=MODEL or FILE.py:CLASS, separated by commas. Default: ngram, and what --draft-model is for, "
        "else draft where a draft model comes with the model."
    ),
]

Lora = Annotated[
    list[str] | None,
    _option(
        "NAME=PATH of a LoRA adapter, a folder that PEFT saved; `verify`, `serve` and `batch` take several.", ENGINE
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which model."""

    model_name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODELS, show_default="mini")] = None
    model: ModelOption = None

    @property
    def name(self) -> str:
        """See `chosen_model`."""
        return chosen_model(self.model_name, self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device and kernels that compute."""

    device: Annotated[str, _option("cpu, cuda, or auto for a GPU where there is one.", ENGINE)] = "auto"
    kernels: KernelsName = "auto"
    activations: Annotated[
        str,
        _option(
            "Activations in products with quantized weights: auto rounds them to 8 bits; float32 does not, and is "
            "slower.",
            ENGINE,
        ),
    ] = "auto"
    threads: Threads = None
    pin_threads: Annotated[
        bool | None,
        _option("Each thread on a core of its own. Default: on machines with several memory nodes.", ENGINE),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Machine):
    """How a model is loaded; fields of EngineConfig."""

    dtype: Dtype = "auto"
    kv_cache_dtype: Annotated[str, _option("The KV cache: auto (as the model), float32, bfloat16 or int8.", ENGINE)] = (
        "auto"
    )
    max_model_len: Annotated[
        int | None,
        _option(
            "Context to make room for. Default: the model's own, or what the memory holds if that is less.", ENGINE
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLoading(Loading):
    """A model and adapters of it."""

    lora: Lora = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLoading(AdaptedLoading):
    """A model that several processes may compute together."""

    tensor_parallel: Annotated[
        int, _option("Processes that share every layer; see docs/several-machines.md.", ENGINE, "--tensor-parallel")
    ] = 1
    pipeline_parallel: Annotated[
        int, _option("Groups of layers, each in processes of its own.", ENGINE, "--pipeline-parallel")
    ] = 1
    rank_timeout_s: Annotated[
        int, _option("Seconds of silence of one of these processes after which all end.", ENGINE, "--rank-timeout")
    ] = 15
    rank_start_s: Annotated[
        int, _option("Seconds that these processes wait for each other at the start.", ENGINE, "--rank-start-timeout")
    ] = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """What drafts and how much, for any drafter; fields of DrafterConfig, except `draft_model`."""

    draft_model: DraftModel = None
    max_draft_tokens: Annotated[
        int | None, _option("Most tokens drafted a step. Default: the drafter's.", DRAFTING)
    ] = None
    tree_width: Annotated[
        int | None,
        _option(
            "Children per node of a draft tree; 1 is a chain. Default: depends on the drafter and the model.",
            DRAFTING,
        ),
    ] = None
    head_weights: Annotated[
        str, _option("Matrices of draft heads: stored, or rounded to int8 or int4 when read.", DRAFTING)
    ] = "stored"
    draft_vocabulary: Annotated[
        str | None,
        _option(
            "File of the only tokens that draft models, EAGLE heads and MTP modules may propose.",
            DRAFTING,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting(DraftSizes):
    """Which drafter, how much it drafts, how drafts are verified, and whether what is learned of them is kept."""

    drafter: DrafterName = None
    adaptive: Adaptive = True
    keep_learned: Annotated[
        bool,
        _option(
            "Keep what the policy learns, and token ids of answers that suffix copies from, for later runs.", DRAFTING
        ),
    ] = True
    verification: Verification = "coupled"

    def of(self, model: str) -> dict[str, Any]:
        """The options given, with the default drafter for `model` if none was named.

        What a draft model is for stands in its folder: it is downloaded where it has to be.
        """
        from forerun.cli.engine import fetch
        from forerun.drafters.named import default_drafter

        if self.drafter is None and self.draft_model is not None:
            fetch(self.draft_model)
        return {**values(self), "drafter": self.drafter or default_drafter(model, self.draft_model)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer's tokens are chosen; the defaults are those of the model's generation_config.json."""

    max_tokens: MaxTokens = 512
    temperature: Annotated[
        float | None,
        _option(
            "0 always takes the most probable token. Default: the model's, else 0.7.", SAMPLING, "--temperature", "-t"
        ),
    ] = None
    top_p: Annotated[
        float | None, _option("Keep the most probable tokens up to this share. Default: the model's.", SAMPLING)
    ] = None
    top_k: Annotated[int | None, _option("Keep this many tokens; 0 keeps all. Default: the model's.", SAMPLING)] = None
    min_p: Annotated[
        float | None,
        _option("Drop tokens below this share of the best one's probability. Default: the model's.", SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None, _option("Above 1: less of what the text already holds. Default: the model's.", SAMPLING)
    ] = None
    seed: Seed = 0
    generation_config: GenerationConfig = "auto"

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams; those not given are left out, since the model may have defaults for them."""
        given = {name: value for name, value in values(self).items() if name != "generation_config"}
        return {name: value for name, value in given.items() if value is not None}

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The options given, else the model's `defaults`, else the usual values. Raises SamplingError."""
        return SamplingParams(**{**USUAL_SAMPLING, **defaults, **self.given()})


def chosen_model(argument: str | None, option: str | None) -> str:
    """The model, given by position or by --model. Raises ConfigError for no name and for two."""
    given = [name for name in (argument, option) if name is not None]
    if len(set(given)) > 1:
        raise ConfigError(f"two models were given, {argument} and --model {option}: give one")
    if "" in given:
        raise ConfigError(f"the model's name is empty: give one, or none for {DEFAULT_MODEL}")
    return given[0] if given else DEFAULT_MODEL


def chosen_drafters(text: str | None, model: str, draft_model: str | None) -> list[str]:
    """Those that were named, else n-grams and who drafts with the draft model, where there is one."""
    if text is not None:
        return names(text)
    return list(dict.fromkeys(("ngram", Drafting(draft_model=draft_model).of(model)["drafter"])))


def names(text: str) -> list[str]:
    """The parts of a comma-separated list. Raises ConfigError if there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"a list separated by commas is needed, got {text!r}")
    return list(dict.fromkeys(parts))


def numbers(text: str, what: str) -> list[float]:
    """The numbers of a comma-separated list. Raises ConfigError naming what is not a number."""
    return [_number(part, what) for part in names(text)]


def degrees(text: str, what: str) -> list[int]:
    """The whole numbers of a comma-separated list. Raises ConfigError naming what is none."""
    wrong = next((part for part in names(text) if not part.isdigit() or not int(part)), None)
    if wrong is not None:
        raise ConfigError(f"{what} must be whole numbers from 1 separated by commas, got {wrong!r}")
    return [int(part) for part in names(text)]


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} must be numbers separated by commas, got {text!r}") from None


def biases(pairs: list[str] | None) -> dict[int, float]:
    """`--logit-bias ID=VALUE` options as a mapping. Raises ConfigError for a malformed one."""
    result = {}
    for pair in pairs or ():
        token_id, sign, value = pair.partition("=")
        if not sign or not token_id.strip().isdigit():
            raise ConfigError(f"--logit-bias must be ID=VALUE, such as 42=-5, got {pair!r}")
        result[int(token_id)] = _number(value, "--logit-bias values")
    return result


def adapters(pairs: list[str] | None) -> dict[str, str]:
    """`--lora NAME=PATH` options as a mapping. Raises ConfigError for a malformed one, and for a name given twice."""
    result = dict[str, str]()
    for pair in pairs or ():
        name, _, path = pair.partition("=")
        if not name or not path or name in result:
            raise ConfigError(f"--lora must be NAME=PATH, such as sql=adapters/sql, each name once; got {pair!r}")
        result[name] = path
    return result
