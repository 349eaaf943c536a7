"""Scripts of torch.distributed that do not mention compression, with --bits or in a study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# gloo may abort a process in which a model outlives its group.
END = """
import gc
for name in {*globals()} - {"dist", "gc"}:
    if not name.startswith("__"):
        del globals()[name]
gc.collect()
dist.destroy_process_group()
"""
# Trains as DDP does by itself, with a hook of torch's own, as a static graph, and a small model.
# Begins with an optimizer in the backward pass, too, which torch runs only with an accelerator.
KINDS = (
    """
import json, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
for kind in ("plain", "hook", "static", "small", "backward"):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    if kind == "small":
        net = torch.nn.Linear(64, 1)
    if kind == "backward":
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.01})
        model = DistributedDataParallel(net)
        model(torch.zeros(1, 64))
        break
    model = DistributedDataParallel(net, static_graph=kind == "static")
    if kind == "hook":
        model.register_comm_hook(None, allreduce_hook)
    with torch.no_grad():
        model(torch.zeros(1, 64))  # no step has begun with this
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(20):
        own = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 64, generator=own)
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x[:, 0]).square().mean()
        loss.backward()
        optimizer.step()
    weights = [float(p.detach().sum()) for p in model.parameters()]
    if dist.get_rank() == 0:
        print(json.dumps([kind, float(loss), weights]), flush=True)
    del net, model, optimizer, loss
"""
    + END
)


def test_bits_compress_a_script_that_says_nothing(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(KINDS)
    told, runs = [], []
    for options in ((), ("--bits", "4")):
        done = run_ranks(2, *options, str(path))
        assert done.returncode == 0, done.stderr
        told.append([line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc:")])
        runs.append({kind: rest for kind, *rest in map(json.loads, done.stdout.splitlines())})
    plain, compressed = runs
    assert told[0] == []
    assert told[1] == [
        "qsgd-hpc: DDP sends gradients in 4 bits, with error feedback; the script has no hook",
        "qsgd-hpc: --bits 4 has no effect: the script has registered a hook of its own",
        "qsgd-hpc: DDP sends gradients uncompressed, not in 4 bits: static_graph=True",
        "qsgd-hpc: DDP sends gradients uncompressed, not in 4 bits: none has two dimensions and at "
        "least 1,024 elements",
        "qsgd-hpc: DDP sends gradients uncompressed, not in 4 bits: its optimizer steps in the "
        "backward pass, through DDP's only hook",
    ]
    assert plain["hook"] == plain["plain"]
    assert compressed["hook"] == plain["hook"]
    assert compressed["static"] == plain["static"]
    assert compressed["small"] == plain["small"]
    assert compressed["plain"] != plain["plain"]
    assert compressed["plain"][0] == pytest.approx(plain["plain"][0], rel=0.1)


# Four ways to train the same model: no two of them enter DDP alike.
ENTRIES = (
    """
import hashlib, torch, torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
for kind in ("call", "forward", "compiled", "replicate"):
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 64)
    model = replicate(net) if kind == "replicate" else DistributedDataParallel(net)
    if kind == "compiled":
        model.module.compile(backend="aot_eager")
    run = model.forward if kind == "forward" else model
    with torch.no_grad():
        run(torch.zeros(1, 64))
    own = torch.Generator().manual_seed(dist.get_rank())
    run(torch.randn(16, 64, generator=own)).square().mean().backward()
    if dist.get_rank() == 0:
        print(kind, hashlib.sha256(net.weight.grad.numpy().tobytes()).hexdigest(), flush=True)
    del net, model, run
"""
    + END
)


def test_bits_compress_however_a_script_enters_ddp(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(ENTRIES)
    plain, coded = (run_ranks(2, *bits, str(path)) for bits in ((), ("--bits", "4")))
    assert plain.returncode == coded.returncode == 0, coded.stderr
    exact, found = (dict(map(str.split, done.stdout.splitlines())) for done in (plain, coded))
    assert list(found) == ["call", "forward", "compiled", "replicate"]
    # replicate() numbers the parameters, and the noise depends on their names.
    assert found["call"] == found["forward"] == found["compiled"] != exact["call"]
    assert found["replicate"] != exact["replicate"] == exact["call"]


# The script starts the ranks itself.
SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(8, 64)).square().mean().backward()
    del model
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def test_bits_compress_in_ranks_that_the_script_starts(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SPAWNED)
    done = run_ranks(1, "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DDP sends gradients in 4 bits") == 1


# As the ImageNet example of PyTorch: each rank is a node, which starts two processes. They average
# their gradients themselves.
SPAWNED_ON_NODES = """
import os, torch, torch.distributed as dist, torch.multiprocessing

def train(local):
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=2 * node + local, world_size=2 * nodes)
    model = torch.nn.Linear(4, 1)
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    torch.optim.SGD(model.parameters(), 0.1).step()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


@pytest.mark.one_mpi
@pytest.mark.parametrize("nodes", [1, 2])
def test_processes_that_nodes_start_are_told_once_what_bits_do_not_compress(
    run_ranks, tmp_path: Path, nodes: int
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SPAWNED_ON_NODES)
    done = run_ranks(nodes, "--ranks-per-node", "1", "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc:")]
    assert "compressed nothing on rank 0 up to the first optimizer step" in told


# Float16 gradients under a scale that grows every third step; with "line", as the docs have it.
SCALED = (
    """
import hashlib, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
if "line" in sys.argv:
    from qsgd_hpc.torch.ddp import compress
    compress(model, bits=4, scaler=scaler)
for step in range(12):
    own = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(8, 64, generator=own)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(scaler.get_scale(), hashlib.sha256(weights).hexdigest(), flush=True)
"""
    + END
)


def test_error_feedback_of_an_unchanged_script_follows_its_scale(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SCALED)
    flag, line, plain = (
        run_ranks(2, *options, str(path), *words)
        for options, words in ((("--bits", "4"), ()), ((), ("line",)), ((), ()))
    )
    assert flag.returncode == line.returncode == plain.returncode == 0, flag.stderr
    assert flag.stdout == line.stdout != plain.stdout
    assert flag.stdout.startswith("1024.0 ")


# Rank 1 has no inputs at all.
JOINED = (
    """
import hashlib, torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with Join([model]):
    for step in range(3 * (1 - dist.get_rank())):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(hashlib.sha256(weights).hexdigest(), flush=True)
"""
    + END
)


def test_a_rank_without_inputs_joins_the_compressed_steps_of_the_others(
    run_ranks, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(JOINED)
    done = run_ranks(2, "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1
    assert "DDP sends gradients in 4 bits" in done.stderr


# Trains two models; with a checkpoint as its argument, it resumes both.
RESUMED = (
    """
import sys, torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
models = [DDP(torch.nn.Linear(64, 64)) for _ in range(2)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for optimizer in optimizers:
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does
for model, optimizer in zip(models, optimizers) if sys.argv[2:] else ():
    get_optimizer_state_dict(model, optimizer)  # steps at a rate of zero
    optimizer.load_state_dict(torch.load(sys.argv[1]))
for model, optimizer in zip(models, optimizers):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save(optimizers[0].state_dict(), sys.argv[1])
"""
    + END
)


@pytest.mark.one_mpi
def test_a_resumed_script_is_told_that_residuals_start_from_zero(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, saved = tmp_path / "train.py", str(tmp_path / "saved.pt")
    path.write_text(RESUMED)
    for options, *words in (("4", saved), ("4", saved, "resume"), ("32", saved, "resume")):
        done = run_ranks(2, "--bits", options, str(path), *words)
        assert done.returncode == 0, done.stderr
        told = done.stderr.count("error feedback starts from zero")
        assert told == (options == "4" and "resume" in words), done.stderr
        assert "does not compress" not in done.stderr


# Forty steps on matrices large enough to travel for a while.
STEPS = (
    """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

dist.init_process_group("gloo")
register_optimizer_step_post_hook(lambda *_: None)  # a script may have one of its own
model = torch.nn.Linear(512, 512, bias=False)
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 512)).square().mean().backward()
    optimizer.step()
"""
    + END
)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_study_sees_the_steps_of_a_script_that_says_nothing(
    run_ranks, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(STEPS)
    found = {}
    for ranks, *bits in ((1, "32"), (2, "32"), (2, "4", "--weight-bits", "8")):
        target = tmp_path / f"{ranks}-{bits[0]}.jsonl"
        done = run_ranks(ranks, "--bits", *bits, str(path), kind, QSGD_RECORDS=str(target))
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in target.read_text().splitlines()]
        engines = sorted((r for r in records if r["event"] == "engine"), key=lambda r: r["rank"])
        assert [(r["rank"], r["ranks"], r["steps"]) for r in engines] == [
            (rank, ranks, 40) for rank in range(ranks)
        ]
        assert all(0 <= r["exposed_s"] <= r["step_mean_s"] for r in engines)
        found[ranks, bits[0]] = engines[0]
    size = 4 * 512 * 512
    assert found[1, "32"]["wire_bytes"] == 0
    assert [found[2, bits]["gradient_bits"] for bits in ("32", "4")] == [32, 4]
    assert found[2, "32"]["gradient_bytes"] == found[2, "4"]["gradient_bytes"] == 40 * size
    # Of DDP both halves of a ring; of FSDP2 half the weights, and half the gradients.
    assert found[2, "32"]["wire_bytes"] == 40 * size
    assert found[2, "32"]["exposed_s"] > 0
    # 4 of 32 bits, of weights 8, and a norm for each bucket of 512 elements.
    share = 1 / 8 if kind == "ddp" else (1 / 8 + 1 / 4) / 2
    assert share < found[2, "4"]["wire_bytes"] / (40 * size) < 1.07 * share
    if kind == "ddp":
        coded = found[2, "4"]
        assert sum(count for count, _ in coded["layers"]) == 512 * 512
        assert coded["layers"][0][1] == 0
        assert coded["layers"][-1][1] == coded["backward_s"]
        assert 0 < coded["coding_s"] < coded["step_mean_s"]
        assert found[2, "32"]["coding_s"] == 0
        assert "layers" not in found[2, "32"]


def test_bits_import_nothing_into_other_scripts(run_ranks, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.own = True")
    path = tmp_path / "other.py"
    path.write_text("import sys; print(sys.own, {'torch', 'qsgd_hpc', 'typing'} & {*sys.modules})")
    done = run_ranks(2, "--bits", "4", str(path), PYTHONPATH=str(tmp_path / "own"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True set()\n" * 2


# A GAN freezes the discriminator for its first pass; nanoGPT compiles, then wraps.
WRAPPED = (
    """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
G, D = DDP(torch.nn.Linear(64, 64)), DDP(torch.nn.Linear(64, 64))
fake = G(torch.randn(4, 64))
D.requires_grad_(False)
D(fake).pow(2).mean().backward()
D.requires_grad_(True)
D(fake.detach()).pow(2).mean().backward()
built_in = DDP(torch.nn.Linear(64, 64))
built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
built_in(torch.randn(4, 64)).sum().backward()
compiled = DDP(torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64)), backend="eager"))
compiled(torch.randn(4, 64)).sum().backward()
hooks = [len(model._comm_hooks) for model in (G, D, built_in, compiled)]
names = sorted(compiled._comm_hooks[0][1].global_state_dict()["parameters"])
if dist.get_rank() == 0:
    print("hooks", hooks, names)
"""
    + END
)


OWN = (
    """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from qsgd_hpc.torch.ddp import compress
dist.init_process_group("gloo")
for bits in (4, None):
    torch.manual_seed(1)
    model = DDP(torch.nn.Linear(64, 64))
    state = compress(model, bits)
    model(torch.randn(4, 64)).sum().backward()
    if dist.get_rank() == 0:
        print(state.bits, state.sent_bytes < 5000)
"""
    + END
)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_hook_of_the_script_takes_the_bits_that_it_leaves_open(
    run_ranks, tmp_path: Path, bits: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(OWN)
    done = run_ranks(2, "--bits", str(bits), str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 True", f"{bits} {bits < 32}"]
    told = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc:")]
    said = "qsgd-hpc: the script compresses in 4 bits itself: --bits 8 has no effect"
    assert told == ([said] if bits < 32 else [])


UNCODED = (
    """
import sys, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
if sys.argv[1] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif sys.argv[1] == "hook":
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(None, hooks.fp16_compress_hook)
elif sys.argv[1] == "fsdp2":
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.step()  # as some scripts do before they step a scheduler
for _ in range(2):
    model(torch.randn(4, 64)).sum().backward()
    for p in model.parameters():
        if sys.argv[1] == "by hand":
            dist.all_reduce(p.grad)
    optimizer.step()
"""
    + END
)


@pytest.mark.parametrize(
    ("bits", "kind", "reason"),
    [
        ("4", "ddp", None),
        ("4", "hook", None),  # told by another sentence
        ("32", "by hand", None),
        ("4", "by hand", "it compresses what DistributedDataParallel averages, not all_reduce()"),
        ("4", "fsdp2", "FSDP2 sends codes with --weight-bits 8, too, or by quantize_fsdp(model)"),
        ("auto", "ddp", "auto chooses for scripts of the Horovod API"),
    ],
)
def test_bits_that_compress_nothing_are_told(
    run_ranks, tmp_path: Path, bits: str, kind: str, reason: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(UNCODED)
    done = run_ranks(2, "--bits", bits, str(path), kind)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "compressed nothing" in line]
    assert len(told) == (reason is not None), done.stderr
    assert (reason or "") in "".join(told)


# Rank 0 trains another model, alone.
WITHOUT_RANK_0 = (
    """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
others = dist.new_group([1, 2])
model = torch.nn.Linear(64, 64)
if dist.get_rank() > 0:
    model = DDP(model, process_group=others)
model(torch.randn(4, 64)).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
"""
    + END
)


@pytest.mark.one_mpi
def test_models_of_a_group_without_rank_0_are_told(run_ranks, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WITHOUT_RANK_0)
    done = run_ranks(3, "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc:"))
    nothing, coded = told
    assert nothing.startswith("qsgd-hpc: --bits 4 compressed nothing on rank 0 up to"), told
    assert coded.startswith("qsgd-hpc: rank 1: DDP sends gradients in 4 bits"), told


# Rank 1 trains with rank 0, then with rank 2.
GROUPS = (
    """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
for pair in [dist.new_group([0, 1]), dist.new_group([1, 2])]:
    if dist.get_rank(pair) >= 0:
        DDP(torch.nn.Linear(64, 64), process_group=pair)(torch.randn(4, 64)).sum().backward()
"""
    + END
)


@pytest.mark.one_mpi
def test_groups_that_send_alike_are_told_once(run_ranks, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(GROUPS)
    done = run_ranks(3, "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc:")]
    assert told.startswith("qsgd-hpc: DDP sends gradients in 4 bits"), told


def test_bits_compress_whatever_order_a_script_wraps_its_models_in(run_ranks, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WRAPPED)
    done = run_ranks(2, "--bits", "4", str(path))
    assert done.returncode == 0, done.stderr
    assert "hooks [1, 1, 0, 1] ['0.bias', '0.weight']" in done.stdout, done.stdout + done.stderr
    assert "the script has registered a hook of its own" in done.stderr


COMPILED = (
    """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
models = [torch.nn.Linear(64, 64) for _ in range(2)]
compiled = DDP(models[0])
if sys.argv[1] == "asked":
    from qsgd_hpc.torch.ddp import compress
    compress(compiled, bits=4)
compiled = torch.compile(compiled, backend="eager")
passes = [compiled] if sys.argv[1] == "alone" else [compiled, DDP(models[1])]
for model in passes:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
"""
    + END
)


@pytest.mark.parametrize(("kind", "told"), [("alone", 1), ("beside another", 1), ("asked", 0)])
def test_a_compiled_model_that_is_not_compressed_is_told_once(run_ranks, tmp_path, kind, told):
    path = tmp_path / "train.py"
    path.write_text(COMPILED)
    done = run_ranks(2, "--bits", "4", str(path), kind)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc: --bits 4 ")]
    assert len(lines) == told, done.stderr
    assert all("does not compress a DDP model that is compiled" in line for line in lines)
    coded = "qsgd-hpc: DDP sends gradients in 4 bits, with error feedback; the script has no hook"
    assert (coded in done.stderr) == (kind != "alone")


# How a script may call a model of FSDP2 other than by model(x).
SHARDED_ENTRIES = (
    """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from qsgd_hpc.torch.fsdp import is_quantized

class Net(torch.nn.Sequential):
    def score(self, x):
        return self.forward(x)

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for kind in ("call", "compiled", "in place", "method", "no root"):
    torch.manual_seed(0)
    net = Net(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for module in [*net, *([net] if kind != "no root" else [])]:
        fully_shard(module, mesh=mesh)
    run = net
    if kind == "compiled":
        run = torch.compile(net, backend="eager")
    elif kind == "in place":
        net.compile(backend="eager")
    elif kind == "method":
        register_fsdp_forward_method(net, "score")
        run = net.score
    run(torch.randn(4, 64)).square().mean().backward()
    if dist.get_rank() == 0:
        print(kind, sum(map(is_quantized, net.modules())), flush=True)
"""
    + END
)


def test_weight_bits_compress_however_a_script_enters_fsdp(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SHARDED_ENTRIES)
    done = run_ranks(2, "--bits", "4", "--weight-bits", "8", str(path))
    assert done.returncode == 0, done.stderr
    counts = [line.rpartition(" ") for line in done.stdout.splitlines()]
    assert [(kind, int(count)) for kind, _, count in counts] == [
        ("call", 3), ("compiled", 3), ("in place", 3), ("method", 3), ("no root", 2)
    ]  # fmt: skip
    assert done.stderr.count("FSDP2 sends weights in 8 bits and gradients in 4 bits") == 1
