"""The trainer: talks are the target's own, lessons are what the engine computes, and runs end, go on and refuse."""

import fcntl
import json
import math
import random
import re
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app import demo
from app.config.error import ConfigError
from app.engine.checkpoint.files import DEMO
from app.engine.load.engine import Engine
from app.messages import Request
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import make_engine, run_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import features, load_target
from tools.bench.formats import Prompt
from tools.train_draft import checkpoint, command, loop, loss, talks
from tools.train_draft.loop import State, Trainer
from tools.train_draft.loss import Ends, learn, tokens_a_step
from tools.train_draft.model import Draft
from tools.train_draft.muon import orthogonal
from tools.train_draft.shape import Shape
from tools.train_draft.talks import Talk, Talks
from tools.train_draft.teacher import Lesson, Teacher

torch.set_num_threads(1)
LENGTH = 192
MATH = [Prompt({"messages": prompt["messages"]}) for prompt in demo.held_out()["math"][:16]]
SMALL: dict[str, Any] = {"layers": 1, "block": 4, "mlp": 16, "rank": 4, "heads": 2, "kv_heads": 1, "head_dim": 8}


def make_demo(**settings: Any) -> Engine:
    return make_engine(DEMO / "target", max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=512, **settings)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")


def source(tokenizer: Tokenizer, prompts: list[Prompt], held_out: int = 0, **wishes: Any) -> Talks:
    wishes = {"length": LENGTH, "at_once": 8, "num_held_out": held_out, "draw": random.Random(0)} | wishes
    if known := wishes.pop("held_out_talks", None):
        wishes["held_out"] = known
    return Talks(make_demo().core, tokenizer, prompts, **wishes)


def question(talk: Talk) -> tuple[int, ...]:
    return tuple(talk.ids[: talk.own.index(True)])


# Talks


def test_a_prompt_is_followed_by_the_targets_own_answer(tokenizer: Tokenizer) -> None:
    rendered = [tokenizer.chat_template.render(prompt.body["messages"]) for prompt in MATH]
    prompts = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in rendered}
    found = list(islice(source(tokenizer, MATH, at_once=3).more(), len(MATH)))
    assert {question(talk) for talk in found} <= prompts and all(all(o[o.index(True) :]) for _, o in found)
    ends = tokenizer.eos_ids
    asked = [Request(str(i), question(talk), LENGTH // 2, stop_token_ids=ends) for i, talk in enumerate(found[:4])]
    answers = run_engine(make_demo(), asked).texts
    assert [talk.ids[talk.own.index(True) :] for talk in found[:4]] == answers, "the first answers are greedy"


def test_prompts_come_again_with_other_answers(tokenizer: Tokenizer) -> None:
    prose = [Prompt({"messages": prompt["messages"]}) for prompt in demo.held_out()["prose"][:3]]
    found = list(islice(source(tokenizer, prose, at_once=3).more(), 12))
    assert len({question(talk) for talk in found}) == 3 and len({tuple(talk.ids) for talk in found}) > 8


def test_what_is_held_out_is_never_learned(tokenizer: Tokenizer) -> None:
    talks = source(tokenizer, MATH, held_out=5)
    apart = {question(talk) for talk in talks.held_out}
    assert len(apart) == 5 and not apart & {question(talk) for talk in islice(talks.more(), 40)}


def test_a_run_that_goes_on_learns_nothing_that_was_held_out(tokenizer: Tokenizer) -> None:
    before = source(tokenizer, MATH, held_out=5)
    talks = source(tokenizer, [*MATH, *MATH], held_out=5, held_out_talks=before.held_out, draw=random.Random(1))
    assert talks.held_out == before.held_out
    learned = {question(talk) for talk in islice(talks.more(), 40)}
    assert len(learned) == 10 and not learned & set(map(question, before.held_out))


def test_an_answer_that_is_cut_ends_its_talk(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thought that is not finished would be followed by a question."""
    monkeypatch.setattr("tools.train_draft.talks.MAX_ANSWER", 6)
    cut = 0
    for ids, own in islice(source(tokenizer, []).more(), 30):
        ends = [i for i in range(len(ids)) if own[i] and own[i + 1 : i + 2] != [True]]
        assert all(ids[end] in tokenizer.eos_ids for end in ends[:-1])
        cut += ids[ends[-1]] not in tokenizer.eos_ids
    assert cut


def test_a_message_that_spells_a_control_token_has_none(tokenizer: Tokenizer) -> None:
    spelt = [Prompt({"messages": [{"role": "user", "content": f"Repeat <|im_end|> {i} times"}]}) for i in range(3)]
    for ids, own in islice(source(tokenizer, spelt).more(), 3):
        assert "Repeat <|im_end|> " in tokenizer.decode(ids, skip_special_tokens=False)
        assert ids[: own.index(True)].count(tokenizer.backend.token_to_id("<|im_end|>")) == 1, "the template's own"


def test_the_target_asks_itself_by_the_chat_template(tokenizer: Tokenizer) -> None:
    talks = source(tokenizer, [], held_out=3, length=LENGTH)
    turns = Counter[int]()
    for ids, own in [*talks.held_out, *islice(talks.more(), 12)]:
        starts = [i for i in range(1, len(ids)) if own[i] and not own[i - 1]]
        turns[len(starts)] += 1
        assert len(ids) <= LENGTH
        for start in starts:  # before each answer stands what the template writes for the conversation so far
            text = tokenizer.decode(ids[:start], skip_special_tokens=False)
            said = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
            assert said[-1][0] == "user" and len(said) == 2 * starts.index(start) + 1
            messages = [{"role": role, "content": content} for role, content in said]
            assert text == tokenizer.chat_template.render(messages)
    assert max(turns) > 1
    assert all(sorted(talk.own) == talk.own for talk in talks.held_out), "one answer each"


def test_too_few_or_too_long_prompts_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="15 of 16 have 1 to 144 tokens, and 16 are held out"):
        source(tokenizer, MATH, held_out=16)
    with pytest.raises(ConfigError, match="0 of 16 have 1 to 2 tokens"):
        source(tokenizer, MATH, held_out=2, length=50)
    with pytest.raises(ConfigError, match="0 of 3 have 1 to 144 tokens"):
        source(tokenizer, 3 * [Prompt({"prompt": ""})], held_out=2)


def test_a_question_leaves_room_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that would never end, so that each talk has an answer. A row without the room is refused."""
    endless = Tokenizer(DEMO / "target")
    endless.eos_ids = []
    found = source(endless, [], held_out=3, length=140)
    for talk in [*found.held_out, *islice(found.more(), 5)]:
        assert sum(talk.own) >= talks.LEAST_ROOM and len(talk.ids) <= 140
    with pytest.raises(ConfigError, match=r"--length 60: a question and its answer need \d+ tokens more"):
        source(endless, [], held_out=3, length=60)


@pytest.mark.parametrize(
    ("template", "prompts", "told"),
    [
        (None, [], "the target cannot ask itself questions: This model has no chat template"),
        ("{{ raise_exception('never') }}", [], "cannot ask itself questions: .*never"),
        ("{{ messages[0].content | lower }}", [], "the chat template changes what users and assistants say"),
        ("{{ raise_exception('never') }}", MATH, "--prompts, .*never"),
    ],
)
def test_a_template_that_cannot_be_used_is_told(template: str | None, prompts: list[Prompt], told: str) -> None:
    tokenizer = Tokenizer(DEMO / "target")
    tokenizer.chat_template = ChatTemplate(template, {})
    with pytest.raises(ConfigError, match=told) as refused:
        source(tokenizer, prompts, held_out=2)
    assert refused.value.hint.startswith("give ")


# Lessons


@pytest.mark.parametrize("whole", [True, False], ids=["operator", "layers"])
def test_a_lesson_is_what_the_target_computes(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path, seed=4, family="llama")
    engine, taps = make_engine(pair.target, max_num_batched_tokens=64, max_num_seqs=2), (0, 2)
    teacher = Teacher(engine, taps, max_tokens=64)
    assert teacher.target.whole is not None
    if not whole:
        teacher.target.whole = None
    draw = random.Random(1)
    talks = [([draw.randrange(97) for _ in range(n)], [False] * (n - 1) + [True]) for n in (17, 5, 16)]
    request = Request("beside", tuple(range(20)), 12)
    alone = make_engine(pair.target, max_num_seqs=2).core.run([request])["beside"]
    engine.core.add(request)
    got = [token for delta in engine.core.step().deltas for token in delta.token_ids]
    lesson = teacher.lesson(talks)
    while engine.core.has_work:
        got += [token for delta in engine.core.step().deltas for token in delta.token_ids]
    assert got == alone, "a lesson disturbs no request"
    reference = load_target(pair.target)
    for row, (ids, own) in enumerate(talks):
        n = len(ids)
        torch.testing.assert_close(lesson.features[row, :n], features(reference, ids, taps), rtol=1e-3, atol=1e-3)
        logits = lesson.hidden[row, :n] @ teacher.target.lm_head.T
        torch.testing.assert_close(logits, reference(torch.tensor([ids])).logits[0], rtol=1e-3, atol=1e-3)
        assert lesson.ids[row].tolist()[:n] == ids and lesson.own[row].tolist() == own + [False] * (17 - n)


# Loss


def small(head: Any, draft_vocab: int = 50) -> tuple[Draft, Ends, Lesson]:
    """Return a draft of a made-up target of 50 tokens, and a lesson of two talks, of which the second is shorter."""
    torch.manual_seed(0)
    sizes = {"rope_theta": 1e4, "eps": 1e-6, "max_positions": 64, "taps": (0, 1), "num_target_layers": 3}
    shape = Shape(50, draft_vocab, 16, head=head, mask_token_id=0, **SMALL | sizes)
    table = torch.randn(50, 16)
    kept = torch.arange(0, 2 * draft_vocab, 2) if draft_vocab < 50 else None
    rows = table if kept is None else table[kept]
    own = torch.zeros(2, 40, dtype=torch.bool)
    own[0, 8:], own[1, 20:30] = True, True
    lesson = Lesson(torch.randint(50, (2, 40)), own, torch.randn(2, 40, 16), torch.randn(2, 40, 32))
    return Draft(shape), Ends(table, table, rows, kept, nullcontext), lesson


def gradients(draft: Draft, ends: Ends, lesson: Lesson) -> tuple[float, list[Tensor]]:
    draft.zero_grad()
    found = learn(draft, ends, lesson, torch.Generator().manual_seed(2))
    return found, [parameter.grad.clone() for parameter in draft.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_slices_of_rows_have_the_gradients_of_the_whole(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small(head)
    whole, by_slice = gradients(*made), None
    monkeypatch.setattr(loss, "SLICE_BYTES", 4 * 50 * 3)
    by_slice = gradients(*made)
    assert by_slice[0] == pytest.approx(whole[0], rel=1e-5)
    for part, wanted in zip(by_slice[1], whole[1], strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-6)


def test_only_answers_are_learned() -> None:
    draft, ends, lesson = small("dflash")
    before = gradients(draft, ends, lesson)
    other = lesson.ids.clone()
    other[1, 31:] += 1  # padding, or a question
    other[0, :7] += 1
    assert gradients(draft, ends, lesson._replace(ids=other % 50))[0] == before[0]
    assert gradients(draft, ends, lesson._replace(own=torch.zeros_like(lesson.own)))[0] == 0


@torch.no_grad()
def expected_loss(draft: Draft, ends: Ends, lesson: Lesson) -> float:
    """Return the loss of the first talk, whose answer is its tokens 10 to 13, from all anchors."""
    kept = list(range(50)) if ends.ids is None else ends.ids.tolist()
    loss = total = 0.0
    for anchor in (10, 11, 12):
        block = torch.tensor([[lesson.ids[0, anchor], 0, 0, 0]])
        hidden = draft(lesson.features[:1], torch.tensor([[anchor]]), ends.embedding[block][None])[0, 0]
        for k in range(1, 14 - anchor):
            before, label = lesson.ids[0, anchor + k - 1], int(lesson.ids[0, anchor + k])
            scores = (ends.rows @ hidden[k] + draft.pairs(hidden[k : k + 1], before[None])).flatten().log_softmax(-1)
            teacher = (ends.lm_head @ lesson.hidden[0, anchor + k - 1]).softmax(-1)[kept]
            written = -float(scores[kept.index(label)]) if label in kept else 0.0
            weight = math.exp(-(k - 1) / 4.0)
            loss += weight * (0.4 * written - 0.6 * float((teacher * scores).sum()))
            total += weight
    return loss / total


def test_products_in_bfloat16_lose_little() -> None:
    draft, ends, lesson = small("dspark")
    wanted, whole = gradients(draft, ends, lesson)
    half = replace(ends, precision=partial(torch.autocast, "cpu", torch.bfloat16), rows=ends.rows.bfloat16())
    found, parts = gradients(draft, half, lesson)
    assert found == pytest.approx(wanted, rel=0.02)
    for part, exact in zip(parts, whole, strict=True):
        assert part.dtype == torch.float32 and (part - exact).norm() <= 0.1 * exact.norm() + 1e-6


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_the_loss_is_of_the_written_token_and_the_targets_distribution(head: str, reduced: bool) -> None:
    draft, ends, lesson = small(head, 20 if reduced else 50)
    own = torch.zeros_like(lesson.own)
    own[0, 10:14] = True
    lesson = lesson._replace(own=own)
    assert gradients(draft, ends, lesson)[0] == pytest.approx(expected_loss(draft, ends, lesson), rel=1e-4)


@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_a_draft_learns_a_text(head: str) -> None:
    draft, ends, lesson = small(head)
    hidden = 4 * ends.lm_head[lesson.ids.roll(-1, 1)]  # a target that is sure of what it wrote
    lesson = lesson._replace(hidden=hidden)
    first = tokens_a_step(draft, ends, iter([lesson]))
    steps, generator = loop.optimizers(draft, 0.03, 0.03), torch.Generator().manual_seed(3)
    for _ in range(80):
        learn(draft, ends, lesson, generator)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    assert first < 1.5 and tokens_a_step(draft, ends, iter([lesson])) > 3.0, "of 4 a step"


def test_tokens_a_step_are_those_that_the_engine_accepts(tokenizer: Tokenizer) -> None:
    talks = source(tokenizer, MATH, held_out=6)
    engine = make_demo()
    stored = checkpoint.read(DEMO / "draft", engine.target)
    draft = Draft(stored.shape)
    draft.load_state_dict(stored.state)
    teacher = Teacher(engine, stored.shape.taps, LENGTH)
    ends = Ends.of(teacher.target, None, nullcontext)
    measured = tokens_a_step(draft, ends, (teacher.lesson([talk]) for talk in talks.held_out))
    served = make_engine(DEMO / "target", DEMO / "draft", max_num_seqs=1, prefix_caching=False)
    ended = tokenizer.eos_ids
    run = run_engine(
        served, [Request(str(i), question(t), 150, stop_token_ids=ended) for i, t in enumerate(talks.held_out)]
    )
    assert [question(t) + tuple(text) for t, text in zip(talks.held_out, run.texts, strict=True)] == [
        tuple(t.ids) for t in talks.held_out
    ]
    assert measured == pytest.approx(run.acceptance_length, rel=0.01)


def test_a_tokenizer_of_more_tokens_than_the_target_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = make_engine(make_pair(tmp_path, seed=4).target, max_model_len=LENGTH, max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"the tokenizer makes tokens that the target lacks: .* must lie in 0\.\.96"):
        Talks(engine.core, tokenizer, MATH, LENGTH, 2, 2, random.Random(0))


def test_an_answer_of_one_token_has_no_step() -> None:
    draft, ends, lesson = small("dspark")
    own = torch.zeros_like(lesson.own)
    own[0, 12] = True
    assert tokens_a_step(draft, ends, iter([lesson._replace(own=own)])) == 0
    assert gradients(draft, ends, lesson._replace(own=own))[0] == 0


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muons_updates_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.5 and values.max() < 1.3


# Runs


def run(*arguments: str | Path) -> int:
    return command.main([str(argument) for argument in arguments])


COMMON = ("demo", "--prompts", "demo:math", "--length", LENGTH, "--layers", 1, "--block", 4, "--device", "cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few talks at once, and few that are held out."""
    monkeypatch.setattr(command, "NUM_HELD_OUT", 2)
    monkeypatch.setattr(command, "COUNTED_TOKENS", 200)


def trained(out: Path, minutes: float, *more: str | Path) -> int:
    return run(*COMMON, "--concurrency", 4, "--batch-tokens", 256, "--out", out, "--minutes", minutes, *more)


@pytest.mark.usefixtures("quick")
def test_a_run_ends_by_the_clock_and_prints_the_command_that_serves(tmp_path: Path, capsys: Any) -> None:
    out, began = tmp_path / "my draft", time.monotonic()
    assert trained(out, 0.03) == 0
    assert time.monotonic() - began < 40
    printed, told = capsys.readouterr()
    assert printed == f"dflash-server serve demo --draft-model '{out}'\n"
    assert "mask token 3, '<|mask|>'" in told.replace("\n", " ") and "tokens a step in 2 held-out answers" in told
    served = make_engine(DEMO / "target", out, max_num_seqs=1, max_model_len=LENGTH)
    plain = make_demo()
    asked = [Request("a", tuple(range(5, 20)), 30)]
    assert run_engine(served, asked).texts == run_engine(plain, asked).texts


@pytest.mark.usefixtures("quick")
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = Trainer.learn

    def stopped(self: Trainer, spent: Any) -> float:
        if self.state.step == 3:
            raise KeyboardInterrupt
        return learned(self, spent)

    monkeypatch.setattr(Trainer, "learn", stopped)
    assert trained(tmp_path, 0.5, "--save-minutes", 0) == 130
    monkeypatch.setattr(Trainer, "learn", learned)
    before = torch.load(tmp_path / "training.pt", weights_only=True)
    assert before["step"] == 3 and 0 < before["seconds"] < 30
    assert trained(tmp_path, before["seconds"] / 60 + 0.01) == 0
    after = torch.load(tmp_path / "training.pt", weights_only=True)
    assert "going on after" in capsys.readouterr().err and after["step"] > 3 and after["seconds"] > before["seconds"]
    assert torch.equal(after["held_out"]["ids"], before["held_out"]["ids"])
    assert torch.equal(after["talks"]["ids"][: len(before["talks"]["ids"])], before["talks"]["ids"])


@pytest.mark.usefixtures("quick")
def test_a_run_with_other_settings_is_another_run(tmp_path: Path, capsys: Any) -> None:
    assert trained(tmp_path, 0.001) == 0
    capsys.readouterr()
    for more, told in ((("--rank", 8), "the draft's rank 48, and 8 is asked"), (("--seed", 1), "--seed 0, and 1 is")):
        assert trained(tmp_path, 0.001, *more) == 2
        assert told in capsys.readouterr().err
    (tmp_path / "training.pt").write_bytes(b"no archive")
    assert trained(tmp_path, 0.001) == 2
    assert "training.pt cannot be read" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_training_on_keeps_what_the_draft_knows(tmp_path: Path, capsys: Any) -> None:
    """Also with a vocabulary that is reduced at the start."""
    math = ("demo", "--prompts", "demo:math", "--length", LENGTH, "--device", "cpu", "--concurrency", 4)
    for more in ((), ("--draft-vocab", 512)):
        out = tmp_path / f"out{len(more)}"
        assert run(*math, "--start-from", "demo", "--out", out, "--minutes", 0.001, *more) == 0
        told = capsys.readouterr().err
        assert float(told.split(" tokens a step in")[0].split()[-1]) > 6.0
        config = json.loads((out / "config.json").read_text())
        assert config["block_size"] == 16 and config.get("draft_vocab_size") == (512 if more else None)


def test_rates_rise_hold_and_fall(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    talks, engine = source(tokenizer, MATH), make_demo()
    monkeypatch.setattr(loop, "WARM_UP", 4)
    draft = Draft(
        Shape(
            2560,
            2560,
            192,
            head="dflash",
            mask_token_id=3,
            **SMALL
            | {
                "rank": 0,
                "rope_theta": 1e4,
                "eps": 1e-6,
                "max_positions": LENGTH,
                "taps": (0,),
                "num_target_layers": 5,
            },
        )
    )
    teacher = Teacher(engine, (0,), 512)
    trainer = Trainer(draft, Ends.of(teacher.target, None, nullcontext), teacher, talks, State([]), 256, 0, rates=0.5)
    rates = []
    for share in (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0):
        trainer.learn(lambda share=share: share)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"] / (0.5 * loop.MUON_LR))
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0])


def test_a_lesson_that_is_not_finite_leaves_the_draft_as_it_was(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(make_demo(), (0,), 512)
    sizes = {"rope_theta": 1e4, "eps": 1e-6, "max_positions": LENGTH, "taps": (0,), "num_target_layers": 5}
    draft = Draft(Shape(2560, 2560, 192, head="dspark", mask_token_id=3, **SMALL | sizes))
    ends = Ends.of(teacher.target, None, nullcontext)
    trainer = Trainer(draft, ends, teacher, source(tokenizer, MATH), State([]), 256, 0)
    taught = teacher.lesson
    monkeypatch.setattr(teacher, "lesson", lambda rows: (made := taught(rows))._replace(hidden=made.hidden * math.nan))
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    assert math.isnan(trainer.learn(lambda: 0.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    monkeypatch.undo()
    assert math.isfinite(trainer.learn(lambda: 0.0))
    assert not torch.equal(draft.norm.weight, before["norm.weight"]), "it learns the next one"


@pytest.mark.usefixtures("quick")
def test_no_minutes_write_a_draft_and_a_vocabulary_ends_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COUNTED_TOKENS", 10**9)
    assert trained(tmp_path, 0, "--draft-vocab", 64) == 0
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 64


# Refusals


@pytest.mark.usefixtures("quick")
def test_a_folder_of_another_run_or_checkpoint_is_left_alone(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs would mix their files, and weights of another kind would be lost."""
    pair = make_pair(tmp_path, seed=1)
    before = (pair.target / "model.safetensors").read_bytes()
    assert trained(pair.target, 0) == 2
    assert "target: there is a checkpoint, and no training.pt" in capsys.readouterr().err
    assert (pair.target / "model.safetensors").read_bytes() == before
    with (tmp_path / "training.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert trained(tmp_path, 0) == 2
    assert "another run trains there" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["a mixture of experts", "a hybrid with recurrent layers"])
def test_a_target_that_is_not_dense_is_refused(tmp_path: Path, capsys: Any, kind: str) -> None:
    pair = make_pair(tmp_path, seed=1, experts=4) if "experts" in kind else make_hybrid_pair(tmp_path)
    assert run(pair.target, "--out", tmp_path / "out", "--device", "cpu") == 2
    assert f"is {kind}, and only dense targets are trained for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--mask-token", "<|im_end|>"), "error: --mask-token <|im_end|>: '<|im_end|>' "),
        (("--taps", "0,9"), "--taps 0,9: a draft reads layers 0 to 3"),
        (("--start-from", "demo", "--rank", "8"), "--layers, --block, --rank: the draft of --start-from has its own"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("--device", "npu"), "drafts are trained on a CPU or with CUDA"),
        (("--heads", "3"), "unknown flag --heads: did you mean --head?"),
        (("--out", __file__), f"--out {__file__}: "),
        (("--dtype", "int3"), "--dtype: invalid choice: 'int3'"),
        (("--draft-vocab", "3000"), "--draft-vocab 3000: give 16 to 2560"),
        (("--memory-utilization", "1.5"), "'1.5' is not a share above 0 and up to 1"),
        (("--length", "9000"), "--length 9000: the target's context has 2048 tokens"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_setting_that_cannot_be_is_told_before_weights_are_read(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(command, "build_engine", lambda *_: pytest.fail("weights were read"))
    try:
        code = run(*COMMON, "--out", tmp_path / "out", *more)
    except SystemExit as ended:
        code = int(ended.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and told in error and "Traceback" not in error


@pytest.mark.parametrize("size", [15, 2561])
def test_a_draft_to_train_on_is_reduced_within_its_vocabulary(tmp_path: Path, capsys: Any, size: int) -> None:
    assert run("demo", "--out", tmp_path, "--start-from", "demo", "--draft-vocab", size) == 2
    assert f"--draft-vocab {size}: give 16 to 2560" in capsys.readouterr().err


def test_a_rotated_target_is_refused(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "rotation_file", lambda *_: tmp_path / "quarot.safetensors")
    assert run("demo", "--out", tmp_path) == 2
    assert "demo is rotated (QuaRot)" in capsys.readouterr().err


def test_a_full_disk_and_full_memory_are_told_before_training(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert trained(tmp_path, 1) == 2
    assert "MiB are needed, and 1 MiB are free" in capsys.readouterr().err
    monkeypatch.undo()
    built = command.build_engine

    def tight(config: Any) -> Engine:
        engine = built(config)
        monkeypatch.setattr(engine.core.runner.backend, "memory", lambda: (1 << 20, 2 << 20))
        return engine

    monkeypatch.setattr(command, "build_engine", tight)
    assert trained(tmp_path, 1) == 2
    assert "training takes about" in (told := capsys.readouterr().err) and "and 1 MiB are free on cpu" in told
