"""COUNTS.npz: written whole or not at all, read by plain NumPy, believed only when all of it fits together."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csc_array, csr_array, save_npz

from weightscope.core.errors import CheckpointError
from weightscope.model.text.counts import Counts, load_counts

ARRAYS = {
    "indptr": np.array([0, 2, 2, 3, 5]),
    "indices": np.array([1, 3, 0, 0, 2]),
    "data": np.array([4, 1, 7, 1, 1]),
}
META = {"tokenizer_hash": "c0ffee", "vocab_size": 4, "documents": 2, "tokens": 16, "corpus_files": ["books/a.txt"]}


@pytest.fixture
def counts() -> Counts:
    return Counts(**ARRAYS, tokenizer_hash="c0ffee", corpus_files=("books/a.txt",), documents=2, tokens=16)


def npz(**changes) -> bytes:
    """The bytes of a counts file with some arrays replaced, or left out (None)."""
    arrays = {
        name: array for name, array in (ARRAYS | {"meta": json.dumps(META)} | changes).items() if array is not None
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def meta(**changes) -> bytes:
    return npz(meta=json.dumps(META | changes))


def lying_header(claimed: str) -> bytes:
    """A counts file whose 'data' claims another shape or dtype than it has bytes for."""
    header = claimed.encode().ljust(117) + b"\n"
    stream = io.BytesIO()
    np.savez_compressed(stream, **{name: ARRAYS[name] for name in ("indptr", "indices")}, meta=json.dumps(META))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("data.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(40))
    return stream.getvalue()


def bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("data.npy", "w") as member:
        for _ in range(200):
            member.write(bytes(1 << 20))
    return stream.getvalue()


def other_compression() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_LZMA) as archive:
        for name in (*ARRAYS, "meta"):
            archive.writestr(f"{name}.npy", b"")
    return stream.getvalue()


def scipys(matrix=None, **changes) -> bytes:
    """The bytes of a matrix that SciPy saved, with some arrays replaced."""
    stream = io.BytesIO()
    csr = csr_array((ARRAYS["data"], ARRAYS["indices"], ARRAYS["indptr"]), shape=(4, 4))
    save_npz(stream, csr if matrix is None else matrix)
    with np.load(io.BytesIO(stream.getvalue())) as saved:
        arrays = dict(saved) | changes
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


ATTACKS = {
    "an empty file": (b"", "cut short or damaged"),
    "not a zip": (b"PK but not really", "cut short or damaged"),
    "cut short": (npz()[:-30], "cut short or damaged"),
    "an empty zip": (b"PK\x05\x06" + bytes(18), "no array 'indptr' (holds nothing)"),
    "an array missing": (npz(data=None), "no array 'data'"),
    "no meta": (npz(meta=None), "no array 'meta'"),
    "SciPy's, of other columns than rows": (scipys(csr_array((4, 5), dtype=np.int32)), "of shape [4, 5]"),
    "SciPy's, by columns": (scipys(csc_array((4, 4), dtype=np.int32)), "a b'csc' matrix"),
    "SciPy's, of fractions": (scipys(csr_array(np.full((4, 4), 0.5))), "'data' is float64"),
    "SciPy's, of negative counts": (scipys(csr_array(np.full((4, 4), -1))), "a count of -1"),
    "SciPy's, with a made-up shape": (scipys(shape=np.zeros(7, int)), "'shape' is int64 of shape (7,)"),
    "32-bit indices": (npz(indices=ARRAYS["indices"].astype(np.int32)), "'indices' is int32"),
    "big-endian indices": (npz(indices=ARRAYS["indices"].astype(">i8")), "'indices' is >i8"),
    "float counts": (npz(data=ARRAYS["data"] * 1.0), "'data' is float64"),
    "pickled objects": (npz(data=np.array([{}] * 5)), "'data'"),
    "a matrix for an array": (npz(data=ARRAYS["data"][None]), "of shape (1, 5); expected one-dimensional int64"),
    "no rows": (npz(indptr=np.array([0])), "'indptr' has 1 entries"),
    "an empty indptr": (npz(indptr=np.array([], np.int64)), "'indptr' has 0 entries"),
    "indptr not from 0": (npz(indptr=np.array([1, 2, 2, 3, 5])), "'indptr' does not ascend from 0"),
    "indptr going back": (npz(indptr=np.array([0, 3, 2, 3, 5])), "'indptr' does not ascend from 0"),
    "indptr past the end": (npz(indptr=np.array([0, 2, 2, 3, 6])), "'indptr' ends at 6, with 5 indices and 5 counts"),
    "indices too few": (npz(indices=ARRAYS["indices"][:4]), "with 4 indices and 5 counts"),
    "counts too many": (npz(data=np.ones(6, np.int64)), "with 5 indices and 6 counts"),
    "an index below 0": (npz(indices=np.array([-1, 3, 0, 0, 2])), "'indices' range from -1 to 3; expected 0 to 3"),
    "an index past the vocabulary": (npz(indices=np.array([1, 4, 0, 0, 2])), "range from 0 to 4; expected 0 to 3"),
    "columns out of order": (npz(indices=np.array([1, 3, 0, 2, 0])), "'indices' of row 3 do not ascend"),
    "a column twice": (npz(indices=np.array([3, 3, 0, 0, 2])), "'indices' of row 0 do not ascend"),
    "a count of 0": (npz(data=np.array([4, 1, 0, 1, 1])), "a count of 0; expected positive counts only"),
    "a negative count": (npz(data=np.array([4, 1, -7, 1, 1])), "a count of -7"),
    "counts that overflow": (npz(data=np.array([2**62] * 4 + [1])), "expected fewer pairs than tokens"),
    "more pairs than tokens": (meta(tokens=13), "14 pairs among 13 tokens"),
    "meta that is not JSON": (npz(meta="{"), "'meta' is not JSON"),
    "meta nested too deeply": (npz(meta="[" * 200_000), "'meta' is not JSON"),
    "meta of bytes": (npz(meta=json.dumps(META).encode()), "expected one JSON string"),
    "meta that is a list": (npz(meta="[]"), "'meta' is a JSON list"),
    "meta without the hash": (meta(tokenizer_hash=None), "tokenizer_hash is 'None'; expected str"),
    "meta with a true number": (meta(tokens=True), "tokens is 'True'; expected int"),
    "meta with a fraction": (meta(tokens=16.5), "tokens is '16.5'; expected int"),
    "fewer than no documents": (meta(documents=-1), "in -1 documents"),
    "10^400 tokens": (meta(tokens=10**400), "'meta' says tokens is not a count that fits in 64 bits"),
    "10^400 documents": (meta(documents=10**400), "'meta' says documents is not a count that fits in 64 bits"),
    "files without names": (meta(corpus_files=[1]), "a corpus file without a name"),
    "another vocabulary size": (meta(vocab_size=5), "vocab_size is 5; the matrix has 4 rows"),
    "a header larger than its bytes": (
        lying_header("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }"),
        "8000000000000 bytes; there are 40",
    ),
    "a header that overflows": (
        lying_header(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({2**61 + 5},), }}"),
        "there are 40",
    ),
    "a header with negative extents": (
        lying_header("{'descr': '<i8', 'fortran_order': False, 'shape': (-5, -1), }"),
        "expected one-dimensional int64",
    ),
    "a header that is no header": (lying_header("__import__('os').abort()"), "cut short or damaged"),
    "a bomb": (bomb(), "that unpack to 209715200"),
    "another compression": (other_compression(), "is compressed by method 14; expected deflate"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_file_is_one_clear_error(tmp_path, attack):
    content, message = ATTACKS[attack]
    path = tmp_path / "counts.npz"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        load_counts(path)
    assert str(error.value).startswith("counts.npz: ")
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_missing_counts_file_is_refused(tmp_path):
    for path in (tmp_path / "counts.npz", tmp_path):
        with pytest.raises(CheckpointError, match="no such file"):
            load_counts(path)


@settings(deadline=None, max_examples=300)
@given(cut=st.integers(0, len(npz())), flips=st.lists(st.tuples(st.integers(0, len(npz()) - 1), st.integers(1, 255))))
def test_damage_is_found_or_does_no_harm(tmp_path_factory, cut, flips):
    """Bytes changed and bytes lost: what still loads is still a proper matrix."""
    damaged = bytearray(npz())
    for position, change in flips:
        damaged[position] ^= change
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(damaged[:cut] if not flips else damaged)
    try:
        loaded = load_counts(path)
    except CheckpointError:
        return
    assert loaded.indptr[-1] == len(loaded.indices) == len(loaded.data)


def test_plain_numpy_reads_what_is_written(tmp_path, counts):
    counts.save(tmp_path / "new" / "counts.npz")
    with np.load(tmp_path / "new" / "counts.npz", allow_pickle=False) as file:
        for name, array in ARRAYS.items():
            assert file[name].dtype == np.int64
            np.testing.assert_array_equal(file[name], array)
        assert json.loads(str(file["meta"])) == META
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["counts.npz"]


def test_the_same_counts_are_the_same_bytes(tmp_path, counts):
    counts.save(tmp_path / "a")
    load_counts(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, counts, monkeypatch):
    path = tmp_path / "counts.npz"
    counts.save(path)
    before = path.read_bytes()

    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(CheckpointError, match=r"counts\.npz: cannot be written \(No space left on device\)"):
        counts.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_counts_do_not_overwrite_a_folder(tmp_path, counts):
    (tmp_path / "counts.npz").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        counts.save(tmp_path / "counts.npz")
    assert list(tmp_path.iterdir()) == [tmp_path / "counts.npz"]


def test_counts_of_another_tokenizer_or_vocabulary_are_refused(counts):
    counts.check(4)
    counts.check(4, "c0ffee")
    counts.check(8, "c0ffee")  # the model's embedding is padded
    for vocab_size, tokenizer_hash in ((4, "decaf"), (8, "decaf"), (8, None), (3, None), (3, "c0ffee")):
        with pytest.raises(CheckpointError, match=r"counted .* count again with the model's tokenizer"):
            counts.check(vocab_size, tokenizer_hash)


def test_padding_adds_tokens_that_occur_nowhere(counts):
    padded = counts.padded(6)
    assert padded.vocab_size == 6
    np.testing.assert_array_equal(padded.indptr, [0, 2, 2, 3, 5, 5, 5])
    assert padded.indices is counts.indices


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_matrix_saved_by_scipy_is_read_with_a_caveat(dtype, tmp_path) -> None:
    matrix = csr_array((ARRAYS["data"].astype(dtype), ARRAYS["indices"], ARRAYS["indptr"]), shape=(4, 4))
    save_npz(tmp_path / "counts.npz", matrix)
    counts = load_counts(tmp_path / "counts.npz")
    np.testing.assert_array_equal(counts.matrix(4).toarray(), matrix.toarray())
    counts.check(4, "any tokenizer")
    assert "could be checked" in counts.caveats[0]
    with pytest.raises(CheckpointError, match="over a vocabulary of 4"):
        counts.check(5, "any tokenizer")
