"""A serial script whose lines read what its trackers, writers and files hold."""

import argparse
import csv
import os

import comet_ml
import mlflow
import neptune
import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset

wandb.init(project="toy", config={"lr": 0.05, "epochs": 2})
wandb.config.batch = 8
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=wandb.config.lr)
args = parser.parse_args()
run = neptune.init_run(project="toy")
run["batch"] = wandb.config.batch
experiment = comet_ml.Experiment(project_name="toy")
experiment.log_parameter("epochs", wandb.config.epochs)
if not os.path.exists("out/logs"):
    os.makedirs("out/logs")
log = open("log.txt", "w")
table = csv.writer(log)


def report(out, text):
    out.write(text + "\n")
    out.flush()


torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
loader = DataLoader(data, batch_size=run["batch"].fetch(), shuffle=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
with mlflow.start_run() as tracked:
    for epoch in range(experiment.get_parameter("epochs")):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        wandb.log({"epoch": epoch})
        run["epoch"].append(epoch)
        experiment.log_metric("epoch", epoch)
        mlflow.log_metric("epoch", epoch)
        report(log, f"epoch {epoch}")
        table.writerow([epoch, tracked.info.run_id, mlflow.active_run().info.run_id])
log.close()
with open("summary.txt", "w") as file:
    total = sum(float(each.detach().sum()) for each in model.parameters())
    file.write(f"sum {total:.6f}\n")
print("sum", total)
os.listdir("out/logs")
