#include "codec/crc32c.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace fusedcomm {
namespace {

// All CRCs here are without the complements at begin and end. Bit 31 - i is the coefficient of x^i.
constexpr uint32_t kPolynomial = 0x82F63B78;

using Bytes = const unsigned char*;

constexpr uint32_t times_x(uint32_t value) { return (value & 1) != 0 ? (value >> 1) ^ kPolynomial : value >> 1; }

// The CRC after one more byte, which has been added to the last byte of `value`.
constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kByteTable = byte_table();

uint32_t by_table(uint32_t crc, Bytes data, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; ++i) crc = (crc >> 8) ^ kByteTable[(crc ^ data[i]) & 0xff];
  return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

// The CRC after `nbytes` zero bytes. A CRC is linear, so each of its bytes is looked up by itself.
class Zeros {
 public:
  explicit Zeros(int64_t nbytes) {
    for (size_t bit = 0; bit < 32; ++bit) {
      uint32_t value = uint32_t{1} << bit;
      for (int64_t i = 0; i < 8 * nbytes; ++i) value = times_x(value);
      auto& table = tables_[bit / 8];
      const size_t own = size_t{1} << bit % 8;
      for (size_t lower = 0; lower < own; ++lower) table[own + lower] = table[lower] ^ value;
    }
  }
  uint32_t after(uint32_t crc) const {
    return tables_[0][crc & 0xff] ^ tables_[1][(crc >> 8) & 0xff] ^ tables_[2][(crc >> 16) & 0xff] ^
           tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

// The processor has the CRC of 8 bytes after three cycles, and can begin one in each. So three streams are computed at
// once. kLong and kShort: bytes of a stream; a multiple of 8.
constexpr int64_t kLong = 4096, kShort = 256;

#if defined(__x86_64__)
#define FUSEDCOMM_CRC_TARGET __attribute__((target("sse4.2")))
FUSEDCOMM_CRC_TARGET inline uint64_t add_8(uint64_t crc, uint64_t bytes) { return _mm_crc32_u64(crc, bytes); }
FUSEDCOMM_CRC_TARGET inline uint32_t add_1(uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
constexpr char kWay[] = "sse4.2";
bool has_instructions() { return __builtin_cpu_supports("sse4.2"); }
#else
#if defined(__clang__)
#define FUSEDCOMM_CRC_TARGET __attribute__((target("crc")))
#else
#define FUSEDCOMM_CRC_TARGET __attribute__((target("+crc")))
#endif
FUSEDCOMM_CRC_TARGET inline uint64_t add_8(uint64_t crc, uint64_t bytes) {
  return __crc32cd(static_cast<uint32_t>(crc), bytes);
}
FUSEDCOMM_CRC_TARGET inline uint32_t add_1(uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
constexpr char kWay[] = "arm";
constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32 of Linux
bool has_instructions() { return (getauxval(AT_HWCAP) & kHasCrc32) != 0; }
#endif

inline uint64_t load_8(Bytes data) {
  uint64_t value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// Adds as many whole groups of three streams as there are. Returns the bytes that it has added.
template <int64_t kStream>
FUSEDCOMM_CRC_TARGET int64_t add_groups(uint32_t* crc, Bytes data, int64_t nbytes) {
  static const Zeros kZeros(kStream);
  int64_t begin = 0;
  for (; begin + 3 * kStream <= nbytes; begin += 3 * kStream) {
    const Bytes at = data + begin;
    uint64_t first = *crc, second = 0, third = 0;
    for (int64_t i = 0; i < kStream; i += 8) {
      first = add_8(first, load_8(at + i));
      second = add_8(second, load_8(at + kStream + i));
      third = add_8(third, load_8(at + 2 * kStream + i));
    }
    const uint32_t two = kZeros.after(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    *crc = kZeros.after(two) ^ static_cast<uint32_t>(third);
  }
  return begin;
}

FUSEDCOMM_CRC_TARGET uint32_t by_instructions(uint32_t crc, Bytes data, int64_t nbytes) {
  int64_t begin = add_groups<kLong>(&crc, data, nbytes);
  begin += add_groups<kShort>(&crc, data + begin, nbytes - begin);
  uint64_t wide = crc;
  for (; begin + 8 <= nbytes; begin += 8) wide = add_8(wide, load_8(data + begin));
  crc = static_cast<uint32_t>(wide);
  for (; begin < nbytes; ++begin) crc = add_1(crc, data[begin]);
  return crc;
}

#else

constexpr char kWay[] = "";
bool has_instructions() { return false; }
uint32_t by_instructions(uint32_t crc, Bytes data, int64_t nbytes) { return by_table(crc, data, nbytes); }

#endif

}  // namespace

uint32_t crc32c(const void* data, int64_t nbytes, uint32_t before) {
  static const auto kFunction = has_instructions() ? by_instructions : by_table;
  return ~kFunction(~before, static_cast<Bytes>(data), nbytes);
}

std::vector<std::string> crc32c_ways() {
  std::vector<std::string> ways = {"table"};
  if (has_instructions()) ways.emplace_back(kWay);
  return ways;
}

uint32_t crc32c_by(const std::string& way, const void* data, int64_t nbytes, uint32_t before) {
  if (way == "table") return ~by_table(~before, static_cast<Bytes>(data), nbytes);
  if (!has_instructions() || way != kWay) {
    std::string possible;
    for (const std::string& known : crc32c_ways()) possible += (possible.empty() ? "" : ", ") + known;
    throw std::invalid_argument("crc32c: way='" + way + "' is not possible here: use one of " + possible);
  }
  return ~by_instructions(~before, static_cast<Bytes>(data), nbytes);
}

}  // namespace fusedcomm
