"""One rule of the conversion at a time, on the smallest script that shows it."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from qsgd_hpc.eight_steps.convert import convert
from qsgd_hpc.eight_steps.convert.cli import to_decide
from qsgd_hpc.eight_steps.convert.plan import Edit, apply
from qsgd_hpc.errors import UsageError
from tests.eight_steps.scripts import NOISY, done, has, torch_script


def test_inserts_at_one_place_keep_their_order_and_vanish_in_what_is_replaced():
    edits = [Edit(2, 4, "XY"), Edit(3, 3, "gone"), Edit(2, 2, "b", 2), Edit(2, 2, "a", 1)]
    assert apply("012345", edits) == "01abXY45"


def test_a_sum_divided_by_the_samples_of_all_is_added_up():
    made = done(torch_script(after="print(total / len(loader.dataset))"))
    assert "total = sum(hvd.allgather_object(total))\n" in made.after


def test_a_sum_may_be_an_attribute_of_an_object():
    text = torch_script(after="print(total / len(loader.dataset))")
    made = done(text.replace("total", "stats.total"))
    assert "    stats.total = sum(hvd.allgather_object(stats.total))\n" in made.after


def test_a_sum_divided_by_a_ranks_batches_is_averaged():
    made = done(torch_script(after="print(total / len(loader))"))
    assert "total = sum(hvd.allgather_object(total)) / hvd.size()" in made.after


def test_a_sum_divided_by_something_unknown_is_left_to_the_author():
    made = done(torch_script(after="print(total / mystery())"))
    assert "allgather_object(total)" not in made.after
    assert any("total covers only this rank's batches" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("added", "mean"),
    [
        ("loss.item() / len(loader)", " / hvd.size()"),
        ("loss.item() * len(x) / len(data)", ""),
        ("loss.item() / len(x)", ""),
        ("loss.item() / accumulation", ""),
    ],
)
def test_a_mean_that_the_loop_adds_up_is_that_of_all_ranks(added, mean):
    made = done(torch_script(after="print(total)").replace("loss.item()", added))
    assert f"total = sum(hvd.allgather_object(total)){mean}\n" in made.after


def test_a_sampler_has_the_length_of_a_ranks_part():
    made = done(torch_script(after="print(total / len(loader.sampler))"))
    assert "total = sum(hvd.allgather_object(total)) / hvd.size()" in made.after


def test_a_sampler_of_the_script_too_has_the_length_of_a_ranks_part():
    setup = "own = torch.utils.data.distributed.DistributedSampler(data, 1, 0)"
    made = done(torch_script(setup, after="print(total / len(own))"))
    assert "total = sum(hvd.allgather_object(total)) / hvd.size()" in made.after


@pytest.mark.parametrize(
    ("use", "gathered"),
    [
        ("plt.plot(losses)", "[sum(v) / hvd.size() for v in zip(*hvd.allgather_object(losses))]"),
        ("print(np.median(losses))", "sum(hvd.allgather_object(losses), [])"),
    ],
)
def test_a_curve_of_losses_is_the_mean_of_those_of_the_ranks(use, gathered):
    made = done(f"""
        import torch, numpy as np
        import matplotlib.pyplot as plt

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in torch.utils.data.DataLoader(data, 8, True):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        {use}
    """)
    assert f"\nlosses = {gathered}\n" in made.after and ".cpu()" not in made.after
    tensors = done(made.before.replace("losses.append(loss.item())", "losses.append(loss)")).after
    on_cpu = "losses = [v.detach().cpu() if torch.is_tensor(v) else v for v in losses]\n"
    assert f"\n{on_cpu}losses = {gathered}\n" in tensors


@pytest.mark.parametrize("added", ["(y == 1).float().sum()", "torch.ones(3)", "loss.detach()"])
def test_a_tensor_of_another_type_is_no_number(added):
    text = torch_script(after="print(total / len(loader.dataset))")
    made = done(text.replace("loss.item()", added))
    assert "\n    total = hvd.allreduce(total, op=hvd.Sum)\n" in made.after


def test_an_array_of_numpy_is_no_tensor():
    text = torch_script("import numpy as np", after="print(total / len(loader.dataset))")
    made = done(text.replace("total = 0.0", "total = np.zeros(3)"))
    assert "\n    total = sum(hvd.allgather_object(total))\n" in made.after


@pytest.mark.parametrize(
    "added",
    [
        *("loss.detach() * len(x)", "(loss.sum() / 2) * x.size(0)"),
        *(
            "accuracy_of(model(x), y)",
            "learner.step(x)",
            "args.batch",
            "first",
            "(hits == 1).sum()",
        ),
    ],
)
def test_what_may_be_a_tensor_or_a_number_is_tested_when_it_is_summed(added):
    text = torch_script(after="print(total / len(loader.dataset))")
    made = "hits, (first, other) = model(x).numpy(), step_of(x)\n        loss.backward()"
    text = text.replace("loss.backward()", made)
    assert has(
        done(text.replace("loss.item()", added)),
        """
        if torch.is_tensor(total):
            total = hvd.allreduce(total, op=hvd.Sum)
        else:
            total = sum(hvd.allgather_object(total))
        """,
    )


@pytest.mark.parametrize(
    "added", ["loss.item() * args.batch", "2 * x.shape[0]", "np.mean(x)", "loss.float().item()"]
)
def test_a_product_of_numbers_and_settings_is_a_number(added):
    text = torch_script("import numpy as np", after="print(total / len(loader.dataset))")
    made = done(text.replace("loss.item()", added))
    assert "    total = sum(hvd.allgather_object(total))\n" in made.after


def test_a_sum_that_is_not_used_behind_the_loop_stays():
    assert "allgather_object" not in done(torch_script()).after


def test_the_schedulers_of_the_script_are_kept_and_the_warm_up_goes_beside_them():
    setup = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"
    made = done(torch_script(setup, "scheduler.step()"))
    assert setup in made.after and "scheduler.step()" in made.after
    assert "torch.optim.lr_scheduler.LinearLR(" in made.after
    assert not made.to_decide


@pytest.mark.parametrize("setup", ["step = optimizer.step", "from engine import step"])
def test_a_step_of_another_name_is_no_reason_to_stop(setup):
    argument = "optimizer" if setup.startswith("from") else ""
    assert "hvd.DistributedOptimizer(" in done(torch_script(setup, f"step({argument})")).after


@pytest.mark.parametrize(
    "setup",
    [
        "s = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 1 / (e + 1))",
        "for group in optimizer.param_groups:\n    group['lr'] = 0.01",
        "optimizer.load_state_dict(torch.load('c.pt'))",
    ],
)
def test_a_rate_that_something_else_sets_gets_no_warm_up_but_a_todo(setup):
    made = done(torch_script(setup))
    assert "LinearLR(" not in made.after
    assert any("warm-up" in note.text for note in made.to_decide)


def test_a_one_cycle_schedule_has_its_peak_scaled():
    setup = "s = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=9)"
    made = done(torch_script(setup))
    assert "max_lr=0.4 * hvd.size()" in made.after
    assert "LinearLR(" not in made.after and not made.to_decide


def test_a_rate_that_the_loop_sets_anew_is_marked_where_it_is_set():
    made = done(torch_script(clip="optimizer.param_groups[0]['lr'] = rate(step)\n        "))
    (note,) = made.to_decide
    assert "multiply it by hvd.size()" in note.text
    lines = made.after.splitlines()
    at = lines.index("        optimizer.param_groups[0]['lr'] = rate(step)")
    assert lines[at - 2].strip().startswith("# qsgd-hpc: TODO this sets the learning rate again")


def test_each_place_that_sets_the_rate_anew_is_marked():
    setup = "optimizer.param_groups[0]['lr'] = found"  # by a search for a rate, before the training
    made = done(torch_script(setup, clip="optimizer.param_groups[0]['lr'] = rate(step)\n        "))
    told = [note.text for note in made.to_decide]
    assert ["multiply it by hvd.size()" in text for text in told] == [True, True]


@pytest.mark.parametrize("change", ["['lr'] *= 0.5", "['lr'] = group['initial_lr'] * rise(step)"])
def test_a_rate_that_the_loop_only_changes_is_scaled_where_it_began(change):
    made = done(torch_script(clip=f"group{change}\n        "))
    assert ["raise it to this" in note.text for note in made.to_decide] == [True]


def test_a_loader_with_options_by_name_gets_the_sampler_among_them():
    text = torch_script().replace(
        "DataLoader(data, batch_size=8, shuffle=True)", "DataLoader(data, **options)"
    )
    made = done(text)
    assert not made.to_decide
    assert 'train_options = {**options, "shuffle": False, "sampler": train_sampler}' in made.after
    assert "loader = DataLoader(data, **train_options)" in made.after
    assert "loader.sampler.set_epoch(epoch)" in made.after


def test_names_that_the_script_has_are_not_taken_again():
    text = torch_script().replace(
        "DataLoader(data, batch_size=8, shuffle=True)", "DataLoader(data, **train_options)"
    )
    assert "train_rank_options = train_options\n" in done(text).after


def test_an_import_further_down_does_not_draw_the_beginning_down_with_it():
    text = torch_script().replace("torch.manual_seed(0)", "model_of = 1\nprint(model_of)")
    lines = done(text.replace("model = make_model()", "import json")).after.splitlines()
    assert lines.index("hvd.init()") < lines.index("    print(model_of)")
    assert lines.index("import json") > lines.index("    print(model_of)")


@pytest.mark.parametrize("place", ["further down", "in a function"])
def test_the_gpu_is_pinned_whatever_imports_torch(place):
    text = torch_script()
    if place == "in a function":
        text = "def main():\n" + indent(text, "    ") + '\nif __name__ == "__main__":\n    main()\n'
    lines = done(f"import glob\nprint(glob.glob('*.txt'))\n{text}").after.splitlines()
    assert lines[:3] == ["import glob", "import torch", "import qsgd_hpc.torch as hvd"]


def test_a_module_that_the_script_imports_is_not_imported_again():
    text = "import keras\nmodel.compile('adam', 'mse')\nmodel.fit(x, y)\n"
    assert done(text).after.count("import os\n") == 1
    assert done(f"import os\n{text}").after.count("import os\n") == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"', True),
        ('os.environ.setdefault("CUDA_VISIBLE_DEVICES", args.gpu)', True),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "-1"', False),
        ('print(os.environ["CUDA_VISIBLE_DEVICES"])', False),
        ('gpus = os.environ.get("CUDA_VISIBLE_DEVICES")', False),
    ],
)
def test_a_choice_of_gpus_for_all_ranks_is_left_to_the_author(line, told):
    made = done(f"import os\n{line}\n{torch_script()}")
    assert any("choice of GPUs" in note.text for note in made.to_decide) == told


def test_a_copy_to_the_current_gpu_is_no_choice_of_a_gpu():
    assert not done(torch_script("model.cuda(non_blocking=True)")).to_decide
    (note,) = done(torch_script("model.cuda(0)")).to_decide
    assert "its own GPU" in note.text


@pytest.mark.parametrize(
    ("device", "told"),
    [
        *(("'cuda:1'", True), ("f'cuda:{args.gpu}'", True), ("'cuda:' + gpu", True)),
        *(("'cuda:%d' % gpu", True), ("'cuda', 0", True), ("'cuda:0'", False)),
        ("'cuda' if usable else 'cpu'", False),
    ],
)
def test_a_gpu_with_a_number_is_left_to_the_author(device, told):
    made = done(torch_script(f"device = torch.device({device})\nprint(f'cuda: {{device}}')"))
    text = "each rank has its own GPU: leave out the number."
    assert [note.text for note in made.to_decide] == ([text] if told else [])


def test_a_loader_with_its_own_sampler_is_left_to_the_author():
    text = torch_script().replace("shuffle=True", "sampler=mine")
    made = done(text)
    assert "DistributedSampler" not in made.after
    assert any("sampler of its own" in note.text for note in made.to_decide)


def test_a_loader_left_to_the_author_sets_the_epoch_only_if_it_can():
    made = done(torch_script().replace("shuffle=True", "shuffle=mixed, **options"))
    assert any("shard this loader" in note.text for note in made.to_decide)
    assert 'if hasattr(getattr(loader, "sampler", None), "set_epoch"):' in made.after


def test_a_sampler_that_is_none_is_replaced():
    """As in PyTorch's example of ImageNet."""
    loader = "shuffle=(mine is None), sampler=mine)"
    text = (
        torch_script().replace("loader =", "mine = None\nloader =").replace("shuffle=True)", loader)
    )
    after = done(text).after
    assert "shuffle=train_sampler is None and (mine is None), sampler=train_sampler)" in after


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_tabs_and_carriage_returns_stay(newline):
    text = torch_script(after="print(1)\nprint('''a\nb''')").replace("    ", "\t")
    text = text.replace("loader =", "# \f\u2028\x85\v\nloader =").replace("\nfor", "\n\ffor")
    made = convert(text.replace("\n", newline).encode())
    assert made.after == convert(text).after.replace("\n", newline)
    assert "\n\ffor" in convert(text).after
    compile(made.after, "out", "exec")


def test_lines_end_as_their_neighbours_do_not():
    text = torch_script(after="print(1)").replace("optimizer =", "# a\roptimizer =")
    after = convert(text.encode()).after
    assert after == done(text.replace("\r", "\n")).after.replace("# a\n", "# a\r")


def test_an_unseeded_split_of_the_data_is_pointed_out():
    text = "from sklearn.model_selection import train_test_split\n" + torch_script(
        "a, b = train_test_split(data)"
    )
    assert any("random_state=0" in note.text for note in done(text).to_decide)


def test_what_a_training_step_draws_may_differ_between_ranks():
    step = "def noise(x):\n    return x + np.random.normal(0, 1, len(x))\n"
    text = torch_script().replace("model(x)", "model(noise(x))")
    assert not done(f"import numpy as np\n{step}{text}").to_decide
    made = done(f"import numpy as np\n{step}data = noise(data)\n{text}")
    assert any("ranks draw different numbers" in note.text for note in made.to_decide)


def test_files_of_rank_0_are_loaded_when_they_are_written():
    text = """
import torch
from torch.utils.data import DataLoader

def best():
    with open("best.pt", "rb") as file:
        model.load_state_dict(torch.load(file))

def train():
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), "best.pt")

torch.manual_seed(0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}train()
best()
"""
    wait = "hvd.barrier()  # until rank 0 has written the file\n"
    after = done(text.format(before="")).after
    assert f"train()\n{wait}best()\n" in after and after.count(wait) == 1
    assert done(text.format(before="best()\n")).after.count(wait) == 1
    inline = text.replace("\nbest()", '\nwith open("best.pt", "rb") as f:\n    torch.load(f)')
    assert f"train()\n{wait}with open" in done(inline.format(before="")).after


def test_a_script_for_horovod_is_distributed_already():
    assert not convert("import horovod.torch as hvd\nimport torch\n").changed


def test_a_module_next_to_the_script_that_has_the_training_loop_is_named(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "trainer.py").write_text("def run():\n    loss.backward()\n")
    text = "import torch\nfrom lib.trainer import run\nrun()\n"
    with pytest.raises(UsageError, match=r"repeats\. Convert lib/trainer\.py, and let only"):
        convert(text, tmp_path / "train.py")


def test_a_script_without_training_is_refused():
    with pytest.raises(UsageError, match="Looked for imports of torch"):
        convert("print(1)\n")


def test_one_rank_of_a_node_downloads_while_the_others_wait():
    text = "from torchvision.datasets import MNIST\n" + torch_script(
        "data = MNIST('d', download=True)\ntest = MNIST('d', train=False, download=True)"
    )
    after = done(text).after
    before = "if hvd.local_rank() != 0:\n    hvd.barrier()\ndata = MNIST"
    assert before in after
    assert "download=True)\nif hvd.local_rank() == 0:\n    hvd.barrier()\n" in after
    assert after.count("hvd.barrier()") == 2


def test_backward_passes_are_counted_whatever_makes_the_optimizer():
    text = """
import torch

class Net(torch.nn.Module):
    def configure_optimizers(self, lr):
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        return optimizer

accumulation = 4
model = Net()
optimizer = model.configure_optimizers(1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    for micro in range(accumulation):
        x, y = get_batch()
        scaler.scale(model(x, y) / accumulation).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    assert "backward_passes_per_step=accumulation" in done(text).after


def test_a_script_in_another_encoding_keeps_it_and_what_is_no_text_is_refused():
    text = "# -*- coding: latin-1 -*-\n# Größe" + torch_script()
    made = convert(text.encode("latin-1"))
    assert made.encoding in ("latin-1", "iso-8859-1") and "Größe" in made.after
    with pytest.raises(UsageError, match="not text"):
        convert(b"import torch\n# \xff\n")


def test_a_loop_that_draws_batches_itself_is_told_to_set_the_epoch():
    text = torch_script().replace("for x, y in loader:", "for x, y in cycle(loader):")
    made = done(text)
    assert "DistributedSampler(" in made.after
    assert any("set_epoch" in note.text for note in made.to_decide)


def test_a_step_by_hand_is_told_to_average_gradients():
    text = NOISY.format(drawn="").replace("optimizer.step()", "net.scale.data -= net.scale.grad")
    lines = [line for line in text.splitlines() if "optim" not in line]
    notes = [note.text for note in done("\n".join(lines)).to_decide]
    remedy = "average each gradient before it is used: hvd.allreduce_(p.grad)"
    assert any(remedy in note for note in notes)
    assert not any("wrap the optimizer" in note for note in notes)


def test_a_closure_trains_and_the_rate_of_lbfgs_stays():
    text = """
        import torch

        net = torch.nn.Linear(8, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8)
        data = torch.utils.data.TensorDataset(torch.ones(64, 8))
        for (x,) in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
            def closure():
                optimizer.zero_grad()
                loss = net(x).mean()
                loss.backward()
                return loss
            optimizer.step(closure)
    """
    made = done(dedent(text))
    assert "num_replicas=hvd.size(), rank=hvd.rank()" in made.after
    assert "optimizer = hvd.DistributedOptimizer(optimizer" in made.after
    assert "lr=0.8)" in made.after and "warm_up" not in made.after
    assert "learning rate" not in to_decide(made, "train.py")


def test_a_class_next_to_the_script_that_writes_is_pointed_out(tmp_path):
    (tmp_path / "stopping.py").write_text(
        "import torch\nclass Stop:\n    def save(self, net):\n        torch.save(net, 'best.pt')\n"
        "class Mean:\n    pass\n"
    )
    script = tmp_path / "train.py"
    text = f"from stopping import Mean, Stop\nmean, stop = Mean(), Stop()\n{torch_script()}"
    script.write_text(text)
    told = [note.text for note in convert(text, script).to_decide]
    assert [each for each in told if "writes a file" in each] == [
        "Stop of stopping.py writes a file (line 4): let only rank 0 do that."
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("env.step(1)", "play other episodes"),
        ("world.step(1)", "play other episodes"),
        ("", "shard"),
    ],
)
def test_ranks_that_play_are_told_to_play_differently(line, told):
    made = done(
        f"""
        import torch
        class Game:
            def reset(self): return 0
            def step(self, action): return 1, False
        world = Game()
        net = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for episode in range(9):
            {line}
            optimizer.zero_grad()
            net(torch.ones(8)).sum().backward()
            optimizer.step()
        """
    )
    assert any(told in note.text for note in made.to_decide)


def test_an_optimizer_that_repeats_its_closure_is_answered_with_the_remedy():
    text = """
        import torch

        def closure():
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)
        optimizer.step(closure)
    """
    with pytest.raises(UsageError, match=r"for _ in range\(1\): optimizer.step\(closure\)"):
        done(text)
    made = done(text.replace("optimizer.step(", "for _ in range(1): optimizer.step("))
    assert "hvd.DistributedOptimizer(" in made.after
