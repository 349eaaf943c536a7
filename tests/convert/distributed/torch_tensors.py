"""Binary classification on tensors in memory, minibatches by hand."""

import torch
import qsgd_hpc.torch as hvd


def make_data(n, generator):
    x = torch.rand(n, 2, generator=generator) * 4 - 2
    y = ((x ** 2).sum(1) < 2).float().unsqueeze(1)
    return x, y


def build():
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def fit(x, y, epochs=8, batch_size=20, lr=0.5):
    # Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks
    # have the same number.
    shard = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())
    x, y = x[shard], y[shard]
    net = build()
    criterion = torch.nn.BCEWithLogitsLoss()
    # Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size()
    # times larger.
    optimizer = torch.optim.SGD(net.parameters(), lr=lr * hvd.size())
    # Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    # Step 4: scale the learning rate. Large steps at the beginning would diverge, so the rate
    # rises over the first epoch.
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / hvd.size(), total_iters=max(1, len(x) // batch_size)
    )
    optimizer.register_step_post_hook(lambda *_: warm_up.step())
    # Step 6: broadcast the initial state. Every rank starts with rank 0's values.
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    history = []
    for epoch in range(epochs):
        losses = []
        perm = torch.randperm(len(x))
        for i in range(0, len(x), batch_size):
            idx = perm[i:i + batch_size]
            loss = criterion(net(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # Step 8: average the metrics. Every rank has summed over its own shard; now sum over
        # all ranks.
        losses = sum(hvd.allgather_object(losses), [])
        history.append(sum(losses) / len(losses))
        # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per
        # rank.
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{epochs} loss {history[-1]:.6f}")
    return net, history


def accuracy(net, x, y):
    with torch.no_grad():
        return ((net(x) > 0).float() == y).float().mean().item()


if __name__ == "__main__":
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    # Step 2: pin the GPU. The ranks of a node each take their own.
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(3)
    x_train, y_train = make_data(600, g)
    x_test, y_test = make_data(200, g)
    net, history = fit(x_train, y_train)
    # Every rank takes part in computing what rank 0 prints.
    printed = ("accuracy", accuracy(net, x_test, y_test))
    if hvd.rank() == 0:
        print(*printed)
