"""Train a small byte-level language model, fully sharded, on the sources of Python's standard library.

    torchrun --standalone --nproc-per-node=2 examples/train_bytes.py
    python examples/train_bytes.py                      # one process, same code path
    torchrun --standalone --nproc-per-node=2 examples/train_bytes.py --folder run    # saves there, and resumes

Every process keeps only its share of parameters, gradients and optimizer state. Needs nothing but the
Python installation it runs on: no download, no GPU (one GPU per process is used where there is one).

At the end it prints the path of a report: an HTML page with the losses, step times, dtypes and the sharding map.

With `--folder` it saves a checkpoint every few steps, while training goes on, and when it is asked to stop (Ctrl-C,
SIGTERM). Started again with the same options, it goes on after the latest checkpoint, with any number of processes:
a step trains on the same windows however many processes share them. If it was killed, it repeats the steps since then.
"""

import argparse
import math
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, checkpoint, fully_shard, tools

VOCABULARY = 256  # one token per byte value
HEAD_DIM = 32
CORPUS_LIMIT = 20_000_000
HELD_OUT = 0.05
VALIDATION_BATCHES = 6
SAMPLE_BYTES = 160
TRY_NEXT = """
Try next:
  train on, with one process           {bin}/torchrun --nproc-per-node=1 {program} --folder {folder} --steps {steps}
  see what a checkpoint contains       {bin}/unshard checkpoint inspect {folder}
  write its weights as safetensors     {bin}/unshard export {folder} {folder}/weights"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level transformer, fully sharded.")
    parser.add_argument("--steps", type=int, default=70, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks, one shard unit each")
    parser.add_argument("--dim", type=int, default=224, help=f"model width, a multiple of {HEAD_DIM}")
    parser.add_argument("--seq", type=int, default=128, help="bytes per training window")
    parser.add_argument("--batch", type=int, default=8, help="windows per step, shared out to the processes")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the computation; bf16 is slow on CPUs without instructions for it",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="save checkpoints and the report here, and go on after the latest")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    args = parser.parse_args()
    for name in ("steps", "layers", "dim", "seq", "batch", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.batch < int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"--batch must be at least the number of processes, got {args.batch}")
    if args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of {HEAD_DIM}, got {args.dim}")
    return args


# ---------------------------------------------------------------------------------------------- processes


def start_processes() -> torch.device:
    """Join the process group and return the device of this process."""
    launched = "RANK" in os.environ  # set by torchrun
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < local_world and local_rank == 0:
        print(f"{gpus} GPU(s) for {local_world} processes: using the CPU instead", flush=True)
    use_cuda = gpus >= local_world
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    backend = "nccl" if use_cuda else "gloo"
    if use_cuda:
        torch.cuda.set_device(device)
    if launched:
        dist.init_process_group(backend, device_id=device if use_cuda else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def mean_over_ranks(values: Tensor) -> Tensor:
    """The element-wise mean over all ranks; `values` is overwritten."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


# --------------------------------------------------------------------------------------------------- data


def source_files(root: Path) -> Iterator[Path]:
    """The .py files below `root` in a fixed order, without installed packages and test suites."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def load_corpus(seq: int) -> tuple[Tensor, Tensor]:
    """Return the training and the held-out bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in source_files(root):
        text += path.read_bytes()
        if len(text) >= CORPUS_LIMIT:
            break
    data = torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_LIMIT] if text else torch.empty(0)
    cut = int(len(data) * (1 - HELD_OUT))
    if len(data) - cut <= seq + 1:
        raise SystemExit(f"{root} holds {len(data)} bytes of Python sources, too few for windows of {seq}")
    return data[:cut], data[cut:]


def draw_starts(data: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Where the windows of a step begin: they depend on the step, and not on the number of processes."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    return torch.randint(len(data) - args.seq, (args.batch,), generator=draw)


# -------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Causal self-attention and an MLP, each normalized before and added to the residual stream."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.attend(self.norm_attention(x)))
        return x + self.contract(F.relu(self.expand(self.norm_mlp(x))).square())

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, seq, dim)


class ByteTransformer(nn.Module):
    def __init__(self, layers: int, dim: int, seq: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, dim)
        # With the byte before as input, the model need not learn in a short run to attend to it.
        self.bytes_before = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(seq, dim)
        blocks = [Block(dim) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._initialize)
        for embedding in (self.bytes, self.bytes_before):  # large, so that the model tells bytes apart from the start
            nn.init.normal_(embedding.weight, std=0.5)
        for block in blocks:  # keeps the residual stream at the same scale however deep the model is
            for linear in (block.project, block.contract):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        before = F.pad(tokens[:, :-1], (1, 0))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.bytes_before(before) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_sharded(args: argparse.Namespace, device: torch.device) -> tuple[ByteTransformer, int]:
    """Return the sharded model and the bytes its parameters take unsharded."""
    torch.manual_seed(args.seed)  # every rank must shard the same weights
    model = ByteTransformer(args.layers, args.dim, args.seq)
    full_bytes = sum(p.nbytes for p in model.parameters())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # what is left: embeddings, last norm, head
    return model, full_bytes


def loss_of(model: nn.Module, data: Tensor, starts: Tensor, seq: int, device: torch.device) -> Tensor:
    """This rank's part of the loss: the mean over ranks is the mean over all windows that begin at `starts`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = starts[rank::world]  # one window more on some ranks, if they cannot be shared out evenly
    rows = data[mine[:, None] + torch.arange(seq + 1)].long().to(device)
    logits = model(rows[:, :-1]).float()
    total = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return total * world / (len(starts) * seq)


# ------------------------------------------------------------------------------------------------- memory


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes this rank itself holds of `tensors`."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


@dataclass(frozen=True)
class Memory:
    """Bytes of parameters, gradients and optimizer state between two steps."""

    sharded: int  # held by this rank
    unsharded: int  # what one process would hold without sharding
    cuda_peak: int  # everything allocated on the GPU at its peak; 0 without one

    @classmethod
    def measure(cls, model: nn.Module, optimizer: torch.optim.Optimizer, full_bytes: int) -> list["Memory"]:
        """Return the memory of every rank."""
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        # AdamW without sharding: parameter, gradient and two moments, all of the parameter's size.
        mine = cls(local_bytes(parameters + gradients + states), 4 * full_bytes, peak)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, mine)
        return of_all


# ----------------------------------------------------------------------------------------------- progress


_WIDTH = 24  # of bars and curves: a terminal of 80 columns also shows the figures beside them


class Progress:
    """A table that is drawn anew in place on a terminal; elsewhere a plain line about every tenth of the way."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next_line = 0.0
        self.losses: list[float] = []
        self.live: Any = None
        if dist.get_rank() == 0 and sys.stdout.isatty():
            with suppress(ImportError):
                from rich.live import Live

                self.live = Live(refresh_per_second=8)
                self.live.start()

    def update(self, step: int, loss: float, tokens_per_s: float, memory: list["Memory"]) -> None:
        """`memory`: of every rank."""
        self.losses.append(loss)
        facts = f"step {step}/{self.total}  loss {loss:.6f}  {tokens_per_s:,.0f} tokens/s"
        if self.live:
            self.live.update(self.table(facts, step, memory))
        elif dist.get_rank() == 0 and (step / self.total >= self.next_line or step == self.total):
            print(f"{step / self.total:4.0%}  {facts}", flush=True)
            self.next_line = (math.floor(step / self.total * 10) + 1) / 10

    def table(self, facts: str, step: int, memory: list["Memory"]) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = partial(ProgressBar, width=_WIDTH, complete_style="red", finished_style="green")
        table = Table.grid(padding=(0, 2))
        table.add_row("training", bar(self.total, step), facts)
        table.add_row("loss", curve(self.losses, _WIDTH), f"{self.losses[0]:.3f} at first")
        unsharded = memory[0].unsharded
        for rank, each in enumerate(memory):
            table.add_row(f"memory of rank {rank}", bar(unsharded, each.sharded), mib(each.sharded))
        table.add_row("unsharded", bar(1, 1), mib(unsharded))
        return table

    def close(self) -> None:
        if self.live:
            self.live.stop()


def curve(values: list[float], width: int) -> str:
    """Draw values in one line of text, the largest as a full block."""
    picked = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)]
    low, high = min(picked), max(picked)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (each - low) / (high - low or 1))] for each in picked)


# -------------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """Saves the run now and then, and when it is asked to stop. Without a folder it does nothing."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.every, self.last_step = args.folder, args.save_every, args.steps
        self.model, self.optimizer = model, optimizer
        self.asked_to_stop = False
        if self.folder:
            self.saver = checkpoint.Saver(self.folder, keep_last=2)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask_to_stop)

    def ask_to_stop(self, number: int, frame: object) -> None:
        self.asked_to_stop = True
        signal.signal(number, signal.SIG_DFL)  # asked twice, the program ends at once

    def load(self) -> int:
        """Load the latest checkpoint and return its step, 0 if there is none."""
        if self.folder and checkpoint.latest(self.folder):
            return checkpoint.load(self.folder, model=self.model, optimizer=self.optimizer)
        return 0

    def after_step(self, step: int, device: torch.device) -> bool:
        """Save if it is time to. Returns whether to stop, on all ranks alike: a signal may reach them at two steps."""
        if not self.folder:
            return False
        stop = torch.tensor(float(self.asked_to_stop), device=device)
        dist.all_reduce(stop)
        ends = stop.item() > 0 or step == self.last_step
        if ends or step % self.every == 0:
            self.saver.save(step=step, model=self.model, optimizer=self.optimizer)
        if ends:
            self.saver.wait()
        return ends


# ----------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Outcome:
    first_step: int
    last_step: int
    first_loss: float  # mean over ranks, nats per byte
    last_loss: float
    seconds: float
    tokens_per_s: float  # all ranks together


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warm_up = max(1, args.steps // 10)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    along = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: Checkpoints,
    done: int,
    data: Tensor,
    args: argparse.Namespace,
    device: torch.device,
    recording: Any,
    full_bytes: int,
) -> Outcome:
    """Train from step `done` + 1 to the last, or until the program is asked to stop. Record the steps."""
    progress = Progress(args.steps)
    tokens_per_step = args.batch * args.seq
    # Losses are averaged over ranks only every `interval` steps: that waits for the device and the other ranks.
    interval = math.ceil(args.steps / 50)
    losses: list[float] = []
    pending: list[Tensor] = []
    memory: list[Memory] = []
    began = time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, args)
        optimizer.zero_grad()
        loss = loss_of(model, data, draw_starts(data, step, args), args.seq, device)
        loss.backward()
        optimizer.step()
        recording.step(loss, step=step)  # of rank 0, whose batch is another one; does not wait for the device
        pending.append(loss.detach())
        ends = checkpoints.after_step(step, device) or step == args.steps
        if step % interval == 0 or step == done + 1 or ends:
            losses.append(mean_over_ranks(torch.stack(pending).mean()).item())
            pending.clear()
            speed = (step - done) * tokens_per_step / (time.perf_counter() - began)
            memory = memory or Memory.measure(model, optimizer, full_bytes)
            progress.update(step, losses[-1], speed, memory)
        if ends:
            break
    progress.close()
    seconds = time.perf_counter() - began
    return Outcome(done + 1, step, losses[0], losses[-1], seconds, (step - done) * tokens_per_step / seconds)


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss over evenly spread held-out windows."""
    spread = torch.linspace(0, len(data) - args.seq - 1, VALIDATION_BATCHES * args.batch).long()
    losses = [loss_of(model, data, starts, args.seq, device) for starts in spread.split(args.batch)]
    return mean_over_ranks(torch.stack(losses).mean()).item()


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, args: argparse.Namespace, device: torch.device) -> str:
    """Sample bytes after `prompt`. Every rank has to call this: each forward gathers from all of them."""
    draw = torch.Generator().manual_seed(args.seed)  # the same choices on every rank
    text = list(prompt)
    for _ in range(SAMPLE_BYTES):
        context = torch.tensor([text[-args.seq :]], device=device)
        logits = model(context)[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1, generator=draw)))
    decoded = bytes(text).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded)


# ------------------------------------------------------------------------------------------------- report


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def introduce(args: argparse.Namespace, full_bytes: int, train_bytes: int, device: torch.device) -> None:
    say(
        f"{full_bytes // 4:,} parameters in {args.layers} blocks, fully sharded over "
        f"{dist.get_world_size()} process(es) on {device.type} ({dist.get_backend()}), {args.dtype}; "
        f"{train_bytes / 1e6:.1f} MB of Python sources"
    )


def recording_folder(args: argparse.Namespace) -> Path:
    """Return a folder for the report, which is the same on all ranks."""
    folders = [args.folder / "report" if args.folder else None]
    if not args.folder:
        folders = [Path(tempfile.mkdtemp(prefix="unshard-"))] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(folders)
    return folders[0]


def report(outcome: Outcome, validation_loss: float, memory: Memory, sample: str) -> None:
    share = memory.sharded / memory.unsharded
    steps = f"steps {outcome.first_step} to {outcome.last_step}"
    print(f"\ntrain loss   {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} nats per byte, {steps}")
    print(f"validation   {validation_loss / math.log(2):.3f} bits per byte ({validation_loss:.3f} nats)")
    print(f"speed        {outcome.tokens_per_s:,.0f} tokens/s over all ranks, {outcome.seconds:.1f} s")
    print(f"memory       {mib(memory.sharded)} on rank 0, {mib(memory.unsharded)} unsharded ({share:.0%}):")
    print("             parameters, gradients and AdamW state between steps")
    if memory.cuda_peak:
        print(f"             {mib(memory.cuda_peak)} peak on rank 0's GPU, activations included")
    print(
        f"sample after {outcome.last_step} steps\n" + "\n".join("    | " + line for line in sample.split("\n")),
        flush=True,
    )


def main() -> None:
    args = parse_args()
    device = start_processes()
    train_data, held_out = load_corpus(args.seq)
    model, full_bytes = build_sharded(args, device)
    # After sharding, so that it holds the shards. `foreach`: a few calls per step, not some per parameter.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), foreach=True)
    introduce(args, full_bytes, len(train_data), device)
    checkpoints = Checkpoints(args, model, optimizer)
    done = checkpoints.load()
    if done:
        rest = "going on" if done < args.steps else f"nothing to do. Train on with --steps {2 * done}"
        say(f"{args.folder} has step {done} of {args.steps}: {rest}")
    if done < args.steps:
        folder = recording_folder(args)
        with tools.record(folder, model, optimizer) as recording:
            outcome = train(model, optimizer, checkpoints, done, train_data, args, device, recording, full_bytes)
        if outcome.last_step < args.steps:
            say(f"\nstopped after step {outcome.last_step}; the same command goes on from there (a traceback follows)")
        else:
            memory = Memory.measure(model, optimizer, full_bytes)[0]
            validation_loss = validate(model, held_out, args, device)
            sample = generate(model, b"def ", args, device)
            if dist.get_rank() == 0:
                report(outcome, validation_loss, memory, sample)
        if dist.get_rank() == 0:
            print(f"report: {tools.report(folder, folder).resolve()}", flush=True)
            if args.folder and outcome.last_step == args.steps:
                places = {"bin": os.path.relpath(os.path.dirname(sys.executable)), "program": sys.argv[0]}
                print(TRY_NEXT.format(folder=args.folder, steps=2 * args.steps, **places), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
