#include "watch/fields.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

namespace fusedcomm {
namespace {

constexpr Limits kAnyInteger{std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
// Hexadecimal digits of a 64-bit checksum.
constexpr size_t kChecksumDigits = 16;

std::string header(const std::string& kind) { return kind + " " + std::to_string(kFieldsVersion) + " "; }

// Returns the 64-bit FNV-1a hash of `bytes` in hexadecimal digits.
std::string checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  std::string digits(kChecksumDigits, '0');
  for (size_t i = kChecksumDigits; i-- > 0; hash >>= 4) digits[i] = "0123456789abcdef"[hash & 15];
  return digits;
}

// Returns the beginning of `bytes` in quotes, for an error's text. A byte that is not printable ASCII becomes "?".
std::string shown(std::string_view bytes) {
  constexpr size_t kMaxShown = 40;
  std::string text(bytes.substr(0, kMaxShown));
  for (char& byte : text) {
    if (byte < ' ' || byte > '~') byte = '?';
  }
  return "\"" + text + (bytes.size() > kMaxShown ? "…\"" : "\"");
}

[[noreturn]] void fail(const char* name, const std::string& what) {
  throw UnreadableError("its field \"" + std::string(name) + "\" " + what);
}

// Returns whether all of `digits` is one number, and stores it in `value`.
template <typename Integer>
bool parse(std::string_view digits, Integer* value) {
  const char* const end = digits.data() + digits.size();
  const auto [at, error] = std::from_chars(digits.data(), end, *value);
  return error == std::errc() && at == end;
}

}  // namespace

std::string sealed(const std::string& kind, const std::string& fields) {
  return header(kind) + checksum(fields) + "\n" + fields;
}

void FieldWriter::write(std::string_view bytes) {
  text_ += std::to_string(bytes.size()) + ":";
  text_ += bytes;
  text_ += ",";
}

void FieldWriter::operator()(const char*, int64_t value, Limits) { write(std::to_string(value)); }

void FieldWriter::operator()(const char*, bool value) { write(value ? "1" : "0"); }

void FieldWriter::operator()(const char*, double value) {
  // Written as the integer with the same bits, which is exact for every value and independent of the locale.
  int64_t bits;
  static_assert(sizeof(bits) == sizeof(value));
  std::memcpy(&bits, &value, sizeof(bits));
  write(std::to_string(bits));
}

void FieldWriter::operator()(const char*, const std::string& value) { write(value); }

void FieldWriter::operator()(const char* name, const std::optional<std::string>& value) {
  (*this)(name, value.has_value());
  if (value) write(*value);
}

void FieldWriter::operator()(const char*, const std::set<std::string>& values) {
  write(std::to_string(values.size()));
  for (const std::string& value : values) write(value);
}

void FieldWriter::operator()(const char*, const std::map<std::string, int64_t>& values, Limits) {
  write(std::to_string(values.size()));
  for (const auto& [key, value] : values) {
    write(key);
    write(std::to_string(value));
  }
}

FieldReader::FieldReader(const std::string& kind, const std::string& text) : rest_(text) {
  const std::string expected = header(kind);
  if (rest_.substr(0, expected.size()) != expected) {
    throw UnreadableError("it does not begin with \"" + expected + "\" but is " + shown(rest_));
  }
  rest_.remove_prefix(expected.size());
  if (rest_.size() <= kChecksumDigits || rest_[kChecksumDigits] != '\n') {
    throw UnreadableError("it is cut off or garbled: no checksum in " + shown(text));
  }
  const std::string_view written = rest_.substr(0, kChecksumDigits);
  rest_.remove_prefix(kChecksumDigits + 1);
  const std::string found = checksum(rest_);
  if (written != found) {
    throw UnreadableError("it is cut off or garbled: its checksum is " + shown(written) + ", but its " +
                          std::to_string(rest_.size()) + " bytes of fields have \"" + found + "\"");
  }
}

std::string_view FieldReader::read(const char* name) {
  const size_t colon = rest_.find(':');
  size_t length = 0;
  if (colon == std::string_view::npos || !parse(rest_.substr(0, colon), &length)) fail(name, "has no length");
  const size_t left = rest_.size() - colon - 1;  // including the comma
  if (length >= left || rest_[colon + 1 + length] != ',') {
    fail(name, "should have " + std::to_string(length) + " bytes but does not end there");
  }
  const std::string_view bytes = rest_.substr(colon + 1, length);
  rest_.remove_prefix(colon + 1 + length + 1);
  return bytes;
}

int64_t FieldReader::integer(const char* name, Limits limits) {
  const std::string_view digits = read(name);
  int64_t value = 0;
  if (!parse(digits, &value)) fail(name, "is " + shown(digits) + ", not an integer");
  if (value < limits.least || value > limits.most) {
    fail(name, "is " + std::to_string(value) + ", not from " + std::to_string(limits.least) + " to " +
                   std::to_string(limits.most));
  }
  return value;
}

void FieldReader::operator()(const char* name, double& value) {
  const int64_t bits = integer(name, kAnyInteger);
  std::memcpy(&value, &bits, sizeof(value));
  if (!std::isfinite(value)) fail(name, "is not a finite number");
}

void FieldReader::operator()(const char* name, std::optional<std::string>& value) {
  bool is_there = false;
  (*this)(name, is_there);
  value.reset();
  if (is_there) value = read(name);
}

void FieldReader::operator()(const char* name, std::set<std::string>& values) {
  values.clear();
  for (int64_t left = integer(name, {0, kAnyInteger.most}); left > 0; --left) values.emplace(read(name));
}

void FieldReader::operator()(const char* name, std::map<std::string, int64_t>& values, Limits limits) {
  values.clear();
  for (int64_t left = integer(name, {0, kAnyInteger.most}); left > 0; --left) {
    const std::string key(read(name));
    values[key] = integer(name, limits);
  }
}

void FieldReader::finish() const {
  if (!rest_.empty()) throw UnreadableError("it goes on after its last field with " + shown(rest_));
}

}  // namespace fusedcomm
