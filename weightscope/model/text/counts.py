"""Bigram counts: a sparse matrix, its corpus, and its file.

COUNTS.npz holds a CSR matrix of shape (vocab, vocab), rows = current token i, columns = previous
token j, as the int64 arrays `indptr`, `indices` and `data`, and `meta`, a JSON string. Plain
`numpy.load` reads it. What SciPy's `save_npz` writes of such a matrix is read too; it does not say
which tokenizer its rows are tokens of.
"""

import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.files import Folder, regular_file

LARGEST_EXPANSION = 50  # times its file; counts of 40 MB of books unpack to 6.5 times
SMALL = 64 << 20  # bytes that any file may unpack to
NAMED = 3  # files of a corpus that a sentence names
# Errors of zipfile and numpy.lib.format for bytes that are damaged, cut short or made up.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    MemoryError,
)
ARRAYS = ("indptr", "indices", "data")
META = {
    "tokenizer_hash": str,
    "vocab_size": int,
    "documents": int,
    "tokens": int,
    "corpus_files": list,
}

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Counts:
    """Bigram counts: each token's previous tokens, with the number of times they precede it."""

    indptr: Int64s  # (vocab_size + 1,)
    indices: Int64s  # (pairs,): previous tokens, ascending within a row
    data: Int64s  # (pairs,): counts, all positive
    tokenizer_hash: str  # empty where the file does not say it
    corpus_files: tuple[str, ...]  # names, not paths
    documents: int
    tokens: int
    file: Path | None = None  # where the counts were loaded from

    def __repr__(self) -> str:
        bigrams = f"{self.pairs:,} bigrams of {self.vocab_size:,} tokens"
        return f"Counts({bigrams}, from {self.documents:,} documents)"

    @property
    def vocab_size(self) -> int:
        return len(self.indptr) - 1

    @property
    def caveats(self) -> tuple[str, ...]:
        """Caveats that a result made of these counts shows."""
        if self.tokenizer_hash:
            return ()
        return (
            "the counts do not say which tokenizer they are of: only the size of the vocabulary "
            "could be checked",
        )

    @property
    def origin(self) -> str:
        """The counted corpus in words, as far as it is known."""
        bigrams = f"{self.pairs:,} distinct bigrams"
        if not self.documents:
            return bigrams
        names = ", ".join(map(printable, self.corpus_files[:NAMED]))
        if (more := len(self.corpus_files) - NAMED) > 0:
            names += f" and {counted(more, 'file')} more"
        return f"{self.tokens:,} tokens in {self.documents:,} documents of {names}; {bigrams}"

    @property
    def pairs(self) -> int:
        """Distinct pairs."""
        return len(self.indices)

    def row(self, token: int) -> tuple[Int64s, Int64s]:
        """The tokens that come before `token`, and how often each does."""
        row = slice(self.indptr[token], self.indptr[token + 1])
        return self.indices[row], self.data[row]

    @property
    def occurrences(self) -> Int64s:
        """(vocab_size,) the times that each token follows another."""
        total = np.concatenate([[0], np.cumsum(self.data)])
        return total[self.indptr[1:]] - total[self.indptr[:-1]]

    def matrix(self, vocab_size: int) -> Any:
        """The counts as a csr_array of (vocab_size, vocab_size); further tokens occur nowhere."""
        from scipy.sparse import csr_array

        csr = self.data, self.indices, self.padded(vocab_size).indptr
        return csr_array(csr, shape=(vocab_size, vocab_size))

    def check(self, vocab_size: int, tokenizer_hash: str | None = None) -> None:
        """Refuse counts that were made for another vocabulary or tokenizer.

        Parameters
        ----------
        vocab_size : int
            Rows of the model's token embedding. Embeddings are often padded, so more rows than
            tokens are fine once the hash has shown that the tokens are the same.
        tokenizer_hash : str, optional
            The model's tokenizer's, where there is one.

        Raises
        ------
        CheckpointError
        """
        again = (
            "count again with the model's tokenizer "
            "(weightscope bigrams CORPUS --tokenizer MODEL --out COUNTS.npz)"
        )
        size = self.vocab_size
        tokenizer_hash = tokenizer_hash if self.tokenizer_hash else None
        if tokenizer_hash is not None and tokenizer_hash != self.tokenizer_hash:
            problem = (
                f"counted with another tokenizer than the model's (vocabulary of {size}, hash "
                f"{self.tokenizer_hash[:12]}; the model's hash is {tokenizer_hash[:12]}, "
                f"with {vocab_size} embeddings)"
            )
            raise CheckpointError(f"{problem}; {again}", file=self.file)
        padded = tokenizer_hash is not None and size <= vocab_size
        if size != vocab_size and not padded:
            problem = f"counted over a vocabulary of {size} tokens; the model embeds {vocab_size}"
            raise CheckpointError(f"{problem}; {again}", file=self.file)

    def padded(self, vocab_size: int) -> "Counts":
        """These counts over a larger vocabulary, whose further tokens occur nowhere."""
        further = vocab_size - self.vocab_size
        return replace(self, indptr=np.pad(self.indptr, (0, further), mode="edge"))

    def save(self, path: str | Path) -> None:
        """Write COUNTS.npz, whole or not at all.

        Raises
        ------
        CheckpointError
            It cannot be written there.
        """
        meta = np.array(json.dumps({name: getattr(self, name) for name in META}))
        arrays = {name: getattr(self, name) for name in ARRAYS}
        Folder(Path(path).parent).npz(Path(path).name, **arrays, meta=meta)


def load_counts(path: str | Path) -> Counts:
    """Read COUNTS.npz, or a `scipy.sparse.csr_array` that `save_npz` wrote, and check all of it.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    Counts

    Raises
    ------
    CheckpointError
        Anything but a whole and consistent counts file; the message names the file, what was found
        and what was expected.

    Examples
    --------
    >>> from scipy.sparse import csr_array, save_npz
    >>> from weightscope.core.files import scratch_folder
    >>> with scratch_folder() as folder:
    ...     save_npz(folder / "counts.npz", csr_array([[0, 2], [1, 0]]))
    ...     load_counts(folder / "counts.npz")
    Counts(2 bigrams of 2 tokens, from 0 documents)
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError("no such file; expected bigram counts (COUNTS.npz)", file=path)
    try:
        with regular_file(path) as file, zipfile.ZipFile(file) as archive:
            _check_expansion(archive, path)
            scipys = "format.npy" in archive.namelist()
            indptr, indices, data = (_integers(archive, name, any_size=scipys) for name in ARRAYS)
            meta = _scipys_meta(archive, indptr, data) if scipys else _meta(archive)
        _check_matrix(indptr, indices, data)
        _check_meta(meta, len(indptr) - 1, data)
    except _CountsError as error:
        raise CheckpointError(str(error), file=path) from None
    except DAMAGE as error:
        problem = f"not a whole counts file, cut short or damaged ({error})"
        raise CheckpointError(f"{problem}; expected an .npz of bigram counts", file=path) from error
    files = tuple(meta["corpus_files"])
    known = {name: meta[name] for name in ("tokenizer_hash", "documents", "tokens")}
    return Counts(indptr, indices, data, corpus_files=files, file=path, **known)


class _CountsError(Exception):
    """A problem with found and expected values; `load_counts` adds the file."""


def _check_expansion(archive: zipfile.ZipFile, path: Path) -> None:
    unpacked = sum(info.file_size for info in archive.infolist())
    packed = path.stat().st_size
    if unpacked > SMALL + LARGEST_EXPANSION * packed:
        raise _CountsError(
            f"{packed} bytes that unpack to {unpacked}; "
            f"counts expand at most {LARGEST_EXPANSION} times"
        )


def _open(archive: zipfile.ZipFile, name: str) -> tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]:
    """A member's stream, shape and dtype, once its header agrees with its length."""
    if f"{name}.npy" not in archive.namelist():
        contents = ", ".join(archive.namelist()[:8]) or "nothing"
        raise _CountsError(
            f"has no array '{name}' (holds {contents}); expected indptr, indices, data and meta"
        )
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _CountsError(
            f"array '{name}' is compressed by method {info.compress_type}; expected deflate"
        )
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise _CountsError(f"array '{name}' is in .npy format {version}; expected (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        size = info.file_size - stream.tell()
    length = dtype.itemsize
    for extent in shape:  # Python integers: what a header claims does not overflow
        length *= extent
    if length != size:
        claim = f"array '{name}' is said to be {dtype} of shape {shape}, {length} bytes"
        raise _CountsError(f"{claim}; there are {size}")
    return archive.open(info), shape, dtype


def _integers(archive: zipfile.ZipFile, name: str, *, any_size: bool) -> Int64s:
    """A list of int64, or with `any_size` of any integers that fit (SciPy picks small ones)."""
    stream, shape, dtype = _open(archive, name)
    with stream:
        fits = dtype == np.int64
        if any_size:
            fits = dtype.kind in "iu" and np.can_cast(dtype, np.int64)
        if not fits or len(shape) != 1:
            raise _CountsError(
                f"array '{name}' is {dtype} of shape {shape}; expected one-dimensional int64"
            )
        return np.lib.format.read_array(stream, allow_pickle=False).astype(np.int64)


def _scipys_meta(archive: zipfile.ZipFile, indptr: Int64s, data: Int64s) -> dict[str, Any]:
    """The little that is known of counts in SciPy's `save_npz`, once they are square CSR."""
    kind, shape = _small(archive, "format"), _small(archive, "shape")
    rows = len(indptr) - 1
    if kind != b"csr" or shape != [rows, rows]:
        raise _CountsError(
            f"a {kind!r} matrix of shape {shape}; "
            "expected b'csr' with one row and one column per token"
        )
    tokens = int(data.sum(dtype=np.float64))
    known = {"vocab_size": rows, "tokens": tokens}
    return known | {"tokenizer_hash": "", "documents": 0, "corpus_files": []}


def _small(archive: zipfile.ZipFile, name: str) -> Any:
    """A scalar or a short list, as Python has it."""
    stream, shape, dtype = _open(archive, name)
    with stream:
        if dtype.hasobject or shape not in ((), (2,)):
            raise _CountsError(
                f"'{name}' is {dtype} of shape {shape}; expected what scipy.sparse.save_npz writes"
            )
        return np.lib.format.read_array(stream, allow_pickle=False).tolist()


def _meta(archive: zipfile.ZipFile) -> Any:
    stream, shape, dtype = _open(archive, "meta")
    with stream:
        if dtype.kind != "U" or shape != ():
            raise _CountsError(f"'meta' is {dtype} of shape {shape}; expected one JSON string")
        text = str(np.lib.format.read_array(stream, allow_pickle=False))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _CountsError(f"'meta' is not JSON ({error})") from error


def _check_matrix(indptr: Int64s, indices: Int64s, data: Int64s) -> None:
    """Refuse all but a canonical CSR matrix of positive counts within the vocabulary."""
    vocab_size = len(indptr) - 1
    if vocab_size < 1:
        problem = f"'indptr' has {len(indptr)} entries"
        raise _CountsError(f"{problem}; expected one more than there are tokens")
    if indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise _CountsError("'indptr' does not ascend from 0")
    if not indptr[-1] == len(indices) == len(data):
        indices_and_counts = f"{len(indices)} indices and {len(data)} counts"
        raise _CountsError(
            f"'indptr' ends at {indptr[-1]}, with {indices_and_counts}; "
            "expected three times the same number"
        )
    if not len(indices):
        return
    if indices.min() < 0 or indices.max() >= vocab_size:
        problem = f"'indices' range from {indices.min()} to {indices.max()}"
        raise _CountsError(f"{problem}; expected 0 to {vocab_size - 1}")
    ascends = np.diff(indices) > 0
    row_starts = indptr[(indptr > 0) & (indptr < len(indices))]
    ascends[row_starts - 1] = True  # a new row starts over
    if not ascends.all():
        row = int(np.searchsorted(indptr, np.argmin(ascends), side="right")) - 1
        raise _CountsError(
            f"'indices' of row {row} do not ascend; expected each previous token once, in order"
        )
    if data.min() < 1:
        raise _CountsError(f"a count of {data.min()}; expected positive counts only")


def _check_meta(meta: Any, vocab_size: int, data: Int64s) -> None:
    if not isinstance(meta, dict):
        raise _CountsError(f"'meta' is a JSON {type(meta).__name__}; expected an object")
    for key, kind in META.items():
        if type(meta.get(key)) is not kind:
            stated = str(meta.get(key))[:60]
            raise _CountsError(f"'meta' says {key} is {stated!r}; expected {kind.__name__}")
    if not all(isinstance(name, str) for name in meta["corpus_files"]):
        raise _CountsError("'meta' has a corpus file without a name")
    if meta["vocab_size"] != vocab_size:
        raise _CountsError(
            f"'meta' says vocab_size is {meta['vocab_size']}; the matrix has {vocab_size} rows"
        )
    for key in ("documents", "tokens"):
        if abs(meta[key]) >= 2**63:
            raise _CountsError(f"'meta' says {key} is not a count that fits in 64 bits")
    pairs = data.sum(dtype=np.float64)  # exact below 2^53, and it cannot wrap around
    if meta["documents"] < 0 or pairs > meta["tokens"]:
        tokens = f"{meta['tokens']} tokens in {meta['documents']} documents"
        raise _CountsError(f"{pairs:.0f} pairs among {tokens}; expected fewer pairs than tokens")
