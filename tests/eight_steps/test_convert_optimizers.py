"""What the conversion does to optimizers, gradients and their state, a rule at a time."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.convert.cli import to_decide
from qsgd_hpc.eight_steps.reading import parse
from tests.eight_steps.scripts import done, torch_script


def test_gradients_are_averaged_before_they_are_clipped():
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n        "
    after = done(torch_script(clip=clip)).after
    assert "        optimizer.synchronize()\n        torch.nn.utils.clip" in after
    assert "with optimizer.skip_synchronize():\n            optimizer.step()" in after


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)"


def test_the_average_is_awaited_also_if_clipping_is_an_option():
    choice = f"if norm:\n            {CLIP}\n        elif value:\n            {CLIP}\n        "
    made = done(torch_script(clip=choice))
    assert "        optimizer.synchronize()\n        if norm:\n" in made.after
    assert made.after.count("synchronize()") == 2  # that of skip_synchronize()
    assert not made.to_decide


def test_a_branch_without_the_loss_scaler_waits_for_the_average_itself():
    """As in torchvision's reference script."""
    branches = f"""
        if scaler:
            scaler.scale(loss).backward()
            if norm:
                scaler.unscale_(optimizer)
                {CLIP}
            scaler.step(optimizer)
        else:
            loss.backward()
            if norm:
                {CLIP}
            optimizer.step()
"""
    text = torch_script().replace("        loss.backward()\n        optimizer.step()\n", branches)
    made = done(text)
    waits = "            optimizer.synchronize()\n            if norm:\n                torch.nn"
    assert made.after.count("optimizer.synchronize()") == made.after.count(waits) == 1
    assert "with optimizer.skip_synchronize():\n                optimizer.step()" in made.after
    assert not made.to_decide


def test_clipping_after_either_backward_pass_is_left_to_the_author():
    branches = f"""
        if scaler:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        {CLIP}
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
"""
    text = torch_script().replace("        loss.backward()\n        optimizer.step()\n", branches)
    made = done(text)
    assert [note.text for note in made.to_decide] == [
        "average the gradients before clipping: see docs/training.md."
    ]


def test_clipping_that_is_left_to_the_author_is_listed_once():
    made = done(torch_script(f"def clip():\n    {CLIP}  # all", clip="clip()\n        "))
    listed = to_decide(made, "new.py")
    assert listed.count("clip") == listed.count("average the gradients before clipping") == 1
    assert "QH504" in [found.rule.id for found in check(parse(made.after))]


def test_state_is_broadcast_behind_a_checkpoint_that_is_loaded():
    after = done(torch_script("model.load_state_dict(torch.load('c.pt'))")).after
    assert after.index("load_state_dict(torch.load") < after.index("hvd.broadcast_parameters(")
    assert after.index("hvd.DistributedOptimizer(") < after.index("load_state_dict(torch.load")


def test_what_was_best_is_loaded_when_rank_0_has_saved_it_and_broadcasts_nothing():
    text = torch_script()
    text += "    torch.save(model.state_dict(), 'b.pt')\n"
    text += "model.load_state_dict(torch.load('b.pt'))\n"
    after = done(text).after
    assert after.index("hvd.broadcast_parameters(") < after.index("\nfor ")
    assert "\nhvd.barrier()  # until rank 0 has written the file\nmodel.load_state_dict(" in after


def test_parts_of_a_batch_are_reduced_once_for_a_step():
    parts = """
    for part in range({count}):
        loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
        loss.backward()
    optimizer.step()
"""
    head = torch_script().partition("    for ")[0].replace("seed(0)", "seed(0)\nparts = 4")
    made = done(head + parts.format(count="parts"))
    assert "backward_passes_per_step=parts" in made.after
    made = done(head + parts.format(count="len(x)").replace("range(len(x))", "x"))
    assert any("backward_passes_per_step" in note.text for note in made.to_decide)


def test_what_an_object_has_summed_is_left_to_the_author():
    text = torch_script(after="print(meter.avg)").replace("total = 0.0", "meter = AverageMeter()")
    made = done(text.replace("total += loss.item()", "meter.update(loss.item(), len(x))"))
    assert [note.text for note in made.to_decide] == [
        "meter covers only this rank's batches: average over the ranks."
    ]


def test_optimizers_of_two_branches_are_wrapped_once():
    text = torch_script().replace(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "if adam:\n    optimizer = torch.optim.Adam(model.parameters())\n"
        "elif fast:\n    optimizer = torch.optim.SGD(model.parameters(), lr=rate + 1)\n"
        "else:\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    )
    after = done(text).after
    assert after.count("hvd.DistributedOptimizer(") == 1
    assert "torch.optim.Adam(model.parameters(), lr=1e-3 * hvd.size())" in after
    assert "lr=(rate + 1) * hvd.size()" in after
    assert "lr=0.1 * hvd.size()" in after


def test_gradients_that_add_up_are_reduced_once_for_a_step():
    made = done(
        torch_script("accumulate = 4").replace(
            "        optimizer.step()",
            "        if step % accumulate == 0:\n            optimizer.step()",
        )
    )
    assert any("number of backward passes per step" in note.text for note in made.to_decide)


def test_a_generator_that_trains_in_some_steps_only_has_one_backward_pass_in_each():
    text = torch_script("critic = make_model()\ns = torch.optim.Adam(critic.parameters())").replace(
        "total += loss.item()",
        "s.zero_grad()\n        if step % every == 0:\n"
        "            critic(model(x)).mean().backward()\n            s.step()",
    )
    made = done(f"every = 5\n{text}")
    assert "backward_passes_per_step" not in made.after
    assert not any("passes per step" in note.text for note in made.to_decide)


def test_passes_that_add_up_in_two_branches_are_counted():
    lines = "if step % parts == 0:\n{0}loss.backward()\n{0}optimizer.step()\n{1}else:\n"
    lines += "{0}loss.backward()"
    both = lines.format(12 * " ", 8 * " ")
    text = torch_script().replace("loss.backward()\n        optimizer.step()", both)
    made = done(text.replace("seed(0)", "seed(0)\nparts = 4"))
    assert "backward_passes_per_step=parts" in made.after


GAN = """
import torch

critic, generator = make(1), make(2)
d_opt = torch.optim.Adam(critic.parameters())
g_opt = torch.optim.Adam(generator.parameters())
for x, z in loader:
    {zero}.zero_grad()
    loss_of(critic(x), 1).backward()
    loss_of(critic(generator(z)), 0).backward()
    d_opt.step()
    g_opt.zero_grad()
    loss_of(critic(generator(z)), 1).backward()
    g_opt.step()
"""


@pytest.mark.parametrize("zero", ["d_opt", "critic"])
def test_the_losses_of_a_gan_reach_only_the_models_that_step_next(zero):
    made = done(GAN.format(zero=zero))
    own = ".backward(inputs=[p for p in {}.parameters() if p.requires_grad])"
    assert made.after.count(own.format("critic")) == 2
    assert made.after.count(own.format("generator")) == 1
    assert made.after.count("backward_passes_per_step=2") == 1
    assert "critic.named_parameters(), backward_passes_per_step=2" in made.after
    told = [note.text for note in made.to_decide]
    assert not any("several" in text for text in told), told


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    {zero}.zero_grad()\n", ""),  # gradients of the generator's loss are used
        ("torch.optim.Adam(critic.parameters())", "torch.optim.Adam(both)"),
        ("Adam(critic.parameters())", "Adam([*critic.parameters(), scale])"),
        ("generator.parameters()", "critic.parameters()"),
        ("    d_opt.step()\n", ""),
        (
            "    {zero}.zero_grad()\n",
            "    d_opt.zero_grad()\n    if x:\n        g_opt.zero_grad()\n",
        ),
    ],
)
def test_losses_that_may_be_meant_for_several_optimizers_are_left_to_the_author(old, new):
    assert old in GAN
    text = GAN.replace(old, new)
    if "if x" in new:  # and no longer between the two turns
        text = text.replace("\n    g_opt.zero_grad()\n    loss_of", "\n    loss_of")
    made = done(text.format(zero="d_opt"))
    assert "inputs=" not in made.after
    assert any("a loss reaches those of one optimizer only" in n.text for n in made.to_decide)


BUILT = """
import torch

def build(model, config):
    return torch.optim.AdamW(model.parameters(), lr=config.rate)

def train(model, data, config):
    opt = build(model, config)
    for step in range(config.steps):
        for group in opt.param_groups:
            group["lr"] = rate_of(step)
        (model(next(data)).sum() / config.parts).backward()
        if (step + 1) % config.parts == 0:
            opt.step()
            opt.zero_grad()
"""


def test_an_optimizer_that_a_function_returns_has_the_passes_and_the_rate_of_the_loop():
    made = done(BUILT)
    assert "named_parameters(), backward_passes_per_step=config.parts)" in made.after
    told = [note.text for note in made.to_decide]
    assert any("this sets the learning rate again" in text for text in told)
    assert not any("raise the learning rate" in text for text in told)


@pytest.mark.parametrize("step", ["opt_head.step()", "scaler.step(opt_head)"])
def test_an_optimizer_from_elsewhere_is_left_to_the_author(step):
    own = "from lion_pytorch import Lion\nopt_head = Lion(head.parameters())"
    text = torch_script(own, clip=f"{step}\n        ")
    assert ["wrap this optimizer" in note.text for note in done(text).to_decide] == [True]


def test_an_optimizer_from_elsewhere_alone_is_left_to_the_author_once():
    text = torch_script(clip="torch.nn.utils.clip_grad_norm_(p, 1)\n        ")
    made = done(text.replace("torch.optim.SGD(", "from_elsewhere("))
    told = [note.text for note in made.to_decide]
    assert sum("wrap" in each for each in told) == 1
    assert any("average the gradients before clipping" in each for each in told)
    assert "synchronize()" not in made.after  # which it has only when it is wrapped


def test_an_optimizer_from_an_own_function_is_wrapped_there():
    own = "def build():\n    return torch.optim.Adam(head.parameters())\nopt_head = build()"
    made = done(torch_script(own, clip="opt_head.step()\n        "))
    assert not any("wrap this optimizer" in note.text for note in made.to_decide)


def test_an_optimizer_from_a_method_of_a_model_is_wrapped_there():
    made = done(
        """
        import torch

        class Net(torch.nn.Module):
            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), lr=0.1)

        def train(model):
            optimizer = model.configure_optimizers()
            for x in data:
                model(x).backward()
                optimizer.step()
        """
    )
    assert made.after.count("hvd.DistributedOptimizer(") == 1
    assert not any("wrap this optimizer" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("model.parameters()", True),
        ("list(model.parameters())", True),
        ("list(model.parameters()) + list(head.parameters())", False),
        ("model.layers.parameters()", False),
    ],
)
def test_gradients_are_named_if_the_optimizer_has_exactly_those_of_a_model(given, named):
    made = done(torch_script().replace("model.parameters()", given)).after
    assert ("named_parameters=model.named_parameters()" in made) == named


def test_the_running_averages_of_every_model_of_a_loop_are_rank_0s():
    setup = """
        norm = torch.nn.BatchNorm2d(8)
        critic = make_critic()
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
    """
    after = done(torch_script(setup, clip="critic(x)\n        other.step()\n        ")).after
    for model in ("model", "critic"):
        assert f"hvd.broadcast_parameters(dict({model}.named_buffers()), root_rank=0)\n" in after


@pytest.mark.parametrize(
    ("count", "divided"), [("100", True), ("steps", True), ("3 * batches", False)]
)
@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {})", "T_max"),
        (
            "transformers.get_cosine_schedule_with_warmup(optimizer, 5, {})",
            "num_warmup_steps and num_training_steps",
        ),
    ],
)
def test_the_steps_of_a_schedule_of_batches_are_a_ranks(count, divided, made, name):
    setup = f"import transformers\nbatches = len(loader)\nsteps = 100\ns = {made.format(count)}"
    text = torch_script(setup, clip="s.step()\n        ")
    remedy = f"a rank makes hvd.size() times fewer steps: divide {name} too."
    assert (remedy in [note.text for note in done(text).to_decide]) == divided
    each_epoch = torch_script(setup, "s.step()")
    assert remedy not in [note.text for note in done(each_epoch).to_decide]


@pytest.mark.parametrize("name", ["opt", "optim", "sgd"])
def test_a_rate_that_a_checkpoint_restores_gets_no_warm_up_but_a_todo(name):
    text = torch_script("optimizer.load_state_dict(torch.load('a.pt'))")
    made = done(text.replace("optimizer", name))
    assert "LinearLR" not in made.after
    assert any("a checkpoint sets the learning rate" in note.text for note in made.to_decide)


def test_optimizers_restored_in_a_loop_get_no_warm_up():
    made = done(torch_script("for each in (model, optimizer):\n    each.load_state_dict(s)"))
    assert "LinearLR" not in made.after


def test_a_restored_model_is_no_restored_rate():
    assert "LinearLR" in done(torch_script("model.load_state_dict(state)")).after


@pytest.mark.parametrize("length", ["", "\n    def __len__(self):\n        return 9"])
def test_a_stream_without_a_length_is_not_asked_for_it(length):
    kind = f"class Stream(torch.utils.data.IterableDataset):\n    pass{length}\n"
    text = torch_script().replace("loader = DataLoader(data", f"{kind}loader = DataLoader(Stream()")
    assert ("len(loader)" in done(text).after) == bool(length)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            'groups = [{"params": a, "lr": 1e-4}, dict(params=b, lr=rate)]',
            'groups = [{"params": a, "lr": 1e-4 * hvd.size()}, '
            "dict(params=b, lr=rate * hvd.size())]\n",
        ),
        (
            'groups = []\nfor p in a:\n    groups.append({"params": p, "lr": rate})',
            '    groups.append({"params": p, "lr": rate * hvd.size()})\n',
        ),
        (
            'head = {"params": b, "lr": rate}\ngroups = [{"params": a}, head]',
            'head = {"params": b, "lr": rate * hvd.size()}\n',
        ),
        (
            'def groups_of(p):\n    return [{"params": p, "lr": rate}]\n'
            "groups = []\ngroups += groups_of(a)\ngroups.extend(groups_of(b))",
            '    return [{"params": p, "lr": rate * hvd.size()}]\n',
        ),
    ],
)
def test_the_rates_of_groups_in_a_variable_are_scaled_once(groups, expected):
    text = torch_script().replace("model.parameters()", "groups")
    made = "torch.optim.SGD(groups, lr=0.1)"
    text = text.replace(made, f"{made} if plain else torch.optim.AdamW(groups, lr=0.1)")
    text = text.replace("optimizer = ", f"{groups}\noptimizer = ")
    assert expected in done(text).after
