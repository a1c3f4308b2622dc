"""Matrix products over as many rows as a server's run over.

Kernels choose their order of summation by the number of rows. Equality to the last bit with a server therefore asks for
products as large as its own; drafting/product_sizes.py says how large these are.

Suffixes: R rows, Q some of them, N rows of one size, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replay import narrow_products

CPU = torch.device("cpu")
# More rows than any prompt has: a server that cuts no prompt.
WHOLE_PROMPTS = 1 << 62
# Numbers of rows that go in whole fours in fp32, for the same bits on any number of threads (narrow_products.py).
# From 5 to 11 it was seen to matter. Where they have to be as many as a server's, they go in as many threads as in the
# process that asks for them: a worker's share is smaller.
_SMALL = range(5, 32)
_threads: int | None = None


def take_served_products_in(threads: int | None) -> None:
    """Let this process take those products of a server's size whose bits depend on it in so many threads; None: in as
    many as it has for all others."""
    global _threads
    _threads = threads


@dataclass(frozen=True, slots=True)
class Execution:
    """What a head runs in, on what, and how large its products are: no more of a result than its rounding.

    ``product_rows`` is the most rows of a product (None: all at once). A server that decodes a few requests at a time
    stays below it. ``prefill_rows`` is the most rows of a prompt that it prefilled at once (WHOLE_PROMPTS: any number;
    None: not known); only what works out ``ProductSizes``, or whether a prompt was prefilled whole, reads it.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    product_rows: int | None = None
    prefill_rows: int | None = None


FP32_ON_CPU = Execution()


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """The rows of one pass by the size of the product in which a server made each: make it with ``group_by_size``.

    ``groups`` pairs each size with the indices [N] of its rows. Rows of one size are put together; where a product
    lacks some, zeros stand in. Sizes up to ``Execution.product_rows`` are alike.
    """

    sizes_R: Tensor
    groups: tuple[tuple[int, Tensor], ...]

    def keep(self, rows: Tensor | slice) -> "ProductSizes":
        """Those of some rows, named by their indices [Q] or by a slice."""
        return group_by_size(self.sizes_R[rows])


def group_by_size(sizes_R: Tensor) -> ProductSizes:
    """Rows whose products have ``sizes_R``, a tensor on the head's device."""
    sizes: list[int] = sizes_R.unique().tolist()
    return ProductSizes(sizes_R, tuple((size, (sizes_R == size).nonzero()[:, 0]) for size in sizes))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` there. From the CPU to a GPU it goes by pinned memory, so that nobody waits for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def multiply(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, execution: Execution, sizes: ProductSizes | None
) -> Tensor:
    """``x`` times the transposed weight [R, O], in products as large as ``sizes`` says or ``execution`` allows."""
    if sizes is None and execution.product_rows is None and not narrow_products.has_kernels(x_RI.dtype):
        return narrow_products.linear(x_RI, weight_OI, bias_O)
    return _in_pieces(x_RI, lambda piece_RI: functional.linear(piece_RI, weight_OI, bias_O), execution, sizes)


def multiply_heads(x_RNI: Tensor, weight_NIO: Tensor, execution: Execution, sizes: ProductSizes | None) -> Tensor:
    """Each attention head's rows times its own weight [R, N, O], in products as large as those of ``multiply``."""
    if sizes is None and execution.product_rows is None and not narrow_products.has_kernels(x_RNI.dtype):
        return narrow_products.multiply_by_head(x_RNI.transpose(0, 1), weight_NIO).transpose(0, 1)
    return _in_pieces(
        x_RNI, lambda piece_RNI: torch.bmm(piece_RNI.transpose(0, 1), weight_NIO).transpose(0, 1), execution, sizes
    )


def _in_pieces(
    x_RI: Tensor, product: Callable[[Tensor], Tensor], execution: Execution, sizes: ProductSizes | None
) -> Tensor:
    rows, most = len(x_RI), execution.product_rows
    if sizes is not None or most is not None:
        product = _in_threads(product)
    if sizes is not None:
        return _by_size(x_RI, product, execution, sizes)
    if most is not None and rows > most:
        return torch.cat([product(piece) for piece in x_RI.split(most)])
    if most is None and execution.device.type == "cpu" and x_RI.dtype == torch.float32 and rows in _SMALL:
        return product(narrow_products.in_fours(x_RI))[:rows]
    if execution.device.type == "cpu" and execution.dtype.itemsize == 2:
        return product(_with_zeros(x_RI, filled_rows(rows) - rows))[:rows]
    return product(x_RI)


def _in_threads(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The product of some rows with the bits that it has in ``take_served_products_in`` threads."""
    own = torch.get_num_threads()
    if _threads in (None, own):
        return product

    def taken(piece_RI: Tensor) -> Tensor:
        depends = piece_RI.dtype == torch.float32 and len(piece_RI) in _SMALL and narrow_products.lacks_fours(piece_RI)
        if piece_RI.device.type != "cpu" or not depends:
            return product(piece_RI)
        torch.set_num_threads(_threads)
        try:
            return product(piece_RI)
        finally:
            torch.set_num_threads(own)

    return taken


def _by_size(x_RI: Tensor, product: Callable[[Tensor], Tensor], execution: Execution, sizes: ProductSizes) -> Tensor:
    assert len(x_RI) == len(sizes.sizes_R)
    out_RO = x_RI.new_empty(0)
    for size, index_N in sizes.groups:
        x_NI = x_RI[index_N]
        if size > (execution.product_rows or 0):
            x_NI = _with_zeros(x_NI, -len(index_N) % size)
        made_NO = torch.cat([product(piece) for piece in x_NI.split(size)])[: len(index_N)]
        if not out_RO.numel():
            out_RO = made_NO.new_empty((len(x_RI), *made_NO.shape[1:]))
        out_RO[index_N] = made_NO
    return out_RO


def _with_zeros(x_RI: Tensor, rows: int) -> Tensor:
    """``x`` with so many more rows of zeros."""
    return functional.pad(x_RI, (0, 0) * (x_RI.dim() - 1) + (0, rows))


def filled_rows(rows: int) -> int:
    """The number of rows, at least ``rows`` and less than an eighth more, that a 16-bit product on a CPU runs over.

    oneDNN builds a kernel of about a megabyte for every number of rows that it meets and keeps 1,024 of them (its
    developer guide, "Primitive Cache"). Packs of requests never have the same number twice, so without rounding up
    memory grows with every pack. Eight numbers an octave are few. Up to 32 rows stay as they are, as servers decode.
    """
    if rows <= 32:
        return rows
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step
