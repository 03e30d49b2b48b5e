"""DP-GAN (Xie, Lin, Wang, Wang, Zhou 2018): a Wasserstein GAN whose critic's gradients are clipped and noised.

The critic's weights are clipped to a small box after every step, which bounds its slopes. The generator sees the
critic only, which is released: it is private by post-processing.

Differs from the paper: gradients are clipped example by example (weight clipping alone bounds them by constants that
are not computed in practice; the published code adds noise to a batch mean that nothing bounds); Poisson samples;
Adam; labels; an average of the generator's weights; priced by the ledger, where the published code has no accountant.
"""

import torch

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
                noisy = gate.release(sum_gradients(network, pool, sample, torch.neg, rows))
            except BudgetExceeded:  # an interruption cost a block: the run ends with fewer, never over budget
                return student.averaged()
            with torch.no_grad():
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="critic", step=step)
            learn(critic, noisy, fake_gradient(network, images, labels, torch.clone, clip=s.clip), batch=s.batch)
            with torch.no_grad():
                for weight in network.parameters():
                    weight.clamp_(-s.weight_clip, s.weight_clip)
            if (step + 1) % s.critic_steps == 0:
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="generator", step=step)
                student.step(-network(images, labels).mean())
        run.log(block)
    return student.averaged()
