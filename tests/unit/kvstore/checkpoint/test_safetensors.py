"""Files of tensors: what is written is read, in pieces too, and nothing damaged is believed."""

from __future__ import annotations

import itertools
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kvstore.checkpoint.atomic import read_json, write_json
from kvstore.checkpoint.safetensors import TensorReader, TensorSpec, TensorWriter
from kvstore.errors import CheckpointError
from kvstore.stores.base import KeySpec

DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8", "c16"]

arrays = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0))
    ),
    max_size=4,
)


def write(path: Path, values: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in values.items()}
    with TensorWriter(path, specs, metadata) as writer:
        for name, value in values.items():
            writer.write(name, 0, value)
    return path


def read(path: Path) -> dict[str, Any]:
    with TensorReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Names in order, shapes, dtypes and bits (a NaN equals itself)."""
    return [*left] == [*right] and all(
        (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())
        for one, other in zip(left.values(), right.values(), strict=True)
    )


def raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


SMALL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "n": np.array(7, np.int64),
    "z": np.array([1 + 2j, 3 - 4j], np.complex64),
    "none": np.zeros((0, 4), np.float16),
}


# -- round trips --------------------------------------------------------------------------


@given(
    values=arrays, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
)
def test_what_is_written_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], metadata: dict[str, str]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "round", values, metadata)
    assert same(read(path), values)
    with TensorReader(path) as reader:
        assert reader.metadata == metadata


@given(data=st.data())
def test_pieces_in_any_order_make_the_array_and_come_out_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    value = np.arange(23, dtype=np.int32)
    cuts = sorted(data.draw(st.sets(st.integers(1, 22))) | {0, 23})
    pieces = data.draw(st.permutations([*itertools.pairwise(cuts)]))
    path = tmp_path_factory.getbasetemp() / "pieces"
    with TensorWriter(path, {"v": KeySpec((23,), value.dtype)}) as writer:
        for start, stop in pieces:
            writer.write("v", start, value[start:stop])
    start = data.draw(st.integers(0, 23))
    stop = data.draw(st.integers(start, 23))
    with TensorReader(path) as reader:
        assert np.array_equal(reader.read("v", start, stop), value[start:stop])
        assert np.array_equal(reader.read("v", start), value[start:])


def test_bfloat16_is_written_and_read(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {"b": np.array([[1.5, -2.0, 3e38]], ml_dtypes.bfloat16)}
    assert same(read(write(tmp_path / "f", values)), values)


def test_other_byte_orders_and_strides_are_written_as_values(tmp_path: Path) -> None:
    value = np.arange(12, dtype=">f4").reshape(3, 4).T
    path = write(tmp_path / "f", {"v": value})
    assert same(read(path), {"v": np.ascontiguousarray(value, "=f4")})


def test_what_is_read_belongs_to_the_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "f", SMALL)
    first = read(path)
    first["w"][:] = 0
    assert same(read(path), SMALL)


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"w": np.array([1, 2], "<u2")}, {"a": "b"})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header["w"] == {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}
    assert header["__metadata__"]["a"] == "b"
    assert (8 + length) % 8 == 0
    assert content[8 + length :] == b"\1\0\2\0"


def test_a_file_is_written_and_read_with_one_piece_of_it_in_memory(tmp_path: Path) -> None:
    pieces, size = 64, 1 << 17
    tracemalloc.start()
    try:
        with TensorWriter(tmp_path / "f", {"v": TensorSpec((pieces, size), np.dtype("f4"))}) as out:
            for number in range(pieces):
                out.write("v", number * size, np.full(size, number, np.float32))
        with TensorReader(tmp_path / "f") as reader:
            for number in range(pieces):
                piece = reader.read("v", number * size, (number + 1) * size)
                assert piece.min() == piece.max() == number
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "f").stat().st_size > 4 * pieces * size
    assert peak_bytes < 4 * 4 * size


# -- the other implementation -------------------------------------------------------------


def test_the_safetensors_package_reads_what_is_written_here(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = write(tmp_path / "f", SMALL, {"epoch": "3"})
    loaded = safetensors.load_file(path)
    pairs = np.array([[1, 2], [3, -4]], np.float32)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        **{name: value.tolist() for name, value in SMALL.items()},
        "z": pairs.tolist(),
    }


def test_what_the_safetensors_package_writes_is_read_here(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    values = {name: value for name, value in SMALL.items() if value.dtype.kind != "c"}
    safetensors.save_file(values, tmp_path / "f", {"epoch": "3"})
    loaded = read(tmp_path / "f")
    assert same({name: loaded[name] for name in values}, values)
    with TensorReader(tmp_path / "f") as reader:
        assert reader.metadata == {"epoch": "3"}


# -- whole or not at all ------------------------------------------------------------------


def test_the_old_file_stands_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "f", SMALL)
    other = np.ones(3)
    with TensorWriter(path, {"v": TensorSpec((3,), other.dtype)}) as writer:
        writer.write("v", 0, other)
        first, second = sorted(os.listdir(tmp_path))
        assert (first, second[:6]) == ("f", "f.tmp-")
        assert same(read(path), SMALL)
    assert os.listdir(tmp_path) == ["f"]
    assert same(read(path), {"v": other})


def test_an_exception_leaves_nothing_but_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "f", SMALL)
    with pytest.raises(KeyError), TensorWriter(path, {"v": TensorSpec((3,), np.dtype("f4"))}):
        raise KeyError
    assert os.listdir(tmp_path) == ["f"]
    assert same(read(path), SMALL)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [([], "none"), ([(0, 4), (6, 4)], "0 to 4, 6 to 10"), ([(1, 9)], "1 to 10")],
)
def test_a_missing_piece_is_an_error_and_no_file(
    tmp_path: Path, pieces: list[tuple[int, int]], said: str
) -> None:
    def write_pieces() -> None:
        with TensorWriter(tmp_path / "f", {"v": TensorSpec((10,), np.dtype("f4"))}) as writer:
            for start, size in pieces:
                writer.write("v", start, np.zeros(size, "f4"))

    with pytest.raises(CheckpointError, match=f"v needs 10 elements, got {said}"):
        write_pieces()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "start", "array", "sentence"),
    [
        ("x", 0, np.zeros(1, "f4"), "the array 'x'; it has v"),
        ("v", 0, np.zeros(1, "f8"), "has dtype float32, the piece has float64"),
        ("v", 8, np.zeros(3, "f4"), "the piece has elements 8 to 11"),
        ("v", -1, np.zeros(3, "f4"), "the piece has elements -1 to 2"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, start: int, array: Any, sentence: str
) -> None:
    with (
        pytest.raises(CheckpointError, match=sentence),
        TensorWriter(tmp_path / "f", {"v": TensorSpec((10,), np.dtype("f4"))}) as writer,
    ):
        writer.write(name, start, array)


@pytest.mark.parametrize(
    ("specs", "metadata", "sentence"),
    [
        ({"v": ((1,), np.dtype("O"))}, {}, "of dtype object .* use bool"),
        ({"v": ((1,), np.dtype("S3"))}, {}, "cannot save the array"),
        ({"v": ((1,), np.dtype("longdouble"))}, {}, "cannot save the array"),
        ({"__metadata__": ((1,), np.dtype("f4"))}, {}, "cannot save the array"),
        ({"v": ((1,) * 32, np.dtype("f4"))}, {}, "with 32 dimensions"),
        ({3: ((1,), np.dtype("f4"))}, {}, "names of arrays must be str"),
        ({"\ud800": ((1,), np.dtype("f4"))}, {}, "not valid Unicode"),
        ({}, {"a": 3}, "metadata must map str to str"),
        ({}, {"kvstore.complex": ""}, r"reserved names kvstore\.complex, "),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_a_file_is_made(
    tmp_path: Path, specs: Any, metadata: Any, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        TensorWriter(tmp_path / "f", specs, metadata)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "f"
    with pytest.raises(CheckpointError, match=r"cannot write .*nowhere/f: No such file"):
        TensorWriter(path, {})
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere/f: No such file"):
        TensorReader(path)


# -- nothing damaged is believed ----------------------------------------------------------


def accepted(path: Path, content: bytes) -> dict[str, Any] | None:
    """The arrays of a file with this content; None when it is refused, as it should be."""
    path.write_bytes(content)
    try:
        return read(path)
    except CheckpointError:
        return None


@given(data=st.data())
def test_a_changed_header_is_refused_or_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed"
    content = bytearray(write(path, SMALL).read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, end - 1))
    stop = data.draw(st.integers(at, min(at + 4, end)))
    content[at:stop] = data.draw(st.binary(max_size=4) | st.sampled_from([b"0", b"9", b'"', b"F"]))
    found = accepted(path, bytes(content))
    assert found is None or same(found, SMALL)


def test_every_changed_bit_of_a_header_is_refused_or_means_the_same(tmp_path: Path) -> None:
    content = write(tmp_path / "f", SMALL).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for bit in range(8 * end):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        found = accepted(tmp_path / "f", bytes(changed))
        assert found is None or same(found, SMALL)
        refused += found is None
    assert refused > 7 * end


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "f", SMALL).read_bytes()
    for length in range(len(content)):
        assert accepted(tmp_path / "f", content[:length]) is None
    assert accepted(tmp_path / "f", content + b"\0") is None


def entry(**changes: Any) -> bytes:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return json.dumps(
        {"v": {name: value for name, value in one.items() if value is not None}}
    ).encode()


DATA = bytes(8)


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"[]", b"", "not a JSON object"),
        (b"", b"", "not a JSON object"),
        (b" {}", b"", "not a JSON object"),
        (b"{}\n", b"", "not a JSON object"),
        (b'{"v": }', b"", "invalid JSON"),
        (b'{"\xff": 1}', b"", "invalid JSON"),
        (b'{"v":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "invalid JSON"),
        (b'{"v": ' + b"9" * 10_000 + b"}", b"", "invalid JSON"),
        (b'{"v": NaN}', b"", "expected a JSON number, got NaN"),
        (entry()[:-1] + b', "v": ' + entry()[6:], DATA, "appears twice"),
        (b'{"v": 3}', b"", "'v' is not an array"),
        (entry(dtype="F33"), DATA, "unknown dtype 'F33'"),
        (entry(dtype=["F32"]), DATA, "'v' is not an array"),
        (entry(dtype=None), DATA, "'v' is not an array"),
        (entry(more=1), DATA, "unexpected fields .*more"),
        (entry(shape=[3]), DATA, "needs 12 bytes"),
        (entry(shape=[2.0]), DATA, "an integer of at least 0, got 2.0"),
        (entry(shape=[True, 2]), DATA, "an integer of at least 0, got True"),
        (entry(shape=[-2]), DATA, "an integer of at least 0, got -2"),
        (entry(shape=2), DATA, "'v' is not an array"),
        (entry(shape=[2] + [1] * 40), DATA, "the shape"),
        (
            entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0]),
            b"",
            "the shape",
        ),
        (entry(data_offsets=[0]), DATA, "'v' is not an array"),
        (entry(data_offsets=[8, 0]), DATA, "'v' is not an array"),
        (entry(data_offsets=[4, 12]), bytes(12), "begins at 4, the values before it end at 0"),
        (entry(), bytes(9), "8 bytes of values, got 9"),
        (entry(), bytes(7), "8 bytes of values, got 7"),
        (entry()[:-1] + b', "u": ' + entry()[6:], DATA, "begins at 0, .* end at 8"),
        (
            entry()[:-1] + b', "u": ' + entry(shape=[2.0])[6:],
            DATA,
            "'u' is not an array: .* got 2.0",
        ),
        (entry(shape=[1, 2])[:-1] + b', "u": ' + entry(shape=[True, 2])[6:], DATA, "got True"),
        (entry()[6:-1], DATA, "its header is not a mapping"),
        (b'{"__metadata__": ' + entry()[6:], DATA, "do not map str to str"),
        (b'{"__metadata__": []}', b"", "do not map str to str"),
        (b'{"__metadata__": {"a": 1}}', b"", "do not map str to str"),
        (b'{"__metadata__": {"kvstore.complex": "[1]"}}', b"", "not a list of names"),
        (b'{"__metadata__": {"kvstore.complex": "["}}', b"", "invalid JSON"),
        (b'{"__metadata__": {"kvstore.complex": "[\\"v\\"]"}}', b"", "pairs of real numbers"),
        (b'{"__metadata__": {"kvstore.crc32": "0"}}', b"", "checksum"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tmp_path: Path, header: bytes, data: bytes, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        TensorReader(raw(tmp_path / "f", header, data))
    assert str(tmp_path / "f") in str(caught.value)


def test_a_header_of_impossible_length_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(CheckpointError, match="more than 100000000"):
        TensorReader(tmp_path / "f")
    (tmp_path / "f").write_bytes(struct.pack("<Q", 90_000_000) + b"{}")
    with pytest.raises(CheckpointError, match="90000000 bytes, the file has 10"):
        TensorReader(tmp_path / "f")


def test_bytes_that_are_no_truth_values_are_refused(tmp_path: Path) -> None:
    path = raw(tmp_path / "f", entry(dtype="BOOL", data_offsets=[0, 2]), b"\1\2")
    with TensorReader(path) as reader:
        assert reader.read("v", 0, 1).tolist() == [True]
        with pytest.raises(CheckpointError, match="bytes other than 0 and 1"):
            reader.read("v")


def test_a_range_outside_the_array_is_refused(tmp_path: Path) -> None:
    with TensorReader(write(tmp_path / "f", SMALL)) as reader:
        for start, stop in [(0, 7), (-1, 2), (4, 3)]:
            with pytest.raises(CheckpointError, match=f"cannot read {start} to {stop}"):
                reader.read("w", start, stop)
        with pytest.raises(CheckpointError, match="the array 'x'; it has w, n, z, none"):
            reader.spec("x")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "f", SMALL)
    with TensorReader(path) as reader:
        os.truncate(path, path.stat().st_size - 16)
        with pytest.raises(CheckpointError, match="was truncated"):
            [reader.read(name) for name in reader.names]


# -- JSON ---------------------------------------------------------------------------------


def test_json_is_written_in_place_of_the_old_and_read(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write_json(path, {"a": [1, 2.5, None, "ü"]})
    write_json(path, {"a": []})
    assert read_json(path) == {"a": []}
    assert os.listdir(tmp_path) == ["m.json"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x"])
def test_what_is_no_json_is_refused_and_the_old_file_stays(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "m.json", 3)
    with pytest.raises(CheckpointError, match=r"m\.json: cannot write the value as JSON"):
        write_json(tmp_path / "m.json", value)
    assert read_json(tmp_path / "m.json") == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" * 10**5, "invalid JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"Infinity", "got Infinity"),
        (b"\xff", "invalid JSON"),
        (b"", "invalid JSON"),
        (b" " * 200_001, "more than 200000 bytes"),
    ],
)
def test_json_that_is_damaged_or_too_long_is_refused(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        read_json(tmp_path / "m.json", max_bytes=200_000)


# -- values -------------------------------------------------------------------------------

BLOCK = 1 << 18


def flipped(path: Path, at: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_every_changed_bit_of_the_values_is_found(tmp_path: Path) -> None:
    content = write(tmp_path / "f", SMALL).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for bit in range(8 * begin, 8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "f").write_bytes(changed)
        with pytest.raises(
            CheckpointError, match=f"f is damaged: wrong checksum of bytes {begin} to {begin + 48}"
        ):
            read(tmp_path / "f")
        with TensorReader(tmp_path / "f") as reader, pytest.raises(CheckpointError):
            reader.verify()


def test_what_is_damaged_is_found_wherever_it_is_read_and_the_rest_can_be_read(
    tmp_path: Path,
) -> None:
    values = {"a": np.arange(BLOCK, dtype=np.float32), "b": np.arange(10), "c": np.ones(BLOCK)}
    path = write(tmp_path / "f", values)
    begin = path.stat().st_size - sum(value.nbytes for value in values.values())
    flipped(path, begin + BLOCK + 400, bit=6)  # element 65636 of a
    with TensorReader(path) as reader:
        assert np.array_equal(reader.read("a", 0, 65536), values["a"][:65536])
        assert np.array_equal(reader.read("a", 131072), values["a"][131072:])
        assert np.array_equal(reader.tensor("b"), values["b"])
        assert np.array_equal(reader.tensor("c"), values["c"])
        found = rf"wrong checksum of bytes {begin + BLOCK} to {begin + 2 * BLOCK}; load an"
        for start, stop in [(0, 262144), (65536, 131072), (65530, 65537), (100000, 100001)]:
            with pytest.raises(CheckpointError, match=found):
                reader.read("a", start, stop)
        with pytest.raises(CheckpointError, match=found):
            reader.verify()


@given(data=st.data())
def test_pieces_across_blocks_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks"
    values = {"t": np.array([True]), "v": np.arange(3 * BLOCK // 8 + 5, dtype=np.int64)}
    if not path.exists():
        write(path, values)
    with TensorReader(path) as reader:
        for _ in range(4):
            start = data.draw(st.integers(0, len(values["v"])))
            stop = data.draw(st.integers(start, len(values["v"])))
            assert np.array_equal(reader.read("v", start, stop), values["v"][start:stop])


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    path = raw(tmp_path / "f", entry(), DATA)
    flipped(path, path.stat().st_size - 1, bit=7)
    with TensorReader(path) as reader:
        reader.verify()  # nothing is known of it
        assert reader.tensor("v").tolist() == [0.0, -0.0]


def test_checksums_need_that_of_the_header(tmp_path: Path) -> None:
    content = write(tmp_path / "f", SMALL).read_bytes()
    (tmp_path / "f").write_bytes(content.replace(b"kvstore.crc32", b"kvstore.crc33"))
    with pytest.raises(CheckpointError, match="the checksum of its header is missing"):
        TensorReader(tmp_path / "f")


def test_checksums_that_are_none_are_refused(tmp_path: Path) -> None:
    texts = {"kvstore.checksums": "crc32 262144 00"}
    arrays = json.loads(entry())
    checksum = zlib.crc32(json.dumps([arrays, texts], sort_keys=True).encode())
    metadata = {**texts, "kvstore.crc32": f"{checksum:08x}"}
    header = json.dumps({"__metadata__": metadata, **arrays}).encode()
    with pytest.raises(
        CheckpointError,
        match=r"f is damaged: kvstore\.checksums: expected checksums of 8 hexadecimal digits, "
        r"8 for each block of 262144 bytes, got 2 digits; load an earlier checkpoint, or update",
    ):
        TensorReader(raw(tmp_path / "f", header, DATA))


def test_the_digest_of_a_file_differs_with_its_values(tmp_path: Path) -> None:
    digests = []
    for value in (1.0, 2.0, 1.0):
        with TensorWriter(tmp_path / "f", {"v": TensorSpec((3,), np.dtype("f4"))}) as writer:
            writer.write("v", 0, np.full(3, value, np.float32))
        with TensorReader(tmp_path / "f") as reader:
            assert reader.digest == writer.digest
            digests.append(reader.digest)
    assert digests[0] == digests[2] != digests[1]
