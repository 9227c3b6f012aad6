// Rank 0's Negotiator, beside every process's Order (order.h): counts which ranks have submitted what, and decides what
// all issue next, in one order for all. Not for several threads at once.
//
//   the first time  a rank sends an operation's signature. When every member has, they are compared, and the operation
//                   begins
//   later           the operation has a number by then, and a rank sends that
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct NegotiatorOptions {
  int64_t fusion_nbytes = 25 << 20;  // most bytes of a bucket
  double stall_warning_s = 60;       // 0: never
  double stall_shutdown_s = 0;       // 0: never
};

class Negotiator {
 public:
  using Say = std::function<void(const std::string& text)>;
  // What a rank has submitted: the signature, the rank, and the rows.
  using Said = std::tuple<std::string, int, std::vector<int64_t>>;
  // Why two ranks' operations of one name cannot be one; empty if they can.
  using Mismatch = std::function<std::string(const Said& a, const Said& b)>;

  // sets: the ranks of each process set.
  Negotiator(int size, const std::vector<std::vector<int>>& sets, const NegotiatorOptions& options, Mismatch mismatch,
             Say say);

  void add(int set, int rank, Entry entry);
  // The operation of a number.
  const OperationPtr& operation(Id id) const { return operations_.at(id); }
  const std::vector<int>& ranks(int set) const { return sets_.at(static_cast<size_t>(set)).ranks; }
  // Whether the set has something to be issued; with is_busy, only if that fills a bucket.
  bool is_due(int set, bool is_busy) const;
  Buckets take(int set);

  // When look_for_stalls() is to be called; none: nothing waits.
  std::optional<Clock::time_point> next_look() const;
  // Warns of ranks that do not submit. Returns why everything ends; empty: it goes on.
  std::string look_for_stalls();

 private:
  // An operation that some members have submitted.
  struct Pending {
    OperationPtr first;
    int first_rank = 0;
    std::vector<int64_t> first_rows;
    std::vector<bool> has;  // by member
    size_t num_missing = 0;
    std::vector<std::vector<int64_t>> rows;
    std::vector<std::string> parts;  // of a small sum, by member
    std::string problem;
    Clock::time_point since;
    bool was_reported = false;
  };
  struct Set {
    std::vector<int> ranks;
    std::map<std::string, Pending> pending;  // by key
    std::vector<Pending> ready;
    int64_t ready_nbytes = 0;
    std::unordered_map<std::string, Id> ids;  // by signature
  };
  void join(int rank);
  void look_whether_ready(Set& set, const std::string& key);
  Response response_of(Set& set, Pending pending);
  std::string missing_text(const Set& set, const Pending& pending) const;

  const NegotiatorOptions options_;
  const Mismatch mismatch_;
  const Say say_;
  std::vector<Set> sets_;
  std::vector<OperationPtr> operations_;  // by id
  std::vector<bool> joined_;              // by rank
};

}  // namespace fusedcomm::horovod
