// What the ranks tell each other about operations, and how it is written.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
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
  bool repeats = true;           // whether it is worth a number, by which it travels the next time
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

// The operations of a process set that have gone one way, in messages that arrive in their order. Each end keeps its
// own: the second time, an operation travels as its number.
class Known {
 public:
  static constexpr uint32_t kNoNumber = UINT32_MAX;

  // At the end that writes.
  uint32_t number_of(const Operation& operation) {
    if (const auto found = numbers_.find(operation.signature); found != numbers_.end()) return found->second;
    if (!operation.repeats || numbers_.size() == kMax) return kNoNumber;
    const auto next = static_cast<uint32_t>(numbers_.size());
    return numbers_[operation.signature] = next;
  }
  // At the end that reads. Null: the operation itself follows.
  OperationPtr operation(uint32_t number) const {
    return number < operations_.size() ? operations_[number] : OperationPtr();
  }
  void add(OperationPtr operation) { operations_.push_back(std::move(operation)); }
  size_t size() const { return numbers_.size(); }

 private:
  // Operations beyond these get no number, so that a script that makes up a name for each call does not fill the
  // memory.
  static constexpr size_t kMax = 1 << 16;
  std::unordered_map<std::string, uint32_t> numbers_;  // by signature
  std::vector<OperationPtr> operations_;               // by number
};

// A message that is written, or read, in the same order. Numbers are as they lie in memory, texts, lists and tensors
// with their length before them. Throws std::runtime_error if there is less to read.
class Message {
 public:
  // To be written. known: of each set.
  Message(MessageType type, int set, std::vector<Known>& known) : is_read_(false) { begin(type, set, known); }
  // To be read.
  Message(std::string bytes, std::vector<Known>& known) : is_read_(true), bytes_(std::move(bytes)) {
    begin(MessageType(), 0, known);
  }

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
    const size_t num_known = known_->size();
    uint32_t number = is_read_ ? 0 : known_->number_of(*operation);
    (*this)(number);
    if (is_read_) operation = known_->operation(number);
    if (is_read_ ? operation != nullptr : number < num_known) return;
    Operation of = is_read_ ? Operation() : *operation;
    (*this)(of.key), (*this)(of.signature), (*this)(of.fuses), (*this)(of.nbytes);
    (*this)(of.repeats), (*this)(of.may_lack_joined), (*this)(of.is_join), (*this)(of.op);
    if (!is_read_) return;
    operation = std::make_shared<const Operation>(std::move(of));
    if (number != Known::kNoNumber) known_->add(operation);
  }
  void operator()(Entry& entry) {
    (*this)(entry.operation), (*this)(entry.rows), (*this)(entry.problem), (*this)(entry.part);
  }
  void operator()(Response& response) {
    (*this)(response.operation), (*this)(response.rows), (*this)(response.error), (*this)(response.number);
    (*this)(response.sum);
  }

 private:
  void begin(MessageType type, int set, std::vector<Known>& known) {
    type_ = type, set_ = set;
    (*this)(type_), (*this)(set_);
    known_ = &known.at(static_cast<size_t>(set_));
  }
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
  Known* known_ = nullptr;
};

}  // namespace fusedcomm::horovod
