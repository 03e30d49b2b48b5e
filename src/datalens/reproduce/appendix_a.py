"""What the paper prints in Appendix A: Tables 8-11. Accuracies in percent."""

import math

INF = math.inf
GM_DP = 1.0  # k of plain DP-SGD
TITLES = {
    "table8": "Table 8: DP-SGD with norm-based TopAgg (Appendix A)",
    "table9": "Table 9: DP-SGD with norm- and dimension-based TopAgg (Appendix A)",
    "table10": "Table 10: compression and noise, one without the other (Appendix A)",
    "table11": "Table 11: the paper's best settings of DP-SGD, and what they reach (Appendix A)",
    "figure3": "Figure 3: accuracy of DP-SGD against epsilon (Appendix A)",
}

# What the paper prints: (data set, ε) → k (1: GM-DP) → (mean, spread), in percent.
KS = (0.6, 0.7, 0.8, GM_DP)


def _row(*values: float) -> dict[float, tuple[float, float]]:
    return {k: (values[2 * i], values[2 * i + 1]) for i, k in enumerate(KS)}


TABLE8: dict[tuple[str, float], dict[float, tuple[float, float]]] = {
    ("mnist", 0.05): _row(73.87, 4.77, 75.81, 3.59, 77.15, 2.89, 78.40, 4.00),
    ("mnist", 0.1): _row(85.67, 1.48, 86.12, 1.39, 85.88, 1.97, 84.55, 0.98),
    ("mnist", 0.2): _row(89.84, 0.64, 90.25, 0.40, 90.80, 1.04, 91.17, 0.37),
    ("mnist", 0.3): _row(91.21, 0.53, 91.85, 0.21, 92.35, 0.53, 93.31, 0.42),
    ("mnist", 0.5): _row(92.83, 0.52, 93.50, 0.75, 93.82, 0.46, 94.38, 0.24),
    ("mnist", 0.7): _row(94.41, 0.19, 94.61, 0.24, 94.65, 0.27, 95.08, 0.10),
    ("mnist", 1.0): _row(95.13, 0.33, 95.22, 0.20, 95.42, 0.20, 95.41, 0.26),
    ("mnist", INF): _row(97.94, 0.19, 98.58, 0.11, 98.79, 0.09, 99.08, 0.04),
    ("cifar10", 0.025): _row(42.18, 0.89, 44.32, 0.59, 45.87, 0.97, 41.58, 2.01),
    ("cifar10", 0.05): _row(65.10, 0.48, 71.47, 0.32, 72.03, 0.25, 71.29, 0.27),
    ("cifar10", 0.075): _row(74.70, 0.26, 75.22, 0.21, 75.62, 0.15, 75.13, 0.19),
    ("cifar10", 0.1): _row(75.56, 0.18, 76.91, 0.17, 77.65, 0.20, 77.05, 0.09),
    ("cifar10", 0.2): _row(79.44, 0.07, 80.23, 0.12, 80.76, 0.08, 80.37, 0.13),
    ("cifar10", 0.3): _row(80.19, 0.17, 81.70, 0.08, 82.15, 0.15, 82.19, 0.10),
    ("cifar10", 0.4): _row(81.91, 0.10, 82.86, 0.05, 82.82, 0.13, 82.80, 0.09),
    ("cifar10", 0.6): _row(82.56, 0.36, 82.91, 0.20, 83.44, 0.15, 83.46, 0.04),
    ("cifar10", 0.8): _row(83.40, 0.06, 83.67, 0.22, 84.10, 0.07, 84.44, 0.07),
    ("cifar10", 2.0): _row(84.34, 0.08, 84.80, 0.18, 85.18, 0.08, 85.97, 0.04),
    ("cifar10", 4.0): _row(84.82, 0.04, 85.11, 0.08, 85.40, 0.08, 86.63, 0.05),
    ("cifar10", 8.0): _row(85.13, 0.05, 85.37, 0.04, 85.62, 0.04, 87.05, 0.03),
    ("cifar10", INF): _row(85.19, 0.3, 85.42, 0.02, 85.80, 0.03, 87.85, 0.02),
}
# ε → k of the coordinates → (mean, spread).
TABLE9_DIM: dict[float, dict[float, tuple[float, float]]] = {
    0.05: {0.2: (74.25, 3.25), 0.4: (78.45, 2.89), 0.6: (73.55, 1.97)},
    0.1: {0.2: (83.65, 0.73), 0.4: (85.59, 1.39), 0.6: (86.41, 0.70)},
    0.2: {0.2: (89.10, 1.22), 0.4: (90.48, 0.73), 0.6: (89.30, 0.74)},
}
# (compression, noise) → ε → mean, spread; a cell the text at hand does not have is missing.
TABLE10: dict[tuple[str, str], dict[float, tuple[float, float]]] = {
    ("NormTopK", "σ²C²"): {0.1: (83.86, 1.49), 1.0: (94.95, 0.25)},
    ("NormTopK", "kσ²C²"): {0.1: (85.88, 1.97), 1.0: (95.42, 0.20)},
    ("NormTopK", "none"): {0.1: (91.96, 0.61), 1.0: (98.03, 0.09)},
    ("none", "σ²C²"): {0.1: (85.05, 1.85)},
    ("none", "none"): {0.1: (94.26, 0.43)},
}
# (data set, ε) → k → clip, σ, batch size, learning rate.
TABLE11: dict[tuple[str, float], dict[float, tuple[float, float, int, float]]] = {
    ("mnist", 0.05): {
        0.6: (10, 5.8, 128, 0.01), 0.7: (5, 6.6, 128, 0.01), 0.8: (5, 7.4, 128, 0.01), GM_DP: (3, 8.2, 128, 0.01),
    },
    ("mnist", 0.2): {
        0.6: (12, 3.6, 512, 0.1), 0.7: (10, 3.6, 512, 0.1), 0.8: (10, 3.6, 512, 0.1), GM_DP: (10, 3.4, 512, 0.08),
    },
    ("mnist", 1.0): {
        0.6: (16, 1.6, 512, 0.08), 0.7: (12, 1.6, 512, 0.1), 0.8: (10, 1.6, 512, 0.1), GM_DP: (14, 1.8, 512, 0.04),
    },
    ("cifar10", 0.025): {
        0.6: (1, 6, 24, 8e-4), 0.7: (1.5, 7, 32, 1e-3), 0.8: (0.8, 6, 24, 1e-3), GM_DP: (0.3, 7, 32, 2e-3),
    },
    ("cifar10", 0.4): {
        0.6: (1, 2.5, 96, 5e-3), 0.7: (1, 2.5, 96, 5e-3), 0.8: (1, 2.5, 96, 5e-3), GM_DP: (1.5, 3, 96, 5e-3),
    },
    ("cifar10", 8.0): {
        0.6: (0.5, 2.5, 2048, 0.2), 0.7: (0.5, 2.5, 2048, 0.2), 0.8: (0.5, 3, 2048, 0.2), GM_DP: (2.5, 2.5, 2048, 0.04),
    },
}  # fmt: skip
