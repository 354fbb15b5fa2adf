"""A picture of an embedding: t-SNE of its most frequent words, coloured by region."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.text import Text
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

BACKGROUND = "#11151c"


def save_map(path: Path, vectors: np.ndarray, words: Sequence[str], title: str) -> None:
    """Draw the words as a map in which near words have similar vectors.

    Args:
        path: the PNG to write.
        vectors (n, D): of length one, the most important word first.
        words: the label of each vector. Where there is no room for all of them, the more
            important one is written.
        title: written above the map.
    """
    # These are small tasks: on a busy machine, threads would mostly wait for each other.
    with threadpool_limits(1):
        places = _places(vectors)
        clusters = KMeans(min(12, len(places)), n_init=4, random_state=0).fit(places)
    colours = np.array([colormaps["Set3"](label) for label in clusters.labels_])

    figure = Figure(figsize=(14, 9), dpi=120, facecolor=BACKGROUND)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.93))
    axes.set_axis_off()
    axes.margins(0.03)
    axes.update_datalim(places)
    axes.autoscale_view()
    figure.text(0.02, 0.955, title, color="white", fontsize=15)
    labels = [
        axes.text(x, y, word, color=colour, fontsize=9, ha="center", va="center")
        for (x, y), word, colour in zip(places, words, colours, strict=True)
    ]
    _hide_overlapping(figure, labels)
    hidden = [not label.get_visible() for label in labels]
    axes.scatter(*places[hidden].T, s=4, c=colours[hidden], alpha=0.5, linewidths=0)
    figure.savefig(path, facecolor=BACKGROUND)


def _places(vectors: np.ndarray) -> np.ndarray:
    perplexity = min(12.0, (len(vectors) - 1) / 3)
    tsne = TSNE(metric="cosine", perplexity=perplexity, random_state=0, init="random")
    places = tsne.fit_transform(vectors)
    # Mixed with ranks, which are spread evenly: dense clusters get room for their labels.
    ranks = places.argsort(0).argsort(0) / len(places)
    spread = (places - places.min(0)) / np.maximum(np.ptp(places, 0), 1e-9)
    return 0.7 * ranks + 0.3 * spread


def _hide_overlapping(figure: Figure, labels: list[Text]) -> None:
    figure.draw_without_rendering()
    shown = []
    for label in labels:
        box = label.get_window_extent().padded(1)
        label.set_visible(not box.count_overlaps(shown))
        if label.get_visible():
            shown.append(box)
