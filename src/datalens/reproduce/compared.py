"""The methods that the paper's tables compare, by their printed names, and their options in full and quick mode."""

from typing import Any

PRINTED = ("DP-GAN", "PATE-GAN", "G-PATE", "GS-WGAN", "DataLens")
OURS, ALONE, REFINED = "datalens (ours)", "datalens, warm start off", "datalens, refined"
TO_THE_LETTER = "DataLens, printed discriminator"
AUTHORS = "DataLens, authors' settings"
FULL_SIZE, FULL_SIZE_AUTHORS = "DataLens, full-size teachers", "DataLens, authors' settings, full-size teachers"
METHODS: dict[str, dict[str, Any]] = {
    "DC-GAN": {"method": "dcgan"},
    "DP-GAN": {"method": "dpgan"},
    "PATE-GAN": {"method": "pategan"},
    "G-PATE": {"method": "gpate"},
    "GS-WGAN": {"method": "gswgan", "steps": 20},  # blocks of 100; the preset has 200, as published: hours for a table
    "DataLens": {"method": "datalens-paper", "network": "compact"},
    TO_THE_LETTER: {"method": "datalens-paper", "network": "printed"},
    AUTHORS: {"method": "datalens-paper", "preset": "code", "network": "compact"},
    FULL_SIZE: {"method": "datalens-paper", "network": "paper"},
    FULL_SIZE_AUTHORS: {"method": "datalens-paper", "preset": "code", "network": "paper"},
    OURS: {"method": "datalens"},
    ALONE: {"method": "datalens", "warm_start": "off"},
    REFINED: {"method": "datalens", "refine": "diffusion"},
}
# Ten epochs of the 37,540 faces of CelebA that were available; a thousand full-size critics would take hours on them.
FACES: dict[str, dict[str, Any]] = {"DC-GAN": {"steps": 6_000}, "GS-WGAN": {"teachers": 100, "steps": 5}}
# Quick mode, on two cores: few compact teachers and few steps. Noise is not scaled down with them.
FEW_TEACHERS: dict[str, Any] = {"teachers": 40, "network": "compact", "steps": 6}
FEW_COSINES: dict[str, Any] = {"teachers": 500, "steps": 20}
QUICK: dict[str, dict[str, Any]] = {
    "DC-GAN": {"preset": "quick", "steps": 60},
    "DP-GAN": {"preset": "quick", "steps": 5},
    "PATE-GAN": {"preset": "quick", "steps": 10},
    "G-PATE": {"preset": "quick", "steps": 10},
    "GS-WGAN": {"preset": "quick", "steps": 4, "teachers": 20},
    "DataLens": FEW_TEACHERS,
    OURS: {},
    ALONE: FEW_COSINES,
}
QUICK_SAID = (
    "**{teachers} compact teachers and {steps} steps where the paper has 4000 and 86, and a few steps of the `quick` "
    "preset of every other method**: scored on 2000 test images, this checks the chain, "
    "not the paper. Use --full on a GPU for that."
).format(**FEW_TEACHERS)
FULL_SAID = (
    "DataLens: preset `paper` (the printed N, k, σ, β, m, T and γ) with compact teachers that have a linear part per "
    "class, since votes of the printed discriminator do not depend on the label; `full-size teachers`: the printed "
    "discriminator with such a part, half a million weights each, on a GPU; `printed discriminator`: without it, run "
    "by version 0.1.0; `authors' settings`: preset `code`, uniform latents and, at ε = 10, their k and σ. Others: "
    "their `paper`, but GS-WGAN with 2,000 steps, a tenth of the published number; on CelebA, DC-GAN has 6,000 steps "
    "(ten epochs of the 37,540 faces at hand) and GS-WGAN 100 discriminators and 500 steps. `steps` of DP-GAN and "
    "GS-WGAN are blocks of 100."
)
DATA = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion-mnist",
    "CelebA-Gender": "celeba-gender",
    "CelebA-Hair": "celeba-hair",
    "Places365": "places365",
    "Scenes (stand-in for Places365)": "scenes",
}


def options(name: str, dataset: str, epsilon: float, *, full: bool) -> dict[str, Any]:
    """Return the options of a method for TrainOptions."""
    common = {"data": DATA[dataset], "epsilon": float(epsilon), "delta": 1e-5}
    if not full:
        return common | METHODS[name] | QUICK[name]
    return common | METHODS[name] | (FACES.get(name, {}) if dataset.startswith("CelebA") else {})


def said(full: bool) -> str:
    """Return the note on how the methods were run."""
    return FULL_SAID if full else QUICK_SAID
