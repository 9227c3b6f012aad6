// One bit for each parameter, in the form in which ranks exchange them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusedcomm {

class Flags {
 public:
  explicit Flags(size_t size) : words_((size + kBits - 1) / kBits, 0) {}

  void set(size_t index) { words_[index / kBits] |= int64_t{1} << (index % kBits); }
  bool operator[](size_t index) const { return (words_[index / kBits] >> (index % kBits)) & 1; }
  bool operator==(const Flags& other) const { return words_ == other.words_; }
  bool operator!=(const Flags& other) const { return words_ != other.words_; }
  void clear() { words_.assign(words_.size(), 0); }

  const std::vector<int64_t>& words() const { return words_; }
  // Sets every bit that is set in `words`, which has as many words as these flags.
  void add(const int64_t* words) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= words[i];
  }
  void assign(const int64_t* words) { words_.assign(words, words + words_.size()); }

 private:
  static constexpr size_t kBits = 64;
  std::vector<int64_t> words_;
};

}  // namespace fusedcomm
