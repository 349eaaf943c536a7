"""Scripts made for Horovod, which know nothing of this package, run unchanged."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qsgd_hpc import env

SCRIPTS = Path(__file__).parents[1] / "horovod_scripts"
DATA = Path(env.get("QSGD_DATA") or "/nowhere")


# Rank 1's first batch is spoilt; both ranks go on with what its gradient makes of the weights.
NAN = """
import horovod.torch as hvd, torch
hvd.init()
model = torch.nn.Embedding(4, 2, sparse={sparse})
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
for step in range(2):
    optimizer.zero_grad()
    factor = float("nan") if hvd.rank() == 1 else 1.0
    (model(torch.tensor([1])) * factor).sum().backward()
    optimizer.step()
    print(bool(model.weight.isnan().any()), flush=True)
"""


@pytest.fixture
def started(run_ranks, tmp_path):
    """Return start(script, *arguments): the ended process of a script that is left as it is."""

    def start(script: str, *arguments: str, options: tuple[str, ...] = (), ranks: int = 2):
        command = ("--horovod", *options, str(SCRIPTS / script), *arguments)
        # XLA compiles a whole network in one of them, which takes minutes on a busy machine.
        paths = str(SCRIPTS.parents[1])
        return run_ranks(ranks, *command, cwd=tmp_path, timeout_s=560, PYTHONPATH=paths)

    return start


@pytest.fixture
def horovod(started):
    """Return run(script, *arguments): what the ranks print on stdout."""

    def run(*words: str, **how) -> str:
        done = started(*words, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def jpeg_tree(tmp_path) -> Path:
    """Return a folder of ten classes with ten images each: CIFAR-10's if there, else made up."""
    archive = DATA / "cifar10" / "cifar10.tar.xz"
    if archive.is_file():
        _extract(archive, tmp_path)
        return tmp_path / "cifar10" / "test"
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(10):
        folder = tmp_path / "made_up" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(20 * label, 20 * label + 60, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return tmp_path / "made_up"


def _extract(archive: Path, folder: Path) -> None:
    found: Counter[str] = Counter()
    with tarfile.open(archive) as members:
        for member in members:
            parent = str(Path(member.name).parent)
            if member.isfile() and "/test/" in member.name:
                found[parent] += 1
                if found[parent] <= 10:
                    members.extract(member, folder)
            elif "/train" in member.name:  # test/ comes first
                return


@pytest.mark.gate
def test_no_script_knows_of_this_package():
    for script in SCRIPTS.glob("*.py"):
        code = re.sub(r'""".*?"""', "", script.read_text(), count=1, flags=re.S)
        assert re.search(r"^import horovod\.[a-z.]+ as hvd", code, flags=re.M)
        assert "qsgd" not in code


@pytest.mark.parametrize(
    ("ranks", "bits"), [pytest.param(2, "32", marks=pytest.mark.gate), (3, "4")]
)
def test_synthetic_benchmark_prints_its_speed(horovod, ranks, bits):
    options = ("--bits", bits)
    said = horovod("synthetic_benchmark.py", "--fp16-allreduce", options=options, ranks=ranks)
    assert re.search(rf"Total img/sec on {ranks} CPU\(s\): [1-9][\d.]+ \+-", said)


@pytest.mark.parametrize(("ranks", "bits"), [(2, "4"), (3, "32")])
@pytest.mark.one_mpi
def test_mnist_learns_with_workers_in_processes_of_their_own(horovod, ranks, bits):
    arguments = ["--images", "1024", "--lr", "0.05", "--epochs", "2"]
    if (DATA / "mnist" / "train-images-idx3-ubyte.gz").is_file():
        arguments += ["--data-dir", str(DATA / "mnist")]
    said = horovod("mnist.py", *arguments, options=("--bits", bits), ranks=ranks)
    accuracy = [float(found) for found in re.findall(r"Accuracy: ([\d.]+)%", said)]
    assert len(accuracy) == 2
    assert accuracy[-1] > 30


@pytest.mark.parametrize("bits", ["32", "4"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.one_mpi
def test_two_optimizers_of_a_gan_take_turns(horovod, ranks, bits):
    said = horovod("gan.py", "--steps", "200", options=("--bits", bits), ranks=ranks)
    found = re.search(r"radius ([\d.]+), replicas equal", said)
    assert 1.5 < float(found[1]) < 2.5, said


@pytest.mark.parametrize("dense", [(), ("--sparse-as-dense",)], ids=["sparse", "as_dense"])
@pytest.mark.parametrize(("ranks", "bits"), [(2, "32"), (3, "4")])
@pytest.mark.one_mpi
def test_lstm_with_a_sparse_embedding_learns(horovod, ranks, bits, dense):
    said = horovod("lstm.py", *dense, options=("--bits", bits), ranks=ranks)
    perplexities = [float(each) for each in re.findall(r"perplexity ([\d.]+)", said)]
    assert perplexities[1] < 60 < perplexities[0] < 500, said
    assert "replicas equal" in said


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_gradients_with_nan_are_warned_of_once_and_handed_on(started, tmp_path, kind):
    script = tmp_path / "nan.py"
    script.write_text(NAN.format(sparse=kind == "sparse"))
    done = started(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4
    told = [line for line in done.stderr.splitlines() if "NaN or Inf" in line]
    assert len(told) == 1, done.stderr
    assert "QSGD_NONFINITE=error" in told[0]
    assert "weight" in told[0]
    if kind == "dense":
        assert "rank(s) 1" in told[0]


@pytest.mark.parametrize(("ranks", "bits"), [(2, "32"), (3, "4")])
@pytest.mark.one_mpi
def test_imagenet_style_training_goes_on_from_its_checkpoint(
    horovod, jpeg_tree, tmp_path, ranks, bits
):
    how = {"options": ("--bits", bits), "ranks": ranks}
    where = ["--train-dir", str(jpeg_tree), "--val-dir", str(jpeg_tree), "--batch-size", "8"]
    first = horovod("imagenet.py", *where, "--epochs", "1", **how)
    assert "Validate epoch #1" in first
    assert (tmp_path / "checkpoint-1.pt").is_file()
    second = horovod("imagenet.py", *where, "--epochs", "2", "--fp16-allreduce", **how)
    assert "resuming after epoch 1" in second
    assert "epoch #1:" not in second
    assert "Validate epoch #2" in second


def numbers(pattern: str, said: str) -> list[float]:
    """Return what the pattern's only group finds."""
    return [float(found) for found in re.findall(pattern, said)]


@pytest.mark.one_mpi
def test_mnist_learns_by_adasum(horovod):
    said = horovod("mnist.py", "--images", "1024", "--lr", "0.05", "--epochs", "2", "--use-adasum")
    assert numbers(r"Accuracy: ([\d.]+)%", said)[-1] > 30


@pytest.mark.one_mpi
@pytest.mark.parametrize("bits", ["32", "4"])
def test_contrast_with_the_samples_of_all_ranks_finds_the_pairs(horovod, bits):
    said = horovod("contrastive.py", options=("--bits", bits))
    found = numbers(r"found ([\d.]+)", said)
    assert found[0] < 0.5 < 0.8 < found[-1], said
    assert said.count("replicas equal") == 2


@pytest.mark.one_mpi
def test_a_loss_scaler_skips_a_step_that_one_rank_overflows(horovod):
    said = horovod("amp.py")
    before, after = numbers(r"step \d+: loss ([\d.]+)", said)
    assert after < 0.8 * before
    # Doubled after 20 good steps, halved by the overflow, doubled after 20 more.
    assert said.count("replicas equal, scale 2048") == 2


@pytest.mark.one_mpi
def test_a_second_optimizer_finetunes_a_model_that_is_saved_whole(horovod, tmp_path):
    said = horovod("finetune.py")
    found = re.search(r"head ([\d.]+), unfrozen ([\d.]+), whole ([\d.]+)", said)
    head, unfrozen, whole = map(float, found.groups())
    assert head > unfrozen > whole
    assert said.count("replicas equal") == 4
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_unequal_length_are_joined(horovod, ranks):
    said = horovod("uneven.py", ranks=ranks)
    assert numbers(r"last (\d)", said) == [ranks - 1] * ranks
    assert min(numbers(r"([\d.]+) of", said)) > 0.9
    assert said.count("replicas equal") == ranks


@pytest.mark.one_mpi
def test_towers_of_process_sets_share_a_head(horovod):
    said = horovod("process_sets.py", ranks=4)
    assert said.count("head equal: True, tower equal in half, in all: (True, False)") == 4
    assert max(numbers(r"step 80: loss ([\d.]+)", said)) < 0.55


@pytest.mark.one_mpi
def test_results_of_all_ranks_decide_on_the_rate_and_the_best_model(horovod):
    said = horovod("validation.py")
    first, last = numbers(r"epoch \d+: error ([\d.]+)", said)
    assert last < first
    assert said.count("replicas equal") == 2


@pytest.mark.one_mpi
def test_elastic_script_goes_on_from_its_commit(horovod):
    said = horovod("elastic.py", "--fail-in-epoch", "1")
    assert sorted(re.findall(r"rank \d begins again", said)) == [
        "rank 0 begins again", "rank 1 begins again"
    ]  # fmt: skip
    losses = [float(found) for found in re.findall(r"Epoch \d: loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensorflow_loop_trains_a_resnet34_over_jpegs(horovod, jpeg_tree, tmp_path, ranks):
    pytest.importorskip("tensorflow")
    where = ("--data-dir", str(jpeg_tree), "--profile-dir", str(tmp_path / "profile"))
    said = horovod("tensorflow_resnet34.py", *where, ranks=ranks)
    losses = [float(found) for found in re.findall(r"step \d: loss ([\d.]+)", said)]
    assert len(losses) == 10
    assert np.isfinite(losses).all()
    weights = re.findall(r"ends with weights of ([\d.]+)", said)
    assert len(weights) == ranks
    assert len(set(weights)) == 1
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.one_mpi
def test_tensorflow_homework_learns_mnist(horovod, tmp_path):
    pytest.importorskip("tensorflow")
    where = []
    if (DATA / "mnist" / "train-images-idx3-ubyte.gz").is_file():
        where = ["--data-dir", str(DATA / "mnist")]
    said = horovod("tensorflow_mnist.py", *where, options=("--bits", "4"))
    accuracy = [float(found) for found in re.findall(r"test accuracy ([\d.]+)", said)]
    assert len(accuracy) == 2
    assert accuracy[-1] > 0.8
    assert list((tmp_path / "checkpoints").iterdir())


@pytest.mark.one_mpi
def test_tensorflow_graph_trains_in_a_monitored_session(horovod, tmp_path):
    pytest.importorskip("tensorflow")
    said = horovod("tensorflow_v1.py")
    ends = re.findall(r"rank (\d) ends after step 20 with accuracy ([\d.]+)", said)
    assert sorted(rank for rank, _ in ends) == ["0", "1"]
    assert len({accuracy for _, accuracy in ends}) == 1
    assert (tmp_path / "checkpoints" / "checkpoint").is_file()


# Each trains on data that differ from rank to rank, and prints whether the ranks' weights do.
SMALL = sorted(
    path.name
    for path in SCRIPTS.glob("*.py")
    if path.name.startswith(("keras_", "tensorflow_")) and "replicas equal" in path.read_text()
)


@pytest.mark.one_mpi
@pytest.mark.parametrize("script", SMALL)
def test_replicas_are_equal_and_the_loss_falls(horovod, script):
    pytest.importorskip("tensorflow")
    found = re.findall(r"loss ([\d.]+) -> ([\d.]+), replicas equal", horovod(script))
    assert len(found) == 2
    assert all(float(last) < float(first) for first, last in found)


@pytest.mark.one_mpi
def test_keras_resumes_from_the_checkpoint_of_rank_0(horovod):
    pytest.importorskip("tensorflow")
    horovod("keras_imagenet.py", "--epochs", "2")
    said = horovod("keras_imagenet.py", "--epochs", "4")
    assert said.count("resumed after 2, rate 0.001") == 2
    assert "replicas equal" in said
