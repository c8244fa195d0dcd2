"""Prompts are the demo's held-out ones, lines of files or made-up texts."""

import json
from pathlib import Path
from statistics import mean, median, quantiles

import pytest

from app import demo
from app.config.error import ConfigError
from tools.bench.formats import BOXED, Prompt
from tools.bench.prompts import PRESETS, Lengths, from_file, named, synthetic


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_demos_prompts_are_its_held_out_ones() -> None:
    (dataset,) = named("demo:math", seed=0)
    assert [asked.body for asked in dataset.first(200)] == [
        {"messages": prompt["messages"]} for prompt in demo.held_out()["math"]
    ]
    assert [dataset.name for dataset in named("demo", 0)] == ["math", "prose", "code", "copy", "jumble", "talk"]


def test_a_seed_orders_the_same_prompts_anew() -> None:
    def asked(seed: int) -> list[str]:
        return [json.dumps(prompt.body) for prompt in named("demo:prose", seed)[0].first(200)]

    assert asked(3) == asked(3) != asked(0) and sorted(asked(3)) == sorted(asked(0))


def test_token_ids_are_of_all_domains_in_turn() -> None:
    first = [prompts[0]["token_ids"] for prompts in demo.held_out().values()]
    assert demo.token_ids(6) == [tuple(ids) for ids in first] and len(demo.token_ids()) == 144


def test_every_kind_of_line_becomes_a_prompt(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be brief"}
    path = file_of(
        tmp_path,
        {"prompt": "once", "max_tokens": 5},
        {"messages": [system, user, {"role": "assistant", "content": "hello"}]},
        "",
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "a"},
                {"from": "human", "value": "b"},
            ]
        },
        {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    )
    (dataset,) = from_file(path)
    once, chat, shared, problem = dataset.first(4)
    assert (once.body, once.max_tokens) == ({"prompt": "once"}, 5)
    assert chat.body == {"messages": [system, user]}
    assert shared.body == {"messages": [user]}
    assert problem.body == {"messages": [{"role": "user", "content": f"What is 2 + 3?\n{BOXED}"}]}


def test_a_short_file_comes_round_again(tmp_path: Path) -> None:
    (dataset,) = from_file(file_of(tmp_path, {"prompt": "a"}, {"prompt": "b"}))
    assert [p.body["prompt"] for p in dataset.first(5)] == ["a", "b", "a", "b", "a"]


def test_the_kinds_of_a_file_are_datasets_of_their_own(tmp_path: Path) -> None:
    entries = [{"prompt": name, "kind": kind} for name, kind in zip("abc", ("chat", "code", "chat"), strict=True)]
    path = file_of(tmp_path, *entries, {"prompt": "d"})
    code, chat = named(f"{path}:code,chat", seed=0)
    assert (code.name, chat.name) == ("code", "chat")
    assert [[p.body["prompt"] for p in kind.first(2)] for kind in (code, chat)] == [["b", "b"], ["a", "c"]]
    (whole,) = named(str(path), seed=0)
    assert whole.name == "asked" and [p.body["prompt"] for p in whole.first(4)] == list("abcd")
    with pytest.raises(ConfigError, match="no entry is of the kind 'poetry'") as caught:
        named(f"{path}:chat,poetry", seed=0)
    assert caught.value.hint == "its kinds are chat, code"
    with pytest.raises(ConfigError) as caught:
        named(f"{file_of(tmp_path, {'prompt': 'a'})}:chat", seed=0)
    assert caught.value.hint == "its kinds are none: give its entries a field `kind`"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt"', "line 2: not JSON"),
        ("[1]", "line 2: an object is wanted"),
        ('{"text": "x"}', "line 2: its fields (text) are of no known format"),
        ('{"messages": "hi"}', "line 2: messages is no list"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "line 2: in messages a turn has role 'bot'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 2: messages has no user's turn"),
        ('{"conversations": [{"from": "human"}]}', "line 2: in conversations a turn has from 'human' and value None"),
        ('{"prompt": "x", "max_tokens": 0}', "line 2: max_tokens is 0"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(file_of(tmp_path, {"prompt": "fine"}, line))
    assert complaint in str(caught.value) and caught.value.hint


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for wish, complaint in (
        (str(tmp_path / "none.jsonl"), "no such file"),
        (str(tmp_path), "is a directory"),
        ("demo:math,poetry", "no domain 'poetry'"),
        (str(file_of(tmp_path)), "no prompts in it"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            named(wish, 0)


def lengths_of(prompts: list[Prompt]) -> tuple[list[int], list[int]]:
    """Words that are asked, and tokens that are to be answered."""
    return [len(p.body["prompt"].split()) for p in prompts], [p.max_tokens or 0 for p in prompts]


def test_made_up_texts_have_the_lengths_that_were_asked() -> None:
    alike = synthetic(Lengths(40, 20), tokens_per_word=2.0, seed=1).first(3)
    assert lengths_of(alike) == ([20] * 3, [20] * 3)
    assert all(p.exact for p in alike) and alike[0].body != alike[1].body
    spread = synthetic(Lengths(100, 50, 0.8, 0.8), tokens_per_word=1.0, seed=1).first(2000)
    asked, answered = lengths_of(spread)
    assert mean(asked) == pytest.approx(100, rel=0.1) and median(asked) < 0.85 * mean(asked)
    assert max(asked) <= 800 and min(answered) >= 1
    assert [p.body for p in synthetic(Lengths(100, 50, 0.8, 0.8), 1.0, seed=1).first(9)] == [p.body for p in spread[:9]]


def test_prompts_and_answers_have_spreads_of_their_own() -> None:
    asked, answered = lengths_of(synthetic(Lengths(100, 50, input_spread=0.5), 1.0, seed=2).first(50))
    assert len(set(asked)) > 20 and set(answered) == {50}
    asked, answered = lengths_of(synthetic(Lengths(100, 50, output_spread=0.5), 1.0, seed=2).first(50))
    assert set(asked) == {100} and len(set(answered)) > 20


def test_sharegpts_lengths_have_its_means_and_heavy_tails() -> None:
    asked, answered = lengths_of(synthetic(PRESETS["sharegpt"], 1.0, seed=0).first(4000))
    for lengths, middle in ((asked, 220), (answered, 200)):
        assert mean(lengths) == pytest.approx(middle, rel=0.1)
        assert median(lengths) < 0.65 * middle and quantiles(lengths, n=100)[-1] > 4 * middle


def test_drawn_lengths_fit_the_models_positions_and_named_ones_are_left_to_the_server() -> None:
    for positions in (128, 1024):
        asked, answered = lengths_of(synthetic(PRESETS["sharegpt"], 1.0, seed=0, positions=positions).first(2000))
        assert max(asked) == positions // 2 and min(answered) >= 1
        assert all(1.25 * n + m <= positions for n, m in zip(asked, answered, strict=True))
    assert lengths_of(synthetic(Lengths(900, 300), 1.0, seed=0, positions=1024).first(1)) == ([900], [300])
