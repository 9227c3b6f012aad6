// What the ranks tell each other about operations, and how it is written.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "frontends/horovod/small_sums.h"

namespace fusedcomm::horovod {

// What the ranks must agree on for an operation.
struct Operation {
  std::string key;        // its kind and name
  std::string signature;  // all that must be the same on every rank: a text of the caller's
  std::string fuses;      // operations with the same text may share a bucket; empty: none
  int64_t nbytes = 0;
  bool has_number = true;        // whether rank 0 may give it a number
  bool may_lack_joined = false;  // whether it takes place although some ranks have joined
  bool is_call = true;           // whether it moves data: barrier and join do not
  bool is_join = false;
  bool may_be_small = false;  // whether it travels with the messages if every rank waits for it
  Reduction reduction;
};
using OperationPtr = std::shared_ptr<const Operation>;

// The number of an operation that all members of a set know.
using Id = uint32_t;
inline constexpr Id kNoId = UINT32_MAX;

struct Entry {
  Id id = kNoId;
  OperationPtr operation;
  std::vector<int64_t> rows;  // what may differ between ranks
  std::string problem;        // why this rank cannot take part; empty: it can
  std::string part;           // of a small sum; empty: this rank sends it with others
};

// One operation that all members issue, or its failure.
struct Response {
  Id id = kNoId;
  bool is_new = true;  // the members do not know it by its number yet
  OperationPtr operation;
  std::vector<std::vector<int64_t>> rows;  // of every member; empty for operations without
  std::string error;
  int number = 0;   // join: the rank that joined last
  std::string sum;  // a small one; empty: the backends sum
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

// The fields of a message's parts, in their order. `on` is a Writer or a Reader.
template <typename On, typename Of>
void visit_operation(On& on, Of& of) {
  on(of.key), on(of.signature), on(of.fuses), on(of.nbytes);
  on(of.has_number), on(of.may_lack_joined), on(of.is_call), on(of.is_join), on(of.may_be_small), on(of.reduction);
}
template <typename On, typename Of>
void visit_entry(On& on, Of& of) {
  on(of.id), on(of.part);
  if (of.id == kNoId) on(of.operation), on(of.rows), on(of.problem);
}
template <typename On, typename Of>
void visit_response(On& on, Of& of) {
  on(of.id), on(of.is_new), on(of.sum);
  if (of.is_new) on(of.operation), on(of.rows), on(of.error), on(of.number);
}

// Numbers as they lie in memory, texts and lists with their length before them.
class Writer {
 public:
  template <typename T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }
  void operator()(const OperationPtr& operation) { visit_operation(*this, *operation); }
  template <typename T>
  void operator()(const std::vector<T>& list) {
    (*this)(static_cast<uint32_t>(list.size()));
    for (const T& each : list) (*this)(each);
  }
  void operator()(const Entry& entry) { visit_entry(*this, entry); }
  void operator()(const Response& response) { visit_response(*this, response); }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Throws std::runtime_error if a message is too short.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <typename T>
  T get() {
    T value{};
    (*this)(value);
    return value;
  }
  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(&value, take(sizeof value), sizeof value);
  }
  void operator()(std::string& text) {
    const auto size = get<uint32_t>();
    text.assign(take(size), size);
  }
  void operator()(OperationPtr& operation) {
    const auto of = std::make_shared<Operation>();
    visit_operation(*this, *of);
    operation = of;
  }
  template <typename T>
  void operator()(std::vector<T>& list) {
    const auto size = get<uint32_t>();
    for (uint32_t i = 0; i < size; ++i) list.push_back(get<T>());
  }
  void operator()(Entry& entry) { visit_entry(*this, entry); }
  void operator()(Response& response) { visit_response(*this, response); }

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
