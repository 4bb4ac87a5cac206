"""Which processes and devices compute a training, and how the global batch is cut for them.

The recipe fixes the global batch. It is cut into `micro_batches` equal parts; a process takes every `world`-th unit, one after the other.
What a unit computes does not depend on who computes it, so 1 process x 8 units and 8 processes x 1 are the same training.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer

Sharding = Literal["none", "full"]


@dataclass(frozen=True)
class Devices:
    """This process among all."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def own_micro_batches(self) -> tuple[int, ...]:
        """The units that this process computes, one after the other."""
        return tuple(range(self.rank, self.micro_batches, self.world_size))

    @property
    def accumulation(self) -> int:
        return self.micro_batches // self.world_size

    def describe(self, batch: int) -> str:
        kind = "GPU" if self.device.type == "cuda" else self.device.type.upper()
        name = f"{kind} ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else kind
        return f"batch {batch} = {self.world_size} x {name} x {self.accumulation} accumulation x {batch // self.micro_batches}"

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place and on the device."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: list[float]) -> list[float]:
        """The largest of each number over all processes. Goes from processor to processor: no device is waited for."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        """Until all processes are here; one that has died is noticed at once, which a barrier of the devices would not do."""
        self.all_reduce_max([0.0])

    def all_gather(self, value: Any) -> list[Any]:
        """What every process has there."""
        if self.world_size == 1:
            return [value]
        found = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: Any) -> Any:
        """What the first process has there."""
        return self.all_gather(value)[0]

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Trouble of one process is everybody's at the end of the block, so that nobody waits for one that has left.

        Inside the block a process must not wait for others.
        """
        trouble: UserError | None = None
        try:
            yield
        except UserError as error:
            trouble = error
        sentence = next((each for each in self.all_gather(None if trouble is None else str(trouble)) if each is not None), None)
        if sentence is not None:
            trouble = UserError(sentence) if trouble is None else trouble
            trouble.report_here = self.is_main if self.world_size > 1 else None
            raise trouble


@contextmanager
def connected(device: str | None = None) -> Iterator[Devices]:
    """Join the other processes if `torchrun` started several; one device otherwise."""
    if "RANK" not in os.environ:
        yield Devices(begin(choose_device(device)))
        return
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ["RANK"])
    chosen = begin(choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))))
    store = None if dist.is_initialized() else meet(chosen)
    try:
        yield Devices(chosen, rank, world, world)
    except UserError as error:
        shared = error.report_here is not None or world == 1
        if error.report_here is None:
            error.report_here = first_to_tell(store, otherwise=False)
        if shared or chosen.type == "cpu":  # devices that compute for the others would keep this one waiting
            leave(store)
        raise
    except Exception as error:
        if world == 1:
            leave(store)
        if world == 1 or not is_broken_connection(error):
            raise
        # The devices may wait for the lost one for ever, so that there is no orderly farewell.
        trouble = UserError(f"Process {rank} has lost the others: one of them has ended, or the connection has.")
        trouble.report_here = first_to_tell(store, otherwise=True)
        raise trouble from None
    leave(store)


def begin(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def meet(device: torch.device) -> dist.Store:
    """Wait for all processes; the place where they met."""
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"RANK is set but {missing[0]} is not: start several processes with torchrun, or unset RANK for one.")
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun keeps the place when it starts the processes anew: they must not find the addresses of those before them.
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {world}", store)
    # Both at once: tensors travel from device to device, what is agreed on between two steps from processor to processor.
    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, device_id=device if cuda else None
    )
    return dist.PrefixStore("vitrail", store)


def leave(store: dist.Store | None) -> None:
    if store is not None:
        dist.destroy_process_group()


def first_to_tell(store: dist.Store | None, otherwise: bool) -> bool | None:
    """Whether nobody has told of any trouble yet; None where there is no place to ask.

    `otherwise` is the answer if the place is gone with the process that kept it, the first one: of trouble that all have it has
    told, of its own death it has not.
    """
    if store is None:
        return None
    try:
        return store.add("told", 1) == 1
    except (RuntimeError, ValueError):
        return otherwise


def is_broken_connection(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def is_launched() -> bool:
    """Whether there is a group of processes, be it one of one."""
    return dist.is_initialized()


def choose_device(name: str | None, local: int = 0) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"There is no device {name!r}: give cpu, cuda or cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Vitrail does not compute on the device {name!r}: give cpu, cuda or cuda:1.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("There is no GPU that torch can use here: give --device cpu.")
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise UserError(f"Each of several processes takes a GPU of its own: give --device cuda, not {name}.")
        index, count = local if device.index is None else device.index, torch.cuda.device_count()
        if index >= count:
            trouble = UserError(f"There is no GPU number {index}; this machine has {count}.")
            # Of the processes without a GPU the first tells it; those with one do not know.
            trouble.report_here = index == count if device.index is None else None
            raise trouble
        return torch.device("cuda", index)
    return device


def cut(batch: int, world: int, largest: int) -> int:
    """How many equal units the batch is cut into so that none has more than `largest` images and each process gets as many."""
    if batch % world:
        raise UserError(f"The batch of {batch} does not divide by {world} processes: set batch to a multiple of {world}.")
    for micro_batches in range(world, batch + 1, world):
        if batch % micro_batches == 0 and batch // micro_batches <= largest:
            return micro_batches
    raise UserError(f"The batch of {batch} cannot be cut for {world} processes into parts of at most {largest}.")


def wrap(module: nn.Module, model: VisionTransformer, devices: Devices, sharding: Sharding) -> nn.Module:
    """The module that the loop calls: as it is, replicated (DDP), or with every block's weights sharded (FSDP2)."""
    if sharding == "full":
        return shard(module, model, devices)
    return replicate(module, model, devices) if devices.world_size > 1 else module


def replicate(module: nn.Module, model: VisionTransformer, devices: Devices) -> nn.Module:
    # Of weights with a dimension of one, whose order in memory is a matter of taste: nothing to mend.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    replicated = nn.parallel.DistributedDataParallel(
        module,
        device_ids=[devices.device.index] if devices.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=has_idle_heads(model),
    )
    replicated.broadcast_buffers = False  # `Statistics` keeps them equal; the argument is spelt otherwise since torch 2.13
    return replicated


def shard(module: nn.Module, model: VisionTransformer, devices: Devices) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    check_shardable(model)
    mesh = init_device_mesh(devices.device.type, (devices.world_size,))
    # Weights travel in single precision and autocast rounds them where they are used, as it does without sharding. Sending
    # them in half would be faster and another training: norms, scales and the residual stream would be rounded too.
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "outputs")  # what `Supervised` calls; the weights are gathered around it
    return module


def check_shardable(model: VisionTransformer) -> None:
    if not is_launched():
        raise UserError("Sharding needs processes to share among: start with torchrun.")
    single = next((name for name, parameter in model.named_parameters() if parameter.ndim == 0), None)
    if single:
        raise UserError(f"{single} is a single number, which cannot be shared among processes: train without --shard.")


def has_idle_heads(model: VisionTransformer) -> bool:
    """Whether labels alone leave a head without a gradient: the dense one."""
    return model.head_dense is not None


def without_reduction(module: nn.Module, last: bool) -> Any:
    """Gradients of all but the last accumulation step stay at home."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not last:
        return module.no_sync()
    for part in module.children():
        # Of FSDP2's modules; their class would cost everyone who chooses a device a second of imports.
        if synchronize := getattr(part, "set_requires_gradient_sync", None):
            synchronize(last)
    return nullcontext()
