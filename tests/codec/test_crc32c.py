"""CRC-32C: every way gives the standard's values."""

import pytest
import torch

from fusedcomm.native import _C


def crc(data: torch.Tensor, way: str, before: int = 0) -> int:
    return _C.crc32c(data, before, way)


def by_bits(data: bytes) -> int:
    """CRC-32C as RFC 3720 defines it, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def drawn(numel: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(numel))


# The last three are examples of RFC 3720, B.4.
@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
@pytest.mark.parametrize("way", _C.crc32c_ways())
def test_known_values(way, data, expected):
    assert by_bits(data) == expected
    assert crc(torch.tensor(list(data), dtype=torch.uint8), way) == expected


# Around the lengths at which three streams of 256 and of 4096 bytes begin, at any address.
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 767, 768, 769, 2047, 12287, 12288, 12289, 13056, 40000])
@pytest.mark.parametrize("way", _C.crc32c_ways())
def test_all_ways_agree_at_every_address(way, numel):
    data = drawn(numel + 9)
    for offset in range(9):
        piece = data[offset : offset + numel].clone() if offset == 0 else data[offset : offset + numel]
        assert crc(piece, way) == crc(piece, "table")
    assert crc(data[:numel], "table") == by_bits(bytes(data[:numel].tolist()))


@pytest.mark.parametrize("way", _C.crc32c_ways())
def test_pieces_follow_each_other(way):
    data = drawn(20000)
    for cut in (0, 1, 100, 12288, 19999, 20000):
        assert crc(data[cut:], way, before=crc(data[:cut], way)) == crc(data, way)


@pytest.mark.parametrize("way", _C.crc32c_ways())
def test_every_single_bit_counts(way):
    data = drawn(900)
    whole = crc(data, way)
    seen = {whole}
    for byte in range(0, 900, 7):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(crc(data, way))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(range(0, 900, 7))


def test_an_unknown_way_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"way='avx' is not possible here: use one of table"):
        crc(drawn(1), "avx")
