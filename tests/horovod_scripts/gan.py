"""Train a generative adversarial network with two optimizers, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod gan.py
"""

import argparse
import itertools
import math

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=7)

NOISE = 8
MODES = 8


def real_points(count, generator):
    """Return points of eight small clouds on a circle of radius 2."""
    angles = 2 * math.pi / MODES * torch.randint(MODES, (count,), generator=generator)
    centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centres + 0.05 * torch.randn(count, 2, generator=generator)


def layers(*widths):
    found = []
    for before, after in itertools.pairwise(widths):
        found += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*found[:-1])


def distributed(network, args):
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr, betas=(0.5, 0.9))
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())


def main(args):
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + hvd.rank())  # networks differ until they are broadcast
    data = torch.Generator().manual_seed(args.seed + hvd.rank())
    generator, discriminator = layers(NOISE, 64, 64, 2), layers(2, 64, 64, 1)
    of_generator, of_discriminator = (
        distributed(network, args) for network in (generator, discriminator)
    )
    ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)
    for step in range(1, args.steps + 1):
        of_discriminator.zero_grad()
        fake = generator(torch.randn(args.batch_size, NOISE)).detach()
        real = real_points(args.batch_size, data)
        loss_d = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(discriminator(fake), zeros)
        loss_d.backward()
        of_discriminator.step()

        # The discriminator only shows the way: its parameters take no gradient here.
        discriminator.requires_grad_(False)
        of_generator.zero_grad()
        score = discriminator(generator(torch.randn(args.batch_size, NOISE)))
        loss_g = F.binary_cross_entropy_with_logits(score, ones)
        loss_g.backward()
        of_generator.step()
        discriminator.requires_grad_(True)
        if step % 100 == 0 and hvd.rank() == 0:
            print(f"step {step}  loss_d {loss_d.item():.3f}  loss_g {loss_g.item():.3f}")

    with torch.no_grad():
        made = generator(torch.randn(1000, NOISE))
    radius = hvd.allreduce(made.norm(dim=1).mean(), name="radius")
    weights = [p for network in (generator, discriminator) for p in network.parameters()]
    flat = nn.utils.parameters_to_vector(weights).detach()
    same = all(torch.equal(flat, each) for each in hvd.allgather(flat[None], name="replicas"))
    if hvd.rank() == 0:
        print(f"radius {radius:.2f}, replicas {'equal' if same else 'DIFFER'}")


if __name__ == "__main__":
    main(parser.parse_args())
