"""Every family of targets: its logits are the reference's, and its text with DFlash is its text without."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config.engine import EngineConfig
from app.engine.checkpoint.families import FAMILIES as TABLE
from app.engine.checkpoint.read import check_checkpoints
from app.engine.errors import UnsupportedError
from app.engine.load.loader import target_class
from app.engine.models.target import Target
from tests.fast.engine.feeder import Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.lossless import LUCKY, Case, Subject, assert_lossless, random_prompts
from tests.fast.engine.pairs import FAMILIES, GPT_OSS, make_pair
from tests.fast.engine.reference import features, load_target, teacher_forced

torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", TABLE)
def test_every_line_of_the_table_names_a_class(model_type: str) -> None:
    assert issubclass(target_class(model_type), Target)


@pytest.mark.parametrize("shape", FAMILIES)
def test_logits_and_taps_are_the_references(tmp_path: Path, shape: str) -> None:
    checkpoint = random_checkpoint(tmp_path, **FAMILIES[shape])
    feeder, text, target = Feeder(checkpoint.engine()), checkpoint.prompts[1], load_target(checkpoint.folder)
    chunked = feeder.feed_whole(text, 7)
    decoded = feeder.sequence(text)
    feeder.feed(prefills=[(decoded, 5)])
    while decoded.num_computed < len(text):
        feeder.feed(decodes=[decoded])
    for sequence in (chunked, decoded):
        assert_logits_close(feeder.logits(sequence), teacher_forced(target, text))
        assert_logits_close(feeder.features(sequence), features(target, text, checkpoint.taps))


def test_frequencies_in_an_older_file_change_nothing(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path, **FAMILIES["Llama 2"])
    text, file = checkpoint.prompts[1], checkpoint.folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    feeder = Feeder(checkpoint.engine())
    assert_logits_close(feeder.logits(feeder.feed_whole(text, 7)), teacher_forced(load_target(checkpoint.folder), text))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_a_prefix_of_all_names_changes_nothing(tmp_path: Path, prefix: str) -> None:
    """Multimodal checkpoints have the text part under one, and the lm_head may be there or beside it."""
    checkpoint = random_checkpoint(tmp_path, **FAMILIES["Llama 3.1"])
    text, file = checkpoint.prompts[1], checkpoint.folder / "model.safetensors"
    wanted = teacher_forced(load_target(checkpoint.folder), text)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("lm_head.")}
    outer = "language_model." if prefix.startswith("language_model.") else ""
    renamed = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(renamed | {outer + name: tensor for name, tensor in head.items()}, file)
    (checkpoint.folder / "tokenizer.json").write_text("{}")
    check_checkpoints(EngineConfig(checkpoint.folder))
    feeder = Feeder(checkpoint.engine())
    assert_logits_close(feeder.logits(feeder.feed_whole(text, 7)), wanted)
    save_file(renamed | {f"{twice}norm.weight": torch.ones(32) for twice in ("", "model.")}, file)
    with pytest.raises(UnsupportedError, match=r"two tensors are called norm\.weight"):
        checkpoint.engine()


WITH_DRAFTS = {name: LUCKY | FAMILIES[name] for name in ("Llama 3.1", "Qwen2.5")} | {"gpt-oss": LUCKY | GPT_OSS}


@pytest.mark.parametrize("shape", WITH_DRAFTS)
def test_dflash_changes_no_token(tmp_path: Path, shape: str) -> None:
    pair = make_pair(tmp_path, **WITH_DRAFTS[shape])
    subject, case = Subject(shape, pair.target, pair.draft, random_prompts(pair.vocab_size, 4)), Case(concurrency=4)
    if shape != "gpt-oss":  # the reference has none
        assert_lossless(subject.compare(list(subject.plain(case)), case))
    run = subject.run(case)
    assert_lossless(subject.compare(run.texts, case))
    assert run.verify_steps > 0
