"""The examples train, go on where they stopped, and print what their pages say."""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.programs import DROPIN, TORCHRUN, python
from torch import nn
from torch.nn import functional as F

from unshard import checkpoint

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"


@contextmanager
def program(name: str, processes: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """An example under torchrun; what it writes to both streams is in one."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(REPOSITORY / "examples" / name), *options]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            yield running
        finally:
            running.kill()  # a test that fails leaves no process


def losses(lines: list[str]) -> dict[int, str]:
    """The printed loss of each step."""
    found = (re.search(r"step (\d+)\S* +loss (\S+)", line) for line in lines)
    return {int(match[1]): match[2] for match in found if match}


def train(name: str, processes: int, *options: str) -> tuple[dict[int, str], str]:
    """Run to the end; the losses, and all that it wrote."""
    with program(name, processes, *options) as running:
        text, _ = running.communicate(timeout=900)
    assert running.returncode == 0, text
    return losses(text.splitlines()), text


@pytest.mark.slow
def test_the_wrappers_example_resumes(tmp_path: Path) -> None:
    def run(folder: str, steps: int, processes: int = 2) -> dict[int, str]:
        options = (f"--steps={steps}", "--every=2", f"--folder={tmp_path / folder}")
        return train("resume_wrapper.py", processes, *options)[0]

    straight = run("straight", 4)
    first, second = run("resumed", 2), run("resumed", 4)
    assert {**first, **second} == straight and list(second) == [3, 4]
    assert list(run("resumed", 6, processes=1)) == [5, 6]


SMALL = ("--layers=1", "--dim=32", "--seq=16", "--batch=12", "--steps=10", "--save-every=2")

# The trainer, and a signal that one of its ranks gets in the middle of a step.
DRIVER = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_bytes
draw_starts = train_bytes.draw_starts
def draw_starts_and_stop(data, step, args):
    if step == {step} and int(os.environ["RANK"]) == {rank}:
        os.kill(os.getpid(), signal.{signal})
    return draw_starts(data, step, args)
train_bytes.draw_starts = draw_starts_and_stop
train_bytes.main()
"""


def interrupted(folder: Path, processes: int, step: int, rank: int, name: str) -> tuple[dict[int, str], str, int]:
    """The losses, all that it wrote, and the exit status."""
    driver = folder.parent / "driver.py"
    driver.write_text(DRIVER.format(examples=str(REPOSITORY / "examples"), step=step, rank=rank, signal=name))
    with program(str(driver), processes, *SMALL, f"--folder={folder}") as running:
        text, _ = running.communicate(timeout=900)
    return losses(text.splitlines()), text, running.returncode


def begun(text: str) -> int:
    found = re.search(r"has step (\d+) of 10: going on", text)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_the_trainer_resumes_with_other_numbers_of_processes(tmp_path: Path) -> None:
    folder, chance = tmp_path / "run", random.Random()
    straight, _ = train("train_bytes.py", 2, *SMALL)
    assert list(straight) == list(range(1, 11))

    killed_in, rank = chance.randint(3, 7), chance.randrange(2)
    first, text, status = interrupted(folder, 2, killed_in, rank, "SIGKILL")
    assert status != 0 and list(first) == list(range(1, killed_in)), text
    assert {step: straight[step] for step in first} == first  # the same arithmetic

    stopped_in, rank = chance.randint(8, 9), chance.randrange(3)
    second, text, status = interrupted(folder, 3, stopped_in, rank, "SIGTERM")
    # The save that was under way when a rank was killed may not be published; the one before it is.
    assert status == 0 and killed_in - 5 < begun(text) < killed_in, (killed_in, text)
    assert list(second) == list(range(begun(text) + 1, stopped_in + 1))
    assert f"stopped after step {stopped_in};" in text

    third, text = train("train_bytes.py", 1, *SMALL, f"--folder={folder}")
    assert begun(text) == stopped_in and list(third) == list(range(stopped_in + 1, 11))
    for step, loss in [*second.items(), *third.items()]:
        assert float(loss) == pytest.approx(float(straight[step]), rel=1e-6), (killed_in, stopped_in, step)
    report = Path(re.findall(r"^report: (.*)$", text, re.MULTILINE)[-1])
    assert report.parent == (folder / "report").resolve() and "10 steps on 1 rank" in report.read_text()
    assert "nothing to do" in train("train_bytes.py", 1, *SMALL, f"--folder={folder}")[1]


@pytest.mark.slow
def test_ranks_with_uneven_work_train_together() -> None:
    """Ranks have different numbers of micro-batches, some steps have none, and ranks skip the vision tower."""
    printed, text = train("two_towers.py", 2)
    assert list(printed) == list(range(1, 41)), text
    tokens = [int(each) for each in re.findall(r"step .* tokens (\d+)", text)]
    assert 0 in tokens and max(tokens) > 1000 and len(set(tokens)) > 30, text
    found = [float(printed[step]) for step in printed]
    assert sum(found[-5:]) < 0.3 * sum(found[:5]), text
    evaluated = re.search(r"evaluation loss (\S+)", text)
    assert evaluated and float(evaluated[1]) < 0.5 * found[0], text


def test_the_program_of_the_page_about_uneven_steps(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "uneven_steps.md").read_text()
    listing, output = re.findall(r"^```(?:python|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    path = tmp_path / "uneven.py"
    path.write_text(listing)
    found, text = train(str(path), 2)
    expected = losses(output.splitlines())
    assert list(found) == list(expected) == list(range(5)), text
    for step, loss in expected.items():
        assert float(found[step]) == pytest.approx(float(loss), abs=0.01), text
    rest = r"tokens .*"
    assert re.findall(rest, text) == re.findall(rest, output)


def programs_of_the_start() -> Iterator[tuple[str, list[str]]]:
    """The program after each step of docs/start.md, and what the page says that it prints."""
    text, code, printed = (REPOSITORY / "docs" / "start.md").read_text(), "", []
    for step in re.split(r"^## (?=\d)", text, flags=re.MULTILINE)[1:]:
        for kind, block in re.findall(r"^```(python|diff)\n(.*?)^```", step, re.MULTILINE | re.DOTALL):
            lines = block.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            new = "".join(line[1:] for line in lines if line[0] != "-")
            assert kind == "python" or code.count(old) == 1, old
            code = block if kind == "python" else code.replace(old, new)
        printed = re.findall(r"^step \d+ +loss \S+", step, re.MULTILINE) or printed  # a captured step prints the same
        yield code, printed


def test_the_first_steps_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(programs_of_the_start())
    assert len(steps) == 5
    compare(steps[3], 2, tmp_path, monkeypatch)
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["step_00000020", "step_00000030"]


@pytest.mark.slow
def test_every_first_step_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(programs_of_the_start())
    for number, processes in enumerate((1, 2, 2, 2, 3)):
        compare(steps[number], processes, tmp_path, monkeypatch)


def compare(step: tuple[str, list[str]], processes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # where the program saves
    code, printed = step
    (folder / "train.py").write_text(code)
    found, text = train(str(folder / "train.py"), processes)
    expected = losses(printed)
    assert list(found) == list(expected) and len(found) == 3, text
    for number, loss in expected.items():
        assert float(found[number]) == pytest.approx(float(loss), abs=0.01), text


# -- programs that write to their folder, and need no terminal ---------------------------------------------------------


def run(name: str, folder: Path, *options: str, processes: int = 2, before: Sequence[str] = ()) -> str:
    """Run an example in a folder, and return what it printed."""
    torchrun = [*TORCHRUN[:-1], f"--nproc-per-node={processes}"]
    return python("-W", "ignore", *torchrun, *before, EXAMPLES / name, *options, cwd=folder).stdout


def numbers(name: str, text: str) -> list[float]:
    return [float(each) for each in re.findall(rf"{name} (\d+\.\d+)", text)]


def need(*libraries: str) -> None:
    for name in libraries:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: `make test-stack` installs it")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture_of_experts", "tensor_parallel"])
def test_the_loss_does_not_depend_on_the_mesh(name: str, tmp_path: Path) -> None:
    option = {"mixture_of_experts": "expert", "tensor_parallel": "tensor"}[name]
    meshes = [run(f"{name}.py", tmp_path, f"--{option}-parallel={count}") for count in (1, 2)]
    first, second = (numbers("loss", text) + numbers("norm", text) for text in meshes)
    assert len(first) == 40 and first == pytest.approx(second, rel=1e-2)
    assert first[19] < 0.7 * first[0]


@pytest.mark.slow
def test_the_elastic_program_resumes_on_one_rank(tmp_path: Path) -> None:
    straight = numbers("loss", run("elastic.py", tmp_path, "checkpoints"))
    assert len(straight) == 200 and sum(straight[-20:]) < 0.5 * sum(straight[:20])
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000200")
    text = run("elastic.py", tmp_path, "checkpoints", processes=1)
    assert "resume at step 180, sample 2160" in text
    assert numbers("loss", text) == pytest.approx(straight[180:], rel=1e-3)


@pytest.mark.slow
def test_a_convolutional_tower_that_ranks_skip(tmp_path: Path) -> None:
    text = run("vision.py", tmp_path)
    losses = numbers("loss", text)
    assert len(losses) == 5 and losses[-1] < 0.3 * losses[0], text
    program = runpy.run_path(str(EXAMPLES / "vision.py"))
    model = program["Captioner"]().eval()
    model.load_state_dict(torch.load(tmp_path / "vision.pt"))  # strict
    torch.manual_seed(9)
    tokens, images, targets = program["batch"](images=True)
    assert (model(tokens, images).argmax(1) == targets).float().mean() > 0.9, text
    assert (model(tokens).argmax(1) == (tokens + 1) % 32).float().mean() > 0.9, text


@world(2)
def test_running_statistics_of_the_convolutional_tower() -> None:
    """Rank 0 has seen one batch and rank 1 has seen three."""
    norm, rank = nn.BatchNorm2d(2), dist.get_rank()
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]) + rank)
    norm.running_var.fill_(3 + 4 * rank)
    norm.num_batches_tracked.fill_(1 + 2 * rank)
    runpy.run_path(str(EXAMPLES / "vision.py"))["average_running_statistics"](nn.Sequential(norm))
    assert norm.running_mean.tolist() == [1.75, 2.75] and norm.running_var.tolist() == [6, 6]


@pytest.mark.slow
def test_reinforcement_publishes_a_policy_that_counts(tmp_path: Path) -> None:
    text = run("reinforcement.py", tmp_path)
    rewards = numbers("reward", text)
    assert len(rewards) == 4 and rewards[0] < 0.9 and rewards[-1] > 0.95, text
    policy = runpy.run_path(str(EXAMPLES / "reinforcement.py"))["build"]()
    policy.load_state_dict(torch.load(tmp_path / "policy.pt"))
    assert policy(torch.arange(11)).argmax(1).tolist() == list(range(1, 12))


@pytest.mark.slow
def test_a_nan_is_found_and_its_batch_skipped(tmp_path: Path) -> None:
    text = run("recover_from_nan.py", tmp_path, "checkpoints")
    assert re.findall(r"step (\d+) .* skipped (.*)", text) == [
        (str(step), "[34]" if step > 30 else "[]") for step in range(10, 61, 10)
    ], text
    losses = numbers("loss", text)
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0], text
    folder = tmp_path / "checkpoints"
    assert sorted(each.name for each in folder.iterdir()) == ["step_00000050", "step_00000060"]
    assert run("recover_from_nan.py", tmp_path, "checkpoints") == ""  # nothing to do


@pytest.mark.slow
def test_the_lightning_program(tmp_path: Path) -> None:
    need("lightning")
    text = run("lightning_fsdp.py", tmp_path, before=DROPIN)
    losses = numbers("loss", text)
    assert len(losses) == 5 and losses[-1] < 0.3 * losses[0], text
    assert "the layers are a unshard.fsdp2.module.FSDPModule" in text


# accelerate uses FSDP only on accelerators.
ACCELERATE = """
import runpy, sys
sys.path.insert(0, {stack!r})
from outcome import let_accelerate_shard_on_the_cpu
let_accelerate_shard_on_the_cpu()
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_accelerate_program(tmp_path: Path) -> None:
    need("accelerate")
    driver = tmp_path / "driver.py"
    program = str(EXAMPLES / "accelerate_fsdp.py")
    driver.write_text(ACCELERATE.format(stack=str(REPOSITORY / "tests" / "stack"), program=program))
    done = python("-W", "ignore", *TORCHRUN, *DROPIN, driver, "--folder=weights", cwd=tmp_path)
    losses = numbers("loss", done.stdout)
    assert len(losses) == 6 and losses[-1] < 0.3 * losses[0], done.stdout
    assert "unshard sharded 3 units" in done.stderr, done.stderr
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))
    checkpoint.load_safetensors(model, tmp_path / "weights")
    tokens = torch.arange(32)
    assert F.cross_entropy(model(tokens), (tokens + 1) % 32) < 0.1 * losses[0]


# -- recipes: what their pages show ------------------------------------------------------------------------------------

RECIPES = sorted(each.stem for each in (EXAMPLES / "recipes").glob("*.py"))
QUICK = ("token_weighted_loss",)
LIBRARIES = {
    "hugging_face": ("transformers",),
    "generate": ("transformers",),
    "lora": ("transformers", "peft"),
    "qlora": ("transformers", "peft", "bitsandbytes"),
}


def page(name: str) -> tuple[str, str, str]:
    """The command, the program and the output on the page of a recipe: its first three listings."""
    text = (REPOSITORY / "docs" / "recipes" / f"{name}.md").read_text()
    kinds, blocks = zip(*re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:3], strict=True)
    assert kinds == ("sh", "python", "text")
    return blocks


def test_pages_of_recipes_show_the_programs() -> None:
    pages = sorted(each.stem for each in (REPOSITORY / "docs" / "recipes").glob("*.md"))
    assert len(RECIPES) > 10 and pages == RECIPES
    for name in RECIPES:
        command, program, _ = page(name)
        assert program == (EXAMPLES / "recipes" / f"{name}.py").read_text(), f"copy the program into {name}.md"
        assert command.strip() in program and command.endswith(f" examples/recipes/{name}.py\n"), name


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"^\| \[(\S+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    programs = [*EXAMPLES.glob("*.py"), *(EXAMPLES / "recipes").glob("*.py")]
    assert sorted(listed) == sorted(str(each.relative_to(EXAMPLES)) for each in programs)


@pytest.mark.filterwarnings("ignore")  # libraries warn about themselves
@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in RECIPES]
)
def test_a_recipe_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    need(*LIBRARIES.get(name, ()))
    command, _, expected = page(name)
    processes = re.findall(r"--nproc-per-node=(\d)", command)[0]
    printed = run(f"recipes/{name}.py", tmp_path, processes=int(processes))
    words, found = (re.split(r"(\d+\.\d+)", text) for text in (expected, printed))
    assert words[::2] == found[::2] and len(words) > 3, printed
    assert [float(each) for each in found[1::2]] == pytest.approx([float(each) for each in words[1::2]], 0.05, 0.02)
    CHECKS[name](printed, tmp_path)


def falls(printed: str, folder: Path) -> None:
    losses = numbers("loss", printed)
    assert len(losses) > 2 and losses[-1] < 0.25 * losses[0], printed


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))


def loss_of(model: Any, first: torch.Tensor) -> torch.Tensor:
    tokens = (first + torch.arange(32)) % 64
    return model(input_ids=tokens, labels=tokens).loss


def assert_trained_like(reference: Any, printed: str, lr: float, seed: int = 1, within: float = 2e-3) -> None:
    """Train without sharding, on the batches of both ranks. Losses are those of rank 0."""
    draw = [torch.Generator().manual_seed(seed + rank) for rank in range(2)]
    optimizer = torch.optim.AdamW([each for each in reference.parameters() if each.requires_grad], lr=lr)
    losses = []
    for _ in range(30):
        mine, theirs = (loss_of(reference, torch.randint(64, (8, 1), generator=each)) for each in draw)
        ((mine + theirs) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mine.item())
    assert numbers("loss", printed) == pytest.approx(losses[4::5], abs=within)


def assert_same_loss(model: Any, reference: Any) -> None:
    first = torch.arange(8).unsqueeze(1)
    assert loss_of(model, first).item() == pytest.approx(loss_of(reference, first).item(), rel=0.02)


def hugging_face(printed: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = llama()
    assert_trained_like(reference, printed, 3e-3)
    assert_same_loss(AutoModelForCausalLM.from_pretrained(folder / "fine-tuned"), reference)


def lora(printed: str, folder: Path) -> None:
    from peft import PeftModel

    reference = with_adapters(llama())
    assert_trained_like(reference, printed, 1e-2)
    assert_same_loss(PeftModel.from_pretrained(llama(), folder / "adapters"), reference)


def qlora(printed: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "tiny-llama", quantization_config=quantization, device_map={"": "cpu"}
    )
    torch.manual_seed(1)
    assert_trained_like(with_adapters(model.train()), printed, 1e-2, seed=2, within=0.08)  # bf16


def counting() -> nn.Sequential:
    """The model of the recipes that need only torch."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))


def token_weighted_loss(printed: str, folder: Path) -> None:
    """The same losses as without sharding, with the sequences of both ranks, one by one."""
    draw, model = [torch.Generator().manual_seed(1 + rank) for rank in range(2)], counting()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(20):
        losses = []
        for each in (draw[0], draw[0], draw[1], draw[1]):
            lengths, first = (torch.randint(*limits, (4,), generator=each).tolist() for limits in ((2, 50), (0, 32)))
            for length, begin in zip(lengths, first, strict=True):
                tokens = (begin + torch.arange(length)) % 32
                losses.append(F.cross_entropy(model(tokens), (tokens + 1) % 32, reduction="none"))
        loss = torch.cat(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), sum(map(len, losses))))
    assert numbers("loss", printed) == pytest.approx([loss for loss, _ in found[4::5]], rel=0.02, abs=1e-3)
    assert re.findall(r"(\d+) tokens", printed) == [str(tokens) for _, tokens in found[4::5]]


def dpo(printed: str, folder: Path) -> None:
    """The same losses as without sharding, with the pairs of both ranks. Losses are those of rank 0."""
    draw, policy, reference = [torch.Generator().manual_seed(1 + rank) for rank in range(2)], counting(), counting()
    optimizer, found = torch.optim.AdamW(policy.parameters(), lr=1e-3), []
    for _ in range(20):
        losses = []
        for each in draw:
            prompts = torch.randint(32, (16, 1), generator=each)
            pairs = torch.cat([prompts + torch.arange(8), prompts - torch.arange(8)]) % 32
            logits = policy(pairs[:, :-1]).log_softmax(-1) - reference(pairs[:, :-1]).detach().log_softmax(-1)
            better, worse = logits.gather(-1, pairs[:, 1:, None]).sum((1, 2)).chunk(2)
            losses.append(-F.logsigmoid(0.1 * (better - worse)).mean())
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[0].item())
    assert numbers("loss", printed) == pytest.approx(found[4::5], abs=1.5e-3)


def generate(printed: str, folder: Path) -> None:
    falls(printed, folder)
    sampled = [int(each) for each in re.findall(r"\d+", printed.rpartition("sampled")[2])]
    assert sampled == [(sampled[0] + index) % 64 for index in range(9)], printed


def sleep_and_wake(printed: str, folder: Path) -> None:
    """The same losses without sleeping."""
    program = (EXAMPLES / "recipes" / "sleep_and_wake.py").read_text()
    awake = program.replace("saved = sleep()\n", "").replace("wake(saved)\n", "")
    assert len(program) - len(awake) == len("saved = sleep()\nwake(saved)\n")
    (folder / "awake.py").write_text(awake)
    expected = numbers("loss", run(str(folder / "awake.py"), folder))
    assert numbers("loss", printed) == expected and len(expected) == 2 and expected[1] < 0.2 * expected[0]


def ema(printed: str, folder: Path) -> None:
    model, tokens = counting(), torch.arange(32)
    model.load_state_dict(torch.load(folder / "average.pt"))
    expected = numbers("average", printed)[-1]
    assert F.cross_entropy(model(tokens), (tokens + 1) % 32).item() == pytest.approx(expected, abs=1e-3)
    assert expected < numbers("model", printed)[-1] < 0.9 * numbers("model", printed)[0]


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "dpo": dpo,
    "ema": ema,
    "generate": generate,
    "hugging_face": hugging_face,
    "lora": lora,
    "optimizers": falls,
    "qlora": qlora,
    "skipped_towers": falls,
    "sleep_and_wake": sleep_and_wake,
    "streaming_weights": falls,
    "token_weighted_loss": token_weighted_loss,
}
"""What a wrong program would not pass, besides the lines of its page."""
