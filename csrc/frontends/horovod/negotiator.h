// Rank 0's Negotiator, beside every process's Coordinator (coordinator.h): counts which ranks have submitted what, and
// tells all ranks what to issue, in one order for all. Uses no torch. Only rank 0's coordinator thread calls it.
//
//   the first time  a rank sends a request's signature. When every member has, they are compared, and the collective
//                   begins
//   later           the signature has a number by then, and a rank sends that
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {

struct NegotiatorOptions {
  int64_t fusion_nbytes = 25 << 20;  // most bytes of a bucket
  double stall_warning_s = 60;       // 0: never
  double stall_shutdown_s = 0;       // 0: never
};

class Negotiator {
 public:
  using Send = std::function<void(int rank, const std::string& message)>;
  using Say = std::function<void(const std::string& text)>;
  // is_busy: whether buckets of a set are under way here; what becomes ready then is sent together.
  Negotiator(int size, const NegotiatorOptions& options, Send send, Say say, std::function<bool(int set)> is_busy);

  void add_set(int set, std::vector<int> ranks, double now_s);
  void remove_set(int set);

  void on_ready(int rank, const Ready& ready, double now_s);
  // Ends everything: after this nothing more is sent.
  void end(const std::string& why);
  bool has_ended() const { return has_ended_; }

  // Sends what is due. Call it after all messages that have come.
  void emit();
  // Seconds until look_for_stalls() should be called; negative: nothing waits.
  double next_look_s(double now_s) const;
  void look_for_stalls(double now_s);

 private:
  // A name that some members have submitted.
  struct Pending {
    Signature first;
    int first_rank = 0;
    Id id = kNoId;
    std::vector<bool> has;  // by member
    std::vector<std::vector<int64_t>> of_members;
    std::string problem;
    double since_s = 0;
    bool is_ready = false, was_reported = false;
  };
  struct Set {
    std::vector<int> ranks;
    std::map<std::string, Pending> pending;
    std::vector<std::string> ready;  // keys, in the order in which they became ready
    int64_t ready_nbytes = 0;
    std::map<std::string, Id> ids;  // by key
  };
  static size_t member(const Set& set, int rank);
  Set* find(int set);
  void add(Set& set, int rank, const Ready::Entry& entry, double now_s);
  void join(Set& set, int rank);
  void look_whether_ready(Set& set, const std::string& key, Pending& pending);
  void look_at_all(Set& set);
  void emit(int number, Set& set);
  Response response_of(Set& set, const std::string& key, Pending& pending);
  void send_to_all(const Set& set, const std::string& message) const;
  std::string missing_text(const Set& set, const Pending& pending) const;

  const int size_;
  const NegotiatorOptions options_;
  const Send send_;
  const Say say_;
  const std::function<bool(int)> is_busy_;
  std::map<int, Set> sets_;
  // Messages for sets that this rank's caller has not added yet: rank and message.
  std::map<int, std::vector<std::pair<int, Ready>>> early_;
  std::vector<Signature> signatures_;  // by id
  std::vector<bool> joined_;           // by rank
  bool has_ended_ = false;
};

}  // namespace fusedcomm::horovod
