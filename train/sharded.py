"""A target too large for one process's memory: each keeps a part of every decoder layer, and a layer is whole while it
runs (ZeRO-3 inference).

The bytes of a layer's weights are dealt out to the processes, and gathered into the same storages when the layer runs;
the next layer's come while it does. So modules, fused projections and hooks see the tensors that they always saw, and
features are those of the whole target bit for bit. Embedding, LM head and final norm stay whole: heads read them.
Nothing of it has a gradient or an optimiser.

**Lockstep.** A gather waits for all processes. So each forward of a sharded target is run by all of them, on rows of
their own or in company (`in_lockstep`), and whatever decodes with it decodes the same in all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
import torch.distributed
from torch import nn

from infer.fuse import FusedModules
from infer.target import TargetModel
from train.world import World

Item = TypeVar("Item")

KEPT_BYTES = 1 << 16
"""Weights up to this size, such as those of norms, stay whole: gathering them would cost more than it saves."""


class ShardedTarget(TargetModel):
    """A target whose layers are shared out; made by `shard_target`. `shards`: one for each layer."""

    shards: list[ShardedLayer]

    @classmethod
    def of(cls, target: TargetModel, shards: list[ShardedLayer]) -> Self:
        sharded = cls.__new__(cls)
        sharded.__dict__.update(target.__dict__)
        sharded.shards = shards
        return sharded

    @property
    def num_weight_bytes(self) -> int:
        with_parts: int = super().num_weight_bytes
        return with_parts + sum(shard.num_whole_bytes for shard in self.shards if not shard.is_whole)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all layers are whole, to be read without a forward. All processes enter together."""
        for shard in self.shards:
            shard.begin()
            shard.finish()
            shard.is_held = True
        try:
            yield
        finally:
            for shard in self.shards:
                shard.is_held = False
                shard.release()

    def twin(self, *, own_layers: bool) -> Any:
        raise ValueError(f"{self.name} is shared out among processes: this needs it whole (target.sharded=false)")

    @property
    def num_held_bytes(self) -> int:
        """Bytes of weights in this process, between forwards."""
        storages = [_storage(weights) for weights in _by_storage(self.model.parameters()).values()]
        storages += [storage for shard in self.shards for storage in shard.storages]
        kept: int = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        return kept + sum(part.nbytes for shard in self.shards for part in shard.parts)


class ShardedLayer:
    """The weights of one layer: `parts` is this process's, as bytes, of each of the layer's storages."""

    def __init__(self, layer: nn.Module, held: Sequence[list[nn.Parameter]], world: World, group: Any) -> None:
        """`held`: the weights to share out, by storage."""
        self.following: ShardedLayer | None = None
        self.is_held = False
        self._group = group
        self.storages = [_storage(weights) for weights in held]
        self._views = [(weight, weight.data) for weights in held for weight in weights]
        self.parts = [_part(storage, world) for storage in self.storages]
        self.num_whole_bytes: int = sum(storage.nbytes() for storage in self.storages)
        self._sizes = [part.numel() * world.size for part in self.parts]
        self._pending: list[Any] | None = None
        self.is_whole = True
        self.release()
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after, always_call=True)

    def begin(self) -> None:
        """Ask the other processes for their parts."""
        if self.is_whole or self._pending is not None:
            return
        self._pending = []
        for storage, part, size in zip(self.storages, self.parts, self._sizes, strict=True):
            storage.resize_(size)
            self._pending.append(_gather(_bytes_of(storage), part, group=self._group, async_op=True))

    def finish(self) -> None:
        """Wait for them."""
        for handle in self._pending or ():
            handle.wait()
        self._pending = None
        if not self.is_whole:
            self.is_whole = True
            for weight, view in self._views:
                weight.data = view

    def release(self) -> None:
        if self.is_whole and not self.is_held:
            self.is_whole = False
            for weight, view in self._views:
                weight.data = view.new_empty(0)  # reading a view of a storage without bytes would crash the process
            for storage in self.storages:
                storage.resize_(0)

    def _before(self, *_: Any) -> None:
        self.begin()
        self.finish()
        if self.following is not None:
            self.following.begin()

    def _after(self, *_: Any) -> None:
        self.release()


def shard_target(
    target: TargetModel, world: World, *, device: str | torch.device | None = None, keep_below: int = KEPT_BYTES
) -> TargetModel:
    """`target`, whose layers are from now on shared out among the processes; itself where there is only one.

    All processes have loaded the same target. `device`: where it works from now on, if it was too large to be loaded
    there; its layers are moved one by one. What reads a layer's weights directly, such as a new head that starts from
    them, comes before this, or goes into `ShardedTarget.whole`.
    """
    if world.size == 1:
        return target
    _check_same(target, world)
    target.device = target.device if device is None else torch.device(device)
    target.fused.disable()
    fused = _FusedLayers()
    target.compute_by(fused)
    owners = Counter(id(weight) for layer in target.layers for weight in layer.parameters())
    group = torch.distributed.new_group()
    shards = []
    for layer in target.layers:
        layer.to(target.device)
        fused.layers.append(FusedModules(layer))
        own = [weight for weight in layer.parameters() if owners[id(weight)] == 1]
        held = [weights for weights in _by_own_storage(own).values() if _storage(weights).nbytes() > keep_below]
        shards.append(ShardedLayer(layer, held, world, group))
    _move_rest(target)
    fused.enable()
    for shard, following in itertools.pairwise(shards):
        shard.following = following
    return ShardedTarget.of(target, shards)


def readable(target: Any) -> AbstractContextManager[None]:
    """Inside, the layers' weights of any target can be read; where it is sharded all processes enter together."""
    return target.whole() if isinstance(target, ShardedTarget) else nullcontext()


def in_lockstep(target: TargetModel, world: World, items: Sequence[Item]) -> Iterator[Item]:
    """`items`, for each of which the caller runs one forward of the target. Where it is sharded all processes call this
    together, and one that has fewer items keeps the others company with forwards of a single token."""
    if not isinstance(target, ShardedTarget):
        yield from items
        return
    most = int(world.max([float(len(items))])[0])
    yield from items
    for _ in range(most - len(items)):
        keep_company(target)


def keep_company(target: TargetModel) -> None:
    """A forward for the other processes' sake."""
    target.features([[0]], taps=())


def _check_same(target: TargetModel, world: World) -> None:
    differs = world.broadcast(target.fingerprint) != target.fingerprint
    if world.max([float(differs)])[0]:
        raise ValueError(
            f"the processes loaded different targets (this one {target.name}, fingerprint {target.fingerprint}): "
            "give all of them the same target.model"
        )


class _FusedLayers(FusedModules):
    """Projections that were fused layer by layer, so that no more than a layer of them is ever there twice."""

    way = "eager"  # weights that come and go have no second copy

    def __init__(self) -> None:
        self.layers: list[FusedModules] = []

    def enable(self) -> None:
        for layer in self.layers:
            layer.enable()

    def disable(self) -> None:
        for layer in self.layers:
            layer.disable()


def _move_rest(target: TargetModel) -> None:
    """Embedding, LM head, final norm and tables, after the layers."""
    in_layers = {id(module) for layer in target.layers for module in layer.modules()}
    for module in target.model.modules():
        if id(module) not in in_layers:
            module._apply(lambda tensor: tensor.to(target.device), recurse=False)


def _storage(weights: Sequence[torch.Tensor]) -> Any:
    return weights[0].untyped_storage()


def _by_own_storage(weights: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    """Weights by storage, after those were copied out whose storage is part of a file, or of something else's."""
    for sharing in _by_storage(weights).values():
        storage = _storage(sharing)
        if not storage.resizable() or storage.nbytes() != sum(weight.nbytes for weight in sharing):
            for weight in sharing:
                weight.data = weight.data.clone()
    return _by_storage(weights)


def _by_storage(weights: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    found: dict[int, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(weight.untyped_storage()._cdata, []).append(weight)
    return found


def _part(storage: Any, world: World) -> torch.Tensor:
    """This process's share of a storage, of equal size in all of them."""
    size = -(-storage.nbytes() // world.size)
    own = _bytes_of(storage)[size * world.rank :][:size]
    return nn.functional.pad(own, (0, size - len(own))).clone()


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gather(whole: torch.Tensor, part: torch.Tensor, **settings: Any) -> Any:
    """torch has renamed it."""
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
    return getattr(torch.distributed, name)(whole, part, **settings)
