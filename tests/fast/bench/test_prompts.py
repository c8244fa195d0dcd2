"""Prompts are the demo's problems, lines of files or made-up texts. Judges find the right answers."""

import itertools
import json
from decimal import Decimal
from pathlib import Path
from statistics import mean, median, quantiles

import pytest

from app import demo
from app.config.error import ConfigError
from tools.bench.formats import BOXED, Prompt
from tools.bench.judges import final_number
from tools.bench.prompts import PRESETS, Lengths, from_file, named, synthetic
from tools.demo_pair import prompts as demo_prompts
from tools.demo_pair.corpus import is_right, samples
from tools.demo_pair.corpus.math import final_number as last_number


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_demos_prompts_are_held_out_ones_with_their_judge() -> None:
    for domain in ("math", "code", "copy"):
        (dataset,) = named(f"demo:{domain}", seed=0)
        for asked, sample in zip(dataset.first(5), samples(domain, "heldout", 0), strict=False):
            assert asked.body == {"messages": sample.messages}
            assert asked.judge is not None and asked.judge(sample.answer) and not asked.judge("#### -777")
    (prose,) = named("demo:prose", seed=0)
    assert prose.first(1)[0].judge is None
    assert [dataset.name for dataset in named("demo", 0)] == ["math", "prose", "code", "copy", "jumble", "talk"]


def test_a_seed_orders_the_same_prompts_anew() -> None:
    def asked(seed: int) -> list[str]:
        return [json.dumps(prompt.body) for prompt in named("demo:prose", seed)[0].first(200)]

    assert asked(3) == asked(3) != asked(0) and sorted(asked(3)) == sorted(asked(0))


def test_the_shipped_prompts_are_what_the_corpus_and_the_tokenizer_make() -> None:
    assert demo.PROMPTS.read_text() == demo_prompts.contents()
    assert demo.PROMPTS.stat().st_size < 300_000


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
    once, chat, shared, problem = from_file(path).first(4)
    assert (once.body, once.max_tokens) == ({"prompt": "once"}, 5)
    assert chat.body == {"messages": [system, user]}
    assert shared.body == {"messages": [user]} and shared.judge is None
    assert problem.body == {"messages": [{"role": "user", "content": f"What is 2 + 3?\n{BOXED}"}]}
    assert problem.judge is not None and problem.judge(r"It is \boxed{5.00}.") and not problem.judge("5 and then 6")


def test_a_short_file_comes_round_again(tmp_path: Path) -> None:
    dataset = from_file(file_of(tmp_path, {"prompt": "a"}, {"prompt": "b"}))
    assert dataset.size == 2 and [p.body["prompt"] for p in dataset.first(5)] == ["a", "b", "a", "b", "a"]


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
        ('{"question": "x", "answer": "none"}', "line 2: its answer has no number"),
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 16 - 3 - 4 = 9 eggs left.\nShe makes 9 * 2 = $18.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### -7", "-7"),
        ("#### $18.00", "18"),
        ("**#### 42**", "42"),
        ("First #### 3, no: #### 4", "4"),
        (r"So the total is $\boxed{18}$.", "18"),
        (r"\boxed{\$1{,}080.50} in 2 weeks", "1080.5"),
        (r"\[ \boxed{18 \text{ dollars}} \] since 9 * 2 = 18, as 3 eggs", "18"),
        (r"\boxed{3} is wrong; \boxed{5}", "5"),
        ("The answer is 18. Note that 3 eggs are eaten.", "18"),
        ("The final answer is: **$70,000**.", "70000"),
        ("the answer is 10 - 5 = 5 apples", "5"),
        ("Answer: -3", "-3"),
        ("The answer is 18. As a check, 3 * 3 = 9.", "18"),
        (r"\boxed{18}, for 3 + 3 = 6", "18"),
        (r"\boxed{9 \times 2 = \text{18}}", "18"),
        ("The answer is 1.5 metres.", "1.5"),
        ("Therefore, the answer is that Janet makes 18 dollars every day.", "18"),
        ("There are 5 - 3 = 2 apples.", "2"),
        ("It takes 2-3 = 1 hours", "1"),
        ("Weng earned 0.2 x 50 = $<<0.2*50=10>>10.", "10"),
        ("a profit of $70000.", "70000"),
        ("costs -$5", "-5"),
        ("a loss of \u22125", "-5"),
        ("It is .5 of 3%", "3"),
        ("1, 2, 3", "3"),
        ("12,34", "34"),
        ("<think>maybe 5, #### 5</think>It is 6", "6"),
        ("10 trees in 2024", "2024"),
    ],
)
def test_the_final_number_of_typical_completions(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "I do not know.", "#### none", r"\boxed{x}"])
def test_a_text_without_numbers_has_no_answer(text: str) -> None:
    assert final_number(text) is None


def test_it_reads_the_demos_own_answers_as_the_demo_does() -> None:
    for sample in itertools.islice(samples("math", "heldout", 0), 300):
        assert final_number(sample.answer) == last_number(sample.answer)
        assert is_right(sample, sample.answer)
