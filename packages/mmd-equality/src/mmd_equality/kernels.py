"""String kernels between completions of the same prompt (paper, section 3 and appendix B).

Symbols   paper       here
          y, y'       two rows of an integer matrix, padded on the right with `PAD`
          L           number of columns
          k~(y, y')   `values[i, j] / scale`, unit norm: k~(y, y) = 1 unless the norm is zero

What is different from a textbook Gram matrix: the Hamming and one-hot kernels keep *integer match counts* and a common
scale. Sums of integers are exact whatever their order, so equal permuted statistics compare equal and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable as Function
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PAD",
    "AllSubstrings",
    "Block",
    "Callable",
    "Hamming",
    "KSpectrum",
    "Kernel",
    "OneHot",
    "Precomputed",
    "kernel_from_name",
]

PAD = -1
"""The padding symbol, outside every alphabet. Under Hamming two paddings match; substring kernels leave padding out."""

# Above this many byte compares the compiled loop, when numba is installed, repays the import of numba.
COMPILED_FROM = 2_000_000_000


@dataclass(frozen=True)
class Block:
    """All completions of one prompt, both samples pooled.

    rows: int32 [n, L], padded with `PAD`. completions: the n originals (cut to the same length). positions: int [n], where
    each row stands in the pooled input (all of sample 1, then all of sample 2); `Precomputed` needs it.
    """

    rows: NDArray[np.int32]
    completions: Sequence[Any] = ()
    positions: NDArray[np.int64] | None = None


@runtime_checkable
class Kernel(Protocol):
    """What a kernel must offer: a name, and the Gram matrix of one prompt's completions as `(values, scale)`.

    `values` is float [n, n] and symmetric; k~ is `values / scale`. `exact` says that `values` are integers.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def counts(self, block: Block) -> tuple[NDArray[Any], float]: ...


class _GramMixin:
    """Adds the full Gram matrix over several prompts to a kernel that knows one prompt."""

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        raise NotImplementedError  # abstract: each kernel has its own

    def gram(self, rows: ArrayLike, prompt_ids: Sequence[object] | None = None) -> NDArray[np.float64]:
        """k(z, z') = 1[x = x'] k~(y, y') for all pairs, float64 [n, n] (section 3).

        rows: int [n, L] padded with `PAD`, or a list of n strings. prompt_ids: n labels; None means one prompt.
        """
        texts: Sequence[Any] = ()
        if isinstance(rows, (list, tuple)) and rows and isinstance(rows[0], str):
            texts = rows
            rows = _codepoint_matrix(rows)
        matrix = np.ascontiguousarray(np.asarray(rows), dtype=np.int32)
        if matrix.ndim != 2:
            raise ValueError(f"rows must be a matrix [n, L] or a list of strings, got shape {matrix.shape}")
        labels = [0] * len(matrix) if prompt_ids is None else list(prompt_ids)
        if len(labels) != len(matrix):
            raise ValueError(f"prompt_ids has {len(labels)} entries but rows has {len(matrix)}: one label a row")
        out = np.zeros((len(matrix), len(matrix)))
        groups: dict[object, list[int]] = {}
        for i, label in enumerate(labels):
            groups.setdefault(label, []).append(i)
        for members in groups.values():
            index = np.asarray(members, dtype=np.int64)
            completions = [texts[i] for i in members] if len(texts) else [matrix[i] for i in members]
            values, scale = self.counts(Block(matrix[index], completions, index))
            out[np.ix_(index, index)] = np.asarray(values, dtype=np.float64) / scale
        return out


def _codepoint_matrix(texts: Sequence[str]) -> NDArray[np.int32]:
    length = max((len(t) for t in texts), default=0)
    out = np.full((len(texts), max(length, 1)), PAD, dtype=np.int32)
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<i4")
    return out


@dataclass(frozen=True)
class Hamming(_GramMixin):
    """k~(y, y') = (number of equal positions) / L, padding included (paper, section 3.2). The default.

    It sees only what each position holds, not how positions go together: a pseudo-metric, but one whose power does not
    fade when L grows, since it needs no two completions to be the same.
    """

    name: str = field(default="hamming", init=False)
    exact: bool = field(default=True, init=False)

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        return hamming_counts(block.rows[None])[0], float(max(block.rows.shape[1], 1))


def small_codes(rows: NDArray[np.int32]) -> NDArray[Any]:
    """The same equalities in the smallest unsigned dtype: byte compares are the hot loop."""
    _, codes = np.unique(rows, return_inverse=True)
    codes = codes.reshape(rows.shape)
    top = int(codes.max(initial=0))
    dtype = np.uint8 if top < 256 else np.uint16 if top < 65536 else np.uint32
    return codes.astype(dtype)


def hamming_counts(rows: NDArray[np.int32]) -> NDArray[Any]:
    """Equal positions of all pairs in each of m groups: int [m, n, L] -> float [m, n, n], integers, float32 if exact."""
    m, n, length = rows.shape
    dtype = np.float32 if n * max(length, 1) < 2**24 else np.float64
    if length == 0:  # nothing to compare: all rows are equal, as one column of padding would say
        return np.ones((m, n, n), dtype=dtype)
    codes = small_codes(rows)
    if m * n * n * length >= COMPILED_FROM:
        from mmd_equality import _compiled

        if _compiled.available():
            out = np.zeros((m, n, n), dtype=dtype)
            for group, target in zip(codes, out, strict=True):
                target += _compiled.hamming_counts(np.ascontiguousarray(group))
            return out
    return _hamming_counts_numpy(codes, dtype)


def _hamming_counts_numpy(codes: NDArray[Any], dtype: Any) -> NDArray[Any]:
    m, n, length = codes.shape
    columns = np.ascontiguousarray(codes.transpose(2, 0, 1))
    out = np.zeros((m, n, n), dtype=dtype)
    # Row tiles keep the boolean tile and the byte accumulator inside the second-level cache.
    tile = max(1, min(n, 262_144 // max(m * n, 1)))
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        left, right = columns[:, :, start:stop, None], columns[:, :, None, start:]
        equal = np.empty((m, stop - start, n - start), dtype=bool)
        partial = np.zeros(equal.shape, dtype=np.uint8)
        total = out[:, start:stop, start:]
        for position in range(length):
            np.equal(left[position], right[position], out=equal)
            partial += equal.view(np.uint8)
            if position % 255 == 254:  # a byte counts to 255
                total += partial
                partial.fill(0)
        total += partial
    # Below the diagonal tiles nothing was counted yet; the tiles themselves are whole.
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        out[:, stop:, start:stop] = out[:, start:stop, stop:].transpose(0, 2, 1)
    return out


@dataclass(frozen=True)
class OneHot(_GramMixin):
    """k~(y, y') = 1[y = y'] (appendix B): the collision test. Universal, and without power once completions rarely repeat."""

    name: str = field(default="onehot", init=False)
    exact: bool = field(default=True, init=False)

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        codes = row_codes(block.rows)
        return (codes[:, None] == codes[None, :]).astype(np.float32), 1.0


def row_codes(rows: NDArray[Any]) -> NDArray[np.int64]:
    """One integer per distinct row, int64 [n]."""
    if rows.shape[1] == 0:
        return np.zeros(len(rows), dtype=np.int64)
    packed = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    return np.unique(packed, return_inverse=True)[1].reshape(-1).astype(np.int64)


def substring_counts(rows: NDArray[np.int32], shortest: int, longest: int | None) -> NDArray[np.float64]:
    """sum over strings s of #(s in y) #(s in y') for shortest <= |s| <= longest, float64 [n, n] (appendix B).

    Occurrences overlap. A row ends where its trailing run of `PAD` begins. Instead of k-grams in dictionaries, all positions
    of all rows are refined together: positions that share a string of length t get one label, and labels of length t + 1
    come from (label, next symbol). A position whose string occurs nowhere else can only meet itself from then on, so it is
    dropped and its share of the diagonal is added in closed form.
    """
    from scipy import sparse

    rows = np.asarray(rows)
    unique, which = _distinct_rows(rows)
    n, width = unique.shape
    not_pad = unique != PAD
    lengths = np.where(not_pad.any(axis=1), width - np.argmax(not_pad[:, ::-1], axis=1), 0)
    limit = int(lengths.max(initial=0)) if longest is None else min(longest, int(lengths.max(initial=0)))
    kernel = np.zeros((n, n))

    owner = np.repeat(np.arange(n), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if n else np.zeros(0, dtype=np.int64)
    offset = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    room = np.repeat(lengths, lengths) - offset  # symbols from here to the end of the row
    text = unique[owner, offset]
    symbols, text = np.unique(text, return_inverse=True)
    base = len(symbols)

    active = np.arange(len(text))
    label = np.zeros(len(text), dtype=np.int64)
    alone = np.zeros(n)
    for t in range(1, limit + 1):
        fits = room[active] >= t
        active, label = active[fits], label[fits]
        if not len(active):
            break
        _, label, sizes = np.unique(label * base + text[active + t - 1], return_inverse=True, return_counts=True)
        label = label.reshape(-1)
        shared = sizes[label] > 1
        # A string seen once: this and all its extensions up to the limit count 1 on the diagonal.
        last = active[~shared]
        if len(last):
            longest_here = np.minimum(room[last], limit)
            first = max(t, shortest)
            np.add.at(alone, owner[last], np.maximum(longest_here - first + 1, 0))
        active, label = active[shared], label[shared]
        if t >= shortest and len(active):
            _, dense = np.unique(label, return_inverse=True)
            dense = dense.reshape(-1)
            table = sparse.coo_matrix(
                (np.ones(len(active)), (dense, owner[active])), shape=(int(dense.max()) + 1, n)
            ).tocsr()
            columns = table.T.tocsr()
            step = max(1, 2_000_000 // n)  # a few rows of the product at a time: it may have all n^2 entries
            for start in range(0, n, step):
                product = (columns[start : start + step] @ table).tocoo()
                kernel[product.row + start, product.col] += product.data
    kernel[np.diag_indices(n)] += alone
    return kernel[np.ix_(which, which)]


def _distinct_rows(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    which = row_codes(rows)
    first = np.zeros(int(which.max(initial=-1)) + 1, dtype=np.int64)
    first[which[::-1]] = np.arange(len(rows))[::-1]
    return rows[first], which


def _unit_norm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """k~ / sqrt(k~(y, y) k~(y', y')), with a norm of zero replaced by one (section 3.2)."""
    negative = np.flatnonzero(np.diagonal(values) < 0)
    if len(negative):
        raise ValueError(
            f"the kernel of a completion with itself is {values[negative[0], negative[0]]:.6g} ({len(negative)} such rows): "
            "a kernel is at least 0 there; pass normalize=False to use the values as they are"
        )
    norm = np.sqrt(np.diagonal(values))
    norm = np.where(norm > 0, norm, 1.0)
    return values / np.outer(norm, norm)


def _with_padding_as_text(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    shifted = rows.astype(np.int64) + 1  # PAD becomes an ordinary symbol
    return shifted.astype(np.int32)


@dataclass(frozen=True)
class KSpectrum(_GramMixin):
    """Shared substrings of length k, or of length up to k when `cumulative` (appendix B).

    include_padding=True counts the padding as text, as the official code does: runs of padding then dominate short answers.
    """

    k: int = 5
    cumulative: bool = True
    include_padding: bool = False
    exact: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {self.k!r}")

    @property
    def name(self) -> str:
        return f"kspectrum(k={self.k}, cumulative={self.cumulative}, include_padding={self.include_padding})"

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        rows = _with_padding_as_text(block.rows) if self.include_padding else block.rows
        return _unit_norm(substring_counts(rows, 1 if self.cumulative else self.k, self.k)), 1.0


@dataclass(frozen=True)
class AllSubstrings(_GramMixin):
    """All shared substrings of any length (appendix B). Universal: it tells any two distributions apart given enough samples."""

    include_padding: bool = False
    exact: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return "all_substrings" + ("(include_padding=True)" if self.include_padding else "")

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        rows = _with_padding_as_text(block.rows) if self.include_padding else block.rows
        return _unit_norm(substring_counts(rows, 1, None)), 1.0


@dataclass(frozen=True, eq=False)
class Precomputed(_GramMixin):
    """A Gram matrix of your own over the pooled rows: all of sample 1, then all of sample 2, float [N1 + N2, N1 + N2].

    Only entries between completions of one prompt are used. normalize=True divides by the norms as in section 3.2.
    """

    gram_matrix: NDArray[np.float64]
    normalize: bool = True
    name: str = field(default="precomputed", init=False)
    exact: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        matrix = np.asarray(self.gram_matrix)
        if matrix.dtype.kind not in "fiub":
            raise TypeError(f"a Gram matrix holds real numbers, got dtype {matrix.dtype}")
        matrix = matrix.astype(np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a Gram matrix is square, [N, N] over the pooled rows; got shape {matrix.shape}")
        _check_gram(matrix, np.arange(len(matrix)))
        object.__setattr__(self, "gram_matrix", matrix)

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        positions = np.arange(len(block.rows)) if block.positions is None else block.positions
        if len(positions) and int(positions.max()) >= len(self.gram_matrix):
            raise ValueError(
                f"the Gram matrix has {len(self.gram_matrix)} rows but the pooled samples have more "
                f"(row {int(positions.max())} is asked for): give one row for each completion of sample 1, then of sample 2"
            )
        values = self.gram_matrix[np.ix_(positions, positions)]
        return (_unit_norm(values) if self.normalize else values), 1.0


@dataclass(frozen=True, eq=False)
class Callable(_GramMixin):
    """A kernel of your own: f(y, y') -> float on two completions, or on two matrices of features.

    With `features`, `features(list_of_completions)` gives float [n, d] and f gets two such matrices and returns [n, n]:
    `Callable(lambda a, b: a @ b.T, features=embedder.encode)`. normalize=True divides by the norms as in section 3.2.
    """

    f: Function[[Any, Any], Any]
    features: Function[[list[Any]], ArrayLike] | None = None
    normalize: bool = True
    label: str = "callable"
    exact: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return self.label

    def counts(self, block: Block) -> tuple[NDArray[Any], float]:
        completions = list(block.completions)
        n = len(completions)
        if n != len(block.rows):
            raise ValueError(
                "a Callable kernel needs the completions themselves: call it through two_sample_test or gram"
            )
        if self.features is not None:
            matrix = np.asarray(self.features(completions), dtype=np.float64)
            if matrix.ndim != 2 or len(matrix) != n:
                raise ValueError(
                    f"features must return a matrix [{n}, d] for {n} completions, got shape {matrix.shape}"
                )
            values = np.asarray(self.f(matrix, matrix), dtype=np.float64)
            if values.shape != (n, n):
                raise ValueError(f"the kernel must return [{n}, {n}] for two matrices of {n} rows, got {values.shape}")
        else:
            values = np.zeros((n, n))
            for i in range(n):
                for j in range(n):
                    values[i, j] = float(self.f(completions[i], completions[j]))
        positions = np.arange(n) if block.positions is None else block.positions
        _check_gram(values, positions)
        return (_unit_norm(values) if self.normalize else values), 1.0


def _check_gram(values: NDArray[np.float64], positions: NDArray[np.int64]) -> None:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        i, j = (int(positions[k]) for k in bad[0])
        raise ValueError(
            f"kernel value of rows {i} and {j} is {values[tuple(bad[0])]} ({len(bad)} such entries): all must be finite"
        )
    tolerance = 1e-8 * max(1.0, float(np.abs(values).max(initial=0.0)))
    uneven = np.argwhere(np.abs(values - values.T) > tolerance)
    if len(uneven):
        a, b = uneven[0]
        i, j = int(positions[a]), int(positions[b])
        raise ValueError(
            f"the kernel is not symmetric: rows {i} and {j} give {values[a, b]:.6g} one way and {values[b, a]:.6g} the other"
        )


def kernel_from_name(name: str | Kernel) -> Kernel:
    """`hamming`, `all_substrings`, `onehot`, `kspectrum` (k = 5), `kspectrum3`, or a kernel object, which is returned as it is."""
    if not isinstance(name, str):
        if isinstance(name, type) or not isinstance(name, Kernel):
            raise TypeError(
                f"kernel must be a name or a kernel object with .counts(), got {getattr(name, '__name__', type(name).__name__)}"
            )
        return name
    plain = name.strip().lower().replace("-", "_")
    fixed: dict[str, Kernel] = {"hamming": Hamming(), "all_substrings": AllSubstrings(), "onehot": OneHot()}
    if plain in fixed:
        return fixed[plain]
    if plain.startswith("kspectrum"):
        digits = plain.removeprefix("kspectrum").strip("_()")
        if not digits:
            return KSpectrum()
        if digits.isdigit() and int(digits) >= 1:
            return KSpectrum(k=int(digits))
    raise ValueError(f"kernel must be one of hamming, all_substrings, kspectrum, kspectrum<k>, onehot; got {name!r}")


def exact_in_float32(values: NDArray[Any]) -> bool:
    """Whether sums of a whole row of these integers stay below 2^24, where float32 counts exactly."""
    if values.dtype != np.float32 or not values.size:
        return False
    return math.fsum([float(values.max())]) * values.shape[-1] < 2**24
