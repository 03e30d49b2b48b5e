"""A GAN trained with DP-SGD after "Private GANs, revisited" (Bie, Kamath, Zhang 2023): many steps of a noisy critic
for one of the generator.

Differs from the paper: gradients on fakes are clipped like those on records, but get no noise: they are not private.
Noise and samples come from the operating system; batches are large and steps few, which costs less time at the same
ε; the generator that is released has the average of its last weights.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from datalens.bounded.norm_topk import NormTopK
from datalens.data.records import Records
from datalens.errors import BudgetExceeded
from datalens.peers.noisy_critic import NoisyCriticSettings
from datalens.privacy.dpsgd import GradientGate, Schedule, poisson_sample
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.private.critic_rows import sum_gradients
from datalens.private.pool import Pool
from datalens.public.critic import fresh_critic
from datalens.public.learner import Learner
from datalens.released.critic import fake_gradient, fakes, learn
from datalens.released.generator import Generator, fresh_generator
from datalens.run.folder import Alone, Run


def gather(records: Records, settings: NoisyCriticSettings, *, device: torch.device) -> Pool:
    return Pool.gather(records, device=device)


def train(run: Run, pool: Pool, settings: NoisyCriticSettings, *, device: torch.device) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    student = Learner(generator, rate=s.generator_rate, average=s.average)
    network = fresh_critic(schema.shape, classes, width=s.width, seed=s.seed).to(device)
    critic = Learner(network, rate=s.critic_rate)
    rows = NormTopK(clip=s.clip, selector="none")
    noise = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)
    whole = Schedule(sigma=s.sigma, rate=s.rate, steps=s.steps * s.block, unit=rows.bound, l2_bound=rows.l2_bound)
    gate = GradientGate(run.ledger, whole, noise, blocks=s.steps)

    for block in run.steps(s.steps, student=student, teachers=Alone(critic, run.path / "checkpoints")):
        for step in range(block * s.block, (block + 1) * s.block):
            sample = torch.from_numpy(poisson_sample(noise, pool.count, s.rate))
            try:
                noisy = gate.release(sum_gradients(network, pool, sample, real_loss, rows))
            except BudgetExceeded:  # an interruption cost a block: the run ends with fewer, never over budget
                return student.averaged()
            with torch.no_grad():
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="critic", step=step)
            learn(critic, noisy, fake_gradient(network, images, labels, fake_loss, clip=s.clip), batch=s.batch)
            if (step + 1) % s.critic_steps == 0:
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="generator", step=step)
                student.step(real_loss(network(images, labels)).mean())
        run.log(block)
    return student.averaged()


def real_loss(says: torch.Tensor) -> torch.Tensor:
    return F.softplus(-says)


def fake_loss(says: torch.Tensor) -> torch.Tensor:
    return F.softplus(says)
