"""Binary classification on tensors in memory, minibatches by hand."""

import torch


def make_data(n, generator):
    x = torch.rand(n, 2, generator=generator) * 4 - 2
    y = ((x ** 2).sum(1) < 2).float().unsqueeze(1)
    return x, y


def build():
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def fit(x, y, epochs=8, batch_size=20, lr=0.5):
    net = build()
    criterion = torch.nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
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
        history.append(sum(losses) / len(losses))
        print(f"epoch {epoch + 1}/{epochs} loss {history[-1]:.6f}")
    return net, history


def accuracy(net, x, y):
    with torch.no_grad():
        return ((net(x) > 0).float() == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(3)
    x_train, y_train = make_data(600, g)
    x_test, y_test = make_data(200, g)
    net, history = fit(x_train, y_train)
    print("accuracy", accuracy(net, x_test, y_test))
