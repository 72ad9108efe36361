"""Targets with an adapter: a head's own or anyone's, merged or live; one target on every path, only on its own base."""

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
from heads.checkpoint import HeadCard, TargetReference, read_card, save_head
from heads.lora import merged_weight, read_adapter, tensor_name, write_adapter
from infer.adapter import ADAPTER_FOLDER, Adapter, write_merged_target
from infer.drafters import TreeSettings
from infer.engine import Engine, load_engine
from infer.fingerprint import fingerprint_of
from infer.target import RelativeTarget, TargetModel
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
    factors, scales = read_adapter(root / "drawn")
    Adapter(
        factors=factors,
        scales=scales,
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


# Anyone's adapters


PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 9, "up_proj": 2}},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one expression": {"target_modules": r".*\.mlp\.(up|down)_proj"},
}


def write_peft_adapter(base: Path, folder: Path, *, seed: int = 0, **settings: Any) -> Any:
    """As a user's own training writes one; returns peft's merged model."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"target_modules": ["q_proj", "v_proj", "up_proj"], **settings}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        return adapted.merge_and_unload()


@pytest.fixture(scope="module")
def two_adapters(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("AB"):
        write_peft_adapter(adapted.base, root / name, seed=seed)
    return root / "A", root / "B"


def logits_of(target: TargetModel) -> torch.Tensor:
    with target.stock() as model, torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", PEFT_SETTINGS)
def test_peft_adapters_are_merged_as_peft_merges_them(adapted: Adapted, tmp_path: Path, kind: str) -> None:
    """Weights to float32 rounding, and the same target in every dtype and live."""
    expected = write_peft_adapter(adapted.base, tmp_path / "lora", **PEFT_SETTINGS[kind])
    base = TargetModel.load(adapted.base, dtype="float32")
    target = TargetModel.load(adapted.base, dtype="float32", adapter=tmp_path / "lora")
    mine, before = dict(target.model.named_parameters()), dict(base.model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(mine[name], parameter, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(mine[name], before[name]) for name in mine)
    live = base.with_adapter(tmp_path / "lora")
    assert live.fingerprint == target.fingerprint != base.fingerprint
    torch.testing.assert_close(logits_of(live), logits_of(target), rtol=1e-4, atol=1e-4)
    assert live.reference == target.reference
    assert (target.name, target.reference.name, target.reference.adapter) == (
        "target with adapter lora",
        "target",
        "lora",
    )
    assert target.reference.base_fingerprint == base.fingerprint
    rounded = TargetModel.load(adapted.base, dtype="bfloat16", adapter=tmp_path / "lora")
    assert rounded.fingerprint == target.fingerprint


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_stored_dtype_does_not_change_who_it_is(tmp_path: Path, stored: str) -> None:
    """Merged from what the files hold, in whatever dtype the target is loaded."""
    folders = write_folders(tmp_path, [])
    transformers.AutoModelForCausalLM.from_pretrained(folders.target, dtype=stored).save_pretrained(folders.target)
    write_peft_adapter(folders.target, tmp_path / "lora")
    dtypes = ["float32", "bfloat16", *(["float16"] if stored == "bfloat16" else [])]
    found = [TargetModel.load(folders.target, dtype=one, adapter=tmp_path / "lora").fingerprint for one in dtypes]
    assert len(set(found)) == 1


def test_live_adapters_beside_their_base(adapted: Adapted, two_adapters: tuple[Path, Path]) -> None:
    """Base, A and B share their weights and one draft head made for the base; switched from round to round, each says
    what it says alone (pitfall: adapters that reach the draft, or each other)."""
    base = TargetModel.load(adapted.base, dtype="float32")
    folder = adapted.head.parent / "head"
    targets = [base, *map(base.with_adapter, two_adapters)]
    shared = {id(parameter) for parameter in base.model.parameters()}
    for target in targets[1:]:
        own = [parameter for parameter in target.model.parameters() if id(parameter) not in shared]
        assert len(own) == 2 * 3 * base.num_layers
        assert sum(p.numel() for p in own) < sum(p.numel() for p in base.model.parameters()) / 4
    merged = [TargetModel.load(adapted.base, dtype="float32", adapter=one) for one in (None, *two_adapters)]
    for temperature in (0.0, 1.0):
        params = sampling(temperature)
        expected = [[plain_ids(target, prompt, params) for prompt in PROMPTS] for target in targets]
        assert len({str(texts) for texts in expected}) == 3
        assert expected == [[plain_ids(target, prompt, params) for prompt in PROMPTS] for target in merged]
        engines = [load_engine(folder, base, tree=TreeSettings(max_nodes=8, adaptive=False))]
        for target in targets[1:]:
            with pytest.warns(RelativeTarget, match=r"trained on target, not on target with adapter [AB]: answers are"):
                engines.append(load_engine(folder, target, tree=TreeSettings(max_nodes=8, adaptive=False)))
        requests = [engine.submit(PROMPTS, params) for engine in engines]
        while any(one.finish_reason is None for group in requests for one in group):
            for engine in engines:
                engine.step()
        assert [[tuple(one.output_ids) for one in group] for group in requests] == expected


def test_a_live_adapter_under_the_other_drafters(adapted: Adapted, two_adapters: tuple[Path, Path]) -> None:
    """Views of a view: its first layers, and its rounded weights, draft for it and share its cache."""
    target = TargetModel.load(adapted.base, dtype="float32").with_adapter(two_adapters[0])
    for head in ("layers:2", "int8", "layers:2,vocab=260", "ngram"):
        engine = load_engine(head, target, tree=TreeSettings(max_nodes=8, adaptive=False))
        answers = engine.generate(PROMPTS, sampling())
        assert [one.token_ids for one in answers] == [plain_ids(target, prompt, sampling()) for prompt in PROMPTS]


def test_heads_know_which_adapter_they_were_trained_with(
    adapted: Adapted, two_adapters: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head of the adapted target is at home there, merged or live. Without the adapter it is refused, since answers
    would be another model's than the user means; another adapter of the same base is a relative."""
    first, second = two_adapters
    target = TargetModel.load(adapted.base, dtype="float32", adapter=first)
    head = save_head(tmp_path / "head", random_head(target), HeadCard(target=target.reference))
    base = TargetModel.load(adapted.base, dtype="float32")
    for own in (target, base.with_adapter(first)):
        own.check_card(read_card(head))
    with pytest.raises(ValueError, match=r"with adapter A \(\w+\), but target has other .*give its adapter A too"):
        base.check_card(read_card(head))
    with pytest.warns(RelativeTarget, match="trained on target with adapter A, not on target with adapter B"):
        base.with_adapter(second).check_card(read_card(head))
    other = TargetModel.load(adapted.other, dtype="float32", adapter=first)
    with pytest.raises(ValueError, match="has other weights or another tokenizer"):
        other.check_card(read_card(head))
    path = tmp_path / "answers.json"
    arguments = [str(head), "--target", str(adapted.base), "--prompts", str(adapted.prompts), "--dtype", "float32"]
    arguments += ["--max-tokens", "12", "--json", str(path), "--no-adaptive"]
    texts = {}
    for name, extra in {"A": ["--adapter", str(first)], "B": ["--adapter", str(second)]}.items():
        assert headstart.main(["generate", *arguments, *extra]) == 0
        texts[name] = [answer["token_ids"] for answer in json.loads(path.read_text())]
        assert ("fewer drafts may be accepted" in capsys.readouterr().err) == (name == "B")
        assert headstart.main(["generate", *arguments, *extra, "--no-draft"]) == 0
        assert texts[name] == [answer["token_ids"] for answer in json.loads(path.read_text())]
        capsys.readouterr()
    assert texts["A"] != texts["B"]
    assert headstart.main(["generate", *arguments]) != 0
    assert "give its adapter A too (--adapter" in capsys.readouterr().err


def test_a_relative_is_taken_where_that_is_asked_for(
    adapted: Adapted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A fine-tuned target with a head of its base: refused, or knowingly allowed, with answers that are its own."""
    path = tmp_path / "answers.json"
    arguments = [str(adapted.head.parent / "head"), "--target", str(adapted.other), "--prompts", str(adapted.prompts)]
    arguments += ["--dtype", "float32", "--max-tokens", "12", "--json", str(path), "--no-adaptive"]
    assert headstart.main(["generate", *arguments]) != 0
    assert "has other weights or another tokenizer" in capsys.readouterr().err
    assert headstart.main(["generate", *arguments, "--relative"]) != 0  # its card is too old to tell its tokens
    assert "its draft vocabulary would mean other words" in capsys.readouterr().err
    base = TargetModel.load(adapted.base, dtype="float32")
    head = save_head(tmp_path / "head", random_head(base), HeadCard(target=base.reference))
    answers = []
    for extra in (["--relative"], ["--relative", "--no-draft"]):
        assert headstart.main(["generate", str(head), *arguments[1:], *extra]) == 0
        assert "trained on target, not on other" in capsys.readouterr().err
        answers.append([answer["token_ids"] for answer in json.loads(path.read_text())])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True: only plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"init_lora_weights": "olora"}, "merge others with peft"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"rank_pattern": {"q_proj": 9}}, r"expected \[9, inputs\]"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(
    adapted: Adapted, two_adapters: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "lora"
    shutil.copytree(two_adapters[0], folder)
    break_config(**change)(folder)
    with pytest.raises(ValueError, match=message):
        TargetModel.load(adapted.base, dtype="float32", adapter=folder)


def test_adapters_that_cannot_be_merged_are_refused(
    adapted: Adapted, two_adapters: tuple[Path, Path], tmp_path: Path, tiny_model: Any
) -> None:
    """A folder that is none, another model's, a tied LM head's, a second one, and one beside a head's own."""
    base = TargetModel.load(adapted.base, dtype="float32")
    with pytest.raises(ValueError, match="no adapter folder '/nowhere'"):
        TargetModel.load(adapted.base, dtype="float32", adapter="/nowhere")
    with pytest.raises(ValueError, match="is not an adapter: it has no adapter_config"):
        TargetModel.load(adapted.base, dtype="float32", adapter=adapted.head)
    with pytest.raises(ValueError, match=r"of shape \[48, 32\], not \[48, 64\]"):
        TargetModel.wrap(tiny_model("llama", hidden_size=64)).with_adapter(two_adapters[0])
    with pytest.raises(ValueError, match=r"this one has no layer model\.layers"):
        TargetModel.wrap(tiny_model("gpt2")).with_adapter(two_adapters[0])
    with pytest.raises(ValueError, match="has an adapter already"):
        base.with_adapter(two_adapters[0]).with_adapter(two_adapters[1])
    write_peft_adapter(adapted.base, tmp_path / "lora", target_modules=["lm_head"])
    tied = TargetModel.wrap(tiny_model("llama", vocab_size=base.vocab_size, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="lm_head, whose weight is the embedding's too"):
        tied.with_adapter(tmp_path / "lora")
    live = base.with_adapter(tmp_path / "lora")
    assert live.vocab_size == base.vocab_size
    assert not torch.equal(live.lm_head_weight, base.lm_head_weight)
    torch.testing.assert_close(
        logits_of(live), logits_of(TargetModel.load(adapted.base, dtype="float32", adapter=tmp_path / "lora"))
    )


def test_two_adapters_at_once_are_refused(
    adapted: Adapted, two_adapters: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(adapted.head), "--target", str(adapted.base), "--adapter", str(two_adapters[0])]
    assert headstart.main(command) != 0
    assert "brings its adapter: leave out --adapter" in capsys.readouterr().err


def test_an_own_adapter_may_be_live_too(adapted: Adapted) -> None:
    """That of a head which was trained along with its target: the target on its card."""
    base = TargetModel.load(adapted.base, dtype="float32")
    adapter = Adapter.of_head(adapted.head)
    assert adapter is not None
    live = base.with_adapter(adapter)
    assert live.fingerprint == load(adapted).fingerprint
    live.check_card(read_card(adapted.head))
    with pytest.raises(ValueError, match="but other has other weights"):
        TargetModel.load(adapted.other, dtype="float32").with_adapter(adapter)
