"""Untrusted pickles: plain data comes through, anything else is refused and nothing runs."""

import io
import os
import pickle
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_layouts import python2_pickle
from vsm.data.archives import load_pickle
from vsm.errors import DataError

ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    np.arange(5, dtype=">i4"),
    np.array([True, False]),
    np.array(["apple", "bear"]),
    np.array([b"apple", b"bear"]),
    np.zeros((0, 84, 84, 3), dtype=np.uint8),
    np.array(3.5),
]


def load(data: bytes) -> Any:
    return load_pickle(io.BytesIO(data), "untrusted.pkl")


class Calls:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_come_through_every_protocol(array: np.ndarray[Any, Any], protocol: int) -> None:
    loaded = load(pickle.dumps({"image_data": array}, protocol=protocol))["image_data"]
    assert loaded.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert loaded.shape == array.shape
    assert np.array_equal(loaded, array)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_strings_numbers_and_containers_come_through(protocol: int) -> None:
    value = {
        "text": "naïve",
        "bytes": b"\x00\xff",
        "empty": b"",
        "numbers": [1, -(2**70), 2.5, True, None],
        "scalars": (np.int64(7), np.float32(0.5)),
        "containers": ([1, [2]], {"a": (3,)}),
    }
    assert load(pickle.dumps(value, protocol=protocol)) == value


def test_python_2_pickles_with_old_module_paths_are_read() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = python2_pickle({"data": array, "fine_labels": [3, 70], "name": "caf\xe9"})
    loaded = load(data)
    assert np.array_equal(loaded["data"], array)
    assert loaded["fine_labels"] == [3, 70]
    assert loaded["name"] == b"caf\xe9"


def test_new_module_paths_are_read_too() -> None:
    data = pickle.dumps(np.arange(3), protocol=2)
    assert b"numpy._core.multiarray" in data
    assert np.array_equal(load(data), [0, 1, 2])
    assert np.array_equal(load(data.replace(b"numpy._core", b"numpy.core")), [0, 1, 2])


@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, f"{os.name}.system"), (eval, "builtins.eval"), (getattr, "builtins.getattr")],
)
def test_a_malicious_pickle_is_refused_by_name_and_runs_nothing(
    function: Any, named: str, tmp_path: Path
) -> None:
    witness = tmp_path / "ran"
    arguments = {
        os.system: (f"touch {witness}",),
        eval: (f"open({str(witness)!r}, 'w')",),
        getattr: (0, "real"),
    }[function]
    data = pickle.dumps({"image_data": [Calls(function, *arguments)]}, protocol=3)
    with pytest.raises(DataError, match=f"untrusted.pkl: refused, the pickle asks for {named}"):
        load(data)
    assert not witness.exists()


@pytest.mark.parametrize(
    "value",
    [
        Calls(np.load, "x"),
        Calls(pickle.loads, b"N."),
        Calls(np.ndarray.__new__, np.ndarray),
        Path("x"),
        OrderedDict(a=1),
        np.array(["mixed", 3, None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.ma.masked_array([1, 2], [True, False]),
    ],
)
def test_everything_that_is_not_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"untrusted\.pkl: (refused|damaged)"):
        load(pickle.dumps(value))


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a call of the array type", b"cnumpy\nndarray\n(I1000000000000\ntR."),
        ("a size for bytes", b"c__builtin__\nbytes\n(I1000000000000\ntR."),
        ("a state for a stand-in", b"cnumpy.core.multiarray\n_reconstruct\n(dS'x'\nI1\nsb."),
        ("attributes for a stand-in", b"cnumpy.core.multiarray\n_reconstruct\n"
         b"(N(S'__defaults__'\n(I1\ntdtb."),
        ("a state for a type", b"ccollections\nOrderedDict\n(dS'x'\nI1\nsb."),
        ("an object array from raw memory", b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n"
         b"(S'O8'\nI0\nI1\ntRS'12345678'\ntR."),
        ("an element type with fields", b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n"
         b"(S'V8'\nI0\nI1\ntRS'12345678'\ntR."),
        ("fewer objects than the shape says", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\n"
         b"ndarray\n(I0\ntS'b'\ntR(I1\n(I9\ntcnumpy\ndtype\n(S'O8'\nI0\nI1\ntRI00\n(lNatb."),
        ("fewer bytes than the shape says", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\n"
         b"ndarray\n(I0\ntS'b'\ntR(I1\n(I9\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntRI00\nS'xy'\ntb."),
        ("a container that holds itself", b"(lp0\ng0\na."),
        ("an array without a state", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\n"
         b"ndarray\ntR."),
        ("a persistent id", b"Pelsewhere\n."),
        ("an extension code", b"\x80\x02\x82\x01."),
    ],
)  # fmt: skip
def test_tricks_with_the_stand_ins_are_refused(what: str, data: bytes) -> None:
    with pytest.raises(DataError, match=r"untrusted\.pkl: (refused|damaged)"):
        load(data)
    assert np.array_equal(load(pickle.dumps(ARRAYS[0])), ARRAYS[0])  # and nothing was changed


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_is_reported_and_never_crashes(noise: bytes) -> None:
    with suppress(DataError):
        load(noise)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_pickle_is_reported_and_never_crashes(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps({"image_data": ARRAYS[0], "names": ["a", b"b"]}, protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DataError):
        load(bytes(good))


def test_a_truncated_pickle_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"damaged pickle .*fetch or copy it again"):
        load(pickle.dumps(list(range(1000)))[:500])
