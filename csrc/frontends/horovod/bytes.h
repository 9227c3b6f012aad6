// Writes and reads the ranks' messages: numbers as they lie in memory, texts and lists with their length before them.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace fusedcomm::horovod {

class Writer {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& text) {
    number<uint32_t>(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }
  template <typename T>
  void numbers(const std::vector<T>& list) {
    number<uint32_t>(static_cast<uint32_t>(list.size()));
    bytes_.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T));
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Throws std::runtime_error if a message is too short.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint32_t>();
    return std::string(take(size), size);
  }
  template <typename T>
  std::vector<T> numbers() {
    const auto size = number<uint32_t>();
    const char* const from = take(size_t{size} * sizeof(T));
    std::vector<T> list(size);
    if (size != 0) std::memcpy(list.data(), from, size_t{size} * sizeof(T));
    return list;
  }

 private:
  const char* take(size_t nbytes) {
    if (nbytes > bytes_.size() - at_) throw std::runtime_error("fusedcomm: a message between ranks is cut off");
    const char* const from = bytes_.data() + at_;
    at_ += nbytes;
    return from;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace fusedcomm::horovod
