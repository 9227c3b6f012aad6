// CRC-32C, the checksum with the Castagnoli polynomial, which processors compute. It notices every change of up to 32
// bits in a row, and lets other changes pass once in 2^32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fusedcomm {

// The CRC of bytes that follow those with the CRC `before`; 0: of these bytes alone. data may have any address.
uint32_t crc32c(const void* data, int64_t nbytes, uint32_t before = 0);

// The ways to compute it that this machine has, slowest first: "table", then "sse4.2" or "arm".
std::vector<std::string> crc32c_ways();
// As crc32c(), in one of these ways. Throws std::invalid_argument if this machine does not have it.
uint32_t crc32c_by(const std::string& way, const void* data, int64_t nbytes, uint32_t before = 0);

}  // namespace fusedcomm
