"""PyTorch's collectives with their own names and arguments, each with one line that counts.

Every tensor that a technique sends goes through this file. A **ledger** counts calls, payload bytes
(the tensor that is reduced, gathered or sent) and ring bytes (sent by one rank if the collective
runs on a ring: Patarasuk and Yuan, 2009).

| collective                | payload             | ring bytes per rank |
| ------------------------- | ------------------- | ------------------- |
| all_reduce                | the tensor          | 2 (N-1)/N payload   |
| all_gather_single         | the gathered output | (N-1)/N payload     |
| reduce_scatter_single     | the full input      | (N-1)/N payload     |
| broadcast, reduce         | the tensor          | (N-1)/N payload     |
| all_to_all_single         | the full input      | rows to other ranks |
| isend                     | the tensor          | payload             |
"""

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.linalg import vector_norm
from torch.utils._pytree import tree_leaves

# else NCCL allocates at the first use of each algorithm, which can wait for a receive in flight
os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

Group = ProcessGroup | None  # None: all ranks

# a shard's gradient can overflow on one rank alone, whose GradScaler skips the step
FLOAT16 = "float16 needs a GradScaler, which decides per rank: use bfloat16"

# PyTorch 2.13 renamed them
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Ledger:
    """Communication of this rank: `calls`, `payload` and `ring` bytes by (collective, group).

    `control` counts the calls for scalars: to log, to clip, to stop. No cost table includes them.
    """

    calls: Counter = field(default_factory=Counter)
    payload: Counter = field(default_factory=Counter)  # bytes
    ring: Counter = field(default_factory=Counter)  # bytes
    control: Counter = field(default_factory=Counter)  # calls

    def record(self, name: str, nbytes: int, factor: float, group: Group) -> None:
        """Count one call of `name` with `nbytes` of payload and `factor` times that on a ring."""
        key = (name, group_name(group))
        self.calls[key] += 1
        self.payload[key] += nbytes
        self.ring[key] += nbytes * factor

    @property
    def total_ring_bytes(self) -> float:
        return sum(self.ring.values())

    def reset(self) -> None:
        for counter in (self.calls, self.payload, self.ring, self.control):
            counter.clear()


ledger = Ledger()


def group_name(group: Group) -> str:
    """`dp` for a group of a mesh's dimension "dp", `world` for the default group."""
    if group is None or group is dist.group.WORLD:
        return "world"
    return (group.group_desc or "group").removeprefix("mesh_")


def _is_gloo(tensor: Tensor, group: Group) -> bool:
    """Whether this group runs on Gloo: on CPUs, and on a GPU that ranks share (`setup`)."""
    return f"{tensor.device.type}:gloo" in dist.get_backend_config(group)


def _ring_factor(group: Group) -> float:
    """The share of a payload that each rank sends when it travels once around the ring."""
    size = dist.get_world_size(group)
    return (size - 1) / size


def all_reduce(tensor: Tensor, op=ReduceOp.SUM, group: Group = None, **kwargs) -> Work | None:
    ledger.record("all_reduce", tensor.nbytes, 2 * _ring_factor(group), group)
    return dist.all_reduce(tensor, op=op, group=group, **kwargs)


def all_gather_single(output: Tensor, input: Tensor, group: Group = None, **kwargs) -> Work | None:
    ledger.record("all_gather_single", output.nbytes, _ring_factor(group), group)
    return _all_gather_single(output, input, group=group, **kwargs)


def reduce_scatter_single(
    output: Tensor, input: Tensor, op=ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    ledger.record("reduce_scatter_single", input.nbytes, _ring_factor(group), group)
    if op == ReduceOp.SUM and _is_gloo(input, group):
        # Gloo has no reduce-scatter. PyTorch would all-reduce a copy of the full input and keep a
        # slice, which sends twice as much (pytorch/pytorch#118911). Here each rank gets its slice
        # of every rank's input and sums them.
        slices = torch.empty_like(input)
        work = dist.all_to_all_single(slices, input, group=group, async_op=True)
        by_rank = slices.view(dist.get_world_size(group), *output.shape)
        summed = _WorkWithEnd(work, lambda: torch.sum(by_rank, 0, out=output))
        return summed if async_op else summed.wait()
    return _reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)


@dataclass
class _WorkWithEnd:
    """A `Work` that calls `end` once, in the first `wait`, when the bytes have arrived."""

    work: Work
    end: Callable[[], object] | None

    def wait(self) -> None:
        if self.end is not None:
            self.work.wait()
            self.end()
            self.end = None  # frees the buffers that it refers to


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
) -> None:
    """Split sizes are numbers of rows, one per rank; without them all are equal."""
    kept = 1 / dist.get_world_size(group)
    if input_split_sizes is not None:
        kept = input_split_sizes[dist.get_rank(group)] / max(1, len(input))
    ledger.record("all_to_all_single", input.nbytes, 1 - kept, group)
    dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group)


def broadcast(tensor: Tensor, src: int | None = None, group: Group = None, **kwargs) -> Work | None:
    if not tensor.is_contiguous():
        raise ValueError("broadcast takes contiguous tensors; Gloo would send other elements")
    ledger.record("broadcast", tensor.nbytes, _ring_factor(group), group)
    return dist.broadcast(tensor, src, group=group, **kwargs)


def reduce(tensor: Tensor, dst: int | None = None, group: Group = None, **kwargs) -> Work | None:
    """Sum into one rank's tensor; the other ranks' are undefined."""
    ledger.record("reduce", tensor.nbytes, _ring_factor(group), group)
    return dist.reduce(tensor, dst, group=group, **kwargs)


def isend(tensor: Tensor, dst: int | None = None, group: Group = None, **kwargs) -> Work | None:
    if not tensor.is_contiguous():
        raise ValueError("isend takes contiguous tensors; NCCL would send other elements")
    ledger.record("isend", tensor.nbytes, 1.0, group)
    if _goes_through_host(tensor, group):
        tensor = tensor.cpu()
    return dist.isend(tensor, dst, group=group, **kwargs)


def irecv(tensor: Tensor, src: int | None = None, group: Group = None, **kwargs) -> Work | None:
    if not _goes_through_host(tensor, group):
        return dist.irecv(tensor, src, group=group, **kwargs)  # the sender counts it
    host = torch.empty_like(tensor, device="cpu")
    work = dist.irecv(host, src, group=group, **kwargs)
    return _WorkWithEnd(work, lambda: tensor.copy_(host))


def _goes_through_host(tensor: Tensor, group: Group) -> bool:
    """Whether a message must be copied to the host: Gloo cannot send GPU tensors."""
    return tensor.is_cuda and _is_gloo(tensor, group)


def all_reduce_control(tensor: Tensor, group: Group = None, op=ReduceOp.SUM) -> Tensor:
    """All-reduce a scalar that controls the run: a loss to log, a norm to clip by, a vote to stop.

    Returns the tensor, reduced in place. It is counted apart from the technique's communication.
    """
    ledger.control[("all_reduce", group_name(group))] += 1
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def average_gradients(
    named_parameters: Iterable[tuple[str, nn.Parameter]], group: Group = None
) -> None:
    """Make every gradient the average over the ranks of `group`: after a step's last backward.

    named_parameters: in the same order on all ranks; those that do not train are left out. The
    gradients become views of flat buffers of one dtype and at most 25 MiB, one all-reduce each.
    RuntimeError, before any collective, if a gradient is missing, sparse or part of a graph.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    wrong = [n for n, p in trained if p.grad is None or p.grad.is_sparse or p.grad.requires_grad]
    if wrong:
        raise RuntimeError(f"no gradient, a sparse one, or one with a graph: {', '.join(wrong)}")
    works = []
    for params in split_into_buckets([p for _, p in trained], cap_mb=25):
        flat = torch.cat([p.grad.flatten() for p in params]).div_(dist.get_world_size(group))
        for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view_as(param)
        works.append(all_reduce(flat, group=group, async_op=True))
    for work in works:
        work.wait()


def split_into_buckets(
    params: list[nn.Parameter], cap_mb: float, first_cap_mb: float = float("inf")
) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into lists of one dtype and device and at most `cap_mb` MiB.

    The first list has at most `first_cap_mb`. A parameter above the cap gets a list of its own.
    """
    lists: list[list[nn.Parameter]] = []
    room = 0.0  # MB left in the last list
    for param in params:
        mb = param.numel() * param.element_size() / 2**20
        alike = lists and (param.dtype, param.device) == (lists[-1][0].dtype, lists[-1][0].device)
        if not alike or mb > room:
            room = cap_mb if lists else min(first_cap_mb, cap_mb)
            lists.append([])
        lists[-1].append(param)
        room -= mb
    return lists


def broadcast_module(module: nn.Module, group: Group = None) -> None:
    """Give all ranks the parameters and buffers of the group's rank 0.

    ValueError if their names, shapes, dtypes or `requires_grad` differ between ranks, or if an
    embedding has a `max_norm`: its forward rescales the rows that this rank looks up.
    """
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise ValueError(f"{name}: max_norm would change other rows on each rank")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    check_same("parameters or buffers", kinds, tensors[0][1].device, group)
    for _, tensor in tensors:
        broadcast(tensor.detach(), group=group, group_src=0)


def forbid_float16(output) -> None:
    """ValueError if autocast or the graph of the tensors in `output` uses float16, the graph maybe
    under an autocast within forward. It takes some microseconds per node: do it once."""
    for kind in ("cpu", "cuda"):  # the graph does not show what is in a compiled module
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(FLOAT16)
    nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)]
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        # private: the dtypes of what the node's forward returned
        if any(each is not None and each.dtype == torch.float16 for each in node._input_metadata):
            raise ValueError(FLOAT16)
        nodes += [each for each, _ in node.next_functions]


def check_same(what: str, values: list, device: torch.device, group: Group = None) -> None:
    """Raise ValueError, naming `what`, unless `values` print the same on every rank of `group`."""
    # str() of a tensor shows its device, which differs between ranks, and only four digits
    text = str([v.tolist() if isinstance(v, Tensor) else v for v in values])
    digest = zlib.crc32(text.encode())
    bounds = torch.tensor([digest, -digest], device=device)
    highest, minus_lowest = all_reduce_control(bounds, group, ReduceOp.MAX).tolist()
    if highest != -minus_lowest:
        raise ValueError(f"{what} differ between ranks; this rank's: {text[:200]}")


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all elements of all tensors: a float32 scalar, float64 if any tensor is.

    First the norms of rows of 1,024, then the norm of these. On a CPU PyTorch sums the squares of a
    tensor in a few lanes: for 25 million float32 numbers the norm is off by 1e-3.
    """
    norms = [norm for tensor in tensors for norm in norms_of_rows(tensor)]
    return vector_norm(torch.cat(norms)) if norms else torch.zeros(())


def norms_of_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of rows of 1,024 elements, and that of the remaining elements, [1]."""
    flat, dtype = tensor.flatten(), torch.promote_types(tensor.dtype, torch.float32)
    whole = len(flat) // 1024 * 1024
    rows, rest = flat[:whole].view(-1, 1024), flat[whole:]
    return vector_norm(rows, dim=-1, dtype=dtype), vector_norm(rest, dtype=dtype)[None]
