"""The basics of this package: roundoffs, Gram matrices, eigenproblems, one-sided SVDs.

Two rules, from measurements (docs/decisions/0002-numerics.md, 0013-exact-means-exact.md):

* everything between the stored factors and the stored result is float64; the result is stored in the compute dtype;
* whether a direction of *one client's* factors is rounding noise depends on the roundoff u of the dtype in which they
  were *stored*. No such tolerance ever cuts the clients' mean.
"""

from __future__ import annotations

import torch

from fedlora.linalg.shapes import Float, Tensor

# Bytes of one float64 panel of a tall matrix: the panel and its products stay in cache, and the allocator reuses them.
PANEL = 2**19


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to `dtype`: 1.1e-16 (float64), 6e-8 (float32), 3.9e-3 (bfloat16)."""
    return torch.finfo(dtype).eps / 2


def rank_tolerance(dtype: torch.dtype) -> float:
    """The relative size below which a singular value of factors stored in `dtype` counts as rounding noise.

    u itself for narrow types. 1e-11 for float64, because a gauge of condition up to 1e3 often multiplies the noise of
    its factors. Calibrated by benchmarks/rank_tolerance.py; see docs/decisions/0003-rank-tolerance.md.
    """
    return max(unit_roundoff(dtype), 1e-11)


def norm(X: Tensor, dim: int | None = None) -> Tensor:
    """The Euclidean norm of all numbers, or along a dimension, in float64. Also right for tiny and huge numbers, whose
    squares are zero or infinite: a power of two scales them near 1 first, which rounds nothing.
    """
    X = X.double()
    plain: Tensor = torch.linalg.vector_norm(X, dim=dim)
    if bool(((plain > 1e-140) & (plain < 1e140)).all()) or not X.numel():
        return plain
    largest = X.abs().max() if dim is None else X.abs().amax(dim=dim)
    if bool((largest == 0).all()) or not bool(torch.isfinite(largest).all()):
        return plain
    exponent = torch.frexp(largest).exponent
    scaled = torch.ldexp(X, -exponent if dim is None else -exponent.unsqueeze(dim))
    found: Tensor = torch.ldexp(torch.linalg.vector_norm(scaled, dim=dim), exponent)
    return found


def gram(X: Float[Tensor, "*m d n"], dtype: torch.dtype = torch.float64) -> Float[Tensor, "*m n n"]:
    """X^T X in `dtype`. Batches go a few matrices at a time, large matrices by panels of rows and strips of the lower
    triangle, so that the work stays in cache.

    On a CPU 1.3 to 1.7x faster than casting all of X and forming the whole product.
    """
    n, strip = X.shape[-1], 48
    if X.dim() == 2:
        return gram(X[None], dtype)[0]
    if (few := max(1, PANEL // max(1, 8 * n * X.shape[-2]))) < len(X):
        return torch.cat([gram(some, dtype) for some in torch.split(X, few)])
    if n <= 2 * strip and X.shape[-2] <= 2048:
        X = X.to(dtype)
        return X.mT @ X
    G = torch.zeros(*X.shape[:-2], n, n, dtype=dtype, device=X.device)
    panel = max(256, PANEL // (8 * n))
    for top in range(0, X.shape[-2], panel):
        P = X[..., top : top + panel, :].to(dtype)
        for at in range(0, n, strip):
            G[..., at:, at : at + strip].baddbmm_(P[..., at:].mT, P[..., at : at + strip])
    for at in range(0, n, strip):  # mirrored in place: a second matrix of this size would cost more than the products
        block = G[..., at : at + strip, at : at + strip]
        block.copy_(block.tril() + block.tril(-1).mT)
        G[..., at : at + strip, at + strip :] = G[..., at + strip :, at : at + strip].mT
    return G


def eigh(G: Float[Tensor, "*m n n"]) -> tuple[Float[Tensor, "*m n"], Float[Tensor, "*m n n"]]:
    """Eigenvalues (ascending) and eigenvectors of a symmetric G, on G's device. The CPU solves a small G of a GPU,
    because an eigenproblem is a chain of tiny steps. The size limit is not measured; no GPU was at hand.
    """
    if G.device.type == "cpu" or G.shape[-1] > 512:
        values, vectors = torch.linalg.eigh(G)
        return values, vectors
    values, vectors = torch.linalg.eigh(G.cpu())
    return values.to(G.device), vectors.to(G.device)


def right_svd(X: Float[Tensor, "d n"]) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
    """Singular values (descending) and right singular vectors V of a tall X (d >= n, else of either shape), in float64.

    X = (X V s^-1) s V^T; the caller forms the left factor, for only the columns that it keeps.

    float32 data go through the Gram matrix X^T X in float64: its roundoff, 1e-16 s_1^2, leaves singular values right
    down to 1e-8 s_1, which is below the float32 noise in X itself. float64 data go through QR and the SVD of R.
    """
    if X.dtype == torch.float64:
        _, s, Vh = torch.linalg.svd(torch.linalg.qr(X, mode="r").R, full_matrices=False)
        return s, Vh.mH
    eigenvalues, V = eigh(gram(X))
    return eigenvalues.flip(0).clamp(min=0).sqrt(), V.flip(1)


def count_above(s: Tensor, floor: float) -> int:
    """How many of `s` exceed `floor`."""
    return int((s > floor).sum())
