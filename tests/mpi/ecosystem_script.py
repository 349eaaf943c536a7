"""Train a small network by a library: KIND BITS STEPS SAVE [LOAD].

KIND is ddp, fsdp, titan, lightning, lightning-fsdp, lightning-bf16, fabric, accelerate or trainer.
BITS 32 is the script as its users write it; other bits add the line of this package. Each rank
prints a line of JSON: rank, steps, loss over all data, a digest of its weights, and what error
feedback holds back, in the checkpoint that was loaded and at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KIND, BITS, STEPS, SAVE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
LOAD = sys.argv[5] if len(sys.argv) > 5 else None
SIZE = int(os.environ.get("WORLD_SIZE", "1"))
HERE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
EACH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layers(x)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(768, 64, generator=numbers)
    return x, (x @ torch.randn(64, 10, generator=numbers)).argmax(1)


class Batches(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 768

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x, y = DATA
        return {"x": x[i], "labels": y[i]}


DATA = data()


def loader(sampler: bool = True) -> Any:
    """Return this rank's part of the data, in the same order every time."""
    kind = torch.utils.data.distributed.DistributedSampler
    own = kind(Batches(), shuffle=False) if sampler else None
    return torch.utils.data.DataLoader(Batches(), batch_size=EACH, sampler=own)


def forever(batches: Any) -> Any:
    while True:
        yield from batches


def plain() -> Any:
    """DDP, FSDP2, and FSDP2 as torchtitan has it: a mesh, mixed precision, clipped gradients."""
    dist.init_process_group("gloo")
    net: Any = Net()
    if KIND == "ddp":
        model: Any = nn.parallel.DistributedDataParallel(net)
        hook = None
        if BITS < 32:
            from qsgd_hpc.torch.ddp import compress

            hook = compress(model, BITS)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp_shard",))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if KIND == "titan" else None, reduce_dtype=torch.float32
        )
        for layer in (net.layers[0], net.layers[2], net):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        model, hook = net, None
        if BITS < 32:
            from qsgd_hpc.torch.fsdp import quantize_fsdp

            quantize_fsdp(model, BITS, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, batch in zip(range(STEPS), forever(loader()), strict=False):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        if KIND == "titan":
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return net, STEPS, hook and hook.global_state_dict()


def by_lightning() -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if KIND == "lightning-fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    callbacks = []
    if BITS < 32:
        from qsgd_hpc.torch.lightning import QSGDCallback

        callbacks = [QSGDCallback(BITS)]
    sharded = KIND == "lightning-fsdp"
    trainer = Trainer(
        accelerator="cpu", devices=HERE, num_nodes=SIZE // HERE, max_steps=STEPS,
        callbacks=callbacks,
        strategy=ModelParallelStrategy(SIZE, 1) if sharded else "ddp",
        accumulate_grad_batches=2,
        precision="bf16-mixed" if KIND == "lightning-bf16" else "32-true",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader(sampler=False), ckpt_path=LOAD)
    trainer.save_checkpoint(SAVE)
    return module.net, trainer.global_step, callbacks and callbacks[0].state_dict()


def by_fabric() -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=HERE, num_nodes=SIZE // HERE, strategy="ddp")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    batches = fabric.setup_dataloaders(loader(sampler=False))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if BITS < 32:
        from qsgd_hpc.torch.lightning import compress

        state["hook"] = compress(fabric, model, BITS)
    if LOAD:
        fabric.load(LOAD, state)
    for _, batch in zip(range(state["step"], STEPS), forever(batches), strict=False):
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
    state["step"] = STEPS
    fabric.save(SAVE, state)
    return net, STEPS, BITS < 32 and state["hook"].state_dict()


def by_accelerate() -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net: Any = Net()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), loader(sampler=False)
    )
    hook = None
    if BITS < 32:
        from qsgd_hpc.torch.accelerate import compress

        hook = compress(accelerator, model, BITS)
    if LOAD:
        accelerator.load_state(LOAD)
    step = 0
    for batch in forever(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
        if step == STEPS:
            break
    accelerator.save_state(SAVE)
    return net, step, hook and hook.state_dict()


def by_trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=SAVE, max_steps=STEPS, per_device_train_batch_size=EACH, use_cpu=True,
        ddp_backend="gloo", optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        save_steps=STEPS, report_to="none", disable_tqdm=True, max_grad_norm=0,
        gradient_accumulation_steps=2, resume_from_checkpoint=LOAD,
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=Batches())
    if BITS < 32:
        from qsgd_hpc.torch.transformers import QSGDCallback

        trainer.add_callback(QSGDCallback(trainer, bits=BITS))
    trainer.train(resume_from_checkpoint=LOAD)
    hook = [each for each in trainer.callback_handler.callbacks if hasattr(each, "_attached")]
    held = hook and hook[0]._attached.state_dict()
    return trainer.model, trainer.state.global_step, held


def whole(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


WAYS = {
    "lightning": by_lightning, "lightning-fsdp": by_lightning, "lightning-bf16": by_lightning,
    "fabric": by_fabric, "accelerate": by_accelerate, "trainer": by_trainer,
}  # fmt: skip
loaded: list[Any] = [{}]
if LOAD:
    from qsgd_hpc.torch.attached import Attached

    load = Attached.load_state_dict

    def noted(self: Attached, state: Any) -> None:
        loaded.append(state)
        load(self, state)

    Attached.load_state_dict = noted  # type: ignore[method-assign]
net, steps, held = WAYS.get(KIND, plain)()
weights = [whole(p) for p in net.parameters()]
judge = Net()
for mine, theirs in zip(judge.parameters(), weights, strict=True):
    mine.data.copy_(theirs)
x, labels = DATA
loss = judge(x, labels)["loss"].item()
digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()[:12]


def owed(state: Any) -> float:
    slots = (state or {}).get("parameters", {}).values()
    return sum(float(slot["owed"].abs().sum()) for slot in slots if "owed" in slot)


print(
    json.dumps([dist.get_rank(), int(steps), loss, digest, owed(loaded[-1]), owed(held)]),
    flush=True,
)
# Else gloo's threads end with the interpreter, which now and then aborts the process.
dist.destroy_process_group()
