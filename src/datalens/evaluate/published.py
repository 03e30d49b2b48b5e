"""Accuracies that others published for private synthetic images, as printed: to be shown beside measured ones.

DPImageBench's tables: δ = 1/(n ln n), the best of three networks, at an epoch chosen on real validation records.
DataLens's and G-PATE's: δ = 1e-5, a small network, at the epoch chosen on test records. So they are not comparable with
each other, nor with figures of the last epoch (docs/leaderboard.md).
"""

from dataclasses import dataclass

DPIMAGEBENCH, PAPER = "DPImageBench", "the DataLens paper, Table 1"
DATA = ("mnist", "fashion-mnist", "celeba-gender-32")
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "celeba-gender-32": "CelebA-Gender (32 px)"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One printed accuracy."""

    method: str
    data: str
    epsilon: float
    accuracy: float
    source: str
    public_images: bool = False  # whether the method was trained on public images first


def _rows() -> tuple[Published, ...]:
    # (method, source) → accuracy in percent at ε = 1 and 10, data set by data set in the order of DATA.
    printed: dict[tuple[str, str], tuple[tuple[float, float] | None, ...]] = {
        ("DataLens", PAPER): ((71.23, 80.66), (64.78, 70.61), None),  # its faces have 64 pixels
        ("G-PATE", PAPER): ((58.10, 80.92), (55.67, 69.34), None),
        ("DP-MERF", DPIMAGEBENCH): ((80.3, 81.3), (62.2, 62.2), (81.0, 81.2)),
        ("DP-Kernel", DPIMAGEBENCH): ((94.0, 93.6), (68.4, 70.0), (83.0, 83.7)),
        ("DP-NTK", DPIMAGEBENCH): ((50.0, 91.3), (64.4, 76.3), (61.2, 64.2)),
        ("DP-GAN", DPIMAGEBENCH): ((92.4, 92.7), (71.8, 70.3), (77.9, 89.2)),
        ("DPDM", DPIMAGEBENCH): ((89.2, 97.7), (76.4, 85.6), (74.5, 91.8)),
        ("DP-FETA", DPIMAGEBENCH): ((95.6, 98.1), (81.7, 87.3), (82.3, 94.2)),
        ("FETA-Pro", DPIMAGEBENCH): ((97.3, 98.5), (83.4, 88.2), (90.0, 94.9)),
        ("PrivImage", DPIMAGEBENCH): ((94.0, 97.8), (79.9, 87.1), (90.8, 92.0)),
    }
    return tuple(
        Published(
            method=method,
            data=data,
            epsilon=epsilon,
            accuracy=round(percent / 100, 4),
            source=source,
            public_images=method == "PrivImage",
        )
        for (method, source), columns in printed.items()
        for data, pair in zip(DATA, columns, strict=True)
        for epsilon, percent in zip((1.0, 10.0), pair or (), strict=False)
    )


PUBLISHED = _rows()


def of(data: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points (ε, accuracy) of each method on a data set, by a name that says where they are printed."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in PUBLISHED:
        if one.data == data:
            public = ", with public images" if one.public_images else ""
            points.setdefault(f"{one.method}{public}, as printed ({one.source})", []).append(
                (one.epsilon, one.accuracy)
            )
    return points
