"""Faults, each planted into a script that has none: what is replaced, and what is to be found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CLEAN = Path(__file__).parent / "clean"


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        script: the clean script.
        rule: the id that must be found.
        old: the text that is replaced; it is there once.
        new: what replaces it.
        at: a piece of the line at which it must be found; it stands there once.
        fixable: --fix makes it go away.
    """

    script: str
    rule: str
    old: str
    new: str
    at: str
    fixable: bool = False

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.script}-{self.at[:24]}"

    @property
    def text(self) -> str:
        """The script with the fault."""
        clean = (CLEAN / f"{self.script}.py").read_text(encoding="utf-8")
        assert clean.count(self.old) == 1, f"{self.name}: {self.old!r} is not there once"
        return clean.replace(self.old, self.new)

    @property
    def line(self) -> int:
        """The line at which it is to be found."""
        (found,) = [n for n, line in enumerate(self.text.split("\n"), 1) if self.at in line]
        return found


SAMPLER = """    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)
"""
WRAPPED = (
    "    optimizer = hvd.DistributedOptimizer("
    "optimizer, named_parameters=model.named_parameters())\n"
)
BROADCAST = """    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""
GUARDED = """        if hvd.rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2%}")
            torch.save(model.state_dict(), args.checkpoint)
"""
LOOP_TO_END = (CLEAN / "torch_loader.py").read_text(encoding="utf-8").partition(BROADCAST)[2]
LOOP = LOOP_TO_END.partition("\n\n")[0]

FAULTS = (
    # Changes of Keras
    Fault(
        "keras_fit", "QH001", "model.fit(", "model.fit_generator(", "model.fit_generator(", False
    ),
    # Step 1
    Fault("torch_loader", "QH101", "    hvd.init()\n", "", "seed + hvd.rank()", True),
    Fault("keras_fit", "QH101", "hvd.init()\n", "", "[hvd.local_rank()]", True),
    Fault("jax_loop", "QH101", "hvd.init()\n", "", "default_rng(hvd.rank())", True),
    Fault(
        "tensorflow_session",
        "QH102",
        "hvd.init()\n",
        "first = hvd.rank() == 0\nhvd.init()\n",
        "first = hvd.rank()",
    ),
    Fault(
        "torch_trainer",
        "QH103",
        "return hvd.rank() == 0",
        "return hvd.rank == 0",
        "return hvd.rank == 0",
        True,
    ),
    # Step 2
    Fault(
        "torch_loader",
        "QH201",
        "    if torch.cuda.is_available():\n        torch.cuda.set_device(hvd.local_rank())\n",
        "",
        '"cuda" if',
        True,
    ),
    Fault(
        "tensorflow_tape",
        "QH201",
        '    gpus = tf.config.list_physical_devices("GPU")\n    if gpus:\n'
        '        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")\n',
        "",
        "hvd.init()",
        True,
    ),
    # Step 3
    Fault(
        "torch_loader",
        "QH301",
        SAMPLER,
        "    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)\n"
        "    sampler = loader.sampler\n",
        "DataLoader(data",
        True,
    ),
    Fault(
        "keras_fit",
        "QH301",
        "x_train, y_train = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]\n",
        "",
        "model.fit(",
    ),
    Fault(
        "tensorflow_tape",
        "QH301",
        "    dataset = dataset.shard(hvd.size(), hvd.rank())\n",
        "",
        "from_tensor_slices",
    ),
    Fault(
        "tensorflow_tape",
        "QH302",
        "dataset.shard(hvd.size(), hvd.rank())\n    return dataset.shuffle(1000).",
        "dataset.shuffle(1000).shard(hvd.size(), hvd.rank())\n    return dataset.",
        "dataset.shuffle(1000).shard",
    ),
    Fault(
        "torch_loader",
        "QH303",
        "        sampler.set_epoch(epoch)\n",
        "",
        "DistributedSampler(",
        True,
    ),
    Fault(
        "torch_loader",
        "QH304",
        "        data, num_replicas=hvd.size(), rank=hvd.rank()\n",
        "        data\n",
        "DistributedSampler(",
        True,
    ),
    Fault("torch_trainer", "QH305", ", drop_last=True", "", "DataLoader(part", True),
    # Step 4
    Fault("torch_loader", "QH401", "lr=args.lr * hvd.size()", "lr=args.lr", "optim.SGD(", True),
    Fault("torch_trainer", "QH401", "lr=1e-3 * hvd.size()", "lr=1e-3", "Adam(self.model", True),
    Fault("tensorflow_tape", "QH401", "0.001 * hvd.size()", "0.001", "optimizers.Adam", True),
    Fault("tensorflow_session", "QH401", "0.1 * hvd.size()", "0.1", "AdagradOptimizer(", True),
    Fault("jax_loop", "QH401", "0.01 * hvd.size()", "0.01", "optax.adam(", True),
    # Step 5
    Fault("torch_loader", "QH501", WRAPPED, "", "optim.SGD(", True),
    Fault(
        "torch_loader",
        "QH501",
        WRAPPED,
        WRAPPED.replace("optimizer = hvd", "distributed = hvd"),
        "            optimizer.step()",
    ),
    Fault(
        "keras_fit",
        "QH501",
        "optimizer = hvd.DistributedOptimizer(optimizer)\n",
        "",
        "optimizers.SGD(",
        True,
    ),
    Fault(
        "tensorflow_session",
        "QH501",
        "optimizer = hvd.DistributedOptimizer(optimizer)\n",
        "",
        "AdagradOptimizer(",
        True,
    ),
    Fault(
        "tensorflow_tape",
        "QH502",
        "    tape = hvd.DistributedGradientTape(tape)\n",
        "",
        "tf.GradientTape()",
        True,
    ),
    Fault(
        "jax_loop",
        "QH501",
        "hvd.DistributedOptimizer(optax.adam(0.01 * hvd.size()))",
        "optax.adam(0.01 * hvd.size())",
        "optax.adam(",
        True,
    ),
    Fault(
        "torch_trainer",
        "QH503",
        "            named_parameters=self.model.named_parameters(),\n        )\n",
        "        )\n"
        "        critic = Linear(8, 2)\n"
        "        self.other = hvd.DistributedOptimizer(Adam(critic.parameters(), lr=hvd.size()))\n",
        "self.other = hvd.Dist",
    ),
    Fault(
        "torch_loader",
        "QH504",
        "            optimizer.step()\n",
        "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "            optimizer.step()\n",
        "clip_grad_norm_",
    ),
    # Step 6
    Fault("torch_loader", "QH601", BROADCAST, "", "optimizer = hvd.Dist", True),
    Fault(
        "torch_loader",
        "QH601",
        "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
        "",
        "optimizer = hvd.Dist",
        True,
    ),
    Fault(
        "keras_fit",
        "QH601",
        "    hvd.callbacks.BroadcastGlobalVariablesCallback(0),\n",
        "",
        "optimizer = hvd.Dist",
        True,
    ),
    Fault("tensorflow_session", "QH601", "hvd.BroadcastGlobalVariablesHook(0), ", "", "= hvd.Dist"),
    Fault(
        "tensorflow_tape",
        "QH601",
        "    if first:\n        hvd.broadcast_variables(model.variables, root_rank=0)\n"
        "        hvd.broadcast_variables(optimizer.variables, root_rank=0)\n",
        "",
        "tape = hvd.Dist",
    ),
    Fault("jax_loop", "QH601", "params = hvd.broadcast_parameters(params)\n", "", "= hvd.Dist"),
    Fault(
        "tensorflow_tape",
        "QH602",
        "    loss_of = tf.keras",
        "    hvd.broadcast_variables(optimizer.variables, 0)\n    loss_of = tf.keras",
        "optimizer.variables, 0)",
    ),
    Fault(
        "torch_loader",
        "QH602",
        BROADCAST,
        BROADCAST + "    if hvd.rank() == 0 and args.resume:\n"
        "        model.load_state_dict(torch.load(args.checkpoint))\n",
        "model.load_state_dict",
    ),
    Fault(
        "torch_loader",
        "QH603",
        BROADCAST + LOOP,
        LOOP + "\n" + BROADCAST.rstrip(),
        "hvd.broadcast_parameters(",
    ),
    Fault(
        "torch_trainer",
        "QH604",
        "        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)\n",
        "",
        "self.optimizer.load_state_dict",
    ),
    # Step 7
    Fault(
        "torch_loader",
        "QH701",
        "            torch.save(model.state_dict(), args.checkpoint)\n",
        "        torch.save(model.state_dict(), args.checkpoint)\n",
        "torch.save(",
        True,
    ),
    Fault(
        "torch_trainer",
        "QH701",
        "        if not is_chief():\n            return\n",
        "",
        "torch.save(",
        True,
    ),
    Fault(
        "keras_fit",
        "QH701",
        "if hvd.rank() == 0:\n    callbacks.append(",
        "callbacks.append(",
        "ModelCheckpoint(",
    ),
    Fault(
        "keras_fit",
        "QH701",
        'if hvd.rank() == 0:\n    model.save("trained.keras")\n',
        'model.save("trained.keras")\n',
        "model.save(",
        True,
    ),
    Fault(
        "tensorflow_tape",
        "QH701",
        '            checkpoint.save("checkpoints/mnist")\n',
        '        checkpoint.save("checkpoints/mnist")\n',
        "checkpoint.save(",
        True,
    ),
    Fault(
        "tensorflow_session",
        "QH701",
        'checkpoint_dir = "checkpoints" if hvd.rank() == 0 else None\n',
        'checkpoint_dir = "checkpoints"\n',
        "MonitoredTrainingSession(",
    ),
    Fault(
        "torch_loader",
        "QH702",
        "    hvd.init()\n",
        '    hvd.init()\n    print("begin")\n',
        'print("begin")',
        True,
    ),
    Fault(
        "torch_loader",
        "QH703",
        "    data = load(args.data)\n",
        "    from torch.utils.tensorboard import SummaryWriter\n"
        '    writer = SummaryWriter("logs")\n    data = load(args.data)\n',
        'SummaryWriter("logs")',
    ),
    # Step 8
    Fault(
        "torch_loader",
        "QH801",
        '    return average(right / count, "accuracy")\n',
        "    return right / count\n",
        "accuracy {accuracy",
    ),
    Fault(
        "keras_fit",
        "QH801",
        "    hvd.callbacks.MetricAverageCallback(),\n",
        "",
        "model.fit(",
        True,
    ),
    Fault(
        "torch_loader",
        "QH701",
        "        accuracy = evaluate(model, loader)\n",
        "        torchvision.utils.save_image(x, 'samples.png')\n"
        "        accuracy = evaluate(model, loader)\n",
        "torchvision.utils.save_image",
        True,
    ),
    # Jobs that hang
    Fault(
        "torch_loader",
        "QH802",
        "        accuracy = evaluate(model, loader)\n",
        "        if loss.item() < 0.1:\n            break\n"
        "        accuracy = evaluate(model, loader)\n",
        "if loss.item()",
    ),
    Fault(
        "torch_loader",
        "QH802",
        "            loss.backward()\n",
        "            if loss.isnan():\n                continue\n            loss.backward()\n",
        "if loss.isnan()",
    ),
    Fault(
        "torch_loader",
        "QH802",
        "        accuracy = evaluate(model, loader)\n",
        "        if time.time() > 1e9:\n            break\n"
        "        accuracy = evaluate(model, loader)\n",
        "if time.time()",
    ),
    Fault(
        "torch_loader",
        "QH802",
        "            loss.backward()\n",
        "            _, done = env.step(x)\n            loss.backward()\n"
        "            if done:\n                break\n",
        "if done",
    ),
    Fault(
        "torch_loader",
        "QH802",
        "            loss.backward()\n",
        "            mean_reward = play(model)\n            loss.backward()\n"
        "            if mean_reward > 195:\n                break\n",
        "if mean_reward",
    ),
    Fault(
        "torch_loader",
        "QH901",
        "        if hvd.rank() == 0:\n            print(",
        "        if hvd.rank() == 0:\n            hvd.barrier()\n            print(",
        "hvd.barrier()",
    ),
    Fault(
        "torch_loader",
        "QH902",
        "        accuracy = evaluate(model, loader)\n        if hvd.rank() == 0:\n",
        "        if hvd.rank() == 0:\n            accuracy = evaluate(model, loader)\n",
        "accuracy = evaluate(",
    ),
    Fault(
        "torch_trainer",
        "QH903",
        '        mean = hvd.allreduce(torch.tensor(total / len(self.loader)), name="loss")\n'
        "        if self.rank != 0:\n            return\n",
        "        if self.rank != 0:\n            return\n"
        '        mean = hvd.allreduce(torch.tensor(total / len(self.loader)), name="loss")\n',
        "mean = hvd.allreduce",
    ),
    Fault(
        "tensorflow_tape",
        "QH901",
        "        mean_loss = hvd.allreduce(loss)\n        if hvd.rank() == 0:\n",
        "        if hvd.rank() == 0:\n            mean_loss = hvd.allreduce(loss)\n",
        "mean_loss = hvd.allreduce",
    ),
)
