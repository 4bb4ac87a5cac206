"""Devices and processes of a training, and how the global batch is split among them.

The recipe fixes the global batch size and the groups of images that are mixed or normalized together. The batch is split into
`micro_batches` equal micro-batches, and each process computes every `world_size`-th of them, one after the other. What is
computed for an image depends on its group, not on its micro-batch, so 1 process x 8 micro-batches, 8 processes x 1 and 1 process
x 1 are the same training.
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

from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer

Sharding = Literal["none", "full"]


@dataclass(frozen=True)
class Devices:
    """The device of this process, its rank, and the number of micro-batches of a global batch."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def own_micro_batches(self) -> tuple[int, ...]:
        """Indices of the micro-batches that this process computes."""
        return tuple(range(self.rank, self.micro_batches, self.world_size))

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per process and step."""
        return self.micro_batches // self.world_size

    def describe(self, batch_size: int) -> str:
        """How a batch is split, for the log."""
        kind = "GPU" if self.device.type == "cuda" else self.device.type.upper()
        name = f"{kind} ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else kind
        images = batch_size // self.micro_batches
        return f"batch size {batch_size} = {self.world_size} x {name} x {self.accumulation} accumulation x {images}"

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place, on the device."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: list[float]) -> list[float]:
        """Elementwise maximum over all processes. Runs on the CPU, without synchronizing the device."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait for all processes. Runs on the CPU, where a dead process is detected at once; an NCCL barrier would hang."""
        self.all_reduce_max([0.0])

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.all_gather(value)[0]

    def broadcast_weights(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0, which must not be sharded, to all processes."""
        if self.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raise a UserError of one process on all processes at the end of the block, so that none of them hangs.

        The block must not contain collective operations.
        """
        failure: UserError | None = None
        try:
            yield
        except UserError as error:
            failure = error
        message = next((each for each in self.all_gather(None if failure is None else str(failure)) if each is not None), None)
        if message is not None:
            failure = UserError(message) if failure is None else failure
            failure.report_here = self.is_main if self.world_size > 1 else None
            raise failure


@contextmanager
def init_distributed(device: str | None = None) -> Iterator[Devices]:
    """Initialize the process group if `torchrun` started this process, and yield its devices; a single device otherwise."""
    if "RANK" not in os.environ:
        yield Devices(use_device(choose_device(device)))
        return
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ["RANK"])
    chosen = use_device(choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))))
    store = None if dist.is_initialized() else init_process_group(chosen)
    try:
        yield Devices(chosen, rank, world_size, world_size)
    except UserError as error:
        on_all_processes = error.report_here is not None or world_size == 1
        if error.report_here is None:
            error.report_here = should_report(store, default=False)
        if on_all_processes or chosen.type == "cpu":  # NCCL would wait for the operations of the other processes
            destroy_process_group(store)
        raise
    except Exception as error:
        if world_size == 1:
            destroy_process_group(store)
        if world_size == 1 or not is_broken_connection(error):
            raise
        # The process group is not destroyed: NCCL could wait for the lost process forever.
        lost = UserError(f"Process {rank} lost the connection to the others: one of them has ended, or the network failed.")
        lost.report_here = should_report(store, default=True)
        raise lost from None
    destroy_process_group(store)


def init_process_group(device: torch.device) -> dist.Store:
    """Connect to all processes; returns a key-value store that they share."""
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"RANK is set but {missing[0]} is not: start several processes with torchrun, or unset RANK for one.")
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps the store when it restarts the processes: they must not read the addresses of their predecessors.
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {world_size}", store)
    # Two backends: NCCL for tensors on devices, gloo for what the processes agree on between steps.
    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, device_id=device if cuda else None
    )
    return dist.PrefixStore("vitrail", store)


def destroy_process_group(store: dist.Store | None) -> None:
    if store is not None:
        dist.destroy_process_group()


def should_report(store: dist.Store | None, default: bool) -> bool | None:
    """Whether no other process has reported an error yet; None without a store.

    `default` is returned if the store is gone together with rank 0, which keeps it: rank 0 has reported an error that all
    processes share, but not its own death.
    """
    if store is None:
        return None
    try:
        return store.add("reported", 1) == 1
    except (RuntimeError, ValueError):
        return default


def is_broken_connection(error: Exception) -> bool:
    """Whether torch.distributed raised this because another process is unreachable."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def is_launched() -> bool:
    """Whether a process group is initialized; it may consist of one process."""
    return dist.is_initialized()


def choose_micro_batches(
    batch_size: int, world_size: int, max_size: int, group_size: int = 1, pairs: bool = False, whole_groups: bool = False
) -> int:
    """The smallest number of equal micro-batches of at most `max_size` images that is a multiple of the world size.

    With `pairs` a micro-batch has whole groups or pairs of images of one group, which are mixed. With `whole_groups` it has whole
    groups, or all processes together have one group at a time, whose statistics they synchronize.
    """
    if batch_size % world_size:
        raise UserError(
            f"batch_size={batch_size} is not divisible by {world_size} processes: set it to a multiple of {world_size}."
        )
    count = batch_size // group_size
    for micro_batches in range(world_size, batch_size + 1, world_size):
        size, rest = divmod(batch_size, micro_batches)
        if rest or size > max_size:
            continue
        whole, part = count % micro_batches == 0, micro_batches % count == 0
        together = count == 1 and micro_batches == world_size
        if (whole or not pairs or (part and size % 2 == 0)) and (whole or not whole_groups or together):
            return micro_batches
    needed = "whole groups" if whole_groups else "pairs of groups" if pairs else ""
    largest = min(max_size, batch_size // world_size)
    raise UserError(
        f"batch_size={batch_size} cannot be split among {world_size} processes into parts of at most {largest} images"
        + (f" with {needed} of {group_size} images: set group_size to at most {largest}." if needed else ".")
    )


def wrap_module(module: nn.Module, model: VisionTransformer, devices: Devices, sharding: Sharding) -> nn.Module:
    """Wrap the module that contains `model` in DDP, shard its blocks with FSDP2, or return it as it is for one process."""
    if sharding == "full":
        return wrap_fsdp(module, model, devices)
    return wrap_ddp(module, model, devices) if devices.world_size > 1 else module


def wrap_ddp(module: nn.Module, model: VisionTransformer, devices: Devices) -> nn.Module:
    # Harmless: it concerns weights with a dimension of size one, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    wrapped = nn.parallel.DistributedDataParallel(
        module,
        device_ids=[devices.device.index] if devices.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=has_unused_parameters(model),
    )
    wrapped.broadcast_buffers = False  # `BatchNormStatistics` keeps them equal; the argument has another name since torch 2.13
    return wrapped


def wrap_fsdp(module: nn.Module, model: VisionTransformer, devices: Devices) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    check_shardable(model)
    mesh = init_device_mesh(devices.device.type, (devices.world_size,))
    # Weights are gathered in float32 and rounded by autocast where they are used, as without sharding. Gathering them in half
    # precision would be faster but change the results: norms, layer scales and the residual stream would be rounded too.
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "outputs")  # the task calls this method; FSDP2 gathers the weights around it
    return module


def check_shardable(model: VisionTransformer) -> None:
    """Raise if the model cannot be trained with --shard here."""
    if not is_launched():
        raise UserError("--shard needs a process group: start with torchrun.")
    scalar = next((name for name, parameter in model.named_parameters() if parameter.ndim == 0), None)
    if scalar:
        raise UserError(f"{scalar} is a scalar parameter, which cannot be sharded: train without --shard.")


def has_unused_parameters(model: VisionTransformer) -> bool:
    """Whether a step may leave parameters without a gradient: image labels alone do not train the dense head."""
    return model.head_dense is not None


def gradient_sync(module: nn.Module, enabled: bool) -> Any:
    """Context for a backward pass: whether gradients are reduced over processes, which only the last micro-batch needs."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not enabled:
        return module.no_sync()
    for part in module.children():
        # By method instead of by class: importing FSDP2 takes a second.
        if synchronize := getattr(part, "set_requires_gradient_sync", None):
            synchronize(enabled)
    return nullcontext()
