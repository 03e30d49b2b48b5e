"""DP-MERF (Harder, Adamczewski, Park 2021): release a noisy mean embedding once, then train a generator to match it.

Differs from the paper:
- sums over records are released, not means over n: n is private, and counts ride along in every record's row;
- the bandwidth is public (`fourier`), not the median distance of the records;
- rows are whole numbers, so that the noise is exact.
"""

import torch

from datalens.data.records import Records
from datalens.errors import DatalensError
from datalens.peers.dpmerf import DpmerfSettings
from datalens.plans.guidance import nothing_stands_out
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.private.embedding import embed
from datalens.private.pool import Pool
from datalens.progress import say
from datalens.public.fourier import Fourier
from datalens.released.embedding import fit, read_embedding
from datalens.released.generator import Generator, fresh_generator
from datalens.run.folder import Run


def gather(records: Records, settings: DpmerfSettings, *, device: torch.device) -> Pool:
    return Pool.gather(records, device=torch.device("cpu"))  # it is looked at once


def train(run: Run, pool: Pool, settings: DpmerfSettings, *, device: torch.device) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    fourier = Fourier(schema.shape, s.frequencies, seed=s.seed)
    noisy = run.journal.find(run.ledger, step=0)  # paid for before an interruption: not asked again
    if noisy is None:
        sums = embed(pool, fourier, classes=classes, grid=s.grid, counted=s.counted)
        with open_noise(s.noise, s.sigma, draws=sums.cells, seed=run.config["options"]["noise_seed"]) as noise:
            noisy = make_mechanism(s.sigma, noise).release(sums, run.ledger, step=0)
        run.journal.save(noisy)
    run.completed = 1

    embedding = read_embedding(noisy, grid=s.grid, counted=s.counted)
    if not bool(embedding.present.any()):
        raise DatalensError(nothing_stands_out(schema, run.ledger))
    for label in torch.nonzero(~embedding.present).flatten().tolist():
        say(f"warning: class {schema.classes[label]} has too few records to say anything of: its images mean nothing")
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    return fit(generator, embedding, fourier, steps=s.generator_steps, batch=s.batch, rate=s.rate, seed=s.seed)
