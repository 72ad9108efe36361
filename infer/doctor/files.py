"""What can be said of a head without running it: its folder, its tensors, and how they go with the target.

Shapes: C draft vocabulary, V target vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from heads.base import DraftHead, TargetSizes, final_tap
from heads.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    EMBEDDING_NAMES,
    WEIGHTS_FILE,
    HeadCard,
    load_head,
    present_folder,
    read_card,
    read_json,
    read_tensors,
)
from heads.layers import RMSNorm
from heads.registry import FAMILIES, family_of_config
from heads.vocab import VocabularyProvenance, always_kept_ids
from infer.adapter import ADAPTER_FOLDER
from infer.chat import tokenizer_hash
from infer.doctor.findings import Finding, Problem, Verdict, judged
from infer.doctor.texts import Evidence
from infer.target import TargetModel

FILES, CARD, TENSORS, TARGET, LENT, ROPE, VOCABULARY, LM_HEAD = (
    "files",
    "card",
    "tensors",
    "target",
    "lent weights",
    "rotary embeddings",
    "vocabulary",
    "LM head",
)

_KEYS_WITHOUT_MEANING = frozenset(
    {"torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache", "initializer_range", "pad_token_id"}
)
_KEYS_READ_TOO = frozenset({"rope_parameters", "logit_scale", "target_hidden_size", "input_norm", "bias"})
"""Keys that a family reads (and refuses where they would change what it computes), but does not always write."""
_LARGE_NORM, _SMALL_NORM = 1e3, 1e-3
"""Mean sizes of norm weights beyond which they are absurd; trained ones lie between a hundredth and a few tens."""
_SAME_WEIGHT = 1e-2
"""How far, as a share, two copies of a weight may lie apart that went through bfloat16."""
_RANDOM_EDGE = 1.2
"""A matrix whose largest singular value is less than this multiple of what independent random entries of its size give
(Marchenko and Pastur 1967) has no direction that training put there."""
_NUM_LM_ROWS = 256
_ALIKE = 0.5
"""Rows whose directions have this cosine in the mean stand for the same tokens; unrelated ones of a few hundred
features have less than 0.2."""
_LOW_COVERAGE, _FAILING_COVERAGE = 0.8, 0.5
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadFiles:
    """A head as it was found. head: unbound, in float32; None where its files do not make one."""

    folder: Path
    card: HeadCard
    raw_card: Mapping[str, Any]
    native: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    head: DraftHead | None


def read_files(folder: Path) -> tuple[HeadFiles, Finding]:
    """Everything in a head's folder, and whether it loads. ValueError where there is no card to begin with."""
    folder = present_folder(folder)
    card = read_card(folder)
    raw_card = read_json(folder / CARD_FILE)
    native: Mapping[str, Any] = {}
    tensors: Mapping[str, torch.Tensor] = {}
    head: DraftHead | None = None
    problems = []
    write_again = "write the head again from a good copy (a run's best/ or last/, or `headstart import`)"
    try:
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"the folder lacks {' and '.join(missing)}")
        native = read_json(folder / CONFIG_FILE)
        tensors = read_tensors(folder / WEIGHTS_FILE)
        head, _ = load_head(folder, dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        problems.append(Problem(verdict=Verdict.FAIL, finding=_one_line(error, folder), advice=write_again))
    unread = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.suffix in _OTHER_WEIGHTS and path.name != WEIGHTS_FILE
    )
    if unread:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"{', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read: only {WEIGHTS_FILE} is",
                advice="take out what is not part of the head",
            )
        )
    figures = {"num_tensors": len(tensors), "num_bytes": sum(tensor.nbytes for tensor in tensors.values())}
    fine = f"complete; {len(tensors)} tensors, {figures['num_bytes'] / 1e6:.1f} MB, each where it belongs and finite"
    files = HeadFiles(folder=folder, card=card, raw_card=raw_card, native=native, tensors=tensors, head=head)
    return files, judged(FILES, fine, problems, figures)


def _one_line(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).split())
    return text.replace(f"{folder}/", "") if text else type(error).__name__


def check_card(files: HeadFiles) -> Finding:
    """Whether `headstart.json` and `config.json` speak of the same head."""
    head, said = files.head, files.raw_card.get("head", {})
    assert head is not None
    family = family_of_config(files.native)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    found = {
        "family": family,
        "taps": list(head.config.taps),
        "draft_vocab_size": head.config.draft_vocab_size,
        "num_parameters": num_parameters,
    }
    problems = [
        Problem(
            verdict=Verdict.FAIL,
            finding=f"{CARD_FILE} says {key} = {said[key]}, {CONFIG_FILE} and the weights say {value}",
            advice="one of the two files was changed after the head was saved: restore it",
        )
        for key, value in found.items()
        if key in said and said[key] != value
    ]
    expected = head.config.to_native()
    unknown = sorted(files.native.keys() - expected.keys() - _KEYS_WITHOUT_MEANING - _KEYS_READ_TOO)
    # What a family's own reader knows and its writer leaves out says nothing new.
    unknown = [key for key in unknown if files.native[key] not in (None, False)]
    if unknown:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"{CONFIG_FILE} has keys that headstart does not read: {', '.join(unknown)}",
                advice="see that they do not change what the head computes",
            )
        )
    title = FAMILIES[family].title
    taps = f"taps {list(head.config.taps)} of {files.card.target.num_layers} layers"
    fine = f"{title}, {num_parameters / 1e6:.1f} M parameters, {taps}; {CARD_FILE} and {CONFIG_FILE} agree"
    return judged(CARD, fine, problems, {**found, "taps_by_layer": [tap - 1 for tap in head.config.taps]})


def check_tensors(files: HeadFiles) -> Finding:
    """Tensors that hold no information, or absurd numbers; and the dtypes."""
    head = files.head
    assert head is not None
    problems = []
    again = "write the head again from a good copy"
    norms = {
        f"{name}.weight" if name else "weight": module
        for name, module in head.named_modules()
        if isinstance(module, RMSNorm | torch.nn.LayerNorm)
    }
    figures: dict[str, Any] = {}
    weights = {name: tensor.detach().float() for name, tensor in head.named_parameters()}
    for name, tensor in weights.items():
        size = float(tensor.abs().mean())
        figures[name] = {"shape": list(tensor.shape), "mean_size": size, "largest": float(tensor.abs().max())}
        if name in norms and not _SMALL_NORM <= size <= _LARGE_NORM:
            found = "is all zeros" if not bool(tensor.any()) else f"has entries of {size:.2g} in the mean"
            problems.append(Problem(verdict=Verdict.FAIL, finding=f"the norm {name} {found}", advice=again))
        elif tensor.ndim >= 2 and bool((tensor == tensor.flatten()[0]).all()):
            found = "all zeros" if not bool(tensor.any()) else "one number throughout"
            problems.append(
                Problem(verdict=Verdict.FAIL, finding=f"{name} is {found}: never trained, or lost", advice=again)
            )
        elif tensor.ndim == 2 and (num_zero := int((tensor == 0).all(dim=1).sum())):
            problems.append(
                Problem(
                    verdict=Verdict.WARNING,
                    finding=f"{num_zero} of the {len(tensor)} rows of {name} are zero",
                    advice="if it was padded, pad the vocabulary map too; else write the head again",
                )
            )
    problems += _twins(weights)
    dtypes = sorted({_dtype(tensor) for tensor in files.tensors.values() if tensor.is_floating_point()})
    if len(dtypes) > 1:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"the weights are of several dtypes: {', '.join(dtypes)}",
                advice="save all in one",
            )
        )
    said = str(files.native.get("torch_dtype") or files.native.get("dtype") or "")
    if said and dtypes and said not in dtypes:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"{CONFIG_FILE} says {said}, the weights are {dtypes[0]}",
                advice="correct torch_dtype",
            )
        )
    return judged(TENSORS, f"{', '.join(dtypes)}; none is constant, no norm is absurd", problems, figures)


def _twins(weights: Mapping[str, torch.Tensor]) -> list[Problem]:
    """Matrices that are copies of each other: one module in several places, saved as if they were several."""
    seen: dict[tuple[Any, ...], str] = {}
    problems = []
    for name, tensor in weights.items():
        if tensor.ndim < 2 or not bool(tensor.any()):
            continue
        key = (tuple(tensor.shape), float(tensor.double().sum()), float(tensor.double().square().sum()))
        first = seen.setdefault(key, name)
        if first != name and torch.equal(weights[first], tensor):
            problems.append(
                Problem(
                    verdict=Verdict.WARNING,
                    finding=f"{first} and {name} are the same",
                    advice="depths that share one module cannot differ: train them apart",
                )
            )
    return problems


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_target(files: HeadFiles, target: TargetModel) -> Finding:
    """Whether the head was made for this target."""
    card, problems = files.card.target, []
    ours = {
        "hidden size": (card.hidden_size, target.hidden_size),
        "vocabulary": (card.vocab_size, target.vocab_size),
        "number of layers": (card.num_layers, target.num_layers),
    }
    right_one = f"give the target that the head was trained on ({card.name}) with --target"
    for what, (wanted, found) in ours.items():
        if wanted != found:
            problems.append(
                Problem(
                    verdict=Verdict.FAIL,
                    finding=f"the head's target has {what} {wanted}, {target.name} has {found}",
                    advice=right_one,
                )
            )
    if card.fingerprint != target.fingerprint:
        problems.append(
            Problem(
                verdict=Verdict.FAIL,
                finding=f"the head was trained on {card.name} ({card.fingerprint}), and {target.name} has other "
                f"weights or another tokenizer ({target.fingerprint})",
                advice=right_one,
            )
        )
    if target.tokenizer is not None and card.tokenizer_hash:
        found_hash = tokenizer_hash(target.tokenizer)
        if found_hash != card.tokenizer_hash:
            problems.append(
                Problem(
                    verdict=Verdict.FAIL,
                    finding=f"the tokenizer is not that of the head's target ({found_hash}, {card.tokenizer_hash})",
                    advice=right_one,
                )
            )
    if files.head is not None:
        outside = [tap for tap in files.head.config.taps if not 0 <= tap <= final_tap(target.num_layers)]
        if outside:
            problems.append(
                Problem(
                    verdict=Verdict.FAIL,
                    finding=f"taps {outside} do not exist: the target has {target.num_layers} layers",
                    advice="correct the taps in config.json",
                )
            )
    adapted = ", with the adapter that was trained along" if (files.folder / ADAPTER_FOLDER).is_dir() else ""
    fine = f"{target.name}, whose weights and tokenizer are those that the head was trained on{adapted}"
    return judged(TARGET, fine, problems, {"name": target.name, "fingerprint": target.fingerprint})


def bind(files: HeadFiles, target: TargetModel) -> tuple[DraftHead | None, Finding]:
    """The head ready to run on the target's device, and whether what its file holds of the target is the target's."""
    head = files.head
    problems = []
    notes = []
    own_parameters = set() if head is None else {name for name, _ in head.named_parameters()}
    copies = [name for name in EMBEDDING_NAMES if name in files.tensors and name not in own_parameters]
    if own_parameters.intersection(EMBEDDING_NAMES):
        notes.append("the embedding is the head's own")
    elif copies:
        notes.append(f"{copies[0]} is a copy of the target's embedding")
    else:
        notes.append("no embedding in the file: the target's is used")
    for name in copies:
        problems += _compare_copy(name, files.tensors[name], target.embedding_weight, "the target's embedding")
    if head is None:
        return None, judged(LENT, "; ".join(notes), problems)
    head = head.to(target.device)
    before = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    try:
        head.bind(target.weights)
    except ValueError as error:
        problems.append(Problem(verdict=Verdict.FAIL, finding=_one_line(error, files.folder)))
        return None, judged(LENT, "", problems)
    for name, tensor in head.state_dict().items():
        if not torch.equal(before[name], tensor):
            notes.append(f"{name} is a copy of the target's")
            problems += _compare_copy(name, before[name], tensor, "the target's own")
    own = [name for name, parameter in head.named_parameters() if parameter is own_lm_head(head)]
    if files.native.get("tie_word_embeddings") is True and own:
        problems.append(
            Problem(
                verdict=Verdict.FAIL,
                finding=f"{CONFIG_FILE} says tie_word_embeddings = true, and the file has an LM head of its own "
                f"({own[0]}): readers that believe the flag draft with the embedding",
                advice="set tie_word_embeddings to false",
            )
        )
    notes.append(f"the LM head is the head's own ({own[0]})" if own else "the LM head is the target's")
    return head.eval().requires_grad_(False), judged(LENT, "; ".join(notes), problems, {"copies": copies, "own": own})


def own_lm_head(head: DraftHead, depth: int = 0) -> torch.Tensor | None:
    """The parameter that is the LM head of a depth; None where the head drafts with the target's."""
    for parameter in head.parameters():
        if parameter.ndim == 2 and len(parameter) == head.config.draft_vocab_size:
            probe = torch.zeros((1, head.config.hidden_size), device=head.device, dtype=head.dtype)
            weight = head.outputs(probe, depth)[1]
            if weight is parameter or torch.equal(weight[:, : parameter.shape[1]], parameter):
                return parameter
    return None


def _compare_copy(name: str, copy: torch.Tensor, original: torch.Tensor, what: str) -> list[Problem]:
    advice = "leave it out of the file, or write the head again for this target"
    if copy.shape != original.shape:
        finding = f"{name} has shape {list(copy.shape)}, {what} {list(original.shape)}"
        return [Problem(verdict=Verdict.FAIL, finding=finding, advice=advice)]
    num_other = 0
    for ours, theirs in zip(copy.split(4096), original.split(4096), strict=True):
        ours, theirs = ours.float(), theirs.to(ours.device).float()
        apart = (ours - theirs).abs() > _SAME_WEIGHT * theirs.abs().amax(dim=-1, keepdim=True)
        num_other += int(apart.any(dim=-1).sum())
    if not num_other:
        return []
    finding = f"{name} is not {what}: {num_other} of {len(copy)} rows differ, and headstart uses the target's"
    return [Problem(verdict=Verdict.FAIL, finding=finding, advice=advice)]


def check_rope(head: DraftHead, target: TargetModel) -> Finding:
    """The head's rotary embeddings beside the target's. A difference is allowed, and often a mistake."""
    config: Any = head.config
    theta, scaling = getattr(config, "rope_theta", None), getattr(config, "rope_scaling", None)
    if theta is None or not getattr(config, "num_attention_heads", 0):
        return Finding(check=ROPE, verdict=Verdict.OK, finding="the head has none: it does not attend")
    sizes = TargetSizes.of(target.config)
    ours, theirs = (theta, scaling), (sizes.rope_theta, sizes.rope_scaling)
    figures = {"rope_theta": theta, "rope_scaling": scaling, "target": theirs}
    problems = []
    if ours != theirs:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"{rope_words(*ours)}, the target's are {rope_words(*theirs)}",
                advice="right only if the head was trained so: see what the check of other readings says",
            )
        )
    return judged(ROPE, f"{rope_words(*ours)}, as the target's", problems, figures)


def rope_words(theta: float, scaling: Mapping[str, Any] | None) -> str:
    kind = "unscaled" if not scaling else f"scaled ({scaling.get('rope_type')})"
    return f"rope_theta {theta:g}, {kind}"


def check_vocabulary(head: DraftHead, target: TargetModel, evidence: Evidence | None) -> Finding:
    """What the draft vocabulary leaves out that the target writes."""
    vocabulary = head.vocabulary
    problems = []
    ours = VocabularyProvenance(
        target_fingerprint=target.fingerprint,
        tokenizer_hash="" if target.tokenizer is None else tokenizer_hash(target.tokenizer),
    )
    conflict = vocabulary.provenance.conflict(ours)
    if conflict is not None:
        problems.append(
            Problem(
                verdict=Verdict.FAIL,
                finding=f"the map was counted for another target: its {conflict}",
                advice="make the head with a vocabulary of this target",
            )
        )
    inside = set(vocabulary.target_ids.tolist())
    kinds = _special_tokens(target)
    lacking = {kind: sorted(ids - inside) for kind, ids in kinds.items()}
    for kind, ids in lacking.items():
        if ids:
            shown = ", ".join(spelled(target, token) for token in ids[:4]) + (", ..." if len(ids) > 4 else "")
            problems.append(
                Problem(
                    verdict=Verdict.WARNING,
                    finding=f"{len(ids)} of {len(kinds[kind])} {kind} cannot be drafted: {shown}",
                    advice="keep them in the vocabulary of the next head",
                )
            )
    figures: dict[str, Any] = {"draft_vocab_size": len(vocabulary), "lacking": lacking}
    words = f"{len(vocabulary):,} of {vocabulary.vocab_size:,} tokens"
    if evidence is not None:
        written = [token for text in evidence.texts for token in text.answer]
        coverage = figures["coverage"] = vocabulary.coverage(written)
        words += f", which are {coverage:.1%} of what the target wrote"
        if coverage < _LOW_COVERAGE:
            problems.append(
                Problem(
                    verdict=Verdict.FAIL if coverage < _FAILING_COVERAGE else Verdict.WARNING,
                    finding=f"the vocabulary holds {coverage:.1%} of what the target wrote: no head drafts more",
                    advice="count the vocabulary on the target's own text, or make it larger",
                )
            )
    return judged(VOCABULARY, f"{words}; special, chat and byte tokens are among them", problems, figures)


def _special_tokens(target: TargetModel) -> dict[str, set[int]]:
    kinds = {"ends of text": {token for token in target.eos_ids if token < target.vocab_size}}
    if target.tokenizer is not None:
        kept = {token for token in always_kept_ids(target.tokenizer) if token < target.vocab_size}
        special = {*target.tokenizer.all_special_ids, *target.tokenizer.get_added_vocab().values()} & kept
        kinds["special and chat tokens"] = special - kinds["ends of text"]
        kinds["byte tokens"] = kept - special
    return kinds


def spelled(target: TargetModel, token: int) -> str:
    if target.tokenizer is None:
        return str(token)
    return f"{target.tokenizer.convert_ids_to_tokens(token)!r} ({token})"


@torch.inference_mode()
def check_lm_head(head: DraftHead, target: TargetModel) -> Finding:
    """Whether the LM head was trained, and for the tokens that the map names: a row is mostly what the target's LM
    head has for its token, where it began as that."""
    problems = []
    figures: dict[str, Any] = {}
    notes = []
    seen: set[int] = set()
    parameters = {id(parameter): name for name, parameter in head.named_parameters()}
    target_edge = _edge_share(target.lm_head_weight.float())
    for depth in range(head.num_depths or 1):
        weight = own_lm_head(head, depth)
        if weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        name = parameters[id(weight)]
        edge = _edge_share(weight.float())
        right, alike, mapped = _resemblance(weight.float(), head.target_ids, target.lm_head_weight.float())
        figures[name] = {"edge": edge, "nearest_is_mapped": right, "nearest_cosine": alike, "mapped_cosine": mapped}
        is_alike = alike >= max(_ALIKE, 1.5 * _chance_cosine(target.vocab_size, weight.shape[1]))
        if is_alike and right < 0.5:
            finding = (
                f"the rows of {name} are the target's for other tokens than the vocabulary map names: {right:.0%} of "
                f"them are nearest to the mapped token's (cosine {mapped:.2f}, and {alike:.2f} with the nearest)"
            )
            advice = "the map or the LM head is out of order: write both again from one good copy"
            problems.append(Problem(verdict=Verdict.FAIL, finding=finding, advice=advice))
        elif not is_alike and edge < _RANDOM_EDGE < target_edge:
            finding = f"{name} looks like random numbers (its largest singular value is {edge:.2f} times theirs)"
            problems.append(
                Problem(verdict=Verdict.FAIL, finding=finding, advice="it was never trained, or lost: train the head")
            )
        else:
            like = f"{right:.0%} of its rows are nearest to the target's for the mapped token"
            notes.append(f"{name}: {like}" if is_alike else f"{name}: its rows are its own, unlike the target's")
    return judged(LM_HEAD, "; ".join(notes) or "the target's own", problems, figures)


def _edge_share(weight: torch.Tensor, *, num_steps: int = 20) -> float:
    """The largest singular value of a matrix, over that of independent random entries with its standard deviation (by
    power iteration, which may fall short of it a little)."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(weight.shape[1], generator=generator).to(weight)
    size: torch.Tensor = weight.new_zeros(())
    for _ in range(num_steps):
        image = weight.T @ (weight @ functional.normalize(vector, dim=0))
        size, vector = image.norm().sqrt(), image
    edge = float(weight.std()) * (math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1]))
    return float(size) / max(edge, 1e-12)


def _resemblance(weight: torch.Tensor, target_ids: torch.Tensor, original: torch.Tensor) -> tuple[float, float, float]:
    """Of some rows of a draft LM head [C, H], around their mean: the share whose nearest row of the target's [V, H], by
    direction, is the mapped token's, the mean cosine with the nearest, and that with the mapped one."""
    places = torch.arange(0, len(weight), max(1, len(weight) // _NUM_LM_ROWS), device=weight.device)
    if weight.shape[1] != original.shape[1]:
        return 0.0, 0.0, 0.0
    rows = functional.normalize((weight - weight.mean(0))[places], dim=-1)
    originals = functional.normalize(original - original.mean(0), dim=-1)
    cosines = rows @ originals.T
    nearest = cosines.max(dim=-1)
    ids = target_ids[places]
    mapped = cosines.gather(-1, ids[:, None])[:, 0]
    # Tokens that never occur share one row in many models, so the nearest counts by its cosine and not by its number.
    right = mapped >= nearest.values - 1e-3
    return float(right.float().mean()), float(nearest.values.mean()), float(mapped.mean())


def _chance_cosine(num_rows: int, size: int) -> float:
    """About the largest cosine of a random direction with any of `num_rows` others."""
    return math.sqrt(2 * math.log(num_rows) / size)
