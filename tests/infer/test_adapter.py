"""Targets with a head's adapter merged in: one target on every path, and only on its own base."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headstart
import infer.audit
from heads.checkpoint import HeadCard, TargetReference, save_head
from infer.adapter import (
    ADAPTER_FOLDER,
    Adapter,
    merged_weight,
    tensor_name,
    write_adapter,
    write_merged_target,
)
from infer.drafters import TreeSettings
from infer.engine import Engine, load_engine
from infer.fingerprint import fingerprint_of
from infer.target import TargetModel
from tests.infer.helpers import plain_ids, random_head, sampling, write_folders

RANK, SCALE = 2, 1.5
PROMPTS = [[5, 9, 3], [30, 31, 32, 33, 34], [7]]


@dataclass(frozen=True)
class Adapted:
    """base: a model on disk; other: one of the same shape; head: one with an adapter; prompts: a file."""

    base: Path
    other: Path
    head: Path
    prompts: Path


def write_random_adapter(base: Path, folder: Path) -> None:
    """Factors of all attention projections, large enough to change what the model says."""
    chance = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "self_attn" in name:
            out_features, in_features = module.weight.shape
            tensors[tensor_name(name, "lora_A")] = torch.randn(RANK, in_features, generator=chance) * 0.3
            tensors[tensor_name(name, "lora_B")] = torch.randn(out_features, RANK, generator=chance) * 0.3
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "bias": "none", "task_type": "CAUSAL_LM"}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    write_adapter(folder, config, tensors)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(tmp_path_factory.mktemp("adapted"), "float32")


def make_adapted(root: Path, dtype: str, *, stored: str = "float32") -> Adapted:
    """As if trained in `dtype`, on a base that is stored in another one."""
    folders = write_folders(root, [("chat", "one two three"), ("chat", "abc abc")])
    if stored != "float32":
        transformers.AutoModelForCausalLM.from_pretrained(folders.target, dtype=stored).save_pretrained(folders.target)
    base = TargetModel.load(folders.target, dtype=dtype)
    write_random_adapter(folders.target, root / "drawn")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders.target, dtype=base.dtype)
    Adapter(
        factors=infer.adapter.read_adapter(root / "drawn")[0],
        scale=SCALE,
        base_name="target",
        base_fingerprint=base.fingerprint,
        fingerprint="",
        dtype=base.dtype,
    ).merge_into(model, model)
    reference = TargetReference(
        name="target",
        fingerprint=fingerprint_of(model, base.tokenizer),
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
    )
    card = HeadCard(target=reference, training={"backbone": {"base_fingerprint": base.fingerprint, "dtype": dtype}})
    head = root / "adapted-head"
    save_head(head, random_head(base), card, add_files=lambda f: shutil.copytree(root / "drawn", f / ADAPTER_FOLDER))
    return Adapted(base=folders.target, other=folders.other, head=head, prompts=folders.prompts)


def load(adapted: Adapted, *, dtype: str = "float32", base: Path | None = None) -> TargetModel:
    return TargetModel.load(base or adapted.base, dtype=dtype, adapter=Adapter.of_head(adapted.head))


def merged_by_peft(adapted: Adapted) -> Any:
    """What a user of peft gets from the same two folders."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(adapted.base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it gives up
        return peft.PeftModel.from_pretrained(model, adapted.head / ADAPTER_FOLDER).merge_and_unload()


def test_it_is_the_target_that_peft_makes(adapted: Adapted) -> None:
    """Weights to float32 rounding; token for token, plain decoding is transformers' greedy generate on peft's model."""
    reference, target = merged_by_peft(adapted), load(adapted)
    mine = dict(target.model.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(mine[name], parameter, rtol=1e-5, atol=1e-6)
    base = TargetModel.load(adapted.base, dtype="float32")
    changed = 0
    for prompt in PROMPTS:
        params = sampling()
        answer = plain_ids(target, prompt, params)
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(answer) == expected[0, len(prompt) :].tolist()
        changed += answer != plain_ids(base, prompt, params)
    assert changed == len(PROMPTS)  # the adapter is not too small to be seen


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_answers_are_the_adapted_targets_own(adapted: Adapted, temperature: float) -> None:
    """load_engine merges the adapter by itself, and drafts change no token."""
    engine = load_engine(
        adapted.head, adapted.base, dtype="float32", device="cpu", tree=TreeSettings(max_nodes=8, adaptive=False)
    )
    assert engine.drafter is not None
    params = sampling(temperature)
    answers = engine.generate(PROMPTS, params)
    target = load(adapted)
    assert [answer.token_ids for answer in answers] == [plain_ids(target, prompt, params) for prompt in PROMPTS]
    assert engine.target.fingerprint == target.fingerprint


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_one_target_in_every_dtype(tmp_path: Path, trained: str, stored: str) -> None:
    """Trained in either dtype, it is served in all, and with the same fingerprint. The weights are casts of those of
    the training dtype. (float16 only where the base is stored in bfloat16: the fingerprint asks for that.)"""
    adapted = make_adapted(tmp_path, trained, stored=stored)
    served = ["float32", "bfloat16", *(["float16"] if stored == "bfloat16" else [])]
    targets = {dtype: load(adapted, dtype=dtype) for dtype in served}
    assert len({target.fingerprint for target in targets.values()}) == 1
    assert targets["float32"].fingerprint != TargetModel.load(adapted.base, dtype="float32").fingerprint
    one, two, *three = (target.layers[0].self_attn.q_proj.weight for target in targets.values())
    assert torch.equal(one.bfloat16(), two)
    assert torch.equal(one, two.float()) == (trained == "bfloat16")
    assert all(torch.equal(each, two.half()) for each in three)
    merged = write_merged_target(tmp_path / "merged", adapted.head, adapted.base)
    assert TargetModel.load(merged, dtype="float32").fingerprint == targets["float32"].fingerprint
    assert json.loads((merged / "config.json").read_text())["dtype"] == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_the_exact_sum_rounded(dtype: torch.dtype) -> None:
    """So it does not depend on how a machine orders float32 sums: bit for bit, in sums of 64 products."""
    chance = torch.Generator().manual_seed(2)
    weight = torch.randn(40, 30, generator=chance).to(dtype)
    down, up = torch.randn(64, 30, generator=chance), torch.randn(40, 64, generator=chance)
    products = up[:, :, None].double() * down[None].double()
    exact = [
        [math.fsum([entry, *(SCALE * terms).tolist()]) for entry, terms in zip(row, sums, strict=True)]
        for row, sums in zip(weight.tolist(), products.mT, strict=True)
    ]
    merged = merged_weight(weight, down, up, SCALE)
    assert merged.dtype == dtype
    assert torch.equal(merged, torch.tensor(exact, dtype=torch.float64).float().to(dtype))


def test_a_wrong_base_is_refused_by_name(adapted: Adapted) -> None:
    with pytest.raises(ValueError, match=r"trained along with target .* but other has other weights"):
        load(adapted, base=adapted.other)
    with pytest.raises(ValueError, match="but other has other weights"):
        load_engine(adapted.head, adapted.other, dtype="float32", device="cpu")
    base = TargetModel.load(adapted.base, dtype="float32")
    with pytest.raises(ValueError, match=r"belongs to it with the head's adapter merged in: .*adapter=Adapter.of_head"):
        load_engine(adapted.head, base)


def test_the_merged_target_as_a_folder(adapted: Adapted, tmp_path: Path) -> None:
    """A plain Hugging Face folder with the adapted target's fingerprint, bit for bit its weights, which also serves as
    the head's target; there is nothing to write for other heads, and nothing is overwritten."""
    out = write_merged_target(tmp_path / "merged", adapted.head, adapted.base)
    merged = TargetModel.load(out, dtype="float32")
    target = load(adapted)
    assert merged.fingerprint == target.fingerprint
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, merged.model.get_parameter(name))
    served = load_engine(adapted.head, out, dtype="float32", device="cpu").target
    assert served.fingerprint == target.fingerprint
    command = ["export", str(adapted.head), "--to", "merged-target", "--target", str(adapted.base)]
    assert headstart.main([*command, "--out", str(tmp_path / "by-command")]) == 0
    assert TargetModel.load(tmp_path / "by-command", dtype="float32").fingerprint == target.fingerprint
    with pytest.raises(ValueError, match="exists already"):
        write_merged_target(out, adapted.head, adapted.base)
    with pytest.raises(ValueError, match="other weights"):
        write_merged_target(tmp_path / "x", adapted.head, adapted.other)
    plain_head = adapted.head.parent / "head"
    with pytest.raises(ValueError, match="nothing to merge"):
        write_merged_target(tmp_path / "x", plain_head, adapted.base)
    assert not (tmp_path / "x").exists()


def test_commands_speak_of_the_adapted_target(
    adapted: Adapted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain, drafted and measured: all with the adapter, and told so."""
    path = tmp_path / "answers.json"
    base = [str(adapted.head), "--target", str(adapted.base), "--prompts", str(adapted.prompts), "--dtype", "float32"]
    common = [*base, "--max-tokens", "16", "--json", str(path), "--no-adaptive"]
    answers = []
    for extra in ([], ["--no-draft"]):
        assert headstart.main(["generate", *common, *extra]) == 0
        answers.append([answer["token_ids"] for answer in json.loads(path.read_text())])
        said = capsys.readouterr().err
        assert "target with the head's adapter" in said
        assert "are the adapted target's" in said
    assert answers[0] == answers[1]
    assert headstart.main(["generate", "none", *common[1:]]) == 0
    assert [answer["token_ids"] for answer in json.loads(path.read_text())] != answers[0]
    capsys.readouterr()
    assert headstart.main(["eval", *common]) == 0
    assert json.loads(path.read_text())["target"] == "target with the head's adapter"


def test_an_audit_is_of_the_adapted_target(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def run_checks(load: Callable[[str], TargetModel], *args: Any, **settings: Any) -> Any:
        loaded.extend(load(dtype).fingerprint for dtype in ("float32", "bfloat16"))
        raise ValueError("seen")

    monkeypatch.setattr(infer.audit, "run_checks", run_checks)
    with pytest.raises(ValueError, match="seen"):
        infer.audit.audit(adapted.base, adapted.head, prompts=lambda target: [])
    assert set(loaded) == {load(adapted).fingerprint}


def break_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def break_tensors(change: Callable[[dict[str, torch.Tensor], str], None]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors, sorted(tensors)[0])
        save_file(tensors, path)

    return broken


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_config(use_dora=True), "use_dora = True: only plain LoRA"),
        (break_config(bias="all"), "bias = 'all'"),
        (break_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (break_config(some_new_method={"a": 1}), "some_new_method"),
        (break_config(r=3), r"expected \[3, inputs\]"),
        (break_config(lora_alpha=1), "makes another target"),
        (break_tensors(lambda tensors, name: tensors.pop(name)), r"shapes \[None, "),
        (break_tensors(lambda tensors, name: tensors.update({"x": tensors[name].clone()})), "x, which is no factor"),
        (break_tensors(lambda tensors, name: tensors[name].fill_(torch.nan)), "non-finite"),
        (break_tensors(lambda tensors, name: tensors[name].mul_(1.5)), "makes another target"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: shutil.rmtree(folder), "has no adapter/"),
    ],
)
def test_a_damaged_adapter_is_refused(
    adapted: Adapted, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    """Rather than serving another target under the card's name."""
    head = tmp_path / "head"
    shutil.copytree(adapted.head, head)
    damage(head / ADAPTER_FOLDER)
    with pytest.raises(ValueError, match=message):
        load_engine(head, adapted.base, dtype="float32", device="cpu")


def test_an_adapter_that_the_card_does_not_know_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    """A head of a frozen target beside another head's adapter."""
    head = tmp_path / "head"
    shutil.copytree(adapted.head.parent / "head", head)
    assert Adapter.of_head(head) is None
    shutil.copytree(adapted.head / ADAPTER_FOLDER, head / ADAPTER_FOLDER)
    with pytest.raises(ValueError, match="of which its card does not speak"):
        load_engine(head, adapted.base, dtype="float32", device="cpu")


def test_a_twin_leaves_its_target_alone(adapted: Adapted) -> None:
    """A twin shares weights, or has its decoder layers' own. What is done to it does not reach the target, which goes
    on decoding as before."""
    target = TargetModel.load(adapted.base, dtype="float32")
    before = plain_ids(target, PROMPTS[0], sampling())
    shared, own = target.twin(own_layers=False), target.twin(own_layers=True)
    weights = dict(target.model.named_parameters())
    for name, parameter in shared.named_parameters():
        assert parameter is weights[name]
    for name, parameter in own.named_parameters():
        assert (parameter is weights[name]) != (".layers." in name)
    shared.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    with torch.no_grad():
        own.model.layers[0].mlp.up_proj.weight.zero_()
    assert Engine(target).generate([PROMPTS[0]], sampling())[0].token_ids == before
    assert own.config._attn_implementation == "sdpa"
