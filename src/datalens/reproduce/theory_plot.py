"""The picture of `datalens reproduce theory`."""

from pathlib import Path
from typing import Any

import numpy as np

from datalens.public import theorem6_choose, theorem6_tau


def plot(lines: list[dict[str, Any]], shown: list[dict[str, Any]], path: Path) -> None:
    """Above: measured against allowed. Then, for each crew: τ_k with its models, and bias and noise for each k."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places: Any = [["bounds", "bounds"], *([f"tau {i}", f"trade-off {i}"] for i in range(len(shown)))]
    figure, axes = plt.subplot_mosaic(places, figsize=(10, 4.2 * len(places)), layout="constrained")
    _bounds(axes["bounds"], lines)
    for number, one in enumerate(shown):
        _tau(axes[f"tau {number}"], one)
        _trade_off(axes[f"trade-off {number}"], one)
    figure.suptitle(shown[0]["warning"], fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bounds(axes: Any, lines: list[dict[str, Any]]) -> None:
    for version, mark in (("printed", "x"), ("corrected", "."), ("sharp", "+")):
        axes.plot([r["left"] for r in lines], [r[version] for r in lines], mark, ms=4, label=version)
    ends = [min(r["left"] for r in lines), max(r["left"] for r in lines)]
    axes.plot(ends, ends, "k-", lw=0.8, label="below this line a bound would be wrong")
    axes.set(
        xscale="log", yscale="log", xlabel="mean of min{‖∇f‖², ‖∇f‖₁}, measured", ylabel="allowed by Theorem 6",
        title="simulated teachers",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8)


def _tau(axes: Any, one: dict[str, Any]) -> None:
    d, fit = one["dimensions"], one["fit"]
    ks = np.arange(d + 1)
    axes.plot(ks, one["mean"], label="measured, mean")
    axes.plot(ks, one["most"], ":", label="measured, most")
    axes.plot(ks, theorem6_tau.printed(ks / d, fit["scale"], fit["shape"]), "--", label="as printed, fitted")
    axes.plot(ks, theorem6_tau.weibull(ks / d, fit["weibull_shape"]), "--", label="Weibull sizes, fitted")
    axes.plot(ks, np.sqrt(1 - ks / d), color="#9aa5b1", label="worst of all")
    axes.set(xlabel="k", ylabel="τ_k", title=f"{one['name']}: what top-k leaves out")
    axes.legend(frameon=False, fontsize=8)


def _trade_off(axes: Any, one: dict[str, Any]) -> None:
    facts = {name: one[name] for name in ("dimensions", "teachers", "sigma", "k", "steps")}
    bias, noise = theorem6_choose.trade_off(**facts, shape=one["fit"]["weibull_shape"])
    ks = np.arange(1, one["dimensions"] + 1)
    axes.plot(ks, bias, label="bias of top-k")
    axes.plot(ks, noise, label="noise, at the best rate")
    axes.plot(ks, bias + noise, "k-", label="both")
    axes.axvline(one["suggested"]["k"], color="k", ls=":", label=f"smallest at k = {one['suggested']['k']}")
    axes.axvline(one["k"], color="#9aa5b1", ls=":", label=f"used: k = {one['k']}")
    axes.set(xlabel="k", ylabel="in units of M²", title=f"{one['name']}: the trade-off", xscale="log")
    axes.legend(frameon=False, fontsize=8)
