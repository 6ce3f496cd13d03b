"""How much memory a trial takes at most, told before it starts: a rare long window must not be what tells.

An estimate from above. A trial is refused where it could never fit; what is free at one moment refuses none,
since that changes with the other trials. Of a GPU each has its share, and waits until that is free. No torch,
unless a GPU is asked for its memory.
"""

import gc
import math
from pathlib import Path

import psutil

from models.pieces import EVALUATION_WINDOW, FEWEST_ROWS, MOST_LOGITS, NARROWEST
from regularizers.table import penalises_logits
from trials.spec import TrialConfig

HEADROOM = 1.15
"""For what the heap leaves between the pieces: equal runs differ by a quarter."""

FLOAT = 4
"""Bytes."""

LIBRARIES = 112 * 2**20
"""Bytes that a first step loads, whatever the model, and what the allocator asks for in advance."""

PER_UNIT = 24
"""Floats that a pass keeps for backward for each token and LSTM unit: gates, states, outputs."""

PER_UNIT_WIDE = 16
"""The same of a layer that our own recurrence may run."""

PER_UNIT_RECOMPUTED = 6
"""The same where a layer's own are made again for its gradient: its outputs, masked and not, and copies."""

COPIES_TO_SAVE = 6
"""Of the parameters, and of their averages: cloned, serialised, packed, and what earlier copies left."""


MOST_GRAPHS = 64
"""Lengths of windows that a trial has a CUDA graph of; random ones are some 60, and a rest now and then."""

KERNEL = 10 * 2**10
"""Bytes that CUDA keeps for each kernel in a graph, beside torch's allocator: so NVIDIA's own cache of graphs
reckons (cccl, pull request 3768)."""

KERNELS_A_STEP, KERNELS_A_STEP_RECOMPUTED = 10, 14
"""Of a layer in a graph, for each time step: 7 and 10 are asked for, and cuBLAS may add one to a product."""

KERNELS_A_PIECE = 40
"""In a graph for each piece of the logits of two passes."""

KERNELS_BESIDE = 100
"""In a graph for each layer whatever the window is, and twice as many for all else."""


GPU_CONTEXT = 640 * 2**20
"""Bytes that a process takes of a GPU beside its tensors, which torch counts: CUDA's context, and code."""


class NotEnoughMemory(MemoryError):
    """The trial would not fit."""


def peak_bytes(config: TrialConfig, vocabulary_size: int, device: str = "cpu") -> int:
    """What a process takes at most beyond having torch loaded, of the device's memory or the machine's."""
    model, training = config.model, config.training
    sizes = model.layer_sizes
    last, units = sizes[-1][1], sum(out for _, out in sizes)
    recurrent = sum(4 * out * out for _, out in sizes)
    parameters = model.parameter_count(vocabulary_size)
    averages = 0 if training.averaging == "none" else parameters
    passes = 1 if config.regularization.declaration.second_pass == "none" else 2
    tokens = training.batch_size * training.longest_window
    on_gpu = device.startswith("cuda")
    layers = [out * (PER_UNIT_WIDE if out >= NARROWEST and not on_gpu else PER_UNIT) for _, out in sizes]
    kept = PER_UNIT_RECOMPUTED * units if training.recompute else sum(layers)
    activations = tokens * (kept + 4 * model.embedding_size)
    made_again = tokens * max(layers) if training.recompute else 0
    masked_weights = 1.25 * recurrent  # as floats, and which are kept, as booleans
    rows = min(tokens, max(FEWEST_ROWS, last))
    embedding = passes * model.embedding_size
    # The decoder laid out for either product, its gradient, and that scaled.
    head = vocabulary_size * (_chunks(config) * rows + 4 * last + embedding)
    step = passes * (activations + masked_weights) + made_again + head
    if on_gpu and not training.cuda_graphs:
        # cuDNN has a layer's weights in one piece, for each pass, and their gradients in another.
        step += 2 * passes * sum(4 * out * (inputs + out) for inputs, out in sizes)
    if on_gpu and training.cuda_graphs:
        # Gradients on their way to where they stay, and of a layer's matrix those of each pass; masks as
        # they are drawn and where they stay.
        step += parameters + (passes + 3) * max(4 * out * out for _, out in sizes)
        step += 0 if model.locked else 2 * passes * tokens * (model.embedding_size + last)
        # A window of a new length is first computed beside what the graphs have.
        step = 2 * step + graphs_bytes(config) / FLOAT
    evaluation = min(EVALUATION_WINDOW * vocabulary_size, MOST_LOGITS)
    save = COPIES_TO_SAVE * (parameters + averages)
    # A step leaves holes, but none that an evaluation's logits would be sure to find.
    floats = 2 * parameters + averages + evaluation + max(step, save)
    return int(HEADROOM * (LIBRARIES + FLOAT * floats))


def _chunks(config: TrialConfig) -> int:
    """As large as the logits of a piece of a window, at once: of each pass that has a target, what of them is
    penalised, and what is of another precision."""
    declaration, (*_, (_, last)) = config.regularization.declaration, config.model.layer_sizes
    targets = 2 if declaration.target == "mean" else 1
    penalised = penalises_logits(declaration.target, declaration.penalty, last)
    return targets + penalised + (config.training.precision == "bf16")


def graphs_bytes(config: TrialConfig) -> int:
    """What CUDA keeps of the graphs of a trial's steps at most."""
    training, sizes = config.training, config.model.layer_sizes
    pieces = math.ceil(training.batch_size * training.longest_window / max(FEWEST_ROWS, sizes[-1][1]))
    step = KERNELS_A_STEP_RECOMPUTED if training.recompute else KERNELS_A_STEP
    layers = len(sizes) * (training.longest_window * step + KERNELS_BESIDE)
    kernels = layers + pieces * KERNELS_A_PIECE + 2 * KERNELS_BESIDE
    graphs = MOST_GRAPHS if training.windows == "random" else 2  # the last window is cut short by the end
    return graphs * kernels * KERNEL


def require_memory(config: TrialConfig, vocabulary_size: int, device: str, gpu_share: float = 1.0) -> None:
    """Raises NotEnoughMemory where the trial would not fit even if it were alone, or alone in its share."""
    needed, total = (
        bytes_on(device, config, vocabulary_size),
        share_of(device, gpu_share) * total_bytes(device),
    )
    if needed > total:
        part, more = "in all", ""
        if share_of(device, gpu_share) < 1:
            part, more = f"for a share of {gpu_share:g}", ", or raise resources.gpus"
        raise NotEnoughMemory(
            f"this configuration takes up to {amount(needed)} of memory, and {device} has {amount(total)} "
            f"{part}: lower batch_size, bptt or the sizes of the model{more}"
        )


def bytes_on(device: str, config: TrialConfig, vocabulary_size: int) -> int:
    """What a trial's process takes of the device's memory at most."""
    beside = GPU_CONTEXT if device.startswith("cuda") else 0
    return peak_bytes(config, vocabulary_size, device) + beside


def share_of(device: str, gpu_share: float) -> float:
    """Of its memory: only GPUs are shared out."""
    return gpu_share if device.startswith("cuda") else 1.0


def keep_to_share(device: str, gpu_share: float) -> None:
    """Have torch, in this process, take no more of a GPU than the share: what runs out of memory for that is
    this trial, and no other."""
    if not device.startswith("cuda"):
        return
    import torch

    total = total_bytes(device)
    own = 1.0 if gpu_share == 1 else max(0.0, gpu_share * total - GPU_CONTEXT) / total
    torch.cuda.set_per_process_memory_fraction(own, torch.device(device).index)


def give_back_gpu() -> None:
    """What ended trials of this process held of a GPU's memory: it is for the trials beside this one, too."""
    import torch

    # Otherwise nothing is held, and CUDA is not to look for its GPU before there is one.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        gc.collect()  # tensors in cycles
        torch.cuda.empty_cache()


def room_bytes(device: str) -> float:
    """What a GPU has for tensors of this process now: those that it has, and what nobody has."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def total_bytes(device: str) -> float:
    """Of a GPU's memory, or of the machine's and of the control group's that this process is in."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return min(psutil.virtual_memory().total, limit_of_cgroup(Path("/sys/fs/cgroup")))


def limit_of_cgroup(folder: Path) -> float:
    """Under cgroup v2, as a container sees it; infinite where there is none."""
    try:
        return int((folder / "memory.max").read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return math.inf


def amount(size: float) -> str:
    """Of so many bytes: 210 MiB, 1.2 GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
