"""Retrieval of images by their vectors, and intervals of it: pure functions of vectors and labels.

Each image is a query against the others, the gallery, by the cosine of their vectors. Images of its own class are
right. Those of its own group are not in its gallery, because a frame of the same video is no finding. A query without a
right image in its gallery does not count.

Recall@k is the share of the queries with a right image among the first k. Of equally near images the wrong ones come
first. So a network that gives all images one vector finds nothing.

Queries share their gallery, so they are not independent. And which image is nearest is no smooth function of the
images: leaving out one at a time makes the error twice too large. So the error is that of halves of the images, each
with its own queries and gallery (Shao and Wu, "A general theory for jackknife variance estimation", Annals of
Statistics 17 (1989), 1176-1197). In simulations it is larger than the true one by a quarter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimize.jackknife import JackknifeDifference, Spread, jackknife_difference, jackknife_interval

_Vectors = NDArray[np.float32]
_Labels = NDArray[np.int64]

#: Cosines that differ by less are equal: products of float32 vectors differ by a tenth of it.
_EQUAL: Final = 1e-6
#: About so many cosines are in memory at once.
_AT_ONCE: Final = 1 << 22
#: So many of the nearest images are kept for each query. In a half none of them is there once in four billion times.
_KEPT: Final = 32
#: So many times the images are divided into halves.
_DIVISIONS: Final = 64


@dataclass(frozen=True)
class Retrieved:
    """What was retrieved for each of N queries.

    Attributes:
        near: ``int32 (N, K)``, the nearest images in its gallery, the nearest first.
        right: ``bool (N, K)``, which of them are right.
        labels: ``int64 (N,)``, the class of each.
        groups: ``int64 (N,)``, the group of each.
    """

    near: NDArray[np.int32]
    right: NDArray[np.bool_]
    labels: _Labels
    groups: _Labels

    @property
    def counts(self) -> NDArray[np.bool_]:
        """Which queries have a right image in their gallery, ``bool (N,)``."""
        return self._counts(np.ones(len(self.labels), bool))

    def hits(self, k: int) -> NDArray[np.bool_]:
        """Return which queries have a right image among the first k."""
        return np.asarray(self.right[:, :k].any(axis=1))

    def recall(self, k: int, weights: NDArray[np.float64] | None = None) -> float:
        """Return recall@k. ``weights (N,)``: how often each query counts. None: once. It is 0 without queries."""
        often = self.counts * (1.0 if weights is None else weights)
        return float(np.sum(often * self.hits(k)) / often.sum()) if often.any() else 0.0

    def recall_within(self, there: NDArray[np.bool_]) -> float:
        """Return recall@1 of some images, ``bool (N,)``, which are both queries and gallery."""
        among = there[self.near]
        first = among.argmax(1)[:, None]
        hits = np.take_along_axis(self.right & among, first, 1)[:, 0]
        counts = self._counts(there)
        return float(hits[counts].mean()) if counts.any() else 0.0

    def _counts(self, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of some images have one of their class, in another group, among them."""
        of_class = np.bincount(self.labels[there], minlength=self.labels.max(initial=0) + 1)
        of_pair = np.bincount(self._pairs[there], minlength=len(self._pairs))
        counts: NDArray[np.bool_] = there & (of_class[self.labels] > of_pair[self._pairs])
        return counts

    @cached_property
    def _pairs(self) -> _Labels:
        """The class and group of each image, as one number from 0."""
        pairs = np.unique(np.stack([self.labels, self.groups]), axis=1, return_inverse=True)[1]
        return pairs.ravel()


def retrieve(vectors: _Vectors, labels: _Labels, groups: _Labels | None = None) -> Retrieved:
    """Find the images that are nearest to each.

    Args:
        vectors: ``float32 (N, D)`` of length one.
        labels: ``int64 (N,)``, the class of each image.
        groups: ``int64 (N,)``, the group of each image. None: each is its own.
    """
    kept = min(_KEPT, len(vectors))
    near, rights = np.zeros((len(vectors), kept), np.int32), np.zeros((len(vectors), kept), bool)
    for rows, cosines, right in _galleries(vectors, labels, groups):
        nearness = np.round(cosines / _EQUAL) - 0.5 * right
        some = np.argpartition(-nearness, kept - 1, axis=1)[:, :kept]
        order = np.argsort(-np.take_along_axis(nearness, some, 1), axis=1, kind="stable")
        near[rows] = np.take_along_axis(some, order, 1)
        rights[rows] = np.take_along_axis(right, near[rows], 1)
    return Retrieved(near, rights, labels, np.arange(len(labels)) if groups is None else groups)


def mean_average_precision(vectors: _Vectors, labels: _Labels, groups: _Labels | None = None) -> float:
    """Return the mean over queries of the average precision of the ranked gallery. It is 0 without queries.

    Images with equal cosines share the last of their ranks. See `optimize.average_precision`.
    """
    total, queries = 0.0, 0
    for _, cosines, right in _galleries(vectors, labels, groups):
        order = np.argsort(-cosines, axis=1, kind="stable")
        falling, ranked = np.take_along_axis(cosines, order, 1), np.take_along_axis(right, order, 1)
        places = np.arange(cosines.shape[1])
        ends = np.ones(ranked.shape, bool)
        with np.errstate(invalid="ignore"):  # those that are not in the gallery come last
            ends[:, :-1] = falling[:, :-1] - falling[:, 1:] > _EQUAL
        last = np.minimum.accumulate(np.where(ends, places, len(places))[:, ::-1], axis=1)[:, ::-1]
        hits = np.take_along_axis(np.cumsum(ranked, axis=1), last, 1)
        sums, of = (ranked * hits / (last + 1)).sum(1), ranked.sum(1)
        total += float((sums / np.maximum(of, 1)).sum())
        queries += int((of > 0).sum())
    return total / max(1, queries)


def nearest(vectors: _Vectors) -> NDArray[np.int64]:
    """Return the nearest other image of each of a few, ``(N,)``. Of equal ones it is the first."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    found: NDArray[np.int64] = cosines.argmax(1)
    return found


def recall_interval(found: Retrieved, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of recall@1. See `recall_difference`."""
    return jackknife_interval(found.recall(1), _spread([found]), confidence)


def recall_difference(first: Retrieved, second: Retrieved, confidence: float = 0.95) -> JackknifeDifference:
    """Return the recall@1 of the second network minus that of the first on the same images, with its interval.

    The interval is Student's with the error of halves of the images, or of the groups. It is never narrower than the
    loss that so many groups cannot exclude, even if both networks answer alike: see `Spread.unseen`.

    Args:
        first: what the first network retrieved.
        second: the same of the other.
        confidence: confidence of the interval.
    """
    better = second.hits(1).astype(np.float64) - first.hits(1)
    delta = second.recall(1) - first.recall(1)
    return jackknife_difference(delta, _spread([first, second]), better, confidence)


def _spread(networks: Sequence[Retrieved]) -> Spread:
    """Return the spread of a network's recall@1, or of that of the last minus that of the first."""
    names, places = np.unique(networks[0].groups, return_inverse=True)
    count = len(names)
    if count == 1:
        return Spread(np.inf, 1.0, 1, 1.0)
    rng = np.random.default_rng(0)
    values = []
    for _ in range(_DIVISIONS):
        half = (rng.permutation(count) < count // 2)[places]
        for there in (half, ~half):
            recalls = [network.recall_within(there) for network in networks]
            values.append(recalls[-1] - (recalls[0] if len(recalls) > 1 else 0.0))
    # The variance of a half's mean, given all images, is that of the mean of all.
    return Spread(float(np.std(values)), count - 1.0, count, 1.0)


def _galleries(
    vectors: _Vectors, labels: _Labels, groups: _Labels | None
) -> Iterator[tuple[slice, NDArray[np.float32], NDArray[np.bool_]]]:
    """Yield some queries at a time: their rows, their cosines with all images, and which are right.

    The cosine of an image that is not in the gallery is minus infinity.
    """
    names = np.arange(len(vectors)) if groups is None else groups
    step = max(1, _AT_ONCE // max(1, len(vectors)))
    for start in range(0, len(vectors), step):
        rows = slice(start, start + step)
        cosines = vectors[rows] @ vectors.T
        absent = names[rows, None] == names
        cosines[absent] = -np.inf
        yield rows, cosines, (labels[rows, None] == labels) & ~absent
