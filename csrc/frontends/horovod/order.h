// Every process's Order: issues its operations in the order that rank 0's Negotiator (negotiator.h) decides, whatever
// order its callers submit them in.
//
//   submit() ──► kReady ──► rank 0 ──► kExecute ──► every member issues the bucket
//
// Messages go over a gloo backend of their own. On rank 0 a thread for each other rank waits for that one's messages,
// on the others a thread waits for rank 0's. Who waits for its operation has sent it by itself; what nobody waits for
// yet is gathered for a moment, by one more thread. All sleep while nothing is under way.
#pragma once

#include <ATen/ATen.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>
#include <vector>

#include "frontends/horovod/negotiator.h"

namespace fusedcomm::horovod {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Futures = std::vector<c10::intrusive_ptr<c10::ivalue::Future>>;

// The caller's number of an operation that it has submitted.
using Ticket = int64_t;
// A rank that has joined takes part without having submitted the operation.
inline constexpr Ticket kNoTicket = -1;

// Operations that are issued together on this rank.
struct Issue {
  int set = 0;
  std::vector<Ticket> tickets;
  std::vector<Response> responses;  // of the tickets, in their order
};

class Order {
 public:
  struct Options {
    int rank = 0, size = 1;
    std::vector<std::vector<int>> sets;  // the ranks of each process set
    NegotiatorOptions negotiator;
  };
  // Begins a bucket, and returns what is under way. One thread at a time calls it, in the same order on all members.
  // What it throws ends the operations of all ranks.
  using Start = std::function<Futures(const Issue& issue)>;
  struct Result {
    std::string error;  // empty: the operation has ended; on an accelerator, its data move on a stream
    int number = 0;     // join: the rank that joined last
  };

  // control: null with one rank.
  Order(const Options& options, BackendPtr control, Start start, Negotiator::Mismatch mismatch, Negotiator::Say say);
  ~Order();

  // ticket: a new one. inputs, outputs: of a sum that may be small. at_once: the caller is about to wait for it. Throws
  // std::invalid_argument if the key is under way, std::runtime_error after a failure.
  void submit(Ticket ticket, int set, Entry entry, const std::vector<at::Tensor>& inputs,
              std::vector<at::Tensor> outputs, bool at_once);
  // Whether wait() would return at once.
  bool poll(Ticket ticket);
  // Waits for the operation's end. Forgets the ticket.
  Result wait(Ticket ticket);
  // Ends the operations of every rank.
  void leave(const std::string& why);
  // Ends those of this rank alone: another may answer nobody.
  void fail(const std::string& why);
  // Idempotent. Returns whether all threads, and all that was under way, have ended.
  bool shutdown();
  std::string failure() const;
  // Whether this process is a child, by fork(), of the one that made it. Nothing else may be called then.
  bool is_in_fork() const { return getpid() != process_; }

 private:
  struct Request {
    int set = 0;
    Entry entry;
    Ticket ticket = kNoTicket;
    std::vector<at::Tensor> outputs;  // of a small sum
    bool is_done = false;
    bool has_moved = false;  // whether its data were under way
    Result result;
  };
  using RequestPtr = std::shared_ptr<Request>;
  using Requests = std::vector<RequestPtr>;
  using Key = std::pair<int, std::string>;  // set and a key

  void flush();
  void batch();
  void receive(int peer);
  // Whether it is the peer's last one.
  bool handle(int peer, const std::string& message);
  // Returns what is under way until the message has left; null if the peer is lost.
  c10::intrusive_ptr<c10d::Work> send(int peer, const std::string& message);
  void emit();
  bool is_busy(int set);
  void ring();
  std::string failed_text(const std::string& key, const std::string& why) const;
  void issue(int set, Buckets buckets);
  // The requests of the tickets.
  Requests requests_of(int set, std::vector<Response> bucket, Issue& issue);
  void write_small_sums(const Issue& issue, const Requests& requests);
  // Finishes the requests when the last of these has ended. key: names them in an error.
  void follow(const Futures& futures, int set, const std::string& key, Requests requests);
  // With the mutex.
  void finish(const Requests& requests, const Result& result);
  void end(const std::string& why);

  const Options options_;
  const BackendPtr control_;
  const Start start_;
  const pid_t process_ = getpid();

  mutable std::mutex mutex_;  // guards the members below
  mutable std::condition_variable changed_;
  std::condition_variable bell_;  // for the batch thread
  std::unordered_map<Ticket, RequestPtr> tickets_;
  std::map<Key, RequestPtr> requests_;  // until they are issued
  Requests queue_;                      // not yet told to rank 0
  std::map<Key, Id> ids_;               // by set and signature
  std::unordered_map<Id, OperationPtr> operations_;
  std::string failure_;
  Clock::time_point failed_at_;
  bool is_rung_ = false, has_left_ = false;
  int num_left_ = 0;                  // threads, and buckets under way
  std::map<int, int> num_under_way_;  // buckets by set
  bool rings_at_end_ = false;         // of a bucket

  // On rank 0, held to decide what is next, and to issue it. Nobody who waits for it holds the GIL.
  std::recursive_mutex turn_;
  std::unique_ptr<Negotiator> negotiator_;
  bool is_watching_ = false;

  std::recursive_mutex send_mutex_;
  std::deque<c10::intrusive_ptr<c10d::Work>> sent_;

  std::vector<std::thread> threads_;
};

}  // namespace fusedcomm::horovod
