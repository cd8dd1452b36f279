"""Recipes: the committed ones are valid, and every kind of mistake is refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.training.heads.config import load_head_recipe
from forerun.training.recipe import load_recipe, with_data_dir

COMMITTED = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
KINDS = {path: tomllib.loads(path.read_text("utf-8")).get("kind") for path in COMMITTED}
HEADS = [path for path in COMMITTED if KINDS[path]]
MODELS = [path for path in COMMITTED if path not in HEADS]
DISTILL = '[distill]\nteacher = "x"\nsample_tokens = 9\nsample_share = {}\ngreedy_share = {}\n\n[mix]'


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.stem)
def test_committed_recipes_of_heads_load(path: Path) -> None:
    recipe = load_head_recipe(KINDS[path], path)
    assert (recipe.name, recipe.kind) == (path.stem, KINDS[path])
    assert path.name in path.read_text("utf-8")  # the command


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_committed_recipes_load(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert path.name in path.read_text("utf-8")  # the command
    assert not Path(recipe.data.dir).is_absolute()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 3", "seed = 3\ncolour = 1", "unknown recipe field colour; allowed are name, seed"),
        ("[run]", "[run]\nlog_evry = 1", "unknown recipe field run.log_evry"),
        ("seed = 3", "", "recipe field seed is missing"),
        ("steps = 8", "steps = 'many'", "schedule.steps = 'many' should be of type int"),
        ("seed = 3", "seed = true", "seed = True should be of type int"),
        ("seed = 3", "seed = 3\nprompt_weight = 1.5", "prompt_weight = 1.5 must lie between 0 and 1"),
        ("num_kv_heads = 1", "num_kv_heads = 3", "num_kv_heads 3"),
        ("seq_len = 16", "seq_len = 17", "schedule.seq_len"),
        ("max_positions = 256", "max_positions = 15", "schedule.seq_len 16 exceeds model.max_positions 15; lower"),
        ("max_positions = 256", "max_positions = 31", "schedule.decay_seq_len 32 exceeds model.max_positions 31;"),
        ("tokens_per_step = 128", "tokens_per_step = 100", "schedule.tokens_per_step"),
        ("decay_steps = 3", "decay_steps = 9", "exceed schedule.steps"),
        ("warmup_steps = 2", "warmup_steps = 0", "schedule.warmup_steps"),
        ("heldout_every = 4", "heldout_every = 3", "run.heldout_every"),
        ("log_every = 2", "log_every = 0", "log_every must be at least 1; got 0"),
        ("checkpoint_every = 100", "checkpoint_every = 0", "checkpoint_every must be at least 1; got 0"),
        ("heldout_every = 4", "heldout_every = 0", "heldout_every must be at least 1; got 0"),
        ("seq_len = 16", "seq_len = 0", "seq_len must be at least 1; got 0"),
        ("tokens_per_step = 128", "tokens_per_step = 0", "tokens_per_step must be at least 1; got 0"),
        ("micro_tokens = 64", "micro_tokens = 0", "micro_tokens must be at least 1; got 0"),
        ("[mix]", DISTILL.format(0, 0.5), "distill.sample_share must lie between 0 and 1"),
        ("[mix]", DISTILL.format(1, 0.5), "distill.sample_share must lie between 0 and 1"),
        ("[mix]", DISTILL.format(0.5, 1.5), "distill.greedy_share from 0 to 1; got 0.5 and 1.5"),
        (
            "heldout_every = 4",
            'heldout_every = 4\ndevice = "tpu"',
            "run.device = 'tpu' is unknown",
        ),
        ("african_storybook_en", "african_storybok", "unknown source mix.african_storybok; allowed are classic_young"),
        ("mbpp_train_601_974 = 1", "mbpp_train_601_974 = 0", "must be positive"),
        ("seed = 3", "seed = ", "not valid TOML"),
    ],
)
def test_mistakes_are_named(recipe_path: Path, old: str, new: str, message: str) -> None:
    recipe_path.write_text(recipe_path.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe_path)
    assert message in str(error.value)


def test_recipes_of_other_editors(recipe_path: Path) -> None:
    """Notepad puts a byte order mark before UTF-8, and PowerShell writes UTF-16."""
    text, recipe = recipe_path.read_text("utf-8"), load_recipe(recipe_path)
    recipe_path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert load_recipe(recipe_path) == recipe
    recipe_path.write_text(text, "utf-16")
    with pytest.raises(ConfigError, match=r"tiny\.toml is not valid TOML in UTF-8: "):
        load_recipe(recipe_path)
    with pytest.raises(ConfigError, match=r"tiny\.toml is not valid TOML in UTF-8: "):
        load_head_recipe("medusa", recipe_path)


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="cannot read recipe nowhere"):
        load_recipe(Path("nowhere.toml"))


def test_schedule_warms_up_stays_and_decays(recipe_path: Path) -> None:
    schedule = load_recipe(recipe_path).schedule
    scales = [schedule.learning_rate_scale(step) for step in range(schedule.steps)]
    assert scales == pytest.approx([0.5, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])
    assert [schedule.seq_len_at(step) for step in (0, 4, 5, 7)] == [16, 16, 32, 32]


def test_data_dir_option_wins(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    assert with_data_dir(recipe, None) is recipe
    assert with_data_dir(recipe, Path("elsewhere")).data.dir == "elsewhere"
