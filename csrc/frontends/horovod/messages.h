// What the ranks tell each other about operations, and how it is written.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fusedcomm::horovod {

enum class Op : int8_t { kAverage, kSum, kMin, kMax, kProduct };

// What the ranks must agree on for an operation.
struct Operation {
  std::string key;        // its kind and name
  std::string signature;  // all that must be the same on every rank: a text of the caller's
  std::string fuses;      // operations with the same text may share a bucket; empty: none
  int64_t nbytes = 0;
  bool may_lack_joined = false;  // whether it takes place although some ranks have joined
  bool is_join = false;
  Op op = Op::kSum;  // of a small sum
};
using OperationPtr = std::shared_ptr<const Operation>;

// What a rank has submitted.
struct Entry {
  OperationPtr operation;
  std::vector<int64_t> rows;  // what may differ between ranks
  std::string problem;        // why this rank cannot take part; empty: it can
  at::Tensor part;            // of a small sum: contiguous, on the CPU; undefined: this rank sends it with others
};

// One operation that all members issue, or its failure.
struct Response {
  OperationPtr operation;
  std::vector<std::vector<int64_t>> rows;  // of every member; empty for operations without
  std::string error;
  int number = 0;  // join: the rank that joined last
  at::Tensor sum;  // a small one; undefined: the backends sum
};
using Buckets = std::vector<std::vector<Response>>;

enum class MessageType : uint8_t {
  // To rank 0: operations that this rank has submitted; this rank ends the communication of all, and why; it has heard
  // of the end.
  kReady,
  kLeaving,
  kBye,
  // From rank 0: buckets to issue in this order; nothing more is issued, and why.
  kExecute,
  kEnd,
};

// A message that is written, or read, in the same order. Numbers are as they lie in memory, texts, lists and tensors
// with their length before them. Throws std::runtime_error if there is less to read.
class Message {
 public:
  // To be written.
  Message(MessageType type, int set) : is_read_(false), type_(type), set_(set) { (*this)(type_), (*this)(set_); }
  // To be read.
  explicit Message(std::string bytes) : is_read_(true), bytes_(std::move(bytes)) { (*this)(type_), (*this)(set_); }

  MessageType type() const { return type_; }
  int set() const { return set_; }
  const std::string& bytes() const { return bytes_; }
  template <typename T>
  T get() {
    T value{};
    (*this)(value);
    return value;
  }

  // Writes the value, or reads it.
  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    move(&value, sizeof value);
  }
  void operator()(std::string& text) {
    text.resize(length(text.size()));
    move(text.data(), text.size());
  }
  template <typename T>
  void operator()(std::vector<T>& list) {
    list.resize(length(list.size()));
    for (T& each : list) (*this)(each);
  }
  void operator()(at::Tensor& tensor) {
    const uint32_t numel = length(tensor.defined() ? static_cast<size_t>(tensor.numel()) : 0);
    if (numel == 0) return;
    auto dtype = is_read_ ? at::kByte : tensor.scalar_type();
    (*this)(dtype);
    if (is_read_) tensor = at::empty({numel}, at::TensorOptions().dtype(dtype));
    move(tensor.data_ptr(), tensor.nbytes());
  }
  void operator()(OperationPtr& operation) {
    Operation of = is_read_ ? Operation() : *operation;
    (*this)(of.key), (*this)(of.signature), (*this)(of.fuses), (*this)(of.nbytes);
    (*this)(of.may_lack_joined), (*this)(of.is_join), (*this)(of.op);
    if (is_read_) operation = std::make_shared<const Operation>(std::move(of));
  }
  void operator()(Entry& entry) {
    (*this)(entry.operation), (*this)(entry.rows), (*this)(entry.problem), (*this)(entry.part);
  }
  void operator()(Response& response) {
    (*this)(response.operation), (*this)(response.rows), (*this)(response.error), (*this)(response.number);
    (*this)(response.sum);
  }

 private:
  uint32_t length(size_t written) {
    auto found = static_cast<uint32_t>(written);
    (*this)(found);
    return found;
  }
  void move(void* value, size_t nbytes) {
    if (!is_read_) {
      bytes_.append(static_cast<const char*>(value), nbytes);
      return;
    }
    if (nbytes > bytes_.size() - at_) throw std::runtime_error("fusedcomm: a message between ranks is cut off");
    std::memcpy(value, bytes_.data() + at_, nbytes);
    at_ += nbytes;
  }

  const bool is_read_;
  std::string bytes_;
  size_t at_ = 0;
  MessageType type_{};
  int set_ = 0;
};

}  // namespace fusedcomm::horovod
